"""Before the first generation: each daemon's ledger has the job, whom it waits for, and how that ended."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.fencing import AGREEING_S, CANCEL_S, FORMING_DEADLINE_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decided, Decree, Durable
from ckptless.daemon.protocol.records import JobRecord

NODES = (0, 1, 2)
SPEC = m.JobSpec(
    job="4711",
    command=("t",),
    nodes=2,
    spares=1,
    slots_per_node=1,
    limits=m.Limits(pong_s=30, leave_s=30, join_s=600, stall_s=600, lease_s=3.0),
    names=("a", "b", "c"),
)


def daemon(*, may_vote: bool = True) -> Controller:
    durable = Durable(promised=NO_BALLOT, vote=None, known=first_decree(NODES))
    return Controller(me=1, session="x", nodes=NodeViews(NODES), durable=durable, may_vote=may_vote)


def info(node: int) -> m.NodeInfo:
    return m.NodeInfo(node=node, name="abc"[node], address="127.0.0.1", agent_port=1)


def hello(node: int) -> e.Report:
    return e.Report(node, m.AgentHello(protocol=m.PROTOCOL, spec=SPEC, info=info(node), pid=node + 1))


def meets(node: int) -> e.PeerUp:
    return e.PeerUp(node, e.Standing(0, -1, "forming", index=0))


def rows(outputs: Iterable[e.Output]) -> list[tuple[str, str | None]]:
    writes = [out for out in outputs if isinstance(out, e.Write)]
    found = [(out, record) for out in writes for record in out.records if isinstance(record, JobRecord)]
    assert not any(out.share for out, _ in found)
    return [(record.state, record.reason) for _, record in found]


def test_there_is_a_row_from_the_first_hello_on_that_says_whom_it_waits_for() -> None:
    control = daemon()
    assert rows(control.handle(e.Tick(), 100.0)) == []
    assert rows(control.handle(hello(1), 100.1)) == [("forming", "waiting for a, c")]
    assert rows(control.handle(e.Tick(), 102.0)) == []
    control.handle(meets(2), 102.1)
    assert rows(control.handle(e.Tick(), 103.5)) == [("forming", "waiting for a")]
    control.handle(meets(0), 103.6)
    assert rows(control.handle(e.Tick(), 105.0)) == [("forming", None)]


def test_it_is_closed_where_too_few_have_met_to_begin() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    end = 100.0 + FORMING_DEADLINE_S + AGREEING_S
    found = [row for at in (end - 1, end + 1, end + 5) for row in rows(control.handle(e.Tick(), at))]
    assert found == [("failed", "1 of 3 daemons have met, too few to begin")]


def test_the_row_ends_with_the_same_code_as_the_agent() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    outputs = control.handle(e.Tick(), 100.0 + FORMING_DEADLINE_S + AGREEING_S + 1)
    orders = [out.order for out in outputs if isinstance(out, e.ToAgent)]
    (end,) = [order for order in orders if isinstance(order, m.End)]
    codes = [
        row.exit_code
        for out in outputs
        if isinstance(out, e.Write)
        for row in out.records
        if isinstance(row, JobRecord)
    ]
    assert codes == [end.outcome.exit_code]


def test_it_is_closed_where_its_user_cancels_it() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    control.handle(e.Report(1, m.Cancel(exit_code=143, reason="SIGTERM")), 101.0)
    found = [row for at in (101.5, 104.0, 110.0) for row in rows(control.handle(e.Tick(), at))]
    assert found[-1] == ("stopped", "SIGTERM")
    assert [state for state, _ in found].count("stopped") == 1


def test_who_has_forgotten_a_job_does_not_take_that_for_its_beginning() -> None:
    control = daemon(may_vote=False)
    assert rows([*control.handle(hello(1), 100.0), *control.handle(e.Tick(), 105.0)]) == []


def test_the_row_runs_with_the_first_generation_also_where_another_daemon_leads() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    assignment = m.Assignment(
        job="4711",
        generation=1,
        term=1,
        leader=0,
        places=tuple(m.Place(node=node, slot=0) for node in (0, 1)),
        nodes=tuple(info(node) for node in NODES),
        restore_step=None,
    )
    decree = Decree(index=1, voters=NODES, assignment=assignment)
    assert rows(control.handle(e.Said(0, Decided(decree=decree)), 101.0)) == [("running", None)]
    assert rows(control.handle(e.Tick(), 105.0)) == []
    second = Decree(index=2, voters=NODES, assignment=structs.replace(assignment, generation=2))
    assert rows(control.handle(e.Said(0, Decided(decree=second)), 106.0)) == [], "it runs on"


def test_an_end_is_written_at_once_also_right_after_the_row_was_looked_at() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    control.handle(e.Report(1, m.Cancel(exit_code=143, reason="SIGTERM")), 101.0)
    assert rows(control.handle(e.Tick(), 101.0 + CANCEL_S - 0.1)) == []
    assert rows(control.handle(e.Tick(), 101.0 + CANCEL_S + 0.1)) == [("stopped", "SIGTERM")]


def test_a_node_that_others_hold_for_lost_does_not_end_the_job_s_row() -> None:
    control = daemon()
    control.handle(hello(1), 100.0)
    found = rows(control.handle(e.NodeLost(1, "its agent is gone", 0.0, source="leader"), 101.0))
    found += rows(control.handle(e.Tick(), 105.0))
    assert "failed" not in [state for state, _ in found]
