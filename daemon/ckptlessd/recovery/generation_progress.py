"""Pure: how far the nodes of one generation are, counted: only those with news are looked at again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from ckptless.daemon.ckptlessd.planning.faults import Finding, NodeView, in_order, observe_node
from ckptless.daemon.protocol.messages import Assignment, Phase, Place

INSIDE = frozenset({"assigned", "joined", "restored", "finished"})
# What each phase has reached.
REACHED = {
    "joined": ("joined",),
    "restored": ("joined", "restored"),
    "finished": ("joined", "restored", "stepped"),
    "exited": ("exited",),
}


def _reached(phase: Phase, *, stepped: bool, well: bool) -> tuple[str, ...]:
    """Return how far a slot of the generation has come; `well`: it left or ended without a cause."""
    more = ("stepped",) if stepped and phase != "finished" else ()
    # Its training function has returned; where the leader that released it is gone, it may have ended.
    ended = ("ended",) if phase == "finished" or (phase == "exited" and well) else ()
    return ("here", *REACHED.get(phase, ()), *more, *ended)


_REACHED = {
    (phase, stepped, well): _reached(phase, stepped=stepped, well=well)
    for phase in get_args(Phase)
    for stepped in (False, True)
    for well in (False, True)
}


@dataclass
class _Work:
    """The counts of one node."""

    counts: dict[str, int] = field(default_factory=dict)
    inside: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass
class GenerationProgress:
    """The progress of the generation of `assignment`, by what the agents have told so far.

    `counts`: of how many ranks the slot is of this generation ("here"), and has come as far as "joined",
    "restored", "stepped" (a step since then), "exited" or "ended" (for good). `moving`: nodes that have not
    stopped this generation, or not said who they are. `step`: the newest step that any rank of it has
    committed; `newest`: that anybody has, in whatever generation.
    """

    assignment: Assignment
    counts: Counter[str] = field(default_factory=Counter)
    moving: set[int] = field(default_factory=set)
    step: int = 0
    newest: int = 0
    _frozen: set[int] = field(default_factory=set)
    _works: dict[int, _Work] = field(default_factory=dict)
    _findings: dict[int, list[Finding]] = field(default_factory=dict)
    _inside: dict[int, list[int]] = field(default_factory=dict)
    _news: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, assignment: Assignment, nodes: Mapping[int, NodeView]) -> "GenerationProgress":
        """All nodes are looked at, once."""
        progress = cls(assignment)
        progress.look(nodes, nodes)
        return progress

    @property
    def inside(self) -> list[Place]:
        """Slots whose rank lives, has hooks, and has not left its training function, by rank."""
        ranks = sorted(rank for ranks in self._inside.values() for rank in ranks)
        return [self.assignment.places[rank] for rank in ranks]

    @property
    def findings(self) -> list[Finding]:
        """Everything that keeps the generation from going on."""
        return in_order(finding for findings in self._findings.values() for finding in findings)

    @property
    def disputed(self) -> bool:
        """Whether an agent has stopped this generation."""
        return bool(self._frozen)

    def take_news(self) -> list[Finding]:
        """Return the findings that were made since this was called last."""
        news, self._news = self._news, []
        return in_order(news)

    def all_have(self, reached: str) -> bool:
        """Whether every rank has come so far."""
        return self.counts[reached] == len(self.assignment.places)

    def look(self, nodes: Mapping[int, NodeView], news: Iterable[int]) -> None:
        """Count these nodes again."""
        for node in news:
            self._look(node, nodes[node])

    def _look(self, node: int, view: NodeView) -> None:
        old, new = self._works.get(node), self._work(node, view)
        for reached, count in old.counts.items() if old is not None else ():
            self.counts[reached] -= count
        for reached, count in new.counts.items():
            self.counts[reached] += count
        self._works[node] = new
        # Without its hello it is not usable, and what it holds would not be looked at.
        state = view.state if view.hello is not None else None
        frozen = state is not None and state.frozen == self.assignment.generation
        # One that has come since the generation began has no part in it, and nothing to stop.
        part = not view.late or node in self.assignment.members
        moves = part and not frozen and view.lost is None
        (self.moving.add if moves else self.moving.discard)(node)
        (self._frozen.add if frozen and view.lost is None else self._frozen.discard)(node)
        for kept, value in ((self._findings, new.findings), (self._inside, new.inside)):
            kept.pop(node, None)
            if value:
                kept[node] = value  # type: ignore[assignment]  # each list into its own dict
        self._news += new.findings
        for slot in view.slots():
            if slot.step is not None and slot.step > self.newest:
                self.newest = slot.step

    def _work(self, node: int, view: NodeView) -> _Work:
        work, generation, usable = _Work(), self.assignment.generation, view.usable
        places = self.assignment.places
        told = {slot.slot: slot for slot in view.slots()}
        ranks = [(rank, told.get(places[rank].slot)) for rank in self.assignment.ranks_on(node)]
        alike: dict[tuple[Phase, bool, bool], int] = {}
        for rank, slot in ranks:
            if slot is None:
                continue
            if slot.generation == generation:
                key = slot.phase, slot.stepped, slot.cause is None
                alike[key] = alike.get(key, 0) + 1
                if slot.step is not None and slot.step > self.step:
                    self.step = slot.step
            if usable and slot.phase in INSIDE and slot.hooked:
                work.inside.append(rank)
        counts = work.counts
        for key, count in alike.items():
            for reached in _REACHED[key]:
                counts[reached] = counts.get(reached, 0) + count
        work.findings = observe_node(self.assignment, view, ranks)
        return work
