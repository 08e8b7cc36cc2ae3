"""Accelerate under ckptless: `keep(run, make)`; needs `pip install 'ckptless[accelerate]'`."""

from ckptless.pytorch_hooks.adapters.accelerate import keep

__all__ = ["keep"]
