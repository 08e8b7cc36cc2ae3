"""The memory that a rank's versions are written into: slots in turn, made ready beside the training.

The kernel zeroes each page when it is first touched, and a device's driver locks them: for gigabytes that
takes seconds, which the first commits of a process would wait for.
"""

import ctypes
import logging
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ckptless.daemon.protocol import version
from ckptless.pytorch_hooks.commit.pinned import Pinned
from ckptless.pytorch_hooks.devices import accelerator

logger = logging.getLogger(__name__)

SLOTS = version.SLOTS
# Linux 5.14; an older kernel refuses it, and the first commits touch the pages.
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class Slots:
    """A memfd of the agent's, mapped: `SLOTS` slots of `slot_nbytes`. Takes `fd`. Main thread only.

    `next_slot`: the one that is written first. `pins`: for which kind of device all are page-locked, if any.
    """

    def __init__(self, fd: int, number: int, slot_nbytes: int, next_slot: int, pins: str | None) -> None:
        try:
            mapping = mmap.mmap(fd, slot_nbytes * SLOTS)
        finally:
            os.close(fd)
        self.number, self.slot_nbytes, self.next_slot = number, slot_nbytes, next_slot
        # The tensor keeps the mapping alive, and unmaps it when the last view of it is gone.
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._pins = pins
        thread = ThreadPoolExecutor(1, "ckptless-slots", initializer=accelerator.follow())
        order = [(next_slot + turn) % SLOTS for turn in range(SLOTS)]
        self._ready: dict[int, Future[Pinned | None]] = {i: thread.submit(self._prepare, i) for i in order}
        thread.shutdown(wait=False)

    def slot(self, index: int) -> torch.Tensor:
        """Return a slot's bytes (uint8, 1-D)."""
        return self.bytes[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]

    def take(self) -> int:
        """Return the index of the next slot in turn, once it is ready."""
        index = self.next_slot
        self.next_slot = (index + 1) % SLOTS
        # no deadline: as fast as memory is zeroed
        self._ready[index].result()
        return index

    def close(self) -> None:
        """Unlock the memory; nothing is being copied into it any more."""
        for ready in self._ready.values():
            # no deadline: as fast as memory is zeroed
            if not ready.cancel() and (pinned := ready.result()) is not None:
                pinned.close()
        self._ready.clear()

    def _prepare(self, index: int) -> Pinned | None:
        """Touch and lock the pages of a slot. In a thread."""
        slot = self.slot(index)
        if _libc.madvise(ctypes.c_void_p(slot.data_ptr()), ctypes.c_size_t(len(slot)), _MADV_POPULATE_WRITE):
            logger.debug("the memory of versions is not touched ahead: %s", os.strerror(ctypes.get_errno()))
        return Pinned(slot, self._pins) if self._pins is not None else None
