"""Decides which replicas a node gives to whom in a generation, who has them, and what has become garbage."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, Remake, Watermark, moves, remakes, surplus

# The record of a rank or the tensors of a shard, and the step.
Key: TypeAlias = tuple[Item, int]
# What is sent to a holder.
P = TypeVar("P")

# Whoever is about to get a rank is given so many of its commits ahead. The leader stops the generation at the
# first; where it does not any more, nobody goes on sending.
AHEAD_COMMITS = 3


def verdict(generation: int, here: int, *, accepting: bool) -> Literal["early", "stale", "frozen", "take"]:
    """Return what becomes of a replica that comes, of `generation`, to an agent that is in generation `here`.

    Early: its sender has heard of a new generation first. A frozen agent takes nothing: what it has told of
    its holdings must stay true.
    """
    if generation != here:
        return "early" if generation > here else "stale"
    return "take" if accepting else "frozen"


class Edge(Protocol[P]):
    """The functions that carry the decisions out."""

    def send(self, info: NodeInfo, what: P) -> None:
        """Send it to a holder; `Replication.has` is called when it is held there."""

    def held(self, key: Key) -> P | None:
        """Return what is held here, as it is sent; None where it is not."""

    def items(self) -> Collection[Item]:
        """Return all that takes memory here."""

    def newest(self, item: Item) -> int | None:
        """Return the newest step of an item that is held here."""

    def give_back(self, items: Sequence[Item]) -> None:
        """Hold nothing of these any more."""

    def forget_former(self) -> None:
        """Hold nothing of the number of ranks before any more."""

    def event(self, kind: str, text: str) -> None:
        """Tell the ledger and the log."""

    def now(self) -> float:
        """Return the time, in seconds."""


@dataclass
class ReplicationTask(Generic[P]):
    """Something that holders are given: who has it, and who has not got it yet; then `acked` are called.

    `targets` finds out who is to hold it, of the nodes that can be reached.
    """

    what: P
    targets: Callable[[], Sequence[NodeInfo]]
    acked: list[Callable[[], None]]
    missing: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


class ReReplication(Generic[P]):
    """Replicas that are being made again since their holder is gone: one event when all of them are there."""

    def __init__(self, edge: Edge[P]) -> None:
        self._edge = edge
        self._missing: set[Key] = set()
        self._made: set[Key] = set()
        self._since = 0.0

    def begin(self, key: Key) -> None:
        """Note that it is being given to others."""
        if not self._missing:
            self._made, self._since = set(), self._edge.now()
        self._missing.add(key)

    def end(self, key: Key) -> None:
        """Note that all who are to hold it do."""
        if key in self._missing:
            self._missing.discard(key)
            self._made.add(key)
            self._tell()

    def fail(self, key: Key, why: str) -> None:
        """Note that it cannot be given, if it was to be."""
        if key in self._missing:
            self._missing.discard(key)
            self._edge.event("copies-not-remade", f"{_describe({key})}: {why}")
            self._tell()

    def _tell(self) -> None:
        if self._made and not self._missing:
            took_s = self._edge.now() - self._since
            self._edge.event("copies-remade", f"{_describe(self._made)}, in {took_s:.2f} s")

    def clear(self) -> None:
        """Wait for nothing of this any more: a new generation, or the end."""
        self._missing.clear()


class Replication(Generic[P]):
    """The replicas of one node. `domains` are the nodes' failure domains, see JobSpec.

    `accepting`: not while this node's agent is frozen.
    """

    def __init__(self, node: int, copies: int, domains: tuple[str, ...], edge: Edge[P]) -> None:
        self._me, self._copies, self._domains, self._edge = node, copies, domains, edge
        self.nodes: dict[int, NodeInfo] = {}
        self.generation = 0
        self.accepting = False
        self._to: Holders | None = None
        self._unreachable: set[int] = set()
        self._waiting: dict[Key, ReplicationTask[P]] = {}
        # Where ranks are about to go, and the steps that are given there ahead.
        self._moves: dict[int, NodeInfo] = {}
        self._given_ahead: set[int] = set()
        # Of each rank's record and shard's tensors the newest that its holders have.
        self._newest: dict[Item, tuple[int, ReplicationTask[P]]] = {}
        self._lost_copies = ReReplication(edge)
        self._watermark = Watermark(None)
        self._has_surplus = False

    def follow(self, assignment: Assignment) -> None:
        """Begin a generation: other holders, and nothing of the old one is waited for.

        What the holders lack of the restored step they are given at once.
        """
        self.nodes = {info.node: info for info in assignment.nodes}
        self.generation, self.accepting = assignment.generation, True
        self._unreachable.clear()
        self._forget_tasks()
        to = self._to = Holders(assignment, self._copies, self._domains)
        self._watermark = Watermark(assignment.restore_step)
        self._has_surplus = bool(surplus(to, self._me, self._edge.items()))
        for lost in remakes(to, self._me):
            self._remake(to, lost)

    def release(self) -> None:
        """Training is over: nobody has to hold anything any more, and may hang up."""
        self.nodes, self._to = {}, None
        self._forget_tasks()

    def _forget_tasks(self) -> None:
        self._waiting.clear()
        self._moves, self._given_ahead = {}, set()
        self._newest.clear()
        self._lost_copies.clear()

    # --------------------------------------------------------------------------------- replicate

    def holders(self) -> tuple[NodeInfo, ...]:
        """Return the nodes that are to hold the records of this node's ranks."""
        return self._to.of_node(self._me, self._unreachable) if self._to is not None else ()

    def give_ahead(self, ahead: Assignment) -> None:
        """Give the next commits of ranks that move in `ahead`, which may follow, to their new nodes, too.

        These are holders like the others for that long: what they have not got, the next commit waits for.
        """
        if self._to is not None:
            self._moves, self._given_ahead = moves(self._to, ahead), set()

    def push_record(self, key: Key, what: P, acked: Callable[[], None]) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held."""
        (_, rank), step = key
        self._note_ahead(step)

        def targets() -> tuple[NodeInfo, ...]:
            return self._with_moves(self.holders(), step, lambda moved: moved == rank)

        self._push(key, ReplicationTask(what, targets, [acked]))
        self.saw_commit(step)

    def push_tensors(self, key: Key, what: P, twins: frozenset[int], acked: Callable[[], None]) -> None:
        """Send a shard's tensors to so many others that, with its twins' nodes, there are enough of them."""
        step = key[1]
        self._note_ahead(step)

        def targets() -> tuple[NodeInfo, ...]:
            if self._to is None:
                return ()
            places = self._to.assignment.places
            usual = self._to.of_shared(self._me, twins, self._unreachable)
            return self._with_moves(usual, step, lambda moved: places[moved].node in twins, twins)

        self._push(key, ReplicationTask(what, targets, [acked]))

    def _note_ahead(self, step: int) -> None:
        if self._moves and len(self._given_ahead) < AHEAD_COMMITS:
            self._given_ahead.add(step)

    def _with_moves(
        self,
        usual: tuple[NodeInfo, ...],
        step: int,
        takes: Callable[[int], bool],
        have: Collection[int] = (),
    ) -> tuple[NodeInfo, ...]:
        """Return `usual` and the nodes where ranks that `takes` is true of go, but those that `have` it."""
        if step not in self._given_ahead:
            return usual
        known = {*have, *self._unreachable, *(info.node for info in usual)}
        more = {info.node: info for rank, info in self._moves.items() if takes(rank)}
        return (*usual, *(info for node, info in sorted(more.items()) if node not in known))

    def _remake(self, to: Holders, lost: Remake) -> None:
        """Give to others what this node holds of the restored step, without a rank that commits it."""
        step = to.assignment.restore_step
        assert step is not None
        key: Key = (lost.item, step)
        self._lost_copies.begin(key)
        what = self._edge.held(key)
        if what is None:
            self._lost_copies.fail(key, "this node has lost it, too")
            return
        task = ReplicationTask(
            what,
            lambda: to.targets(lost.item, self._unreachable),
            [lambda: self._lost_copies.end(key)],
            # Who is said to hold it is not asked again.
            held={info.node for info in to.targets(lost.item)} - set(lost.takers),
        )
        self._push(key, task)

    def _push(self, key: Key, task: ReplicationTask[P]) -> None:
        """Send it to all that are to hold it and have not been sent it."""
        before = self._waiting.pop(key, None)
        if before is not None and before is not task:
            task.acked = before.acked + task.acked
        infos = {info.node: info for info in task.targets() if info.node not in task.held}
        fresh = infos.keys() - task.missing
        task.missing = set(infos)
        if infos:
            self._waiting[key] = task
        else:
            self._all_have(key, task)
        for info in infos.values():
            if info.node in fresh:
                self._edge.send(info, task.what)

    def _all_have(self, key: Key, task: ReplicationTask[P]) -> None:
        item, step = key
        self._waiting.pop(key, None)
        if item not in self._newest or self._newest[item][0] <= step:
            self._newest[item] = step, task
        acked, task.acked = task.acked, []
        for tell in acked:
            tell()

    def has(self, node: int, key: Key, generation: int) -> None:
        """Note that a holder has verified what it was sent in `generation`."""
        task = self._waiting.get(key)
        if task is None or generation != self.generation:
            return
        task.missing.discard(node)
        task.held.add(node)
        if not task.missing:
            self._all_have(key, task)

    def again(self, node: int) -> None:
        """Send a node once more what it has not said that it has: the connection is another one."""
        for task in list(self._waiting.values()):
            if node in task.missing and node in self.nodes:
                self._edge.send(self.nodes[node], task.what)

    def unsound(self, key: Key, what: P) -> None:
        """Wait no more for what was to be sent: it is bad here, too, so nobody can hold it."""
        task = self._waiting.get(key)
        if task is None or task.what != what:
            return
        del self._waiting[key]
        (_, number), step = key
        self._edge.event("unprotected", f"shard {number}, step {step}, is held nowhere else")
        self._lost_copies.fail(key, "what is here is bad")
        for tell in task.acked:
            tell()

    def lost(self, node: int, why: str) -> None:
        """A node cannot be reached: the next on the ring takes its place for all that waits on it."""
        if node not in self.nodes or node in self._unreachable:
            return
        self._unreachable.add(node)
        self._edge.event("holder-lost", f"node-{node} cannot hold records any more: {why}")
        if not self.holders():
            self._edge.event("unprotected", "no other node can hold this node's records")
        for key, task in list(self._waiting.items()):
            self._push(key, task)
        for item, (step, task) in list(self._newest.items()):
            if (item, step) not in self._waiting:
                self._replace((item, step), task)

    def _replace(self, key: Key, task: ReplicationTask[P]) -> None:
        """Give it to another: all had it, and one of them is gone."""
        if any(info.node not in task.held for info in task.targets()):
            task.acked = [lambda: self._lost_copies.end(key)]
            self._lost_copies.begin(key)
            self._push(key, task)

    # ------------------------------------------------------------------------ garbage collection

    def saw_commit(self, step: int) -> None:
        """A rank, here or elsewhere, has committed this step: what that makes superfluous is given back.

        A frozen agent gives nothing back: what it has told of its holdings must stay true.
        """
        moved = self._watermark.saw_commit(step)
        if not (moved and self.accepting):
            return
        self._edge.forget_former()
        if not self._has_surplus or self._to is None:
            return
        found = surplus(self._to, self._me, self._edge.items())
        self._edge.give_back([item for item in found if self._watermark.passed(self._edge.newest(item))])
        self._has_surplus = bool(surplus(self._to, self._me, self._edge.items()))


def _describe(keys: set[Key]) -> str:
    steps = ", ".join(map(str, sorted({step for _, step in keys})))
    parts: list[str] = []
    for what, of in (("tensors", "shard"), ("record", "rank")):
        numbers = sorted({item.number for item, _ in keys if item.kind == what})
        if numbers:
            parts.append(f"{what} of {of} {', '.join(map(str, numbers))}")
    return f"step {steps}: {'; '.join(parts)}"
