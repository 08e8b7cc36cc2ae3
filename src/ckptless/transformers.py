"""transformers' Trainer under ckptless: `train(make)`; needs `pip install 'ckptless[transformers]'`."""

from ckptless.daemon.protocol.errors import UsageError

try:
    from ckptless.pytorch_hooks.adapters.transformers import train
except ImportError as error:
    if not (error.name or "").startswith("transformers."):
        raise
    raise UsageError(
        f"transformers is not the one that ckptless knows ({error}): use transformers 5.17 to 5.24"
    ) from error

__all__ = ["train"]
