"""Pure: how long the steps of a rank take by its own doing, and which ranks hold up the others with theirs.

All ranks end a step together, so its length tells nothing of who is slow. What tells is the part of it that
a rank does not spend waiting for others, nor for copies of its state: who arrives last waits least. No clocks
of two nodes are compared. A rank is slow where that part is longer than the others' median by more than a
tenth, and by more than they differ among themselves (their median absolute deviation, scaled to a standard
one).
"""

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ckptless.daemon.protocol.model import Pace
from ckptless.daemon.protocol.page import pace_of

K = TypeVar("K", bound=Hashable)
G = TypeVar("G", bound=Hashable)

SLOWER, DEVIATIONS = 0.1, 3.0
# Of a normal distribution, the standard deviation in median absolute deviations.
SCALE = 1.4826
# What ranks differ by at least, as a part of their median.
LEAST = 0.01

Bound = Literal["data", "compute"]


@dataclass(frozen=True)
class Slow(Generic[K]):
    """A rank or a group that is slower than the others: by so many seconds a step, by what; all's median."""

    who: K
    by_s: float
    bound: Bound
    own_s: float
    median_s: float

    @property
    def share(self) -> float:
        """By what part of the median it is slower."""
        return self.by_s / self.median_s if self.median_s else 0.0


def slow(paces: Mapping[K, Pace]) -> list[Slow[K]]:
    """Return who is slower than the others, a rank or a group of them; the slowest first."""
    if len(paces) < 2:
        return []
    median_s = statistics.median(one.own_s for one in paces.values())
    data_s = statistics.median(one.data_s for one in paces.values())
    deviation_s = statistics.median(abs(one.own_s - median_s) for one in paces.values())
    least_s = max(SLOWER * median_s, DEVIATIONS * max(SCALE * deviation_s, LEAST * median_s))
    found = []
    for who, one in paces.items():
        by_s = one.own_s - median_s
        if by_s > least_s:
            bound: Bound = "data" if one.data_s - data_s >= by_s / 2 else "compute"
            found.append(Slow(who, by_s, bound, one.own_s, median_s))
    return sorted(found, key=lambda one: -one.by_s)


def by_group(paces: Mapping[int, Pace], group_of: Mapping[int, G]) -> dict[G, Pace]:
    """Return the paces of groups of ranks, the medians of theirs; a rank of no group is left out."""
    groups: dict[G, list[Pace]] = {}
    for rank in sorted(paces.keys() & group_of.keys()):
        groups.setdefault(group_of[rank], []).append(paces[rank])
    return {group: pace_of(ones) for group, ones in groups.items()}


@dataclass(frozen=True)
class Shares:
    """Where the time of the job's steps goes, as parts of a step: see `shares`."""

    step_s: float
    compute: float
    data: float
    network: float
    waiting: float
    commit: float

    @property
    def bound(self) -> str:
        """The part that takes most of a step's time, by the name of its field."""
        return max(("compute", "data", "network", "waiting", "commit"), key=lambda name: getattr(self, name))


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
