"""Workers of loaders beside that of the training."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ckptless.pytorch_hooks import env


def begin_anew(loader: Any) -> Any:
    """Have a loader begin with new workers each time that it is gone through; return it.

    With `persistent_workers` a process draws a seed for them once, and a new process once more: from there on
    all that it draws is another. Without an agent nothing.
    """
    within = getattr(loader, "base_dataloader", loader)
    if isinstance(within, DataLoader) and within.persistent_workers and env.read().agent_socket is not None:
        # As `run.batches` does with that of the training; a DataLoader itself refuses to have it changed.
        object.__setattr__(within, "persistent_workers", False)
    return loader
