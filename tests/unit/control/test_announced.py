"""What the job's own output hears: of ranks that return early, a stall, ranks that SIGTERM has ended."""

from __future__ import annotations

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import FaultRecord

from .lease_nodes import LIMITS, STEP, Heard, Node, first_generation, trains
from .recovering import NODES, Job

EARLY = f"rank 1 has returned from the training function after step {STEP}, while rank 0 still trains"


def returned(node: Node) -> Heard:
    state = trains(1, first_generation(3), seq=5, phase="finished")
    return node.feed(e.Report(1, state))


def announced(heard: Heard) -> list[str]:
    orders = [output.order for output in heard.outputs if isinstance(output, e.ToAgent)]
    return [order.text for order in orders if isinstance(order, m.Announce)]


def test_a_stall_names_the_rank_that_has_returned() -> None:
    node = Node(0, 3)
    returned(node)
    assert [text.startswith(EARLY) for text in announced(node.wait(30, tick_s=1.0))] == [True]
    heard = node.wait(LIMITS.stall_s, tick_s=10.0)
    stops = [order for order in heard.orders if isinstance(order, m.Stop)]
    assert f"stall: no step in {LIMITS.stall_s:.0f} s: {EARLY}" in stops[0].reason
    writes = [output for output in heard.outputs if isinstance(output, e.Write)]
    (fault,) = [row for write in writes for row in write.records if isinstance(row, FaultRecord)]
    assert fault.detail == f"no step in {LIMITS.stall_s:.0f} s: {EARLY}, and may wait for it"


def test_without_one_it_is_a_stall() -> None:
    node = Node(0, 3)
    heard = node.wait(LIMITS.stall_s + 20, tick_s=10.0)
    (stop,) = {order.reason for order in heard.orders if isinstance(order, m.Stop)} - {"repeated"}
    assert stop == f"stall: no step in {LIMITS.stall_s:.0f} s"


def terminated() -> Node:
    """Rank 1 was ended by SIGTERM, and whether that was the user is not known yet."""
    node = Node(0, 3)
    slot = m.SlotState(
        slot=0,
        phase="exited",
        generation=1,
        pid=7,
        exit_code=-15,
        cause=m.Cause(kind="died", text="was ended by SIGTERM"),
        step=STEP,
    )
    heard = node.feed(e.Report(1, m.AgentState(seq=5, slots=(slot,), assigned=1)))
    assert heard.events == ["died"]
    assert announced(heard) == []
    return node


def test_where_the_job_is_cancelled_its_output_does_not_hear_of_each_rank() -> None:
    node = terminated()
    heard = node.feed(e.Report(0, m.Cancel(exit_code=143, reason="SIGTERM")))
    assert [end.outcome.reason for end in heard.ends] == ["SIGTERM"]
    assert announced(heard) == []


def test_where_it_goes_on_it_does() -> None:
    node = terminated()
    held = m.Holdings(tensors=((0, (STEP,)),), records=((0, 0, (STEP,)), (1, 0, (STEP,))))
    died = m.Cause(kind="died", text="was ended by SIGTERM")
    slots = (
        m.SlotState(slot=0, phase="left", generation=1, step=STEP),
        m.SlotState(slot=0, phase="exited", generation=1, step=STEP, exit_code=-15, cause=died),
        m.SlotState(slot=0, phase="waiting", generation=1),
    )
    frozen = [m.AgentState(seq=9, assigned=1, frozen=1, slots=(slot,), holdings=held) for slot in slots]
    heard = node.feed(*(e.Report(number, state) for number, state in enumerate(frozen)))
    assert node.control.job.assignment is not None
    assert node.control.job.assignment.generation == 2
    assert announced(heard) == ["rank 1 on n1 (slot 0, pid 7) was ended by SIGTERM"]
    assert announced(node.wait(5.0, tick_s=1.0)) == []


def test_a_rank_that_fails_by_itself_is_told_of_at_once() -> None:
    job = Job()
    (text,) = announced(job.say(1, "exited", cause=m.Cause(kind="died", text="ended with 3"), code=3))
    assert text.endswith("ended with 3")


def test_a_rank_that_sigterm_has_ended_is_told_of_in_one_generation() -> None:
    job = Job()
    died = m.Cause(kind="died", text="was ended by SIGTERM")
    job.say(1, "exited", cause=died, code=-15)
    for node in range(NODES):
        job.say(node, "exited" if node == 1 else "left", frozen=True, cause=died if node == 1 else None)
    assert job.generation == 2
    job.raises()
    job.freeze(*range(NODES))
    assert job.generation == 3
    assert sum("SIGTERM" in text for text in announced(job.node.told)) == 1
