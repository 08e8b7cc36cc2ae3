"""The memory of one batch: a memfd that a producer writes, and nobody any more once it is ready."""

import fcntl
import mmap
import os

from ckptless.daemon.api.errors import BadEntryError
from ckptless.daemon.api.ring_entry import position_of, verify

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class EntryMemory:
    """Owns the descriptor. Memory goes when the last process that has mapped it lets go of it."""

    def __init__(self, stream: int, seq: int) -> None:
        """Raises OSError."""
        self.stream, self.seq = stream, seq
        self.fd = os.memfd_create(f"ckptless-batch-{stream}-{seq}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def seal(self, manifest: str, nbytes: int, position: bytes) -> None:
        """Have the kernel refuse every write from here on, then verify what is there. To be run in a thread.

        Raises BadEntryError, OSError: where somebody has it mapped for writing, too.
        """
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, ALL_SEALS)
        size = os.fstat(self.fd).st_size
        if size != nbytes or not size:
            raise BadEntryError(f"batch {self.seq} of stream {self.stream} has {size} bytes, not {nbytes}")
        with mmap.mmap(self.fd, size, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
            header = verify(view, manifest, self.stream, self.seq)
            found = position_of(view, header)
        if found != position:
            raise BadEntryError(
                f"batch {self.seq} of stream {self.stream} has another position than was said"
            )

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)
