"""Slurm as the cluster edge asks and tells it, in memory, and what that edge sees of a job in the daemon."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery.events import Drained, Leave, NodeLost
from ckptless.daemon.protocol.messages import PROTOCOL, AgentHello, Cancel, JobSpec, Limits, NodeInfo
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.slurm.adapter import DEADLINE_S, Job, Node
from ckptless.daemon.slurm.cached import CachedSlurm, Reading
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import SlurmUnreachableError

T = TypeVar("T")

OWNER = 1001
NAMES = ("n1", "n2", "n3")
ADDRESS = "10.0.0.2"  # of n2, where these tests are


def job(job_id: int = 4711, state: str = "RUNNING", **more: Any) -> Job:
    fields = {"user_id": OWNER, "nodes": NAMES, "batch_host": "n1", **more}
    return Job(job_id=job_id, state=state, **fields)


class FakeSlurm(CachedSlurm):
    """`told` are the orders, `asked` the questions; the orders raise `answers`, one each."""

    def __init__(self, *jobs: Job, trouble: str = "") -> None:
        self.direct = cast(Commands, self)
        self.known, self.trouble = list(jobs), trouble
        self.asked: list[int | None] = []
        self.told: list[tuple[str, ...]] = []
        self.answers: Iterator[Exception | None] = iter(())
        self.closed = False
        self.have = tuple(Node(name=name, address="", state="MIXED") for name in NAMES)
        self.asked_nodes = 0
        self.end = Ending(state="RUNNING")
        self.age_s = 0.0

    async def nodes(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Node, ...]]:
        self.asked_nodes += 1
        return Reading(value=self.have, age_s=self.age_s, fresh=not self.trouble, trouble=self.trouble)

    async def node(self, name: str, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[Node]:
        found = next((node for node in self.have if node.name == name), None)
        return Reading(value=found, age_s=0.0, fresh=not self.trouble, trouble=self.trouble)

    async def job(self, job_id: int, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[Job]:
        self.asked.append(job_id)
        found = next((one for one in self.known if one.job_id == job_id), None)
        return Reading(value=found, age_s=0.0, fresh=not self.trouble, trouble=self.trouble)

    async def jobs(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Job, ...]]:
        self.asked.append(None)
        value = tuple(self.known)
        return Reading(value=value, age_s=self.age_s, fresh=not self.trouble, trouble=self.trouble)

    def _tell(self, *words: str) -> None:
        self.told.append(words)
        with suppress(StopIteration):
            answer = next(self.answers)
            if answer is not None:
                raise answer

    async def order(self, order: Awaitable[T]) -> T:
        return await order

    async def mark_down(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._tell("down", name, reason)

    async def drain(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._tell("drain", name, reason)

    async def undrain(self, name: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._tell("undrain", name)

    async def cancel(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> None:
        self._tell("cancel", str(job_id))

    async def ending(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Ending:
        self.asked.append(job_id)
        if self.trouble:
            raise SlurmUnreachableError(self.trouble)
        return self.end

    async def comment(self, job_id: int, text: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._tell("comment", str(job_id), text)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class FakeRuntime:
    """What the cluster edge looks at in a job of this daemon, and what it says to it."""

    job: str = "4711"
    names: Sequence[str] = NAMES
    leads: bool = True
    lost: Sequence[int] = ()
    evicted: Sequence[int] = ()
    outcome: object = None
    agreed: bool = True
    stage: str = "running"
    leader: int = 1
    age_s: float = 60.0
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    losses: list[NodeLost] = field(default_factory=list)
    reasons: list[tuple[int, int, str]] = field(default_factory=list)
    stopped_s: float = 0.0
    launch: str = NO_RUN
    drained: dict[int, Leave] = field(default_factory=dict)

    @property
    def roster(self) -> Roster:
        peers = (Peer(node=n, name=name, address="127.0.0.1", port=1) for n, name in enumerate(self.names))
        return Roster(1, tuple(peers))

    def name_of(self, node: int) -> str:
        """Return a node's name."""
        return self.names[node]

    @property
    def session(self) -> SimpleNamespace:
        nodes = {n: NodeView(n, lost="x" if n in self.lost else None) for n in range(len(self.names))}
        for node in self.evicted:
            nodes[node] = NodeView(node, lost="x", lost_source="operator")
        control = SimpleNamespace(
            leads=self.leads,
            nodes=nodes,
            known=SimpleNamespace(outcome=self.agreed or None),
            outcome=self.outcome,
            stage=self.stage,
            leader=self.leader,
            drained=self.drained,
        )
        return SimpleNamespace(control=control, lose=self.lose, feed=self.feed)

    def note(self, level: str, kind: str, text: str) -> None:
        self.notes.append((level, kind, text))

    def cut_short(self, reason: str) -> None:
        self.cut.append(reason)

    def lose(self, loss: NodeLost) -> None:
        self.losses.append(loss)
        self.lost = (*self.lost, loss.node)

    def feed(self, event: Drained) -> None:
        self.drained = dict(event.nodes)

    def explained(self, node: int, cancel: Cancel, reason: str) -> None:
        self.reasons.append((node, cancel.exit_code, reason))

    def suspended(self, seconds: float) -> None:
        self.stopped_s += seconds

    @property
    def it(self) -> JobHost:
        return cast(JobHost, self)


def hello(
    run: str = "4711", names: Sequence[str] = NAMES, node: int = 1, address: str = ADDRESS, **more: Any
) -> AgentHello:
    """Of the agent on n2, unless told otherwise."""
    spares = more.pop("spares", 1)
    spec = JobSpec(
        job=run,
        command=("t",),
        nodes=more.pop("nodes", len(names) - spares),
        spares=spares,
        slots_per_node=1,
        limits=Limits.from_max_stall(60),
        names=tuple(names),
    )
    info = NodeInfo(
        node=node,
        name=more.pop("name", "n2"),
        address=address,
        agent_port=1,
    )
    assert not more
    return AgentHello(protocol=PROTOCOL, spec=spec, info=info, pid=1)
