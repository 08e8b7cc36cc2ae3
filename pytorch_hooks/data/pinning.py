"""Batches in page-locked memory, from which a CUDA device copies while the training goes on.

They are copied there, by torch's own allocator, which keeps what it has locked for the next batch. The memory
that the ranks of a node share is not locked in place: each batch is mapped privately, and to lock such pages
for writing gives the process its own copy of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

Pin = Callable[[torch.Tensor], torch.Tensor]
OFF = "pin-memory-off"


class Pinning:
    """Gives a batch's tensors as page-locked ones, where there is a device; `tell(kind, text)` if that fails.

    `pin` locks one tensor; None: as torch does, if it has a device.
    """

    def __init__(self, tell: Callable[[str, str], None], pin: Pin | None = None) -> None:
        self._tell = tell
        self._pin = pin or (_by_torch if torch.cuda.is_available() else None)

    def batch(self, batch: Any) -> Any:
        """The batch, all of its CPU tensors in locked memory; as it is without a device, or memory."""
        if self._pin is None:
            return batch
        try:
            return _each(batch, self._pin)
        except RuntimeError as error:
            self._pin = None
            text = f"batches are not in page-locked memory from here on: {error}"
            logger.warning("%s", text)
            self._tell(OFF, text)
            return batch


def _by_torch(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


def _each(value: Any, pin: Pin) -> Any:
    match value:
        case torch.Tensor():
            return pin(value) if value.device.type == "cpu" and not value.is_sparse else value
        case dict():
            return {key: _each(inner, pin) for key, inner in value.items()}
        case list():
            return [_each(inner, pin) for inner in value]
        case tuple():
            inner = [_each(one, pin) for one in value]
            # A named tuple takes its fields one by one.
            return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return value
