"""Memory that the agent owns and ranks map: memfds, which vanish with the last process that holds them."""

import fcntl
import mmap
import os

# Versions of the tensors that a node keeps: the one being written, the newest committed one, and one more,
# since a rank may be a step behind when another has gone on (see docs/architecture.md, "Which step").
SLOTS = 3
PAGE_NBYTES = 4096
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def round_up(nbytes: int) -> int:
    """To whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


class Region:
    """A memfd of `slots` slots of `slot_nbytes` bytes for one shard; its size is sealed.

    `fd` is one that was made like this before, and is the region's from here on. Raises ValueError where it
    is of another size.
    """

    def __init__(self, number: int, shard: int, slot_nbytes: int, slots: int, fd: int | None = None) -> None:
        self.number, self.shard = number, shard
        self.slot_nbytes, self.slots = slot_nbytes, slots
        size = slot_nbytes * slots
        if fd is not None:
            if os.fstat(fd).st_size != size:
                raise ValueError(
                    f"a memfd of {os.fstat(fd).st_size} bytes for {slots} slots of {slot_nbytes}"
                )
            self.fd = fd
        else:
            self.fd = os.memfd_create(f"ckptless-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)

    def has_slot(self, offset: int, nbytes: int) -> bool:
        """Whether so many bytes lie at the begin of one of the slots."""
        slot, inside = divmod(offset, self.slot_nbytes)
        return inside == 0 and 0 <= slot < self.slots and 0 <= nbytes <= self.slot_nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the region; the caller releases the view. Raises ValueError outside it."""
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._view):
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a region of {len(self._view)}")
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap and close. Ranks that have mapped it keep their mapping."""
        self._view.release()
        self._map.close()
        os.close(self.fd)
