"""Memory that a device copies into without the CPU: page-locked as long as versions lie in it."""

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Pinned:
    """Memory (uint8, on the CPU) that is page-locked for devices of `kind` until `close`.

    Where the device's driver does not take it, copies are right all the same, and hold up the thread that
    queues them.
    """

    def __init__(self, memory: torch.Tensor, kind: str) -> None:
        self._memory, self._driver = memory, _driver(kind)
        nbytes = memory.numel() * memory.element_size()
        self.is_pinned = _succeeded("lock", self._driver.cudaHostRegister(memory.data_ptr(), nbytes, 0))

    def close(self) -> None:
        """Unlock it; nothing is being copied into it any more."""
        if self.is_pinned:
            _succeeded("unlock", self._driver.cudaHostUnregister(self._memory.data_ptr()))


def _succeeded(what: str, error: Any) -> bool:
    if int(error) == 0:
        return True
    logger.warning("cannot %s the memory of versions (the driver's error %d): copies wait", what, int(error))
    return False


def _driver(kind: str) -> Any:
    """Return the runtime calls of CUDA, or of a device that has them by the same names."""
    return torch.get_device_module(kind).cudart()
