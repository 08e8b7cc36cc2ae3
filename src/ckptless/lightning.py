"""Lightning's Trainer under ckptless: `Trainer(strategy="ckptless_ddp")`; needs `ckptless[lightning]`.

To import it makes the names "ckptless_ddp" and "ckptless_fsdp2" known to Lightning.
"""

from ckptless.daemon.protocol.errors import UsageError

try:
    from ckptless.pytorch_hooks.adapters.lightning import DDPStrategy, ModelParallelStrategy
except ImportError as error:
    if not (error.name or "").startswith("lightning."):
        raise
    raise UsageError(
        f"Lightning is not the one that ckptless knows ({error}): use Lightning 2.5 to 2.6"
    ) from error

__all__ = ["DDPStrategy", "ModelParallelStrategy"]
