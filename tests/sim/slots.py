"""A slot of a fake agent: the process in it, and what is told of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptless.daemon.protocol import messages as m

if TYPE_CHECKING:
    from .ranks import Process


@dataclass
class Slot:
    """As `daemon.agent.slots.Slot`."""

    index: int
    process: "Process | None" = None
    phase: m.Phase = "empty"
    generation: int = 0
    step: int | None = None
    cause: m.Cause | None = None
    exit_code: int | None = None
    hooked: bool = False
    since: float = 0.0
    committed: bool = False

    @property
    def living(self) -> "Process | None":
        """Its process, if it lives."""
        return self.process if self.process is not None and self.process.alive else None

    def told(self, now: float) -> m.SlotState:
        """As the daemon is told."""
        return m.SlotState(
            slot=self.index,
            phase=self.phase,
            generation=self.generation,
            pid=self.process.pid if self.process is not None else None,
            hooked=self.hooked,
            step=self.step,
            stepped=self.committed,
            cause=self.cause,
            exit_code=self.exit_code,
            age_s=now - self.since,
        )
