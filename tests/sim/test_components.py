"""Jobs in which components fail again and again: disks, frames, partitions, Slurm, agents' links, daemons."""

from __future__ import annotations

from collections import Counter

import pytest

from ckptless.daemon.ckptlessd.recovery.election import Election
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.transport import handshake

from .components import COMPONENTS, WEIGHTS, Broken, happen
from .faults import Shape
from .frames import WAYS, tamper
from .story import Violation
from .test_disks import FOR_EVER_S, dies, full, play_world
from .test_pairs import block
from .world import World, simulate

CROWD = Shape(components=24)
FOUND = (20043, 20080, 20189, 20394, 5000126)
TWISTS = [(number + part) / len(WAYS) for number in range(len(WAYS)) for part in (0.01, 0.5, 0.99)]


def calm(nodes: int) -> World:
    return World(3, Shape(nodes=nodes, without=frozenset(range(100))))


@pytest.mark.parametrize("seed", range(12))
def test_a_crowd_of_faults(seed: int) -> None:
    simulate(seed, CROWD)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    """In this order: a daemon whose own node was given up accused others, cut off as it was, twice.

    A job that too few nodes came to was said to hear no quorum; a verdict came with the question about it;
    the only voter whose node was left could not vote, and nobody else tried to lead.
    """
    simulate(seed, Shape(components=40))


@pytest.mark.parametrize("cost_s", [0.001, 0.004])
def test_daemons_that_take_their_time_for_each_message(cost_s: float) -> None:
    """A beat comes every 0.1 s from each neighbour: at 4 ms each a daemon of six nodes is a fifth busy."""
    for seed in range(12):
        simulate(seed, Shape(cost_s=cost_s))
    for seed in range(3):
        simulate(seed, Shape(components=24, cost_s=cost_s))


def test_messages_cost_time() -> None:
    def formed_at(cost_s: float) -> float:
        world = World(3, Shape(nodes=5, without=frozenset(range(100)), cost_s=cost_s))
        world.run()
        return world.formed_at

    assert formed_at(0.004) > formed_at(0.0) + 0.004


def test_those_who_are_left_end_too() -> None:
    """A spare whose job's others have given up or are gone; whoever has not heard the user's word."""
    for seed in (7005126, 7005568, 7010180, 7010807):
        simulate(seed, Shape(components=120))


def test_a_crowded_seed_replays_exactly() -> None:
    assert simulate(5, CROWD).story.lines == simulate(5, CROWD).story.lines


def test_every_kind_happens_and_is_counted() -> None:
    """But for a node that is resumed, which takes one that was marked 10 s before."""
    injected: Counter[str] = Counter()
    for seed in range(100, 130):
        injected += simulate(seed, CROWD).injected
    assert injected.keys() >= WEIGHTS.keys() - {"slurm-resumes"}
    assert WEIGHTS.keys() <= COMPONENTS
    assert not COMPONENTS & {"message", "storm", "kill", "raise", "hang", "freeze", "start", "cancel"}


def test_a_fault_that_finds_nobody_does_not_count() -> None:
    world = calm(4)
    happen(world, Broken("slurm-resumes", 0.0, 0.5, 0.5))
    happen(world, Broken("restart", 0.0, 0.5, 0.5))
    assert not world.injected


def test_limits_are_drawn_apart() -> None:
    drawn = [World(seed, CROWD).spec.limits for seed in range(20)]
    assert any(one.lease_s > one.leave_s for one in drawn)
    assert any(one.lease_s < one.leave_s for one in drawn)
    assert any(one.join_s > one.stall_s for one in drawn)
    assert any(one.join_s < one.stall_s for one in drawn)


@pytest.mark.parametrize("twist", TWISTS)
def test_a_frame_of_other_bytes_is_refused(twist: float) -> None:
    assert tamper("a message of some length", twist).startswith(WAYS[int(twist * len(WAYS))])


def test_an_open_seal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusts(_seal: handshake.Sealer, _mac: bytes, body: bytes) -> bytes:
        return body

    monkeypatch.setattr(handshake.Sealer, "open", trusts)
    with pytest.raises(Violation, match="was not noticed"):
        tamper("a message", 0.9)


def test_a_node_that_ends_itself_beside_a_quorum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def deafen(_world: World) -> None:
        monkeypatch.setattr(JobState, "heard_voters", property(lambda job: {job.me}))

    with pytest.raises(Violation, match=r"can hear a quorum of"):
        play_world(calm(5), (5.0, deafen))


def test_a_node_that_is_cut_off_may_end_itself() -> None:
    others = {0, 2, 3, 4}
    pairs = {(1, node) for node in others} | {(node, 1) for node in others}
    world = play_world(calm(5), (2.0, block(pairs)))
    assert world.living.fenced == {1}


def test_a_job_that_nobody_leads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who led is gone, a quorum is there, and nobody tries to lead."""
    world = calm(5)

    def forbid(world: World) -> None:
        monkeypatch.setattr(Election, "campaign_if_due", lambda *_: None)
        dies(0)(world)

    with pytest.raises(Violation, match=r"can hear a quorum of .* nobody was elected leader"):
        play_world(world, (2.0, forbid))


def test_a_job_whose_disks_are_all_full_may_wait() -> None:
    """No votes, no new generation; that is what is promised."""
    world = calm(4)
    play_world(world, *((2.0, full(node, FOR_EVER_S)) for node in range(4)), (3.0, dies(3)))
    assert world.checks.outcome is None


def test_the_end_of_a_node_that_was_given_up_is_said_again() -> None:
    """Its agent hears other agents, and would run on."""
    world = calm(5)

    def lose(world: World) -> None:
        orders = world.daemons[2]._orders
        assert orders is not None
        orders.cut()
        happen(world, Broken("slurm-lies", 0.0, 0.26, 0.5))
        world.events.after(0.3, again)

    def again() -> None:
        agent, daemon = world.agents[2], world.daemons[2]
        assert agent.alive
        assert daemon.control is not None
        assert daemon.control.nodes[2].lost is not None
        agent.daemon_gone(daemon)

    play_world(world, (2.0, lose))
    ends = [at for at, who, text in world.story.lines if who == "agent-2" and "Slurm has it down" in text]
    lied = next(at for at, _, text in world.story.lines if text.startswith("Slurm has node-2 down"))
    assert ends, world.story.render()
    assert ends[0] - lied < 1.0
