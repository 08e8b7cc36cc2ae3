"""On how many nodes an elastic job trains, and which: for every size, loss and wish."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.planning import resizing
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.resizing import Fleet
from ckptless.daemon.protocol import messages as m

Job = tuple[m.JobSpec, Fleet, int | None]
LIMITS = m.Limits.from_max_stall(60)
SLOTS = 2


@st.composite
def specs(draw: st.DrawFn) -> m.JobSpec:
    nodes, spares = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    sizes = draw(st.sets(st.integers(1, nodes + spares), max_size=6)) | {nodes}
    return m.JobSpec(
        job="j",
        command=("x",),
        nodes=nodes,
        spares=spares,
        slots_per_node=SLOTS,
        limits=LIMITS,
        sizes=tuple(sorted(sizes)),
    )


def view(node: int, phase: m.Phase, lost: str | None) -> NodeView:
    info = m.NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)
    slots = tuple(m.SlotState(slot=slot, phase=phase, generation=1, hooked=True) for slot in range(SLOTS))
    return NodeView(node, m.Introduction(info=info, pid=1), m.AgentState(seq=1, slots=slots), lost)


@st.composite
def fleets(draw: st.DrawFn) -> Job:
    """A job that trains on some of its nodes; some are lost, some slots are bad; somebody wants a size."""
    spec = draw(specs())
    total = spec.nodes + spec.spares
    training = draw(st.permutations(range(total)))[: draw(st.sampled_from(spec.sizes))]
    nodes = {
        node: view(
            node,
            "restored" if node in training else draw(st.sampled_from(("waiting", "starting", "empty"))),
            draw(st.sampled_from((None, None, None, "dark"))),
        )
        for node in range(total)
    }
    bad = draw(st.sets(st.sampled_from(range(total)), max_size=2))
    current = m.Assignment(
        job="j",
        generation=3,
        term=1,
        leader=0,
        places=resizing.places_on(training, SLOTS),
        nodes=(),
        restore_step=4,
        bad=tuple(m.Place(node=node, slot=1) for node in sorted(bad)),
    )
    wanted = draw(st.sampled_from((None, *range(1, total + 1))))
    fleet = Fleet.of(spec, nodes, current)
    assert fleet.whole == {node for node in nodes if nodes[node].lost is None} - bad
    return spec, fleet, wanted


@given(fleets())
def test_a_size_is_one_of_the_jobs_and_there_are_nodes_for_it(
    job: Job,
) -> None:
    spec, fleet, wanted = job
    size = resizing.size(spec, fleet, wanted)
    there = len(fleet.whole)
    if size is None:
        limit = there if wanted is None else min(there, wanted)
        assert min(spec.sizes) > limit
        return
    assert size in spec.sizes
    assert size <= there
    if wanted is not None:
        assert size <= wanted
    chosen = fleet.choose(size)
    assert len(set(chosen)) == size
    assert set(chosen) <= fleet.whole
    # Who trains goes on training, as long as there is room, in the same order.
    staying = [node for node in fleet.training if node in fleet.whole][:size]
    assert list(chosen[: len(staying)]) == staying


@given(fleets())
def test_spares_stay_spares_unless_somebody_wants_them(job: Job) -> None:
    spec, fleet, _ = job
    size = resizing.size(spec, fleet, None)
    if size is not None and size > max(spec.nodes, len(fleet.training)):
        assert len(fleet.whole) - size >= spec.spares


@given(fleets())
def test_it_grows_on_warm_nodes_and_shrinks_when_told(job: Job) -> None:
    spec, fleet, wanted = job
    larger, smaller = resizing.may_grow(spec, fleet, wanted), resizing.must_shrink(spec, fleet, wanted)
    assert larger is None or smaller is None
    if larger is not None:
        assert larger > len(fleet.training)
        coming = set(fleet.choose(larger)) - set(fleet.training)
        assert coming <= fleet.warm
    if smaller is not None:
        assert wanted is not None
        assert smaller < len(fleet.training)
    if wanted is None:
        assert smaller is None
