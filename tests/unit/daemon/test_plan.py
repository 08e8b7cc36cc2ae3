"""The plan: which rung for which fault, who goes where, from which step."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.planning.faults import Fault, Finding, NodeView
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.protocol import messages as m

LIMITS = m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10)


def spec(nodes: int = 2, spares: int = 1, slots: int = 2) -> m.JobSpec:
    return m.JobSpec(job="j", command=("t",), nodes=nodes, spares=spares, slots_per_node=slots, limits=LIMITS)


def view(
    node: int,
    tensors: Sequence[int] = (),
    records: dict[int, Sequence[int]] | None = None,
    lost: str | None = None,
    *,
    known: bool = True,
) -> NodeView:
    info = m.NodeInfo(node=node, name=f"node-{node}", address="a", agent_port=1)
    hello = m.AgentHello(protocol=m.PROTOCOL, spec=spec(), info=info, pid=1)
    pairs = tuple((rank, 0, tuple(steps)) for rank, steps in sorted((records or {}).items()))
    holdings = m.Holdings(tensors=((0, tuple(tensors)),), records=pairs)
    state = m.AgentState(seq=1, slots=(), holdings=holdings, frozen=1)
    return NodeView(node, hello if known else None, state if known else None, lost)


def views(job: m.JobSpec, lost: Sequence[int] = (), step: int = 7) -> dict[int, NodeView]:
    """Every node holds the newest two steps of everything."""
    records: dict[int, Sequence[int]] = {rank: (step - 1, step) for rank in range(job.world_size)}
    return {
        node: view(node, (step - 1, step), records, "dark" if node in lost else None)
        for node in range(job.nodes + job.spares)
    }


def fault(kind: str, node: int = 0, slot: int | None = 0, detail: str = "E: x", **more: Any) -> Fault:
    rank = None if slot is None else node * 2 + slot
    finding = Finding(kind, node, slot, rank, detail, source="process", **more)
    return Fault(f"f-{kind}-{node}-{slot}", finding)


def situation(
    faults: Sequence[Fault], job: m.JobSpec | None = None, lost: Sequence[int] = (), **more: Any
) -> plan.Situation:
    job = job or spec()
    nodes = more.pop("nodes", views(job, lost))
    current = more.pop("current", plan.first_assignment(job, views(job), 1, 0))
    return plan.Situation(job, nodes, current, faults, more.pop("progress", 7), term=3, leader=1)


def again(faults: Sequence[Fault], times: int, **more: Any) -> m.Assignment:
    """The plan after the same faults have come `times` times in a row."""
    now = situation(faults, **more)
    following = plan.next_assignment(now)
    for _ in range(times - 1):
        following = plan.next_assignment(situation(faults, current=following, **more))
    return following


DIED = fault("died", exit_code=-9, detail="was ended by SIGKILL")


def test_a_node_without_room_ends_the_job_at_once_whatever_else_there_is() -> None:
    sentence = "n1 has too little memory for the state: give the job more memory"
    faults = [fault("broken", 0), fault("node-lost", 0, None), fault("no-room", 1, detail=sentence)]
    with pytest.raises(plan.NoPlanError) as error:
        plan.next_assignment(situation(faults, spec(spares=0)))
    assert error.value.outcome == m.Outcome(state="failed", exit_code=2, reason=sentence, why="no-room")


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_refused_ends_the_job_at_once_with_its_sentence(order: int) -> None:
    died = fault("died", 1, exit_code=-9, detail="was ended by SIGKILL")
    faults = [fault("refused", detail="UsageError: leave it out"), died][::order]
    with pytest.raises(plan.NoPlanError) as error:
        plan.next_assignment(situation(faults))
    assert error.value.outcome == m.Outcome(
        state="failed",
        exit_code=1,
        reason="rank 0 raised UsageError: leave it out",
        why="script",
        rank=0,
        node=0,
    )


def corrupt(node: int, *, odd: bool = False) -> Fault:
    return fault("silent-corruption", node, detail="shard 0, step 8: ranks differ", odd=odd)


def test_the_odd_one_out_moves_to_another_node_and_its_slot_is_taken_last() -> None:
    """Not to a free slot of its own node; what its agent has seen of it is no second fault."""
    job = spec(nodes=2, spares=1, slots=2)
    following = plan.next_assignment(situation([corrupt(0, odd=True), fault("twins-differ", 1)], job))
    assert following.rung == "spare"
    assert following.places[0] == m.Place(node=2, slot=0)
    assert following.places[1:] == plan.first_assignment(job, views(job), 1, 0).places[1:]
    assert following.bad == ()
    assert following.faults == ("f-silent-corruption-0-0",)
    # The next that needs a place gets the other free slot; one more the suspect, before the job would end.
    after = plan.next_assignment(situation([fault("no-state", 1)], job, current=following))
    for _ in range(LIMITS.process_tries):
        after = plan.next_assignment(situation([fault("no-state", 1)], job, current=after))
    assert after.places[2] == m.Place(node=2, slot=1)
    for _ in range(LIMITS.process_tries + 1):
        after = plan.next_assignment(situation([fault("no-state", 1, 1)], job, current=after))
    assert after.places[3] == m.Place(node=0, slot=0)


def test_without_another_node_it_gets_another_process_for_a_while() -> None:
    alone: dict[str, Any] = {"job": spec(spares=0)}
    for times in (1, LIMITS.process_tries):
        following = again([corrupt(0, odd=True)], times, **alone)
        assert (following.rung, following.renew) == ("process", (m.Place(node=0, slot=0),))
        assert following.bad == ()
    with pytest.raises(plan.NoPlanError) as error:
        again([corrupt(0, odd=True)], LIMITS.process_tries + 1, **alone)
    assert error.value.outcome.why == "corrupt"
    assert "ranks differ" in error.value.outcome.reason
    assert "points to the script" in error.value.outcome.reason


def test_what_goes_with_a_rank_from_node_to_node_is_the_script_s() -> None:
    """A new place each time, and the same rank is the odd one there, too, while there are spares left."""
    job = spec(nodes=2, spares=6)
    following = plan.first_assignment(job, views(job), 1, 0)

    def odd() -> plan.Situation:
        place = following.places[0]
        found = Finding("silent-corruption", place.node, place.slot, 0, "differ", odd=True, source="twins")
        return situation([Fault("f", found)], job, current=following)

    for _ in range(LIMITS.process_tries):
        before = following.places[0].node
        following = plan.next_assignment(odd())
        assert following.places[0].node != before
    with pytest.raises(plan.NoPlanError, match="points to the script") as error:
        plan.next_assignment(odd())
    assert error.value.outcome.why == "corrupt"


def test_where_nobody_can_say_who_is_wrong_all_go_back_then_get_new_processes_then_it_ends() -> None:
    both = [corrupt(0), corrupt(1)]
    assert again(both, 1).rung == "in-process"
    assert again(both, 1).renew == ()
    following = again(both, 2)
    assert (following.rung, following.renew) == (
        "process",
        (m.Place(node=0, slot=0), m.Place(node=1, slot=0)),
    )
    assert following.places == plan.first_assignment(spec(), views(spec()), 1, 0).places
    with pytest.raises(plan.NoPlanError) as error:
        again(both, LIMITS.process_tries + 1)
    assert (error.value.outcome.why, error.value.outcome.exit_code) == ("corrupt", 4)
    assert "points to the script" in error.value.outcome.reason


def test_two_odd_ones_out_get_two_places_and_then_one_stays() -> None:
    """Two free slots on another node take both; one takes one of them, never both."""
    odd = [corrupt(0, odd=True), corrupt(1, odd=True)]
    following = plan.next_assignment(situation(odd, spec(nodes=2, spares=1, slots=2)))
    assert {following.places[0], following.places[2]} == {m.Place(node=2, slot=0), m.Place(node=2, slot=1)}
    following = plan.next_assignment(situation(odd, spec(nodes=2, spares=1, slots=1)))
    assert len(set(following.places)) == len(following.places)


def test_a_slot_that_went_bad_gets_no_new_process() -> None:
    following = again([DIED], LIMITS.process_tries + 1)
    assert (following.rung, following.bad, following.renew) == ("spare", (m.Place(node=0, slot=0),), ())
    (replaced,) = following.replaced
    assert len(replaced.at_s) == LIMITS.process_tries


@pytest.mark.parametrize(
    ("faults", "times", "rung", "renew"),
    [
        ([fault("broken", 1)], 1, "in-process", ()),
        ([fault("stall", 0, None)], 1, "in-process", ()),
        ([fault("nccl-unknown", 1, None)], 1, "in-process", ()),
        # Of its ranks some have ended over it.
        ([DIED, fault("nccl-unknown", 1, None)], 1, "process", ((0, 0),)),
        ([fault("raised")], 1, "in-process", ()),
        ([fault("raised")], 2, "process", ((0, 0),)),
        ([fault("no-state")], 3, "in-process", ()),
        ([fault("no-state")], 4, "spare", ()),
        ([fault("no-memory")], 3, "in-process", ()),
        ([fault("no-memory")], 4, "spare", ()),
        ([fault("hung")], 1, "process", ((0, 0),)),
        ([DIED], 1, "process", ((0, 0),)),
        ([DIED], 3, "process", ((0, 0),)),
        ([DIED], 4, "spare", ()),
        ([fault("died", exit_code=3)], 1, "process", ((0, 0),)),
        ([DIED, fault("broken", 1)], 1, "process", ((0, 0),)),
        ([DIED, fault("raised", 1, 1)], 1, "process", ((0, 0),)),
    ],
)
def test_which_rung(faults: list[Fault], times: int, rung: str, renew: tuple[tuple[int, int], ...]) -> None:
    following = again(faults, times)
    assert following.rung == rung
    assert following.renew == tuple(m.Place(node=node, slot=slot) for node, slot in renew)
    assert following.restore_step == 7
    assert (following.generation, following.term, following.leader) == (times + 1, 3, 1)


def test_secondary_faults_are_not_answered_beside_a_cause() -> None:
    following = again([DIED, fault("broken", 1, 1)], 1)
    assert following.faults == (DIED.id,)
    assert all(not tries.cause.startswith("broken") for tries in following.tries)


def test_ranks_keep_number_and_place() -> None:
    now = situation([DIED])
    assert plan.next_assignment(now).places == now.current.places


def test_the_ranks_of_a_lost_node_go_together_to_a_spare() -> None:
    job = spec(nodes=2, spares=2)
    following = again([fault("node-lost", 1, None)], 1, job=job, lost=[1])
    assert following.rung == "spare"
    assert following.places == tuple(m.Place(node=n, slot=s) for n, s in ((0, 0), (0, 1), (2, 0), (2, 1)))
    assert [info.node for info in following.nodes] == [0, 2, 3]
    assert set(following.bad) == {m.Place(node=1, slot=0), m.Place(node=1, slot=1)}
    assert 1 not in following.holders_of(0)
    assert all(1 not in nodes for nodes in following.record_nodes)
    # A loss has no budget, and no process of the node is worth another try.
    assert (following.tries, following.renew) == ((), ())


def test_two_nodes_at_once_and_the_nearest_record_first() -> None:
    job = spec(nodes=3, spares=2)
    following = again([fault("node-lost", n, None) for n in (0, 1)], 1, job=job, lost=[0, 1])
    assert following.places[:4] == tuple(m.Place(node=n, slot=s) for n in (3, 4) for s in (0, 1))
    assert following.record_nodes[0][0] == 3
    assert following.record_nodes[2][0] == 4


def test_no_spare_left_names_node_and_rank() -> None:
    with pytest.raises(plan.NoPlanError) as error:
        again([fault("node-lost", 1, None, "dark")], 1, job=spec(spares=0), lost=[1])
    outcome = error.value.outcome
    assert (outcome.state, outcome.exit_code, outcome.why) == ("failed", 4, "no-spare")
    assert "rank 2" in outcome.reason
    assert "node-1" in outcome.reason


def test_the_outcome_names_the_process_whose_log_may_say_more() -> None:
    with pytest.raises(plan.NoPlanError) as error:
        again([fault("died", 1, 1, exit_code=-9)], 5, job=spec(spares=0))
    outcome = error.value.outcome
    assert (outcome.why, outcome.rank, outcome.node) == ("no-spare", 3, 1)
    with pytest.raises(plan.NoPlanError) as error:
        again([fault("node-lost", 1, None, "dark")], 1, job=spec(spares=0), lost=[1])
    assert (error.value.outcome.rank, error.value.outcome.node) == (None, None)


def test_the_odd_one_out_is_the_process_in_its_slot() -> None:
    odd = fault("silent-corruption", 1, 1, detail="ranks differ", odd=True)
    following = again([odd], 1, job=spec(spares=0))
    assert following.renew == (m.Place(node=1, slot=1),)


def test_where_nobody_can_say_who_is_wrong_no_new_process_is_claimed() -> None:
    for tries, odd, claimed in ((1, False, False), (1, True, True), (2, False, True)):
        few = replace(spec(spares=0), limits=replace(LIMITS, process_tries=tries))
        with pytest.raises(plan.NoPlanError) as error:
            again([corrupt(0, odd=odd)], tries + 1, job=few)
        assert ("points to the script" in error.value.outcome.reason) is claimed


def test_a_twin_of_which_nobody_says_that_it_is_the_odd_one_keeps_its_process() -> None:
    differs = Finding("silent-corruption", 0, 0, 0, "ranks differ", source="twins")
    assert plan.next_assignment(situation([Fault("f", differs)])).rung == "in-process"


def test_it_is_the_rank_in_the_slot_that_died_that_moves() -> None:
    dies = [fault("died", 1, 1, exit_code=-9)]
    before = plan.first_assignment(spec(), views(spec()), 1, 0).places
    after = again(dies, LIMITS.process_tries + 1).places
    assert [rank for rank in range(4) if before[rank] != after[rank]] == [3]


def test_a_slot_that_went_bad_is_not_used_again() -> None:
    job = spec(nodes=2, spares=1, slots=1)
    faults = [Fault("f", Finding("died", 0, 0, 0, "SIGKILL", exit_code=-9, source="process"))]
    moved = again(faults, 4, job=job)
    assert moved.places[0] == m.Place(node=2, slot=0)
    lost = [Fault("g", Finding("node-lost", 2, None, None, "dark", source="slurm"))]
    with pytest.raises(plan.NoPlanError, match="no spare left for rank 0"):
        plan.next_assignment(situation(lost, job=job, lost=[2], current=moved))


@pytest.mark.parametrize(
    ("kind", "times", "more", "code", "text"),
    [
        ("raised", 3, {"detail": "ValueError: no"}, 1, "ValueError: no"),
        ("died", 2, {"exit_code": 3, "detail": "ended with 3"}, 3, "ended with 3, 2 times without a step"),
        ("died", 2, {"exit_code": 3, "detail": "ended with exit code 3"}, 3, "exit code 3"),
        ("died", 2, {"exit_code": 0, "detail": "ended with exit code 0"}, 1, "exit code 0"),
        ("died", 1, {"exit_code": 5, "hooked": False, "detail": "ended with exit code 5"}, 5, "exit code 5"),
        ("broken", 4, {"detail": "a collective failed"}, 4, "4 times"),
    ],
)
def test_the_end_of_the_ladder(kind: str, times: int, more: dict[str, Any], code: int, text: str) -> None:
    faults = [fault(kind, **more)]
    before = again(faults, times - 1) if times > 1 else situation(faults).current
    with pytest.raises(plan.NoPlanError) as error:
        plan.next_assignment(situation(faults, current=before))
    assert (error.value.outcome.state, error.value.outcome.exit_code) == ("failed", code)
    assert text in error.value.outcome.reason
    assert error.value.outcome.why == ("no-progress" if kind == "broken" else "script")


def test_another_exception_has_its_own_budget() -> None:
    first = again([fault("raised", detail="ValueError: a")], 2)
    second = plan.next_assignment(situation([fault("raised", detail="OSError: b")], current=first))
    assert second.rung == "in-process"
    # The first cause is remembered for as long as there is no progress.
    with pytest.raises(plan.NoPlanError):
        plan.next_assignment(situation([fault("raised", detail="ValueError: a")], current=second))


def test_the_same_exception_on_several_ranks_is_one_cause() -> None:
    following = again([fault("raised", node, slot) for node in (0, 1) for slot in (0, 1)], 1)
    assert [(tries.cause, tries.count) for tries in following.tries] == [("raised:E: x", 1)]


def test_progress_gives_the_budgets_back() -> None:
    faults = [fault("raised")]
    before = again(faults, 2)
    after = plan.next_assignment(situation(faults, current=before, progress=8))
    assert after.rung == "in-process"
    assert [(tries.count, tries.step) for tries in after.tries] == [(1, 8)]


def test_a_cause_that_did_not_come_again_is_remembered_until_there_is_progress() -> None:
    before = again([fault("raised")], 2)
    other = [fault("raised", 1, detail="F: y")]
    same, later = (plan.next_assignment(situation(other, current=before, progress=p)) for p in (7, 8))
    assert sorted(tries.count for tries in same.tries) == [1, 2]
    assert [tries.count for tries in later.tries] == [1]


# --------------------------------------------------------------------------------------- flapping


def flap(times: int, every_s: float, job: m.JobSpec, fault_: Fault = DIED) -> list[m.Assignment]:
    """Every generation of a job of which one slot's process dies so often, with steps in between."""
    line = [plan.first_assignment(job, views(job), 1, 0)]
    for turn in range(times):
        now = plan.Situation(
            job, views(job), line[-1], [fault_], 7 + turn, term=3, leader=1, now_s=1e9 + turn * every_s
        )
        line.append(plan.next_assignment(now))
    return line


def test_a_slot_that_dies_again_and_again_loses_its_rank() -> None:
    line = flap(6, 60.0, spec(spares=1))
    assert [(a.rung, a.flapping) for a in line[1:6]] == [("process", ())] * 5
    moved = line[6]
    assert (moved.rung, moved.flapping) == ("spare", (m.Place(node=0, slot=0),))
    assert moved.places == (m.Place(node=2, slot=0), *line[0].places[1:])
    assert moved.renew == moved.bad == ()
    assert "; flapping: node-0/0" in ledger_rows.describe(moved)


def test_a_flapping_slot_without_a_spare_goes_on() -> None:
    line = flap(20, 60.0, spec(spares=0))
    assert {a.rung for a in line[1:]} == {"process"}
    assert line[-1].places == line[0].places
    assert line[-1].renew == line[-1].flapping == (m.Place(node=0, slot=0),)
    # What is remembered is bounded.
    (replaced,) = line[-1].replaced
    assert len(replaced.at_s) == LIMITS.flap_tries


def test_what_comes_seldom_is_not_flapping() -> None:
    # The sixth comes when the first does not count any more.
    line = flap(30, LIMITS.flap_window_s / 5, spec())
    assert {(a.rung, a.flapping) for a in line[1:]} == {("process", ())}


def test_what_a_rank_gets_over_in_its_process_is_not_flapping() -> None:
    line = flap(20, 1.0, spec(), fault("raised"))
    assert {a.rung for a in line[1:]} == {"in-process"}
    assert line[-1].replaced == ()


def test_a_slot_that_was_flapping_is_better_than_none() -> None:
    job = spec(spares=1)
    moved = flap(6, 60.0, job)[-1]
    lost = [fault("node-lost", 2, None)]
    now_s = 1e9 + 400
    back = plan.next_assignment(
        plan.Situation(job, views(job, lost=[2]), moved, lost, 20, term=3, leader=1, now_s=now_s)
    )
    assert back.places[0] == m.Place(node=0, slot=0)
    # And where there is a sound one, that is taken.
    wide = spec(spares=2)
    moved = flap(6, 60.0, wide)[-1]
    other = plan.next_assignment(
        plan.Situation(wide, views(wide, lost=[2]), moved, lost, 20, term=3, leader=1, now_s=now_s)
    )
    assert other.places[0] == m.Place(node=3, slot=0)


def moved_to(now: plan.Situation) -> dict[int, m.Place]:
    """Return where the ranks went that have moved."""
    following = plan.next_assignment(now).places
    return {rank: place for rank, place in enumerate(following) if place != now.current.places[rank]}


def placed(job: m.JobSpec, places: Sequence[tuple[int, int]], **more: Any) -> m.Assignment:
    """A generation whose ranks are in these slots, by node and slot."""
    first = plan.first_assignment(job, views(job), 1, 0)
    return replace(first, places=tuple(m.Place(node=node, slot=slot) for node, slot in places), **more)


def often(node: int, slot: int, times: int = LIMITS.flap_tries) -> m.Replaced:
    """A slot whose process was replaced so often just now."""
    return m.Replaced(place=m.Place(node=node, slot=slot), at_s=(0.0,) * times)


@pytest.mark.parametrize(("times", "to"), [(1, (0, 0)), (LIMITS.flap_tries, (2, 1))])
def test_a_slot_whose_process_was_replaced_once_is_sound(times: int, to: tuple[int, int]) -> None:
    job = spec(nodes=2, spares=1, slots=2)
    tries = m.Tries(cause="no-state@1/0:", count=LIMITS.process_tries, step=7)
    ranks = [(2, 0), (0, 1), (1, 0), (1, 1)]
    current = placed(job, ranks, replaced=(often(0, 0, times),), tries=(tries,))
    found = moved_to(situation([fault("no-state", 1)], job, current=current))
    assert found == {2: m.Place(node=to[0], slot=to[1])}


def test_ranks_of_two_lost_nodes_get_two_slots_that_were_flapping() -> None:
    job = spec(nodes=2, spares=2, slots=1)
    current = placed(job, [(0, 0), (1, 0)], replaced=(often(2, 0), often(3, 0)))
    lost = [fault("node-lost", node, None) for node in (0, 1)]
    found = moved_to(situation(lost, job, lost=[0, 1], current=current))
    assert found == {0: m.Place(node=2, slot=0), 1: m.Place(node=3, slot=0)}


def test_the_rank_of_a_flapping_slot_may_go_to_another_of_its_node() -> None:
    job = spec(nodes=2, spares=1, slots=2)
    current = placed(
        job,
        [(0, 0), (2, 0), (1, 0), (1, 1)],
        bad=(m.Place(node=2, slot=1),),
        replaced=(often(0, 0),),
    )
    assert moved_to(situation([DIED], job, current=current)) == {0: m.Place(node=0, slot=1)}


def test_an_old_memory_is_dropped() -> None:
    job = spec()
    line = flap(3, 1.0, job)
    late = plan.Situation(job, views(job), line[-1], [fault("raised", 1)], 50, term=3, leader=1, now_s=2e9)
    assert plan.next_assignment(late).replaced == ()


def test_a_first_assignment_takes_the_lowest_usable_nodes() -> None:
    job = spec(nodes=2, spares=1, slots=1)
    nodes = {0: view(0, lost="gone"), 1: view(1), 2: view(2)}
    assert [p.node for p in plan.first_assignment(job, nodes, 1, 1).places] == [1, 2]
    few = {**nodes, 2: view(2, lost="late", known=False)}
    with pytest.raises(plan.NoPlanError) as error:
        plan.first_assignment(job, few, 1, 1)
    assert error.value.outcome.why == "never-formed"
    assert error.value.outcome.reason == "1 of 2 nodes came up; missing: node-0 (gone), node-2 (late)"
    with pytest.raises(plan.NoPlanError, match=r"missing: n07 \(gone\), n09 \(late\)$"):
        plan.first_assignment(replace(job, names=("n07", "n08", "n09")), few, 1, 1)


@pytest.mark.parametrize(("steps", "anew"), [((), True), ((0,), False)])
def test_all_build_anew_only_where_nothing_is_held(steps: tuple[int, ...], anew: bool) -> None:
    job = spec(nodes=1, spares=0, slots=1)
    nodes = {0: view(0, steps, {0: steps})}
    following = plan.next_assignment(situation([fault("raised")], job=job, nodes=nodes, progress=0))
    assert (following.restore_step is None) is anew


def test_a_step_that_not_all_can_give_ends_the_job_and_names_what_is_missing() -> None:
    job = spec(nodes=2, spares=0, slots=1)
    nodes = {0: view(0, (4, 5), {0: (4, 5)}), 1: view(1, (4, 5), {1: (3,)})}
    with pytest.raises(plan.NoPlanError, match=r"rank 1's records are held for steps \[3\]") as error:
        plan.next_assignment(situation([fault("raised")], job=job, nodes=nodes, progress=5))
    assert (error.value.outcome.exit_code, error.value.outcome.why) == (4, "no-common-step")


# ------------------------------------------------------------------------------------- properties


@given(st.data())
def test_no_plan_puts_two_ranks_in_one_slot_or_a_rank_where_none_may_be(data: st.DataObject) -> None:
    job = spec(
        nodes=data.draw(st.integers(1, 3)),
        spares=data.draw(st.integers(0, 3)),
        slots=data.draw(st.integers(1, 2)),
    )
    current = plan.first_assignment(job, views(job), 1, 0)
    lost: list[int] = []
    kinds = st.sampled_from(("raised", "died", "hung", "no-state", "node-lost"))
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.sampled_from(current.places))
        kind = data.draw(kinds)
        if kind == "node-lost":
            lost.append(place.node)
        slot = None if kind == "node-lost" else place.slot
        rank = current.places.index(place)
        finding = Finding(kind, place.node, slot, rank, "x", exit_code=-9, source="process")
        now = situation([Fault("f", finding)], job=job, lost=lost, current=current)
        try:
            following = plan.next_assignment(now)
        except plan.NoPlanError:
            return
        assert len(set(following.places)) == job.world_size
        assert not set(following.places) & set(following.bad)
        assert not {p.node for p in following.places} & set(lost)
        assert set(current.bad) <= set(following.bad)
        homeless = [rank for rank, p in enumerate(current.places) if p in following.bad]
        shaken = [rank for rank, p in enumerate(current.places) if p in following.flapping]
        kept = [rank for rank in range(job.world_size) if rank not in (*homeless, *shaken)]
        assert all(following.places[rank] == current.places[rank] for rank in kept)
        current = following


def test_an_unknown_nccl_gets_roots_of_its_own_from_the_next_generation_on() -> None:
    now = situation([fault("broken", 1)])
    assert not plan.next_assignment(now).stock_roots
    state = now.nodes[1].state
    assert state is not None
    now.nodes[1].state = replace(state, nccl_unknown="a check-in of 192 bytes")
    following = plan.next_assignment(now)
    assert following.stock_roots
    # An agent that was not there at the time has heard of nothing.
    assert plan.next_assignment(situation([fault("broken", 1)], current=following)).stock_roots


def ended(node: int, slot: int, code: int, age_s: float) -> tuple[Fault, m.SlotState]:
    """A rank's end, as its agent tells of it."""
    detail = f"ended with exit code {code}" if code >= 0 else "was ended by SIGKILL"
    state = m.SlotState(slot=slot, phase="exited", generation=1, exit_code=code, age_s=age_s)
    return fault("died", node, slot, detail, exit_code=code, hooked=False), state


@pytest.mark.parametrize(
    ("code", "wanted", "text"),
    [
        (7, 7, "rank 3 ended with exit code 7"),
        (1, 1, "rank 3 ended with exit code 1"),
        (0, 1, "rank 3 ended with exit code 0"),
        (-9, 137, "rank 3 was ended by SIGKILL"),
    ],
)
def test_where_nothing_recovers_the_first_rank_that_failed_ends_the_job(
    code: int, wanted: int, text: str
) -> None:
    job = replace(spec(spares=0), recovers=False)
    nodes = views(job)
    # Rank 0 has failed after rank 3, because of it, and its report has come first.
    (late, late_slot), (first, first_slot) = ended(0, 0, 1, age_s=0.1), ended(1, 1, code, age_s=0.5)
    for node, slot, told_s in ((0, late_slot, 100.0), (1, first_slot, 100.2)):
        state = nodes[node].state
        assert state is not None
        nodes[node].state, nodes[node].told_s = replace(state, slots=(slot,)), told_s
    with pytest.raises(plan.NoPlanError) as caught:
        plan.next_assignment(situation([late, first], job, nodes=nodes))
    outcome = caught.value.outcome
    assert (outcome.exit_code, outcome.why, outcome.state) == (wanted, "script", "failed")
    assert outcome.reason == text
    assert str(caught.value) == text


def test_where_nothing_recovers_a_process_ends_the_job_of_which_its_agent_tells_no_more() -> None:
    job = replace(spec(spares=0), recovers=False)
    late = fault("died", 0, 0, "ended with exit code 3", exit_code=3)
    with pytest.raises(plan.NoPlanError) as caught:
        plan.next_assignment(situation([late], job))
    assert caught.value.outcome.exit_code == 3


def test_where_nothing_recovers_a_lost_node_ends_the_job() -> None:
    job = replace(spec(), recovers=False)
    with pytest.raises(plan.NoPlanError) as caught:
        plan.next_assignment(situation([fault("node-lost", 1, None, "dark")], job, lost=[1]))
    assert caught.value.outcome.exit_code == plan.EXIT_UNRECOVERABLE
    assert "node-1 is lost: dark, and nothing answers faults" in caught.value.outcome.reason
