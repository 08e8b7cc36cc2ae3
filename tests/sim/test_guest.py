"""Two jobs in the same daemons: what happens to a node happens to both, and neither hears of the other."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.session import JobSession

from .components import Broken, happen
from .daemons import Daemon
from .faults import Shape
from .story import Violation
from .world import World, simulate

BESIDE = Shape(guest=True)
CROWD = Shape(guest=True, components=24)
SEEDS_PER_TEST = 20


@pytest.mark.parametrize("first", range(0, 80, SEEDS_PER_TEST))
def test_a_job_beside_another(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed, BESIDE)


@pytest.mark.parametrize("seed", range(8))
def test_two_jobs_in_a_crowd_of_faults(seed: int) -> None:
    simulate(seed, CROWD)


def test_two_jobs_whose_messages_cost_time() -> None:
    for seed in range(8):
        simulate(seed, Shape(guest=True, cost_s=0.002))


def test_two_jobs_replay_exactly() -> None:
    assert simulate(5, CROWD).story.lines == simulate(5, CROWD).story.lines


def calm() -> tuple[World, World]:
    """Five nodes, both jobs on all of them, or nearly, and nothing that goes wrong."""
    world = World(2, Shape(nodes=5, without=frozenset(range(100)), guest=True))
    assert world.guest is not None
    return world, world.guest


def when_both_train(world: World, guest: World, then: list[Broken]) -> None:
    """These happen, once both jobs are in their first generation."""

    def look() -> None:
        if world.generation and guest.generation:
            for one in then:
                happen(world, one)
        else:
            world.events.after(0.05, look)

    world.events.after(0.05, look)
    world.run()


def test_both_jobs_train_to_their_end() -> None:
    world, guest = calm()
    world.run()
    for job in (world, guest):
        assert job.done
        assert min(job.checks.newest.values()) == job.job.steps
    assert {line[1].split()[0] for line in world.story.lines} >= {"guest", "daemon-0", "agent-0"}


def test_a_daemon_that_dies_takes_both_jobs_with_it() -> None:
    world, guest = calm()
    lives: list[tuple[Daemon, Daemon]] = []
    started = world.start_daemon

    def start(node: int) -> None:
        started(node)
        if node in world.daemons and node in guest.daemons:
            lives.append((world.daemons[node], guest.daemons[node]))

    world.start_daemon = start  # type: ignore[method-assign]
    when_both_train(world, guest, [Broken("restart", 0.0, 0.0, 0.5)])
    assert lives
    assert all(one.born == other.born and one.now() == other.now() for one, other in lives)


def test_a_disk_that_is_full_takes_nothing_of_either() -> None:
    world, guest = calm()
    when_both_train(world, guest, [Broken("full-disk", 0.0, 0.0, 0.9), Broken("leader", 0.0, 0.0, 0.5)])
    lost = {who for _, who, text in world.story.lines if text.startswith("vote-lost")}
    assert {"daemon-0", "guest daemon-0"} <= lost, world.story.render()


def test_one_write_after_the_other_goes_to_a_disk() -> None:
    world, guest = calm()
    busy: list[int] = []
    reach = Daemon.reach_disk

    def reached(daemon: Daemon) -> None:
        reach(daemon)
        here = [job.daemons.get(daemon.node) for job in (world, guest)]
        busy.append(sum(one is not None and bool(one._writing) and one._reached for one in here))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Daemon, "reach_disk", reached)
        slow = [Broken("slow-disk", 0.0, pick, 0.9) for pick in (0.0, 0.3, 0.5, 0.7, 0.9)]
        when_both_train(world, guest, [*slow, Broken("restart", 0.0, 0.3, 0.5)])
    assert max(busy) == 1


def test_views_of_nodes_that_two_jobs_share_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agents of one job say is held for what those of the other say."""
    opened = Daemon._open

    def mixed(daemon: Daemon) -> JobSession:
        session = opened(daemon)
        host = daemon._host
        if host is not None and host._session is not None:
            session.control.nodes = host._session.control.nodes
        return session

    def is_noticed(seed: int) -> bool:
        try:
            simulate(seed, BESIDE)
        except Violation:
            return True
        return False

    monkeypatch.setattr(Daemon, "_open", mixed)
    assert any(map(is_noticed, range(20)))
