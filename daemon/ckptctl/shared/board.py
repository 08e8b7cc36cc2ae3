"""Pure: the state of a job as `ckptctl top` shows it: a line for each node, those with trouble first."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptless.daemon.ckptctl.shared.view import ranks_in
from ckptless.daemon.ckptlessd.planning.pace import slow
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.limits import runs
from ckptless.daemon.protocol.model import Pace
from ckptless.daemon.protocol.records import SlotRecord

Sort = Literal["trouble", "node", "step", "own"]
SORTS: tuple[Sort, ...] = get_args(Sort)
# What is worth a look, the worst first; a node is in the first of these that holds.
TROUBLES = ("lost", "daemon away", "silent", "not training", "slow", "")
# A slot that was not told of for so long may be anything by now.
SILENT_S = 10.0


@dataclass(frozen=True)
class NodeLine:
    """A node: its ranks, what they are at, the newest step that all and that one of them have, and its pace.

    `own_s`: what its slowest rank is busy for by itself in a step, `over` by what part more than the median.
    """

    node: int
    name: str
    trouble: str
    ranks: str
    phase: str
    step: int | None
    behind: int
    own_s: float | None
    over: float
    data: float | None
    loss: float | None
    age_s: float


def node_lines(found: Snapshot, now_s: float) -> list[NodeLine]:
    """Return a line for each node that is known, by number."""
    generation, rank_of = found.generation, ranks_in(found.generation)
    slots: dict[int, list[SlotRecord]] = {node.node: [] for node in found.nodes}
    for slot in found.slots:
        slots.setdefault(slot.node, []).append(slot)
    names = {node.node: node for node in found.nodes}
    number = generation.generation if generation is not None else 0
    paces: dict[int, Pace] = {
        slot.rank: slot.pace
        for slot in found.slots
        if slot.rank is not None and slot.pace is not None and slot.generation == number
    }
    late = {one.who: one for one in slow(paces)}
    newest = max((slot.step for slot in found.slots if slot.step is not None), default=0)
    lines = []
    for node, mine in sorted(slots.items()):
        told = [(slot, rank) for slot in mine if isinstance(rank := rank_of(slot), int)]
        training = [slot for slot, _ in told]
        steps = [slot.step for slot in training if slot.step is not None]
        own = [paces[rank] for _, rank in told if rank in paces]
        slowest = max(own, key=lambda one: one.own_s, default=None)
        over = max((late[rank].share for _, rank in told if rank in late), default=0.0)
        age_s = max((now_s - slot.updated_s for slot in mine), default=0.0)
        state = names[node].state if node in names else "up"
        phases = {slot.phase for slot in training} or {slot.phase for slot in mine}
        has = runs(sorted(rank for _, rank in told)) if told else "" if state == "lost" else "spare"
        lines.append(
            NodeLine(
                node=node,
                name=names[node].name if node in names else "",
                trouble=_trouble(state, age_s, training, over),
                ranks=has,
                phase="" if state == "lost" else ", ".join(sorted(phases)),
                step=min(steps, default=None),
                behind=newest - min(steps) if steps else 0,
                own_s=slowest.own_s if slowest is not None else None,
                over=over,
                data=slowest.data_s / slowest.took_s if slowest is not None and slowest.took_s else None,
                loss=next((slot.loss for slot in training if slot.loss is not None), None),
                age_s=age_s,
            )
        )
    return lines


def _trouble(state: str, age_s: float, training: Sequence[SlotRecord], over: float) -> str:
    if state == "lost":
        return "lost"
    if state == "daemon-away":
        return "daemon away"
    if age_s > SILENT_S:
        return "silent"
    # One that has ended well is done; one that has not gets another process.
    if any(slot.phase not in ("restored", "finished", "exited") for slot in training):
        return "not training"
    return "slow" if over else ""


def in_order(lines: Sequence[NodeLine], by: Sort) -> list[NodeLine]:
    """Return them so that what is looked for comes first."""
    match by:
        case "node":
            return sorted(lines, key=lambda one: one.node)
        case "step":
            return sorted(lines, key=lambda one: (-one.behind, one.node))
        case "own":
            return sorted(lines, key=lambda one: (-(one.own_s or 0.0), one.node))
        case "trouble":
            return sorted(lines, key=lambda one: (TROUBLES.index(one.trouble), -one.over, one.node))


def folded(lines: Sequence[NodeLine], most: int) -> tuple[Sequence[NodeLine], str]:
    """Return as many lines as there is room for, and in words what the others are; "" where all are shown."""
    if len(lines) <= most:
        return lines, ""
    shown, rest = lines[: max(0, most - 1)], lines[max(0, most - 1) :]
    counts = [(sum(one.trouble == kind for one in rest), kind or "well") for kind in TROUBLES]
    return shown, f"and {len(rest)} more: " + ", ".join(f"{count} {kind}" for count, kind in counts if count)


@dataclass
class Rate:
    """How many steps a second the job makes, over the last `window_s`."""

    window_s: float = 15.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def see(self, step: int, now_s: float) -> float | None:
        """Take the newest step at this time; None while nothing can be said."""
        if self._seen and step < self._seen[-1][1]:
            # A fault has taken steps back.
            self._seen.clear()
        self._seen.append((now_s, step))
        while now_s - self._seen[0][0] > self.window_s:
            self._seen.popleft()
        (since_s, first), (until_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (until_s - since_s) if until_s > since_s else None
