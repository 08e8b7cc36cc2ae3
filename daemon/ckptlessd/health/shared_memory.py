"""The probe of shared memory: /dev/shm, which NCCL and loaders use, and memfds, which agents use."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckptless.daemon.ckptlessd.health.host import no_room
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.protocol.limits import size_text

SHARED_MEMORY = Path("/dev/shm")
# NCCL's documentation asks for so much (docker run --shm-size=1g); a node of little memory has half of it, as
# tmpfs has of itself.
LEAST_NBYTES = 1 << 30
# With no job here, more than this share of the memory is left over from one.
MOST_IDLE_SHARE = 0.1
# vm.overcommit_memory: every page counts, also of a memfd, and there are so many in all.
_COUNTED = "2"


class SharedMemoryProbe(Probe):
    """Looks at /dev/shm and at memfds. `jobs_here` tells whether any job is on the node.

    A memfd has no mount that bounds it, and is not locked, so RLIMIT_MEMLOCK does not either. Whether a job's
    state fits into the node's memory and into its cgroup its agent asks, before it takes it: `no-room`.
    """

    interval_s = 60.0
    deadline_s = 10.0

    def __init__(
        self, jobs_here: Callable[[], bool], shm: Path = SHARED_MEMORY, proc: Path = Path("/proc")
    ) -> None:
        self._jobs_here, self._shm, self._proc = jobs_here, shm, proc

    def look(self) -> Sequence[Finding]:
        """See `probe.Probe`. Raises OSError."""
        return [*self._mount(), *self._memfds()]

    def _mount(self) -> Iterator[Finding]:
        where = str(self._shm)
        if words := no_room(self._shm):
            yield Finding(code="shared-memory", where=where, evidence=words)
        try:
            found = os.statvfs(self._shm)
        except FileNotFoundError:
            yield Finding(code="shared-memory-small", where=where, evidence="it is not there")
            return
        memory_nbytes = _memory_nbytes()
        nbytes = found.f_blocks * found.f_frsize
        used_nbytes = nbytes - found.f_bfree * found.f_frsize
        if nbytes < min(LEAST_NBYTES, memory_nbytes // 2):
            yield Finding(
                code="shared-memory-small", where=where, evidence=f"its size is {size_text(nbytes)}"
            )
        if used_nbytes > memory_nbytes * MOST_IDLE_SHARE and not self._jobs_here():
            words = f"{size_text(used_nbytes)} of the memory's {size_text(memory_nbytes)} are used"
            yield Finding(code="shared-memory-left-over", where=where, evidence=words)

    def _memfds(self) -> Iterator[Finding]:
        """Make one as agents do, and see what can be written to it where the kernel counts every page."""
        try:
            os.close(os.memfd_create("ckptless-health", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            words = f"memfd_create: {error.strerror}"
            if noexec := _text(self._proc / "sys/vm/memfd_noexec"):
                words += f" (vm.memfd_noexec is {noexec})"
            yield Finding(code="memfd", evidence=words)
        if _text(self._proc / "sys/vm/overcommit_memory") != _COUNTED:
            return
        lines = (line.split() for line in _text(self._proc / "meminfo").splitlines())
        words_of = {words[0]: int(words[1]) << 10 for words in lines if len(words) > 1}
        limit, used = words_of.get("CommitLimit:", 0), words_of.get("Committed_AS:", 0)
        if limit and limit - used < limit * MOST_IDLE_SHARE:
            words = f"{size_text(used)} of {size_text(limit)} are promised, and vm.overcommit_memory is 2"
            yield Finding(code="memfd", where="CommitLimit", evidence=words)


def _memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(path: Path) -> str:
    """Return what is there; "" where the kernel has no such file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
