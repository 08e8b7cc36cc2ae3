"""Pure: from what the agents report to the faults that the current generation has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from ckptless.daemon.protocol.limits import Age, NodeNumber, Text
from ckptless.daemon.protocol.messages import (
    AgentHello,
    AgentState,
    Assignment,
    Copies,
    Introduction,
    SlotState,
)
from ckptless.daemon.protocol.records import FaultSource

# Causes that are consequences as often as they are causes: they start a recovery, but are not counted
# against anybody when a deeper fault is there as well.
SECONDARY = frozenset({"broken", "stall", "twins-differ", "nccl-unknown"})

# A rank, and what is told of its slot.
Seated: TypeAlias = tuple[int, SlotState | None]

# One broken collective breaks it for every rank: of more than so many the story is told by these.
CONSEQUENCES = 64


@dataclass(frozen=True)
class NodeLost:
    """A node is gone, by the word of `source`, or is to go. Whoever says so, what follows is the same.

    `age_s`: how long ago that began. `dark`: nothing on it answers at all.
    """

    node: NodeNumber
    reason: Text
    age_s: Age
    dark: bool = False
    source: FaultSource = field(kw_only=True)


@dataclass
class NodeView:
    """The control plane's knowledge of one node; `lost`: why it is.

    `told_s`: when `state` came, by this daemon's clock. `copies`: the newest that its agent has told of what
    it holds, with the `seq` of that state and when it came; in jobs of many nodes not every state has it.
    `late`: its number is one of those for nodes that may come while the job runs.
    """

    node: int
    hello: AgentHello | Introduction | None = None
    state: AgentState | None = None
    lost: str | None = None
    lost_age_s: float = 0.0
    lost_source: FaultSource = "membership"
    told_s: float = 0.0
    copies: tuple[Copies, int, float] | None = None
    late: bool = False

    @property
    def absent(self) -> bool:
        """No node has come yet that has this number, and none has to."""
        return self.late and self.hello is None

    def slots(self) -> tuple[SlotState, ...]:
        """The slots as the node's agent has told of them."""
        return self.state.slots if self.state is not None else ()

    def take_copies(self, state: AgentState, now: float) -> bool:
        """Whether a state has news of what is held."""
        if state.copies is None or (self.copies is not None and state.seq <= self.copies[1]):
            return False
        self.copies = state.copies, state.seq, now
        return True

    def slot(self, index: int) -> SlotState | None:
        """State of a slot, if its agent has told; agents tell of them in order."""
        slots = self.slots()
        if index < len(slots) and slots[index].slot == index:
            return slots[index]
        return next((slot for slot in slots if slot.slot == index), None)

    @property
    def usable(self) -> bool:
        """Can take ranks and give state."""
        return self.lost is None and self.hello is not None


class NodeViews(Mapping[int, NodeView]):
    """One for each of a job's nodes, made when it is first looked at: most daemons know of few others.

    The numbers from `founders` on are those of nodes that may come while the job runs.
    """

    def __init__(self, nodes: tuple[int, ...], founders: int | None = None) -> None:
        self._nodes = nodes
        self._founders = len(nodes) if founders is None else founders
        self._members = _members(nodes)
        self._known: dict[int, NodeView] = {}

    def __getitem__(self, node: int) -> NodeView:
        view = self._known.get(node)
        if view is None:
            if node not in self._members:
                raise KeyError(node)
            view = self._known[node] = NodeView(node, late=node >= self._founders)
        return view

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


@lru_cache(maxsize=64)
def _members(nodes: tuple[int, ...]) -> frozenset[int]:
    return frozenset(nodes)


@dataclass(frozen=True)
class Finding:
    """A fault before it has an id, of whatever source it is.

    `key` names the same fault seen again; `age_s` is since its first sign. `odd`: of several that differ most
    say that it is this one.
    """

    kind: str
    node: int
    slot: int | None
    rank: int | None
    detail: str
    age_s: float = 0.0
    exit_code: int | None = None
    hooked: bool = True
    odd: bool = False
    pid: int | None = None
    source: FaultSource = field(kw_only=True)

    @property
    def key(self) -> tuple[str, int, int | None]:
        """Identity within one generation."""
        return self.kind, self.node, self.slot


@dataclass(frozen=True)
class Fault:
    """A finding with an id, as the plan and the ledger take it."""

    id: str
    finding: Finding


@dataclass
class FaultLog:
    """The faults of one generation, each once."""

    faults: list[Fault] = field(default_factory=list)
    _keys: set[tuple[str, int, int | None]] = field(default_factory=set)
    _secondary: int = 0

    def add(self, finding: Finding, fault_id: str) -> Fault | None:
        """The new fault; None where it is known already, or one consequence among very many."""
        secondary = finding.kind in SECONDARY
        if finding.key in self._keys or (secondary and self._secondary >= CONSEQUENCES):
            return None
        self._keys.add(finding.key)
        self._secondary += secondary
        fault = Fault(fault_id, finding)
        self.faults.append(fault)
        return fault


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Lost nodes, then the others by rank."""
    return sorted(findings, key=lambda one: (one.rank is not None, one.rank, one.node))


def observe_node(assignment: Assignment, view: NodeView, ranks: Sequence[Seated]) -> list[Finding]:
    """Return the faults of one node, which has these ranks."""
    if not ranks:
        return []
    if view.lost is not None:
        names = ", ".join(str(rank) for rank, _ in ranks)
        detail = f"{view.lost} (rank {names})"
        return [Finding("node-lost", view.node, None, None, detail, view.lost_age_s, source=view.lost_source)]
    generation = assignment.generation
    stopped = view.state is not None and view.state.frozen == generation
    known = [
        _slot_finding(rank, view, slot)
        for rank, slot in ranks
        # What is said of an older generation is not news; nor that ranks that were stopped have left.
        if slot is not None
        and slot.cause is not None
        and slot.generation == generation
        and not (slot.cause.kind == "stop" and (stopped or slot.phase != "left"))
    ]
    return [*known, *_doubts(assignment, view), *_unknown_nccl(assignment, view)]


def _unknown_nccl(assignment: Assignment, view: NodeView) -> list[Finding]:
    """Find ranks that wait in NCCL's bootstrap for an answer that they never get; nothing else tells."""
    if assignment.stock_roots or view.state is None or not view.state.nccl_unknown:
        return []
    text = f"{view.state.nccl_unknown}: it needs roots of its own, as with TORCH_NCCL_RANKS_PER_ROOT=100000"
    return [Finding("nccl-unknown", view.node, None, None, text, source="process")]


def _doubts(assignment: Assignment, view: NodeView) -> list[Finding]:
    """Versions that are not as their twins': enough to stop, not to say who is wrong (`twins_agree`)."""
    if view.state is None or view.state.assigned != assignment.generation:
        return []
    found: list[Finding] = []
    for doubt in view.state.doubts:
        text = f"shard {doubt.shard}, step {doubt.step}: ranks {doubt.rank} and {doubt.other} differ"
        slot = assignment.places[doubt.rank].slot
        found.append(Finding("twins-differ", view.node, slot, doubt.rank, text, source="twins"))
    return found


def _slot_finding(rank: int, view: NodeView, slot: SlotState) -> Finding:
    assert slot.cause is not None
    return Finding(
        # One that left as told, where nobody has stopped it, will not come back, and the others would wait.
        kind="raised" if slot.cause.kind == "stop" else slot.cause.kind,
        node=view.node,
        slot=slot.slot,
        rank=rank,
        detail=slot.cause.text,
        age_s=slot.age_s,
        exit_code=slot.exit_code,
        hooked=slot.hooked,
        pid=slot.pid,
        source="process",
    )
