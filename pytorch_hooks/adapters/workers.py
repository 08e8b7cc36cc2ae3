"""Workers of loaders beside that of the training."""

from __future__ import annotations

import logging
from typing import Any

from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.cursor.loader_state import begin_with_new_workers

logger = logging.getLogger(__name__)


def begin_anew(loader: Any) -> Any:
    """Have a loader begin with new workers each time that it is gone through; return it.

    As `run.batches` does with the loader of the training. Without an agent nothing is changed.
    """
    within = getattr(loader, "base_dataloader", loader)
    if env.read().agent_socket is not None and begin_with_new_workers(within):
        logger.info("persistent_workers of a loader beside the training's is ignored")
    return loader
