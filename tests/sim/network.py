"""The network between the nodes: whole, or cut in two for a while; and the cluster's manager."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .daemons import Daemon
    from .world import World

DARK_S = 0.6
# What it takes to notice that the lease is over, and to end; in a large job pulses are passed on for a while.
OVER_S = 2 * DARK_S + 1.5


@dataclass
class Cables:
    """Between the nodes. `blocked`: pairs (from, to) between which nothing gets through."""

    blocked: frozenset[tuple[int, int]] = frozenset()
    ever: set[int] = field(default_factory=set)
    healed_at: float = -1.0
    broken_at: float = -1.0


class Network:
    """The network as one job has it."""

    def __init__(self, world: "World") -> None:
        self._world = world
        # Two jobs on the same nodes have the same cables.
        self._cables: Cables = Cables() if world.host is None else world.host.network._cables
        # Of nodes until when agent and daemon do not hear each other.
        self.deaf_until: dict[int, float] = {}
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self.over_s = world.spec.limits.lease_s + OVER_S

    @property
    def ever(self) -> set[int]:
        """All nodes that a cut or a mark has touched."""
        return self._cables.ever

    @property
    def healed_at(self) -> float:
        """Return when it became whole last."""
        return self._cables.healed_at

    @property
    def broken_at(self) -> float:
        """Return when it was broken last."""
        return self._cables.broken_at

    @property
    def _blocked(self) -> frozenset[tuple[int, int]]:
        return self._cables.blocked

    @property
    def broken(self) -> bool:
        """Whether any pair cannot talk."""
        return bool(self._blocked)

    def apart(self, one: int, other: int) -> bool:
        """Whether there can be no connection: TCP takes both ways."""
        return (one, other) in self._blocked or (other, one) in self._blocked

    def reached_from(self, node: int) -> set[int]:
        """Return who can be heard of there, also by way of others."""
        # Over a connection that is there already, one way is enough.
        reached = {node, *(n for n in self._world.agents if (n, node) not in self._blocked)}
        edge = list(reached)
        while edge:
            here = edge.pop()
            following = [n for n in self._world.agents if n not in reached and not self.apart(here, n)]
            reached.update(following)
            edge += following
        return reached

    def when_joined(self, one: int, other: int, action: Callable[[], None]) -> None:
        """Deliver what `one` sends to `other` now, or, as TCP would, once that way is free again."""
        if (one, other) in self._blocked:
            self._world.injected["message"] += 1
            self._waiting.append((one, other, action))
        else:
            action()

    def cut(self, side: frozenset[int], away_s: float) -> None:
        """Nothing gets across any more, and nobody is told of it."""
        world = self._world
        world.story.tell("fault", f"the network is cut: {sorted(side)} and the others, for {away_s:.2f} s")
        rest = set(world.agents) - side
        self._block({(a, b) for a in side for b in rest} | {(b, a) for a in side for b in rest}, away_s)
        for job in world.jobs:
            job.network.expect_ends(set(side), rest, away_s)

    def expect_ends(self, side: set[int], rest: set[int], away_s: float) -> None:
        """Look later at whoever has no quorum on its side."""
        world = self._world
        # An agent that does not hear its daemon asks others, and ends when its own lease is over.
        for after_s, every in ((self.over_s, False), (self.over_s + 2 * world.spec.limits.lease_s, True)):
            if away_s > after_s:
                voters, cut_at = world.checks.voters, world.events.now
                for half in (side, rest):
                    look = partial(self._look, half, voters, cut_at, every)
                    world.events.after(after_s, look)

    def block(self, pairs: set[tuple[int, int]], away_s: float) -> None:
        """Nothing gets from one node of each pair to the other; the other way it may."""
        names = ", ".join(f"{a}>{b}" for a, b in sorted(pairs))
        self._world.story.tell("fault", f"nothing gets through for {away_s:.2f} s: {names}")
        self._block(pairs, away_s)

    def _block(self, pairs: set[tuple[int, int]], away_s: float) -> None:
        self._cables.blocked, self._cables.broken_at = frozenset(pairs), self._world.events.now
        self._cables.ever |= {node for pair in pairs for node in pair}
        self._world.events.after(away_s, self._heal)

    def _look(self, half: set[int], voters: tuple[int, ...], cut_at: float, every: bool) -> None:
        """A daemon that was started since, or stopped, or first heard of the job then: another lease.

        `every`: also those whose agent does not hear it.
        """
        world = self._world
        if self.healed_at >= cut_at or self.broken_at != cut_at or world.checks.outcome is not None:
            return
        # One that was stopped passes signs of life from before the cut on when it goes on.
        awake = max((d.awake_since for n, d in world.daemons.items() if n in half), default=0.0)
        if awake > cut_at and awake + self.over_s > world.events.now:
            world.events.at(awake + self.over_s, partial(self._look, half, voters, cut_at, every))
            return
        steady = {
            n
            for n, d in world.daemons.items()
            if max(d.born, d.began, d.awake_since) <= cut_at
            and d.control is not None
            and (every or (self.deaf_until.get(n, 0.0) < cut_at and d.control.stage != "forming"))
        }
        world.checks.cut_off(half, voters, steady)

    def _heal(self) -> None:
        world = self._world
        world.story.tell("fault", "the network is whole again")
        world.faulted("cut")
        self._cables.blocked, self._cables.healed_at = frozenset(), world.events.now
        for job in world.jobs:
            job.network.reconnect()

    def reconnect(self) -> None:
        """Deliver what was held up, and have daemons dial again."""
        world = self._world
        waiting, self._waiting = self._waiting, []
        for _, _, action in waiting:
            action()
        world.barriers.look()
        for low in sorted(world.daemons):
            for high in [node for node in sorted(world.daemons) if node > low]:
                world.dial(low, high)


class Witness:
    """slurmctld: it marks nodes down, and says which are; it does one thing after the other."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.drained: set[int] = set()
        self.down: set[int] = set()
        # Of a cut, the side that it is on: with these nodes, with the others, or it reaches all.
        self.place: int | None = None
        # Until when it answers late, not at all, or without saying that anybody is down.
        self.late_until = self.gone_until = self.says_no_until = -1.0
        # When each node was marked last.
        self.marked: dict[int, float] = {}

    def _reaches(self, node: int) -> bool:
        return self.place is None or not self._world.network.apart(self.place, node)

    def ask(self, daemon: "Daemon", nodes: set[int], ours: set[int]) -> None:
        """Look, drain, look, set down, and look: as `SlurmCluster` does it."""

        def drain() -> None:
            if self._first(daemon, ours):
                self.drained |= nodes
                self._soon(lambda: self._mark(daemon, nodes, ours))

        self._soon(drain)

    def _soon(self, action: Callable[[], None]) -> None:
        late_s = max(0.0, self.late_until - self._world.events.now)
        if late_s:
            self._world.events.after(late_s, action)
        else:
            self._world.soon(action)

    def _first(self, daemon: "Daemon", ours: set[int]) -> bool:
        """Whether it is heard, and the other half has not marked it."""
        heard = daemon.alive and self._reaches(daemon.node) and self._world.events.now >= self.gone_until
        return heard and not ours & (self.down | self.drained)

    def _mark(self, daemon: "Daemon", nodes: set[int], ours: set[int]) -> None:
        world = self._world
        if not self._first(daemon, ours):
            return
        self.down |= nodes
        self.marked.update(dict.fromkeys(nodes, world.events.now))
        world.network.ever.update(nodes)
        for node in nodes:
            world.events.after(world.random.uniform(0.01, 3.0), lambda node=node: self._end(node))  # type: ignore[misc]
        world.soon(lambda: self._look(daemon, nodes))

    def _look(self, daemon: "Daemon", nodes: set[int]) -> None:
        now = self._world.events.now
        if now < max(self.gone_until, self.says_no_until):
            return
        if daemon.alive and self._reaches(daemon.node) and nodes <= self.down:
            self._world.soon(lambda: daemon.hear_witness(nodes))

    def _end(self, node: int) -> None:
        """Slurm ends what runs on a node that it holds for down, once it reaches it."""
        agents = [job.agents[node] for job in self._world.jobs if node in job.agents]
        living = [agent for agent in agents if agent.alive]
        if not living:
            return
        if not self._reaches(node):
            self._world.events.after(0.5, lambda: self._end(node))
            return
        self._world.faulted("node")
        for agent in living:
            agent.world.story.tell(agent.name, "is ended by the cluster's manager")
            agent.die(dark=False)
