"""Which twins differ, who of them is wrong, and what of theirs may still be restored: against brute force."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.ckptlessd.planning.faults import Finding, NodeView
from ckptless.daemon.ckptlessd.planning.plan import first_assignment
from ckptless.daemon.ckptlessd.planning.sources import NoCommonStepError, state_sources
from ckptless.daemon.ckptlessd.planning.twins_agree import SAY_S, Comparison, disputes, findings, ripe
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.protocol import messages as m

STEPS = 4
GOOD, BAD = "0" * 16 + "a", "0" * 16 + "b"
LIMITS = m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10)
# What each node holds of its rank's one shard: by step, whose version it is, and what is in it.
Held = dict[int, tuple[int, str]]


def view(node: int, held: Held, world: int, lost: str | None = None) -> NodeView:
    info = m.NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)
    holdings = m.Holdings(
        tensors=((0, tuple(sorted(held))),),
        records=tuple((rank, 0, tuple(range(STEPS))) for rank in range(world)),
        digests=tuple((0, step, rank, value) for step, (rank, value) in sorted(held.items()) if value),
    )
    state = m.AgentState(seq=1, slots=(), holdings=holdings, frozen=1)
    return NodeView(node, m.Introduction(info=info, pid=1), state, lost)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, Held], set[int]]:
    """Nodes of one rank each, all twins; some hold another one's copy, some say nothing of a version."""
    count = draw(st.integers(2, 5))
    values = {
        (rank, step): draw(st.sampled_from([GOOD] * 4 + [BAD]))
        for rank in range(count)
        for step in range(STEPS)
    }
    nodes: dict[int, Held] = {}
    for node in range(count):
        steps = draw(st.frozensets(st.integers(0, STEPS - 1), min_size=1))
        whose = {step: node if draw(st.integers(0, 5)) else draw(st.integers(0, count - 1)) for step in steps}
        told = {step: draw(st.integers(0, 9)) > 0 for step in steps}
        nodes[node] = {s: (whose[s], values[whose[s], s] if told[s] else "") for s in steps}
    return nodes, draw(st.sets(st.integers(0, count - 1), max_size=1))


def said_of(nodes: Mapping[int, Held], step: int) -> dict[int, str]:
    """Each rank's own value of a step, as far as somebody tells it."""
    return {held[step][0]: held[step][1] for held in nodes.values() if step in held and held[step][1]}


@settings(max_examples=1000, deadline=None)
@given(jobs())
def test_no_side_of_a_dispute_is_restored_while_there_is_a_step_without_one(
    case: tuple[dict[int, Held], set[int]],
) -> None:
    nodes, lost = case
    views = {n: view(n, held, len(nodes), "dark" if n in lost else None) for n, held in nodes.items()}
    living = {node: held for node, held in nodes.items() if node not in lost}
    steps = {step for held in living.values() for step in held}
    agreed = {step for step in steps if len(set(said_of(living, step).values())) < 2}
    most = {
        step: value
        for step in steps - agreed
        for value in (GOOD, BAD)
        if 2 * list(said_of(living, step).values()).count(value) > len(said_of(living, step))
    }
    expected = max(agreed or most, default=None)
    places = [m.Place(node=node, slot=0) for node in nodes]
    try:
        found = state_sources(views, places, progress=1)
    except NoCommonStepError:
        assert expected is None
        return
    assert found.step == expected
    assert expected is not None
    holders = {node for node, held in living.items() if expected in held}
    if any(living[node][expected][1] for node in holders):
        holders = {node for node in holders if living[node][expected][1]}
    if expected in most:
        holders = {node for node in holders if living[node][expected][1] == most[expected]}
    assert set(dict(found.tensor_nodes)[0]) == holders


@settings(max_examples=1000, deadline=None)
@given(jobs())
def test_who_is_named(case: tuple[dict[int, Held], set[int]]) -> None:
    """The fewer, where they are fewer than half of at least three; else all that differ."""
    nodes, lost = case
    views = {n: view(n, held, len(nodes), "dark" if n in lost else None) for n, held in nodes.items()}
    living = {node: held for node, held in nodes.items() if node not in lost}
    spec = m.JobSpec(job="j", command=(), nodes=len(nodes), spares=0, slots_per_node=1, limits=LIMITS)
    whole = {node: view(node, held, len(nodes)) for node, held in nodes.items()}
    assignment = first_assignment(spec, whole, 1, 0)
    named = {finding.rank: finding.odd for finding in findings(assignment, views)}
    disputed = [step for step in range(STEPS) if len(set(said_of(living, step).values())) > 1]
    if not disputed:
        assert not named
        return
    said = said_of(living, disputed[0])
    count = {value: list(said.values()).count(value) for value in said.values()}
    most = {value for value in count if 2 * count[value] > len(said)}
    odd = {rank for rank, value in said.items() if most and value not in most}
    expected = dict.fromkeys(odd, True) if odd else dict.fromkeys(said, False)
    assert named == {rank: is_odd for rank, is_odd in expected.items() if rank not in lost}


def test_three_ways_of_being_wrong() -> None:
    """Of four, two agree: half is no majority."""
    held = [{1: (rank, value)} for rank, value in enumerate((GOOD, GOOD, BAD, BAD + "c"))]
    found = disputes([holdings for node in range(4) if (holdings := told(view(node, held[node], 4)))])
    (dispute,) = found.values()
    assert dispute.sides == ((0, 1), (2,), (3,))
    assert dispute.digest is None
    assert dispute.suspects == (0, 1, 2, 3)


def test_what_is_laid_out_in_another_way_is_no_dispute() -> None:
    held = [{1: (0, GOOD)}, {1: (1, "1" * 16 + "a")}]
    assert not disputes([holdings for node in range(2) if (holdings := told(view(node, held[node], 2)))])


def doubting(step: int, behind: int | None = None) -> tuple[m.Assignment, dict[int, NodeView]]:
    """Ranks 0 and 1 of three differ at a step; rank 2 is so far."""
    nodes = {node: view(node, {}, 3) for node in range(3)}
    spec = m.JobSpec(job="j", command=(), nodes=3, spares=0, slots_per_node=1, limits=LIMITS)
    for node, other in ((0, 1), (1, 0), (2, None)):
        doubt = m.Doubt(shard=0, step=step, rank=node, other=other) if other is not None else None
        far = behind if node == 2 and behind is not None else step
        slot = m.SlotState(slot=0, phase="restored", generation=1, step=far)
        doubts = (doubt,) if doubt is not None else ()
        nodes[node].state = m.AgentState(seq=1, slots=(slot,), assigned=1, doubts=doubts)
        nodes[node].told_s = 100.0
    return first_assignment(spec, nodes, 1, 0), nodes


def test_two_that_differ_wait_for_the_word_of_a_third() -> None:
    assignment, nodes = doubting(7, behind=6)
    found = GenerationProgress.of(assignment, nodes).findings
    assert [(one.kind, one.rank) for one in found] == [("twins-differ", 0), ("twins-differ", 1)]
    died = Finding("died", 2, 0, 2, "", source="process")
    assert ripe([*found, died], assignment, nodes, 100.5) == [died]
    # One that does not come to it is not waited for.
    assert ripe(found, assignment, nodes, 100.0 + SAY_S) == found
    assignment, nodes = doubting(7)
    assert ripe(found, assignment, nodes, 100.0) == found


def test_the_third_is_waited_for_until_the_oldest_step_that_is_in_doubt() -> None:
    assignment, nodes = doubting(7, behind=6)
    found = GenerationProgress.of(assignment, nodes).findings
    state = nodes[1].state
    assert state is not None
    doubts = (replace(state.doubts[0], step=6),)
    nodes[1].state = replace(state, doubts=doubts)
    assert ripe(found, assignment, nodes, 100.0) == found
    third = nodes[2].state
    assert third is not None
    for slots in ((replace(third.slots[0], step=None),), ()):
        nodes[2].state = replace(third, slots=slots)
        assert ripe(found, assignment, nodes, 100.0) == []


def test_the_third_is_waited_for_where_the_first_step_is_in_doubt() -> None:
    assignment, nodes = doubting(1, behind=0)
    assert ripe(GenerationProgress.of(assignment, nodes).findings, assignment, nodes, 100.0) == []


def test_doubts_of_an_older_generation_are_no_news() -> None:
    assignment, nodes = doubting(7)
    assert GenerationProgress.of(replace(assignment, generation=2), nodes).findings == []


def told(one: NodeView) -> m.Holdings | None:
    return one.state.holdings if one.state is not None else None


def test_of_a_disputed_step_only_what_most_have_is_given_and_only_where_nothing_else_is() -> None:
    held = {0: {1: (0, GOOD), 2: (0, GOOD)}, 1: {1: (1, GOOD), 2: (1, BAD)}, 2: {1: (2, GOOD), 2: (2, GOOD)}}
    told = [state.holdings for node in held if (state := view(node, held[node], 3).state) is not None]
    compared = Comparison([one for one in told if one is not None])
    assert [compared.sound(one, disputed=False) for one in told if one is not None] == [[(0, (1,))]] * 3
    steps = [compared.sound(one, disputed=True)[0][1] for one in told if one is not None]
    assert steps == [(1, 2), (1,), (1, 2)]
    # Two sides of the same size: nobody can say which is right, so neither is.
    pair = Comparison([one for one in told[:2] if one is not None])
    assert [pair.sound(one, disputed=True) for one in told[:2] if one is not None] == [[(0, (1,))]] * 2
    # Nor is what nobody has said anything of.
    silent = m.Holdings(tensors=((0, (1, 2)),), records=())
    assert pair.sound(silent, disputed=True) == [(0, ())]


def test_a_disputed_step_is_restored_where_there_is_no_other() -> None:
    held = {0: {1: (0, GOOD)}, 1: {1: (1, BAD)}, 2: {1: (2, GOOD)}}
    nodes = {node: view(node, one, 3) for node, one in held.items()}
    sources = state_sources(nodes, [m.Place(node=node, slot=0) for node in held], 1)
    assert (sources.step, sources.tensor_nodes) == (1, ((0, (0, 2)),))


def test_two_that_differ_are_both_suspects_and_who_has_told_nothing_is_none() -> None:
    held = {0: {1: (0, GOOD)}, 1: {1: (1, BAD)}, 2: {1: (2, "")}, 3: {1: (3, "")}}
    nodes = {node: view(node, one, 4) for node, one in held.items()}
    spec = m.JobSpec(job="j", command=("t",), nodes=4, spares=0, slots_per_node=1, limits=LIMITS)
    assignment = first_assignment(spec, nodes, 1, 0)
    nodes[2].state, nodes[3].state = None, m.AgentState(seq=1, slots=())
    text = "shard 0, step 1: rank 0 and rank 1 differ; nobody can say which is wrong"
    assert [(one.node, one.odd, one.detail) for one in findings(assignment, nodes)] == [
        (0, False, text),
        (1, False, text),
    ]


def test_a_suspect_whose_node_is_lost_is_no_finding() -> None:
    held = {0: {1: (0, GOOD)}, 1: {1: (1, BAD)}, 2: {1: (2, GOOD)}}
    whole = {node: view(node, one, 3) for node, one in held.items()}
    spec = m.JobSpec(job="j", command=("t",), nodes=3, spares=0, slots_per_node=1, limits=LIMITS)
    assignment = first_assignment(spec, whole, 1, 0)
    (odd,) = findings(assignment, whole)
    assert (odd.node, odd.odd) == (1, True)
    assert odd.detail == "shard 0, step 1: rank 0, 2 and rank 1 differ; rank 1 is the odd one out"
    # What it holds is known by another's copy of it, too.
    copy = {**held, 2: {1: (1, BAD)}}
    lost = {node: view(node, one, 3, "dark" if node == 1 else None) for node, one in copy.items()}
    assert all(one.node != 1 for one in findings(assignment, lost))
