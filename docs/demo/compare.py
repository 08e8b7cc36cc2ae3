"""Compares the losses of two runs, bit for bit."""

from dataclasses import dataclass
from typing import Self

from losses import Losses


@dataclass(frozen=True)
class Comparison:
    """How many losses of a run with faults are those of one without, over all ranks and steps.

    `again`: steps that a fault had cut off, and that were done, and written, once more.
    """

    equal: int
    wanted: int
    again_equal: int
    again: int

    @classmethod
    def of(cls, faulty: Losses, clean: Losses, steps: int) -> Self:
        mine, theirs = faulty.by_step(), clean.by_step()
        wanted = [(rank, step) for rank in range(faulty.ranks) for step in range(1, steps + 1)]
        equal = sum(key in mine and len({*mine[key], *theirs.get(key, ["none"])}) == 1 for key in wanted)
        again = [losses for losses in mine.values() if len(losses) > 1]
        same = sum(len(set(losses)) == 1 for losses in again)
        return cls(equal, len(wanted), same, len(again))

    @property
    def good(self) -> bool:
        return self.equal == self.wanted and self.again_equal == self.again

    def lines(self, ranks: int, steps: int) -> list[str]:
        """For people."""
        again = f"{self.again_equal} of {self.again} (steps that a fault had cut off)"
        return [
            f"  losses equal bit for bit:   {self.equal} of {self.wanted} ({ranks} ranks x {steps} steps)",
            f"  written twice, and equal:   {again}",
        ]
