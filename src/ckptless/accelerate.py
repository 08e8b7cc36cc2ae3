"""Accelerate under ckptless: `keep(run, make)`; needs `pip install 'ckptless[accelerate]'`."""

from ckptless.daemon.protocol.errors import UsageError

try:
    from ckptless.pytorch_hooks.adapters.accelerate import keep
except ImportError as error:
    if not (error.name or "").startswith("accelerate."):
        raise
    raise UsageError(
        f"accelerate is not the one that ckptless knows ({error}): use accelerate 1.12 to 1.15"
    ) from error

__all__ = ["keep"]
