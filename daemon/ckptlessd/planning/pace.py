"""Pure: how long the steps of a rank take by its own doing, and which ranks hold up the others with theirs.

All ranks end a step together, so its length tells nothing of who is slow. What tells is the part of it that
a rank does not spend waiting for others, nor for copies of its state: who arrives last waits least. No clocks
of two nodes are compared. A rank is slow where that part is longer than the others' median by more than a
tenth, and by more than they differ among themselves (their median absolute deviation, scaled to a standard
one).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptless.daemon.protocol.model import Pace

SLOWER, DEVIATIONS = 0.1, 3.0
# Of a normal distribution, the standard deviation in median absolute deviations.
SCALE = 1.4826
# What ranks differ by at least, as a part of their median.
LEAST = 0.01

Bound = Literal["data", "compute"]


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than the others: by so many seconds a step, by what, and the median of all."""

    rank: int
    by_s: float
    bound: Bound
    own_s: float
    median_s: float

    @property
    def share(self) -> float:
        """By what part of the median it is slower."""
        return self.by_s / self.median_s if self.median_s else 0.0


def slow(paces: Mapping[int, Pace]) -> list[Slow]:
    """Return the ranks that are slower than the others, the slowest first."""
    if len(paces) < 2:
        return []
    median_s = statistics.median(one.own_s for one in paces.values())
    data_s = statistics.median(one.data_s for one in paces.values())
    deviation_s = statistics.median(abs(one.own_s - median_s) for one in paces.values())
    least_s = max(SLOWER * median_s, DEVIATIONS * max(SCALE * deviation_s, LEAST * median_s))
    found = []
    for rank, one in paces.items():
        by_s = one.own_s - median_s
        if by_s > least_s:
            bound: Bound = "data" if one.data_s - data_s >= by_s / 2 else "compute"
            found.append(Slow(rank, by_s, bound, one.own_s, median_s))
    return sorted(found, key=lambda one: (-one.by_s, one.rank))


@dataclass(frozen=True)
class Shares:
    """Where the time of the job's steps goes, as parts of a step: see `shares`."""

    step_s: float
    compute: float
    data: float
    network: float
    waiting: float
    commit: float


def shares(paces: Mapping[int, Pace]) -> Shares | None:
    """Return where an average rank's time goes; None where no step has a length.

    What even the rank that waits least waits for is the collectives themselves; all others wait besides for
    the ranks that come later.
    """
    step_s = statistics.fmean(one.took_s for one in paces.values()) if paces else 0.0
    if not step_s:
        return None
    network_s = min(one.waited_s for one in paces.values())
    waited_s = statistics.fmean(one.waited_s for one in paces.values())
    data_s = statistics.fmean(one.data_s for one in paces.values())
    own_s = statistics.fmean(one.own_s for one in paces.values())
    commit_s = statistics.fmean(one.commit_s for one in paces.values())
    return Shares(
        step_s=step_s,
        compute=max(0.0, own_s - data_s) / step_s,
        data=data_s / step_s,
        network=network_s / step_s,
        waiting=(waited_s - network_s) / step_s,
        commit=commit_s / step_s,
    )
