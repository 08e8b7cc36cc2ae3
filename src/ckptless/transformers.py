"""transformers' Trainer under ckptless: `train(make)`; needs `pip install 'ckptless[transformers]'`."""

from ckptless.pytorch_hooks.adapters.transformers import train

__all__ = ["train"]
