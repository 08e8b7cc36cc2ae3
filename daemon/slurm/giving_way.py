"""Pure: how many nodes an elastic job is to keep, and when it draws none in: others that wait come first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Begins the name of a job by which a running one draws nodes in: it takes what is idle, and nobody has to
# make room for it.
HELPER_NAME = "ckptless-draw-in"
# A job waits for nodes, and for nothing that nodes would not mend.
WAITS_FOR_NODES = frozenset(("Resources", "Priority"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A job in the queue, or running: the nodes that it asks for or has, and Slurm's reason why it waits."""

    job_id: int
    state: str
    partition: str
    priority: int
    nodes: int
    reason: str
    name: str
    qos: str = ""
    nice: int = 0


def gives_way(
    ours: Queued, others: Iterable[Queued], idle: int, sizes: Sequence[int]
) -> tuple[Queued, int] | None:
    """Return who it is that could start with nodes of ours, and the largest of `sizes` that leaves enough.

    `idle`: nodes of the partition on which a job could start now. None where nobody of higher priority waits
    for nodes there, or the first who does has enough without ours, or would not have enough with them.
    """
    waiting = [one for one in others if _is_before(one, ours) and one.reason in WAITS_FOR_NODES]
    if not waiting:
        return None
    first = max(waiting, key=lambda one: (one.priority, -one.job_id))
    missing = first.nodes - idle
    fitting = [size for size in sizes if size <= ours.nodes - missing]
    return (first, max(fitting)) if missing > 0 and fitting else None


def waits_before(ours: Queued, others: Iterable[Queued]) -> bool:
    """Whether anybody of higher priority waits in the partition: the job does not grow then."""
    return any(_is_before(one, ours) for one in others)


def could_use_idle(ours: Queued, others: Iterable[Queued]) -> Queued | None:
    """Return a job that waits for nodes of the partition, and comes no later than ours; None: nobody does.

    Slurm may keep what is idle together for it. A job that has begun ends later than the request by which it
    draws nodes in, which Slurm would therefore let pass.
    """
    waiting = [one for one in others if _waits(one, ours) and one.reason in WAITS_FOR_NODES]
    return max(
        (one for one in waiting if one.priority >= ours.priority), key=lambda one: one.priority, default=None
    )


def _is_before(one: Queued, ours: Queued) -> bool:
    return _waits(one, ours) and one.priority > ours.priority


def _waits(one: Queued, ours: Queued) -> bool:
    return (
        one.state == "PENDING"
        and one.partition == ours.partition
        and not one.name.startswith(f"{HELPER_NAME}-")
    )
