"""Pure: what the failures of nodes will cost a planned job: its goodput, spares, copies that are lost.

Nodes fail each on its own, after times that are exponentially distributed, while they train and while the
job recovers: a node that fails in a recovery begins it anew. After a failure the job then needs so many
seconds without another; of such seconds e^(-rate * seconds) is the part that training keeps (J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006, of his restarts).
Failures of spares, and of several nodes by one cause, are not in it: racks are the placement's concern.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Outlook:
    """A job of `nodes` that train and `spares`; all times are seconds.

    `mtbf_s`: between two failures of one node. `recovery_s`: from a failure until the job trains, what is
    done again not counted. `requeue_s`: the same of a failure that finds no spare. `repair_s`: until a lost
    node is a spare again. `commit_s`: that a commit holds it up, after `commit_every` steps of `step_s`.
    """

    nodes: int
    spares: int
    mtbf_s: float
    recovery_s: float
    requeue_s: float
    repair_s: float
    step_s: float
    commit_every: int
    commit_s: float

    @property
    def failures_per_s(self) -> float:
        """Failures of any node that trains."""
        return self.nodes / self.mtbf_s

    @property
    def no_spare(self) -> float:
        """The part of failures that find no spare: so many others are still being repaired (M/G/infinity)."""
        mean = self.failures_per_s * self.repair_s
        return max(0.0, 1.0 - math.fsum(_poisson(mean, count) for count in range(self.spares)))

    @property
    def interval_s(self) -> float:
        """From commit to commit."""
        return self.commit_every * self.step_s + self.commit_s

    @property
    def redone_s(self) -> float:
        """Seconds that are done again after a failure, on average."""
        return self.interval_s / 2

    @property
    def failure_s(self) -> float:
        """Seconds that a failure costs on average, where no other comes meanwhile."""
        return (1 - self.no_spare) * self.recovery_s + self.no_spare * self.requeue_s + self.redone_s

    @property
    def commits(self) -> float:
        """The part of the time that commits take."""
        return self.commit_s / self.interval_s

    @property
    def kept(self) -> float:
        """The part of the time that failures leave."""
        rate, none = self.failures_per_s, self.no_spare
        outage = (1 - none) * math.exp(-rate * self.recovery_s) + none * math.exp(-rate * self.requeue_s)
        # A failure comes at any moment between two commits.
        return outage * -math.expm1(-rate * self.interval_s) / (rate * self.interval_s)

    @property
    def goodput(self) -> float:
        """The part of the time that goes into steps that are done for the first time."""
        return self.kept * (1 - self.commits)

    @property
    def useful(self) -> float:
        """The part of what all nodes could do, spares too, that goes into such steps."""
        return self.goodput * self.nodes / (self.nodes + self.spares)

    def with_best_spares(self) -> "Outlook":
        """Return it with as many spares as make the most of all nodes."""
        # More than ever are being repaired at once.
        mean = self.failures_per_s * self.repair_s
        most = round(mean + 8 * math.sqrt(mean)) + 8
        return max((replace(self, spares=count) for count in range(most + 1)), key=lambda one: one.useful)

    def best_commit_every(self, at_least: int) -> int:
        """Return the steps between commits at which they cost what is done again does (J. W. Young, 1974)."""
        interval_s = math.sqrt(2 * self.commit_s / self.failures_per_s)
        return max(at_least, round(interval_s / self.step_s), 1)


def _poisson(mean: float, count: int) -> float:
    """The probability of so many."""
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def losses_per_s(holders: Collection[frozenset[int]], mtbf_s: float, window_s: float) -> float:
    """Return how often all nodes of one of these sets fail, the others within `window_s` after the first.

    That is until the copies that the first one had are elsewhere again. First order in window / MTBF.
    """
    return sum(len(nodes) / mtbf_s * (window_s / mtbf_s) ** (len(nodes) - 1) for nodes in holders)
