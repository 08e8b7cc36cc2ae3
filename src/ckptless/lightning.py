"""Lightning's Trainer under ckptless: `Trainer(strategy="ckptless_ddp")`; needs `ckptless[lightning]`.

To import it makes the names "ckptless_ddp" and "ckptless_fsdp2" known to Lightning.
"""

from ckptless.pytorch_hooks.adapters.lightning import DDPStrategy, ModelParallelStrategy

__all__ = ["DDPStrategy", "ModelParallelStrategy"]
