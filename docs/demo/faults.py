"""The faults of a demo: where they strike, by a seed, and what became of each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from losses import Losses

from ckptless.daemon.protocol.records import RecoveryRecord

KINDS = ("kill", "node")
APART = 8  # steps between faults, and from a fault to either end


@dataclass
class Fault:
    """One fault: planned (kind, step, whose), then done, then recovered from.

    `delay` is how much of a step to wait, so that it strikes anywhere in one. `brief` and `what` say what was
    done; `killed_at` is Unix time, `generation` the one that it ended.
    """

    kind: str
    step: int
    rank: int
    delay: float
    what: str = ""
    brief: str = ""
    generation: int = 0
    killed_at: float = 0.0
    recovery: RecoveryRecord | None = None

    def stall_s(self, losses: Losses) -> float:
        """From the kill until every rank had done the first step of the new generation."""
        ends = self._ends(losses)
        return max(ends.values(), default=float("nan")) - self.killed_at

    def is_over(self, losses: Losses) -> bool:
        """Whether every rank has done that step."""
        return len(self._ends(losses)) == losses.ranks

    def _ends(self, losses: Losses) -> dict[int, float]:
        """When each rank had done the first step of the new generation."""
        new = [line for line in losses.lines if line.generation > self.generation]
        first = min((line.step for line in new), default=0)
        return {line.rank: line.at for line in new if line.step == first}


def least_steps(faults: int) -> int:
    """How many steps a run must have for so many faults."""
    return APART * (faults + 1) + 1


def plan(kinds: Sequence[str], steps: int, seed: int, ranks: int) -> list[Fault]:
    """Faults at random steps, some steps apart."""
    draw = random.Random(seed)
    room = steps - least_steps(len(kinds)) + 1
    places = sorted(draw.randrange(room) for _ in kinds)
    return [
        Fault(kind, place + APART * (number + 1), draw.randrange(ranks), draw.random())
        for number, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
