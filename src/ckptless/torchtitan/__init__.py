"""torchtitan under ckptless: `train(config)`, or `-m ckptless.torchtitan`; needs `ckptless[torchtitan]`."""

from ckptless.daemon.protocol.errors import UsageError

try:
    from ckptless.pytorch_hooks.adapters.torchtitan import train
except ImportError as error:
    if not (error.name or "").startswith("torchtitan."):
        raise
    raise UsageError(
        f"torchtitan is not the one that ckptless knows ({error}): use torchtitan 0.2.2 to 0.3"
    ) from error

__all__ = ["train"]
