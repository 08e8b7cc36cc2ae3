"""Whether a device's memory comes back after each fault: what an abort leaves behind adds up."""

from __future__ import annotations

from ckptless.pytorch_hooks.devices import accelerator

# A group's communicator takes some hundred MB.
GROWN_NBYTES = 1 << 30


class MemoryWatch:
    """Looks at the memory of the current device that is neither free nor has tensors of this process.

    That is contexts, communicators, and what other processes on the device have.
    """

    def __init__(self, grown_nbytes: int = GROWN_NBYTES) -> None:
        self._grown_nbytes = grown_nbytes
        self._known: int | None = None

    def look(self) -> str | None:
        """Return a sentence where that has grown so much since it was looked at first, or told of last."""
        now = accelerator.other_nbytes()
        if now is None:
            return None
        before = self._known
        if before is None:
            self._known = now
            return None
        if now - before < self._grown_nbytes:
            return None
        self._known = now
        return (
            f"{(now - before) / (1 << 30):.1f} GiB more of the device than before are neither free nor kept "
            "for tensors of this process: left by what was aborted, or taken by another process"
        )
