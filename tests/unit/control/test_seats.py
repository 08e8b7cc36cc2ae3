"""Which free slot a rank gets: room, warmth, failure domain, number, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.ckptlessd.planning import plan, seats
from ckptless.daemon.ckptlessd.planning.faults import Fault, Finding, NodeView
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.failure_domains import domain_of

LIMITS = m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10)
STEP = 7


def job(nodes: int, spares: int, slots: int = 1, domains: Sequence[str] = ()) -> m.JobSpec:
    return m.JobSpec(
        job="j",
        command=("t",),
        nodes=nodes,
        spares=spares,
        slots_per_node=slots,
        limits=LIMITS,
        domains=tuple(domains),
    )


def view(spec: m.JobSpec, node: int, phases: Sequence[m.Phase], lost: bool) -> NodeView:
    info = m.NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)
    records = tuple((rank, 0, (STEP,)) for rank in range(spec.world_size))
    slots = tuple(m.SlotState(slot=i, phase=p, generation=1, hooked=True) for i, p in enumerate(phases))
    state = m.AgentState(
        seq=1, slots=slots, holdings=m.Holdings(tensors=((0, (STEP,)),), records=records), frozen=1
    )
    hello = m.AgentHello(protocol=m.PROTOCOL, spec=spec, info=info, pid=1)
    return NodeView(node, hello, state, "dark" if lost else None)


def situation(spec: m.JobSpec, lost: Sequence[int], cold: Sequence[int] = (), **more: Any) -> plan.Situation:
    """Nodes are lost, of others the process is only being started."""
    total = range(spec.nodes + spec.spares)
    phases: dict[bool, m.Phase] = {True: "starting", False: "waiting"}
    all_well = {node: view(spec, node, ["waiting"] * spec.slots_per_node, lost=False) for node in total}
    nodes = {
        node: view(spec, node, [phases[node in cold]] * spec.slots_per_node, node in lost) for node in total
    }
    current = plan.first_assignment(spec, all_well, 1, 0)
    trained = {place.node for place in current.places}
    faults = [
        Fault(f"f{node}", Finding("node-lost", node, None, None, "dark", source="membership"))
        for node in lost
        if node in trained
    ]
    return plan.Situation(spec, nodes, current, faults, STEP, 1, 0, **more)


def moved(now: plan.Situation) -> dict[int, m.Place]:
    """Return where the ranks went that have moved."""
    following = plan.next_assignment(now)
    return {rank: p for rank, p in enumerate(following.places) if p != now.current.places[rank]}


@pytest.mark.parametrize(
    ("domains", "lost", "cold", "expected"),
    [
        ((), [0], [], [2]),
        ((), [0], [2], [3]),
        ((), [0], [2, 3, 4], [2]),
        (("a", "b", "b", "c", "a"), [0], [], [4]),
        (("a", "b", "b", "c", "a"), [0], [4], [2]),
        (("a", "b", "b", "c", ""), [0], [], [2]),
        # The rack has lost a spare, too: what is left of it may be next.
        (("a", "b", "a", "a", "c"), [0, 2], [], [4]),
        (("a", "b", "a", "a", "a"), [0, 2], [], [3]),
        (("a", "a", "a", "b", "c"), [0, 1], [], [3, 4]),
        (("a", "b", "a", "b", "b"), [0, 1], [], [2, 3]),
    ],
)
def test_which_spare(domains: Sequence[str], lost: list[int], cold: list[int], expected: list[int]) -> None:
    found = moved(situation(job(2, 3, 1, domains), lost, cold))
    assert [found[rank].node for rank in sorted(found)] == expected


@pytest.mark.parametrize("resizes", [False, True])
def test_a_wish_beside_a_fault_is_new_until_a_plan_follows_it(resizes: bool) -> None:
    """Else it would wait until nodes have been there for a while, as if nobody had said anything."""
    wish = m.Wish(nodes=3, at_s=5.0)
    now = situation(replace(job(2, 1), sizes=(2, 3)), [], wanted=wish, resizes=resizes)
    died = Finding("died", 0, 0, 0, "SIGKILL", exit_code=-9, source="process")
    following = plan.next_assignment(dataclasses.replace(now, faults=[Fault("f", died)]))
    assert len(following.places) == (3 if resizes else 2)
    assert following.wanted == (wish if resizes else m.Wish())


def test_room_for_all_comes_before_everything_else() -> None:
    spec = job(2, 2, 2, ("a", "b", "a", "b"))
    now = situation(spec, [0], cold=[3])
    # Of node 2, warm and in the same rack, one slot is gone.
    current = plan.next_assignment(now)
    again = plan.Situation(
        spec,
        now.nodes,
        m.Assignment(**{**_fields(now.current), "bad": (m.Place(node=2, slot=0),)}),
        now.faults,
        STEP,
        1,
        0,
    )
    assert {place.node for place in current.places[:2]} == {2}
    assert {place.node for place in plan.next_assignment(again).places[:2]} == {3}


def test_warm_slots_first_on_one_node() -> None:
    spec = job(1, 1, 2)
    now = situation(spec, [])
    nodes = {**now.nodes, 1: view(spec, 1, ["exited", "waiting"], lost=False)}
    died = Finding("died", 0, 0, 0, "SIGKILL", exit_code=-9, source="process")
    tries = (m.Tries(cause="died@0/0:", count=LIMITS.process_tries, step=STEP),)
    current = m.Assignment(**{**_fields(now.current), "tries": tries})
    following = plan.next_assignment(plan.Situation(spec, nodes, current, [Fault("f", died)], STEP, 1, 0))
    assert following.places == (m.Place(node=1, slot=1), m.Place(node=0, slot=1))


def test_a_node_with_enough_warm_slots_needs_no_more_of_them() -> None:
    spec = job(1, 2, 2)
    now = situation(spec, [0], cold=[1])
    nodes = {**now.nodes, 2: view(spec, 2, ["starting", "waiting"], lost=False)}
    free = seats.Seats(nodes, 2, (), [0]).free(replace(now.current, places=()), {m.Place(node=0, slot=0)})
    assert free == {1: [0, 1], 2: [0, 1]}
    assert seats.Seats(nodes, 2, (), [0]).choose(free, 0, 1) == [m.Place(node=2, slot=1)]


def test_only_nodes_with_a_free_slot_have_any() -> None:
    spec = job(2, 2, 2)
    now = situation(spec, [2])
    bad = {m.Place(node=1, slot=1)}
    some = replace(now.current, places=(m.Place(node=0, slot=1), m.Place(node=1, slot=0)))
    assert seats.Seats(now.nodes, 2, (), [2]).free(some, bad) == {0: [0], 3: [0, 1]}


def test_a_node_whose_last_slot_is_taken_is_free_no_more() -> None:
    free = {1: [0, 1], 2: [0]}
    seats.remove(free, [m.Place(node=1, slot=0), m.Place(node=2, slot=0)])
    assert free == {1: [1]}


def _fields(value: m.Assignment) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


@st.composite
def situations(draw: st.DrawFn) -> plan.Situation:
    nodes, spares, slots = draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 3))
    total = range(nodes + spares)
    domains = draw(st.lists(st.sampled_from(("a", "b", "c", "")), max_size=len(total)))
    lost = draw(st.lists(st.sampled_from(total), unique=True, max_size=3))
    cold = draw(st.lists(st.sampled_from(total), unique=True))
    now = situation(job(nodes, spares, slots, domains), lost, cold, now_s=1e9)
    bad = draw(
        st.sets(st.builds(lambda n, s: m.Place(node=n, slot=s), st.integers(nodes, 9), st.integers(0, 2)))
    )
    old = draw(st.lists(st.sampled_from(now.current.places), unique=True))
    replaced = tuple(
        m.Replaced(place=place, at_s=(1e9 - draw(st.sampled_from((1.0, 9e9))),) * LIMITS.flap_tries)
        for place in sorted(old)
    )
    deaths = [
        Fault(f"d{place}", Finding("died", place.node, place.slot, rank, "x", exit_code=-9, source="process"))
        for rank, place in enumerate(now.current.places)
        if place.node not in lost and draw(st.integers(0, 4)) == 0
    ]
    current = m.Assignment(**{**_fields(now.current), "bad": tuple(sorted(bad)), "replaced": replaced})
    return plan.Situation(now.spec, now.nodes, current, [*now.faults, *deaths], STEP, 1, 0, 1e9)


@settings(max_examples=500, deadline=None)
@given(situations())
def test_whatever_is_lost(now: plan.Situation) -> None:
    try:
        following = plan.next_assignment(now)
    except plan.NoPlanError as error:
        if "no spare left" in str(error):
            free = _free(now, set(now.current.places))
            homeless = [place for place in now.current.places if not now.nodes[place.node].usable]
            assert len(free) < len(homeless)
        return
    assert plan.next_assignment(now) == following
    assert len(set(following.places)) == now.spec.world_size
    assert not set(following.places) & set(following.bad)
    assert all(now.nodes[place.node].usable for place in following.places)
    for rank, (old, new) in enumerate(zip(now.current.places, following.places, strict=True)):
        if new != old:
            assert old in following.bad or old in following.flapping, rank
    moved_from = {old for old, new in zip(now.current.places, following.places, strict=True) if old != new}
    stayed = [place for place in following.flapping if place not in moved_from]
    assert set(stayed) <= set(following.renew)
    if stayed:
        # Nobody stays in such a slot while a sound one is free.
        shaky = {old.place for old in now.current.replaced if old.at_s[0] > 0}
        assert not _free(now, {*following.places, *shaky})


def _free(now: plan.Situation, taken: set[m.Place]) -> list[m.Place]:
    return [
        place
        for node, view_ in now.nodes.items()
        if view_.usable
        for slot in range(now.spec.slots_per_node)
        if (place := m.Place(node=node, slot=slot)) not in taken and place not in now.current.bad
    ]


@settings(max_examples=500, deadline=None)
@given(situations())
def test_one_lost_node_goes_to_the_best_there_is(now: plan.Situation) -> None:
    """Said in other words than the code: no other node is better in the first thing that differs."""
    unusable = [node for node, view_ in now.nodes.items() if not view_.usable]
    homes = {place.node for place in now.current.places} & set(unusable)
    if len(homes) != 1:
        return
    home = homes.pop()
    ranks = now.current.ranks_on(home)
    free = _free(now, {*now.current.places})
    rooms = {place.node: sum(p.node == place.node for p in free) for place in free}
    if max(rooms.values(), default=0) < len(ranks):
        return
    own = domain_of(now.spec.domains, home)
    several = sum(domain_of(now.spec.domains, node) == own for node in unusable) > 1

    def merits(node: int) -> tuple[bool, bool, int]:
        slots = now.nodes[node].slots()
        same = domain_of(now.spec.domains, node) == own
        return slots[0].phase == "waiting", same != several, -node

    best = max((node for node, room in rooms.items() if room >= len(ranks)), key=merits)
    found = plan.next_assignment(now).places
    assert {found[rank].node for rank in ranks} == {best}
