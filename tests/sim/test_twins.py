"""Ranks that compute wrongly, among all else that goes wrong: what is restored is what was computed right."""

from collections import Counter

import pytest

from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.ckptlessd.planning import sources, twins_agree

from .agents import Agent
from .faults import Shape
from .ranks import Process, trained
from .story import Violation
from .test_planted import Bug
from .world import World

SEEDS = range(5000, 5120)
FLIPS = 8
POLL_S = 0.005
WITHOUT_OTHERS = Shape(others=False)
QUIET = Shape(without=frozenset(range(100)), others=False)
UNTIL_S = 7.0


def restored(agent: Agent) -> list[Process]:
    """Living processes that train."""
    return [one for one in agent.living if agent.phase(one) == "restored"]


class Flipping(World):
    """A world of DDP or HSDP with one rank on each node, in which values change where they lie."""

    def __init__(self, seed: int, shape: Shape = WITHOUT_OTHERS) -> None:
        super().__init__(seed, shape)
        self.twins = "act"
        self.flipped: list[Process] = []
        self.restored: Counter[bool] = Counter()
        self.events.after(0.0, self._plan_flips)

    @staticmethod
    def noise(generation: int) -> int:
        """Return 0: the test computes again what is right."""
        return 0

    @property
    def fits(self) -> bool:
        """Of two twins on one node only one is compared; a shard without a twin on another is not."""
        size, twins = self.spec.world_size, self.job.twins
        return self.spec.slots_per_node == 1 and twins > 1 and size % twins == 0

    @property
    def excused(self) -> bool:
        """Whether what a rank had computed wrongly may have gone with its node, which could tell no more."""
        agents = [process.agent for process in self.flipped]
        return any(self.network.ever & {a.node} or not (a.sound or a.outcome) for a in agents)

    def _plan_flips(self) -> None:
        for _ in range(FLIPS):
            self.events.after(self.twin_chance.uniform(0.2, UNTIL_S), self._flip)

    def _flip(self) -> None:
        """Of a rank that has agreed with its twins before."""
        living = [one for agent in self.agents.values() if agent.sound for one in restored(agent)]
        able = [one for one in living if one.inside and self._has_agreed(one)]
        if able and self.checks.outcome is None:
            self._spoil(self.twin_chance.choice(able))

    def _spoil(self, process: Process) -> None:
        process.value ^= 1 << self.twin_chance.randrange(60)
        self.flipped.append(process)
        self.flips += 1
        self.faulted("flip")
        self.story.tell("fault", f"a bit of rank {process.rank} flips after step {process.step}")

    @staticmethod
    def _has_agreed(process: Process) -> bool:
        agent = process.agent
        if process.step == process.world.job.steps:
            return False
        return agent.check.has_agreed(agent.vault.shard(process.rank), process.step)

    def check_restored(self, process: Process) -> None:
        """Called for every rank that has its state back."""
        value = 0
        for step in range(1, process.step + 1):
            value = trained(value, frozenset([value]), step)
        self.restored[value == process.value] += 1
        if value != process.value and not self.excused:
            raise Violation(f"rank {process.rank} goes on from step {process.step} with what is wrong")


class Stubborn(Flipping):
    """One in which nothing else goes wrong, and rank 1 flips whenever it has come to step 3."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, QUIET)
        self._spoilt = 0
        self.events.after(POLL_S, self._flip_again)

    def _plan_flips(self) -> None:
        """None by chance."""

    def _flip_again(self) -> None:
        for one in (one for agent in self.agents.values() for one in restored(agent)):
            if (one.rank, one.step) == (1, 3) and one.generation > self._spoilt:
                self._spoilt = one.generation
                self._spoil(one)
        if self.checks.outcome is None:
            self.events.after(POLL_S, self._flip_again)


def flipping(seed: int) -> Flipping | None:
    """One seed. Raises Violation, with the story."""
    world = Flipping(seed)
    if not world.fits:
        return None
    restored = world.checks.restored

    def check(process: Process) -> None:
        restored(process)
        world.check_restored(process)

    world.checks.restored = check  # type: ignore[method-assign]
    try:
        world.run()
        done = world.checks.outcome is not None and world.checks.outcome.state == "done"
        for process in (one for agent in world.agents.values() for one in agent.processes.values()):
            here = process.agent.core.occupied(process.birth) is not None
            if done and here and process.generation == world.generation:
                world.check_restored(process)
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}\n{world.story.render()}") from violation
    return world


@pytest.mark.timeout(600)
def test_what_is_wrong_is_never_restored() -> None:
    worlds = [world for seed in SEEDS if (world := flipping(seed)) is not None]
    assert len(worlds) > 10
    assert sum(bool(world.flipped) and not world.excused for world in worlds) > 5
    # Only what went with its node.
    assert all(not world.restored[False] or world.excused for world in worlds)


def test_a_new_leader_hears_out_a_node_that_has_not_said_who_it_is() -> None:
    """Its report came in a storm without its hello, and with it its word that step 6 is in dispute."""
    assert flipping(9095) is not None


def test_a_job_whose_twins_differ_each_time_ends() -> None:
    """The same rank computes wrongly after the same step, whatever process it is in: four times in a row."""
    worlds = [world for world in map(Stubborn, range(40)) if world.fits]
    assert len(worlds) > 3
    for world in worlds:
        world.run()
        assert world.checks.outcome is not None
        assert world.checks.outcome.why == "corrupt"
        # Who agrees with its next twin commits one step more, which counts as a step in between once.
        assert 4 <= world.flips <= 7


BUGS = (
    Bug("a step in dispute is restored", sources, "_newest_held", "(False, True)", "(True, True)"),
    Bug("nothing is in dispute", twins_agree, "disputes", "len(different) >", "0 >"),
    Bug("nobody waits for the twins", TwinCheck, "_judge", "return False", "return True"),
)


def finds(seed: int) -> bool:
    """Whether a bug shows."""
    try:
        flipping(seed)
    except Violation:
        return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    assert any(finds(seed) for seed in SEEDS)
