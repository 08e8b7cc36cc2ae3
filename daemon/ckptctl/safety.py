"""Says what could be lost now: of a job's holdings in the ledgers, as a sentence or two and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.limits import runs
from ckptless.daemon.protocol.records import JobRecord
from ckptless.daemon.replication.protection import Item, Protection, protection

_SHOWN = 3


@dataclass(frozen=True)
class Safety:
    """The protection of a running job's state. `unknown`: living nodes that ledgers do not tell of."""

    held: Protection
    newest: int | None
    unknown: tuple[int, ...]
    leader: int | None

    @property
    def behind(self) -> int | None:
        """Steps that have been committed and could not be restored now."""
        if self.held.step is None or self.newest is None:
            return None
        return max(0, self.newest - self.held.step)


def safety(job: JobRecord, found: Snapshot) -> Safety | None:
    """None where nothing is held: before the first commit, and when the job is over."""
    if job.state in ENDED or not any(one.records for one in found.holdings):
        return None
    return safety_of(job, found)


def safety_of(job: JobRecord, found: Snapshot) -> Safety:
    """Return the protection as last told, whether the job is over or not."""
    lost, generation = found.lost, found.generation
    known = {one.node for one in found.holdings}
    held = protection(found.holdings, lost, job.world_size, job.nodes + job.spares)
    # Slots and holdings are told of one after the other.
    steps = [slot.step for slot in found.slots if slot.step is not None]
    steps += [copy.step for copies in held.items.values() for copy in copies]
    return Safety(
        held=held,
        newest=max(steps, default=None),
        unknown=tuple(n.node for n in found.nodes if n.node not in lost and n.node not in known),
        leader=None if generation is None else generation.leader,
    )


@dataclass(frozen=True)
class Commits:
    """The steps between two commits, and which part of the slowest rank's time they take."""

    every: int
    share: float | None
    rank: int | None


def commits(job: JobRecord, found: Snapshot) -> Commits | None:
    """None where nothing is committed: before the first time, and when the job is over."""
    slots = [slot for slot in found.slots if slot.rank is not None and slot.every is not None]
    if job.state in ENDED or not slots:
        return None
    # Slots of an older generation have a rank that lives elsewhere by now.
    newest = max(slot.generation for slot in slots)
    present = [slot for slot in slots if slot.generation == newest]
    slowest = max(present, key=lambda slot: slot.share or 0.0)
    every = max(present, key=lambda slot: slot.step or 0).every or 1
    return Commits(every, slowest.share, slowest.rank if slowest.share is not None else None)


# ------------------------------------------------------------------------------------------ for people


def said_of(commits: Commits) -> str:
    """One line: how often, and what it costs."""
    often = "every step" if commits.every == 1 else f"every {commits.every} steps"
    if commits.share is None:
        return f"commits: {often}"
    return f"commits: {often}, {commits.share:.2%} of the time of rank {commits.rank}, which it costs most"


def sentences(safety: Safety) -> list[str]:
    """One or two lines: which step could be restored, and which failures would lose what."""
    if safety.unknown:
        nodes = named("node", "nodes", safety.unknown)
        return [f"held: it is not known here what {nodes} hold{_ask(safety)}"]
    exposure, step = safety.held.exposure, safety.held.step
    if step is None:
        return [f"held: no step could be restored: nobody has {items_named(exposure.gone)}"]
    return [f"held: step {step} can be restored{_lag(safety)}{_later(safety)}", f"at risk: {_risks(safety)}"]


def _ask(safety: Safety) -> str:
    return "" if safety.leader is None else f": ask on node {safety.leader}, whose daemon leads"


def _lag(safety: Safety) -> str:
    return f", {safety.behind} behind the newest" if safety.behind else ", the newest"


def _later(safety: Safety) -> str:
    _, one, two = safety.held.after
    words = ((one, "after any one node's loss"), (two, "after any two's"))
    parts = [f"{step} {when}" for step, when in words if step is not None]
    return f"; {', '.join(parts)}" if parts else ""


def _risks(safety: Safety) -> str:
    exposure = safety.held.exposure
    parts = [f"node {node} alone has {items_named(items)}" for node, items in exposure.one.items()]
    parts += [f"only nodes {a} and {b} have {items_named(items)}" for (a, b), items in exposure.two.items()]
    if not parts:
        return "nothing, whichever two nodes fail"
    more = f"; and {len(parts) - _SHOWN} more: see --json" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def items_named(items: Iterable[Item]) -> str:
    """Shards, and ranks' records, in words."""
    shards, ranks = split(items)
    words = [named("shard", "shards", shards)] if shards else []
    words += [named("the record of rank", "the records of ranks", ranks)] if ranks else []
    return " and ".join(words)


def split(items: Iterable[Item]) -> tuple[list[int], list[int]]:
    """The numbers of shards whose tensors they are, and of ranks whose records."""
    known = list(items)
    return [i.number for i in known if i.kind == "tensors"], [i.number for i in known if i.kind == "record"]


def named(one: str, many: str, numbers: Sequence[int]) -> str:
    """Numbers as a list, runs of them as a range: "ranks 0-3, 7"."""
    return f"{one if len(numbers) == 1 else many} {runs(numbers)}"


# ---------------------------------------------------------------------------------------- for scripts


def as_json(safety: Safety | None) -> dict[str, Any] | None:
    """All of it; `complete` is false where it is not known what some nodes hold: the rest is less then."""
    if safety is None:
        return None
    exposure, after = safety.held.exposure, safety.held.after
    return {
        "complete": not safety.unknown,
        "unknown_nodes": safety.unknown,
        "watermark": safety.held.step,
        "newest_step": safety.newest,
        "behind": safety.behind,
        "after_one_node": after[1],
        "after_two_nodes": after[2],
        "gone": _lost(exposure.gone),
        "lost_with_one": [{"node": node, **_lost(items)} for node, items in exposure.one.items()],
        "lost_with_two": [{"nodes": pair, **_lost(items)} for pair, items in exposure.two.items()],
    }


def _lost(items: Iterable[Item]) -> dict[str, list[int]]:
    shards, ranks = split(items)
    return {"shards": shards, "records_of_ranks": ranks}
