"""Schedules in which an election, a stop or a lease once did not end, or ended a sound job, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from ckptless.daemon.ledger.precedence import ENDED, precedence
from ckptless.daemon.protocol import messages as m

from .faults import LIMITS, Shape
from .network import DARK_S
from .test_disks import dies, full, play_world, told
from .test_pairs import block
from .world import World, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

# A dark node is known, and agreed on, and replaced: detection takes up to three times DARK_S.
RECOVERED_S = 3 * DARK_S + 3.0


def calm(nodes: int, spares: int = 2, limits: m.Limits = LIMITS, seed: int = 3) -> World:
    """A job without faults."""
    shape = Shape(nodes=nodes, without=frozenset(range(100)), spares=spares, limits=limits)
    return World(seed, shape)


def begins(world: World, text: str) -> float:
    return next(at for at, _, line in world.story.lines if line.startswith(text))


def trains_to_the_end(world: World) -> None:
    assert world.checks.outcome is not None, world.story.render()
    assert world.checks.outcome.state == "done", world.story.render()


def recovers_soon(world: World, fault: str, within_s: float = RECOVERED_S) -> None:
    trains_to_the_end(world)
    since_s = begins(world, fault)
    recovered_s = next(at for at, _ in told(world, "recovered") if at > since_s)
    assert recovered_s - since_s < within_s, world.story.render()


def apart(groups: set[int], from_groups: set[int]) -> set[tuple[int, int]]:
    """All pairs between them, both ways."""
    pairs = {(one, other) for one in groups for other in from_groups if one != other}
    return pairs | {(other, one) for one, other in pairs}


def gone(node: int) -> Callable[[World], None]:
    """The node's machine answers, and nobody is there any more."""

    def die(world: World) -> None:
        world.faulted("node")
        world.story.tell("fault", f"node-{node} is gone")
        world.kill_daemon(node, dark=False, lose=True)
        world.agents[node].die(dark=False)
        world.dead_nodes.add(node)

    return die


def forgets(node: int) -> Callable[[World], None]:
    """Its daemon dies, and finds another disk when it is started again."""

    def restart(world: World) -> None:
        world.faulted("daemon")
        world.story.tell("fault", f"daemon-{node} is started again, with an empty disk")
        world.kill_daemon(node, dark=False, lose=True)
        world.forgot.add(node)
        world.events.after(0.3, lambda: world.start_daemon(node))

    return restart


@pytest.mark.parametrize("late_s", [0.0, 0.3, 0.6, 0.9, 1.2])
def test_the_first_promise_of_the_next_leader_is_not_written(late_s: float) -> None:
    """disk_full: once, for a moment; it is the other three that must not wait for it for ever."""
    world = calm(5)
    play_world(world, (2.0, dies(0)), (2.0 + late_s, full(1, 0.4)))
    recovers_soon(world, "node-0 dies")


@pytest.mark.parametrize("forgetful", [1, 2])
def test_a_voter_that_has_lost_its_disk_does_not_lead(forgetful: int) -> None:
    """lost_disk: it follows, and the next one leads."""
    world = calm(5)
    play_world(world, (2.0, forgets(forgetful)), (5.0, dies(0)))
    recovers_soon(world, "node-0 dies")
    assert forgetful not in {int(line.split()[1][5:]) for _, line in told(world, "leader")}


def hangs(node: int) -> Callable[[World], None]:
    def hang(world: World) -> None:
        world.faulted("disk")
        world.story.tell("fault", f"the disk of node-{node} hangs")
        world.hung.add(node)

    return hang


@pytest.mark.parametrize("hung", [(1,), (1, 2)])
def test_a_voter_whose_disk_hangs_keeps_nobody_waiting(hung: tuple[int, ...]) -> None:
    """It is the first that tries, has the support of all, and never has its own promise on the disk."""
    world = calm(7)
    play_world(world, *((2.0, hangs(node)) for node in hung), (3.0, dies(0)))
    recovers_soon(world, "node-0 dies")
    assert {text for _, text in told(world, "vote-lost")} == {
        f"vote-lost: node-{node} cannot vote: the disk has not answered" for node in hung
    }


@pytest.mark.parametrize("for_s", [6.0, 90.0])
def test_the_lowest_voter_reaches_no_quorum(for_s: float) -> None:
    """partial: node 1 reaches 2 and 3 of six voters, 4 and 5 only by way of them; nobody waits for it."""
    # By seed 3 node 1 alone has the newest tensors of node 0, and node 4, which needs them, cannot reach it.
    world = calm(6, seed=5)
    play_world(world, (2.0, block(apart({1}, {4, 5}), for_s)), (2.1, dies(0)))
    assert begins(world, "leader: ") - begins(world, "node-0 dies") < 3 * DARK_S + 1.0, world.story.render()
    trains_to_the_end(world)


@pytest.mark.parametrize("nodes", [6, 8, 12])
def test_a_leader_with_bad_links_does_not_lose_who_is_sound(nodes: int) -> None:
    """leader_partial: the stop gets to three nodes by way of the others, and their reports come back so.

    It may itself give way, since its ranks cannot talk to theirs.
    """
    world = calm(nodes)
    far = set(range(nodes - 3, nodes))

    def rank_dies(world: World) -> None:
        world.faulted("kill")
        world.agents[1].living[0].die(-9)

    play_world(world, (2.0, block(apart({0}, far), 12.0)), (3.0, rank_dies))
    lost = {int(line.split()[1][5:]) for _, line in told(world, "node-lost")}
    assert lost <= {0}, world.story.render()
    recovers_soon(world, "nothing gets through", LIMITS.stall_s)


@pytest.mark.parametrize("stuck_node", [0, 1])
def test_every_survivor_of_a_half_lives_through_a_slow_leave(stuck_node: int) -> None:
    """half: the witness's word is for all who are left, and a leave may take longer than the lease."""
    world = calm(6, 3, structs.replace(LIMITS, leave_s=3 * LIMITS.lease_s))

    def stuck(world: World) -> None:
        world.faulted("hang")
        for process in world.agents[stuck_node].living:
            process.stuck = True

    play_world(world, (2.0, stuck), *((2.0, dies(node)) for node in (2, 4, 5)))
    assert not told(world, "fenced"), world.story.render()
    trains_to_the_end(world)


def cancel(world: World, node: int) -> None:
    agent = world.agents[node]
    if agent.alive and agent._daemon is not None:
        agent._daemon.send(m.Cancel(exit_code=143, reason="signal 15", restarts=None))


def cancelled_when_done(full_s: float, cancels_s: tuple[float, ...]) -> World:
    """The job is done, no disk takes the votes for that for a while, and each node is cancelled meanwhile."""
    # Of this seed nobody looks whether a disk is full before the end is proposed, so the voters stay.
    world = calm(4, seed=5)

    def wait(world: World) -> None:
        if not any(d.control is not None and d.control.stage == "releasing" for d in world.daemons.values()):
            world.events.after(0.02, lambda: wait(world))
            return
        for node, at_s in zip(world.agents, cancels_s, strict=True):
            full(node, full_s)(world)
            world.events.after(at_s, lambda node=node: cancel(world, node))  # type: ignore[misc]

    return play_world(world, (2.0, wait))


def test_a_cancel_does_not_overtake_the_end_that_is_agreed_on() -> None:
    world = cancelled_when_done(2.5, (0.5,) * 4)
    trains_to_the_end(world)
    known = [daemon.control.outcome for daemon in world.daemons.values() if daemon.control is not None]
    assert {outcome.state for outcome in known if outcome is not None} == {"done"}


@pytest.mark.parametrize("first", range(4))
def test_a_node_that_was_stopped_by_itself_tells_the_end_that_is_agreed_on_later(first: int) -> None:
    """Its user has waited for as long as anybody does; the others have not yet when the disks are back."""
    world = cancelled_when_done(10.6, tuple(0.5 if node == first else 8.0 for node in range(4)))
    since_s = world.events.now
    while world.events.now < since_s + 20.0 and world.events.step():
        pass
    world.checks.finished()
    trains_to_the_end(world)
    alone = world.agents[first].outcome
    assert alone is not None
    assert alone.state == "stopped", world.story.render()
    rows = [row for row in world.job_rows if row.state in ENDED]
    assert rows, "whoever led has written how it ended"
    assert max(rows, key=precedence).state == "done", rows


def stops(node: int, for_s: float) -> Callable[[World], None]:
    """SIGSTOP for its daemon; its agent and ranks run on."""

    def stop(world: World) -> None:
        world.faulted("pause")
        world.story.tell("fault", f"daemon-{node} is stopped")
        world.daemons[node].stop_for(for_s)
        world.network.ever.add(node)

    return stop


@pytest.mark.parametrize("cut_first", [False, True])
def test_a_stopped_daemon_that_is_also_cut_off(cut_first: bool) -> None:
    """Its node's agent still has a connection to it, which is no sign of life: it ends the ranks itself."""
    world = calm(5)
    cut, stop = block(apart({1}, {0, 2, 3, 4}), 40.0), stops(1, 60.0)
    play_world(world, *((2.0, cut), (2.3, stop)) if cut_first else ((2.0, stop), (2.3, cut)))
    ended_s = begins(world, "ends its ranks: ")
    assert ended_s - begins(world, "daemon-1 is stopped") < 1.6 * LIMITS.lease_s, world.story.render()
    recovers_soon(world, "nothing gets through")


def test_a_stopped_daemon_ends_nothing() -> None:
    """Its node hears the others' agents: neither it nor they miss anything, for many times the lease."""
    world = calm(5)
    play_world(world, (2.0, stops(1, 10 * LIMITS.lease_s)))
    trains_to_the_end(world)
    assert world.generation == 1
    assert not told(world, "node-lost")


def test_a_daemon_that_dies_again_and_again_on_a_node_that_is_cut_off() -> None:
    """Each of its lives begins without a quorum: none of them gives the node a lease."""
    world = calm(5)

    def again(world: World) -> None:
        world.faulted("daemon")
        world.kill_daemon(1, dark=False, lose=True)
        world.events.after(0.1, lambda: world.start_daemon(1))
        if world.agents[1].alive:
            world.events.after(1.0, lambda: again(world))

    play_world(world, (2.0, block(apart({1}, {0, 2, 3, 4}), 40.0)), (2.3, again))
    took_s = begins(world, "ends its ranks: ") - begins(world, "nothing gets through")
    assert took_s < 1.6 * LIMITS.lease_s + DARK_S, world.story.render()
    recovers_soon(world, "nothing gets through")


def test_a_leader_that_has_lost_its_disk_is_followed_no_more() -> None:
    """It comes back at once, with everybody's connection, and leads nothing."""
    world = calm(5)
    play_world(world, (2.0, forgets(0)), (4.0, dies(2)))
    recovers_soon(world, "node-2 dies")


def test_a_new_leader_waits_for_a_spares_hello() -> None:
    """A frozen report without it once made a spare that nobody could use, and the job had none left."""
    simulate(293894657917, Shape(nodes=12, faults=12))
