"""Whatever other daemons say, and in whatever order: this one holds what it must, and falls over nothing."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.membership.router import LIVES, WINDOW
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.ckptlessd.recovery.events import Report, Standing
from ckptless.daemon.ckptlessd.session import JobSession, Memory
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Ballot, Decided, Decree, Durable, Prepare
from ckptless.daemon.protocol.peers.membership import Beat, Have, Saw, Suspect, Want
from ckptless.daemon.protocol.records import Record
from ckptless.daemon.settings.config import Peer, Timers
from ckptless.daemon.transport.bundles import bundles, unbundle

JOB, ME, NODES = "4711", 3, 12
START_S = 1000.0


class Wires:
    """Everybody is connected, everything is sent; also the Outlets of the session."""

    times = Timers()

    def __init__(self, links: Collection[int]) -> None:
        self.links = set(links)
        self.sent = 0
        self.wanted: frozenset[int] = frozenset()
        self.clock = [START_S]

    @property
    def peer_links(self) -> "Wires":
        return self

    def now(self) -> float:
        return self.clock[0]

    @property
    def up(self) -> Collection[int]:
        return self.links

    def want(self, nodes: frozenset[int]) -> None:
        assert len(nodes) <= NODES
        self.wanted = nodes

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        self.sent += node in self.links
        return node in self.links

    def hang_up(self, node: int, why: str) -> None:
        self.links.discard(node)

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        pass

    def flush_soon(self) -> None:
        pass

    def to_agent(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        pass

    def write(self, records: Sequence[Record]) -> None:
        pass

    def ended(self, outcome: m.Outcome) -> None:
        pass

    def node_is_dark(self, node: int, reason: str, state: str) -> None:
        pass

    def cut_network(self, for_s: float) -> None:
        pass

    def save(self, durable: Durable, then: Any, failed: Any) -> None:
        then()

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        pass

    def explain(self, node: int, cancel: m.Cancel) -> None:
        pass


def make(links: Collection[int]) -> tuple[Peering, Wires, list[float]]:
    peers = tuple(Peer(node=n, name=f"n{n}", address="127.0.0.1", port=1) for n in range(NODES))
    wires = Wires(links)
    peering = JobSession(JOB, Roster(ME, peers), wires, Memory(life=7)).peering
    peering.start()
    for node in sorted(links):
        peering.linked(node)
    return peering, wires, wires.clock


nodes = st.integers(0, NODES - 1)
numbers = st.integers(-(2**40), 2**40)
others = nodes.filter(lambda node: node != ME)
decrees = st.builds(
    Decree, index=st.integers(0, 9), voters=st.lists(nodes, min_size=1, max_size=7, unique=True).map(tuple)
)
standings = st.builds(
    Standing,
    term=st.integers(0, 9),
    leader=st.integers(-1, NODES - 1),
    stage=st.sampled_from(["forming", "joining", "running", "stopping", "ended"]),
    lost=st.lists(st.tuples(nodes, st.just("gone"), st.just("membership")), max_size=2).map(tuple),
    index=st.integers(0, 9),
)
states = st.builds(m.AgentState, seq=st.integers(0, 9), slots=st.just(()))
reports = st.builds(Report, node=nodes, message=states)
said = st.one_of(
    st.builds(
        p.Meeting, job=st.just(JOB), standing=standings, reports=st.lists(reports, max_size=2).map(tuple)
    ),
    st.builds(p.Forwarded, job=st.just(JOB), report=reports),
    st.builds(
        p.Gone,
        job=st.just(JOB),
        node=nodes,
        reason=st.just("gone"),
        age_s=st.floats(0, 9),
        source=st.just("membership"),
    ),
    st.builds(p.Ordered, job=st.just(JOB), term=st.integers(0, 9), order=st.just(m.Go(generation=1))),
    st.builds(
        p.DrillAsked,
        job=st.just(JOB),
        drill=st.builds(m.Drill, kind=st.just("kill-agent"), node=nodes, uid=st.just(0)),
        left_s=st.floats(0, 9),
    ),
    st.builds(p.Agree, job=st.just(JOB), say=st.builds(Decided, decree=decrees)),
    st.builds(
        p.Agree,
        job=st.just(JOB),
        say=st.builds(Prepare, ballot=st.builds(Ballot, number=st.integers(0, 9), node=nodes), index=numbers),
    ),
)
relayed = st.builds(
    p.Relayed,
    job=st.just(JOB),
    origin=nodes,
    to=st.none() | nodes,
    serial=numbers,
    clock_ms=numbers,
    hops=numbers,
    said=said,
)


def bundle(relayed: Sequence[p.Relayed]) -> p.DaemonMessage:
    """All of them in one frame."""
    (found,) = bundles(JOB, relayed)
    return found


def is_wire(message: p.DaemonMessage) -> bool:
    """Whether a decoder would take it: numbers are drawn beyond their bounds, too."""
    try:
        return isinstance(message, p.Bundle) and bool(unbundle(message))
    except ProtocolError:
        return False


messages = st.one_of(
    said,
    relayed,
    st.lists(relayed, min_size=2, max_size=4).map(bundle).filter(is_wire),
    st.builds(Beat, pulses=st.lists(st.tuples(nodes, numbers, numbers), max_size=50).map(tuple)),
    st.builds(Suspect, node=nodes),
    st.builds(Saw, node=nodes, lives=st.booleans()),
    st.builds(Have, origin=numbers, serial=numbers),
    st.builds(Want, origin=numbers, serial=numbers),
)
moments = st.tuples(others, messages, st.floats(0.0, 3.0))


@given(st.sets(others, min_size=1), st.lists(moments, max_size=40))
@settings(deadline=None, max_examples=150)
def test_nothing_that_is_said_breaks_it(
    links: set[int], history: list[tuple[int, p.DaemonMessage, float]]
) -> None:
    peering, wires, clock = make(links)
    for node, message, later_s in history:
        clock[0] += later_s
        if node in wires.links:
            peering.hear(node, message)
        for silent in links - wires.links:
            peering.unlinked(silent, "silent")
            links = links - {silent}
        peering.tick()
        peering.flush()
    router = peering._router
    assert len(router._origins) <= NODES
    assert all(len(lives) <= LIVES for lives in router._origins.values())
    assert all(len(life.above) <= WINDOW for lives in router._origins.values() for life in lives.values())
    assert len(peering._pulses._newest) <= NODES
    assert len(router._ways.keys() | router._newest.keys()) <= NODES


def placed(node: int) -> m.Assignment:
    places = (m.Place(node=node, slot=0),)
    return m.Assignment(job=JOB, generation=2, term=1, leader=0, places=places, nodes=(), restore_step=None)


LOST = m.Drill(kind="kill-agent", node=99, uid=0)


def gone(node: int) -> p.Gone:
    return p.Gone(job=JOB, node=node, reason="x", age_s=0.0, source="membership")


@pytest.mark.parametrize(
    "message",
    [
        Suspect(node=NODES),
        p.Forwarded(job=JOB, report=Report(99, m.AgentState(seq=1, slots=()))),
        gone(99),
        p.DrillAsked(job=JOB, drill=LOST, left_s=1.0),
        p.Ordered(
            job=JOB,
            term=1,
            order=m.Strike(generation=1, place=m.Place(node=99, slot=0), drill=LOST),
        ),
        p.Ordered(job=JOB, term=1, order=m.Prepare(generation=1, assignment=placed(99))),
        p.Agree(job=JOB, say=Decided(decree=Decree(index=1, voters=(99,)))),
        p.Relayed(job=JOB, origin=99, to=None, serial=1, clock_ms=1, hops=1, said=gone(1)),
        bundle(
            [
                p.Relayed(job=JOB, origin=1, to=None, serial=serial, clock_ms=1, hops=1, said=said)
                for serial, said in enumerate((gone(1), gone(77)))
            ]
        ),
    ],
)
def test_nodes_that_the_job_does_not_have(message: p.DaemonMessage) -> None:
    peering, _, _ = make({1, 2})
    with pytest.raises(ProtocolError, match="which the job does not have"):
        peering.hear(1, message)


def test_voters_are_connected_to_each_other_wherever_they_are() -> None:
    peering, wires, clock = make(())
    around = peering.overlay.neighbours(ME)
    far = sorted(set(range(NODES)) - around - {ME})
    assert far
    for index, (voters, wanted) in enumerate(((far, around), ([ME, *far], around.union(far))), 1):
        decree = Decree(index=index, voters=tuple(sorted(voters)))
        peering.hear(far[0], p.Agree(job=JOB, say=Decided(decree=decree)))
        clock[0] += 1.0
        peering.tick()
        assert wires.wanted == wanted, "who votes not needs no more than its neighbours"
