"""Memory that a CUDA device copies into without the CPU: pinned as long as versions lie in it."""

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Pinned:
    """Memory (uint8, on the CPU) that is pinned until `close`.

    Where CUDA does not take it, copies are right all the same, and hold up the thread that queues them.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        nbytes = memory.numel() * memory.element_size()
        self.is_pinned = _succeeded("pin", _cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))

    def close(self) -> None:
        """Unpin it; nothing is being copied into it any more."""
        if self.is_pinned:
            _succeeded("unpin", _cudart().cudaHostUnregister(self._memory.data_ptr()))


def _succeeded(what: str, error: Any) -> bool:
    if int(error) == 0:
        return True
    logger.warning("cannot %s the memory of versions (CUDA error %d): copies wait", what, int(error))
    return False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
