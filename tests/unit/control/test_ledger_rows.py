"""What daemons write of a job: of each slot, whoever knows best is believed; with its end no node is lost."""

from msgspec import structs

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.ledger.merge import merge
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import NodeRecord, Record, SlotRecord

from .lease_nodes import Node

SPEC = m.JobSpec(
    job="j",
    command=("t",),
    nodes=2,
    spares=0,
    slots_per_node=1,
    limits=m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10),
)


def _view(node: int, slot: m.SlotState, told_s: float) -> NodeView:
    info = m.NodeInfo(node=node, name=f"node-{node}", address="a", agent_port=1)
    hello = m.AgentHello(protocol=m.PROTOCOL, spec=SPEC, info=info, pid=1)
    return NodeView(node, hello, m.AgentState(seq=1, slots=(slot,)), told_s=told_s)


EMPTY = m.SlotState(slot=0, phase="empty", generation=0)
TRAINS = m.SlotState(slot=0, phase="restored", generation=1, pid=77)


def test_a_daemon_that_was_told_long_ago_does_not_cover_what_is_so() -> None:
    own = ledger_rows.snapshot((SPEC, 0), {0: _view(0, TRAINS, told_s=5.0)}, None, [0, 1], now=20.0)
    # Written later, of what was said before: nobody tells a daemon that does not lead any more.
    other = ledger_rows.snapshot((SPEC, 1), {0: _view(0, EMPTY, told_s=2.0)}, None, [0, 1], now=20.5)
    for ledgers in ((own, other), (other, own)):
        assert [slot.pid for slot in merge(ledgers).slots] == [77]


def test_of_a_daemon_that_is_gone_the_leader_knows_better() -> None:
    own = ledger_rows.snapshot((SPEC, 0), {0: _view(0, EMPTY, told_s=1.0)}, None, [0, 1], now=3.0)
    leader = ledger_rows.snapshot((SPEC, 1), {0: _view(0, TRAINS, told_s=4.0)}, None, [1], now=9.0)
    found = merge((own, leader))
    assert [(type(slot), slot.pid) for slot in found.slots] == [(SlotRecord, 77)]
    assert [node.state for node in found.nodes] == ["daemon-away"]


def states(node: Node) -> dict[int, str]:
    """The state of each node in the rows that it has written last."""
    writes = [output for output in node.told.outputs if isinstance(output, e.Write)]
    rows = [row for write in writes for row in write.records if isinstance(row, NodeRecord)]
    return {row.node: row.state for row in rows}


def ended(node: Node) -> None:
    node.feed(e.Report(node.me, m.Cancel(exit_code=143, reason="SIGTERM from the user")))
    node.wait(3.0)
    assert node.outcome is not None
    node.forget()


def test_nodes_that_go_with_the_end_are_not_lost() -> None:
    node = Node(0, 4)
    ended(node)
    node.refused([2, 3])
    node.wait(3.0)
    assert set(states(node).values()) == {"up"}
    assert not node.told.dark_states


def test_one_that_was_lost_before_stays_so() -> None:
    node = Node(0, 4)
    node.refused([3])
    node.wait(1.0)
    ended(node)
    node.refused([2])
    node.wait(3.0)
    assert states(node) == {0: "up", 1: "up", 2: "up", 3: "lost"}


def test_the_row_of_a_slot_has_its_rank() -> None:
    node = Node(1, 4)
    slots = [row for row in rows(node) if isinstance(row, SlotRecord)]
    assert {(row.node, row.slot, row.rank) for row in slots} == {(1, 0, 1)}


def rows(node: Node) -> list[Record]:
    writes = [out for out in node.wait(2.0).outputs if isinstance(out, e.Write)]
    return [row for write in writes for row in write.records]


def test_a_generation_in_one_line() -> None:
    place = m.Place(node=0, slot=1)
    first = m.Assignment(
        job="j", generation=1, term=1, leader=0, places=(place,), nodes=(), restore_step=None, rung="start"
    )
    assert ledger_rows.describe(first) == "generation 1 (start), from the start: rank 0 on node-0/1"
    again = structs.replace(first, generation=2, restore_step=0, rung="process")
    assert ledger_rows.describe(again) == "generation 2 (process), from step 0: rank 0 on node-0/1"
    for ranks, end in ((16, "15 on node-0/1"), (17, "15 on node-0/1, and 1 more")):
        many = structs.replace(first, places=first.places * ranks)
        assert ledger_rows.describe(many).endswith(end)
    flapping = structs.replace(first, flapping=(place,) * 17)
    assert ledger_rows.describe(flapping).count("node-0/1") == 1 + 16


def test_a_job_that_waits_for_many_nodes_names_a_few() -> None:
    def reason(count: int) -> str | None:
        return ledger_rows.forming(SPEC, 0.0, range(count)).reason

    few = ", ".join(f"node-{node}" for node in range(ledger_rows.NAMED))
    assert reason(ledger_rows.NAMED) == f"waiting for {few}"
    assert reason(ledger_rows.NAMED + 2) == f"waiting for {few} and 2 more"
    assert reason(0) is None


def test_a_node_has_the_daemon_that_its_agent_talks_to() -> None:
    told, silent = _view(0, TRAINS, told_s=5.0), _view(1, TRAINS, told_s=5.0)
    assert told.state is not None
    told.state, silent.state = structs.replace(told.state, daemon_pid=4712), None
    found = ledger_rows.snapshot((SPEC, 0), {0: told, 1: silent}, None, [0, 1], now=20.0)
    assert [row.daemon_pid for row in found if isinstance(row, NodeRecord)] == [4712, None]


def test_the_own_slots_are_as_of_now_and_others_as_of_when_they_were_told_of() -> None:
    both = {node: _view(node, TRAINS, told_s=5.0) for node in (0, 1)}
    found = ledger_rows.snapshot((SPEC, 0), both, None, [0, 1], now=20.0)
    assert {row.node: row.updated_s for row in found if isinstance(row, SlotRecord)} == {0: 20.0, 1: 5.0}


def test_of_a_lost_node_the_last_word_on_its_slots_stands() -> None:
    lost = _view(1, TRAINS, told_s=5.0)
    lost.lost = "its agent is gone"
    found = ledger_rows.snapshot((SPEC, 0), {1: lost}, None, [0, 1], now=20.0)
    assert [type(row) for row in found] == [NodeRecord]


def test_a_node_that_lives_and_whose_daemon_cannot_be_reached_is_written_as_such() -> None:
    node = Node(0, 4)
    node.feed(e.PeerDown(2), e.AgentAnswers(2, True))
    node.wait(2.0)
    assert states(node) == {0: "up", 1: "up", 2: "daemon-away", 3: "up"}


def test_how_the_nodes_are_is_for_the_own_ledger_alone() -> None:
    written = [out for out in Node(0, 4).wait(2.0).outputs if isinstance(out, e.Write)]
    assert written
    assert not any(out.share for out in written)
