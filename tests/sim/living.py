"""Whether a job lives where it can: nobody fences itself beside a quorum; with one the job trains or ends."""

from typing import TYPE_CHECKING

from ckptless.daemon.ckptlessd.consensus.quorum import is_quorum
from ckptless.daemon.ckptlessd.recovery.fencing import FORMING_DEADLINE_S

from .network import DARK_S
from .story import Violation

if TYPE_CHECKING:
    from .world import World

LOOK_S = 1.0
# What is noticed, agreed on and told, beside the deadlines of the job's own.
MARGIN_S = 10.0


class Living:
    """Looked at each second; `steady_since`: since when nothing has gone wrong, or got well again."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._mark: object = None
        self._moved_at = 0.0
        limits = world.spec.limits
        self._patience_s = limits.leave_s + limits.join_s + limits.stall_s + limits.lease_s + MARGIN_S
        self.fenced: set[int] = set()
        world.events.after(LOOK_S, self._look)

    @property
    def steady_since(self) -> float:
        """By what really happened: faults and their ends, networks, and daemons that go on."""
        world = self._world
        awake = [daemon.awake_since for daemon in world.daemons.values()]
        born = [max(daemon.born, daemon.began) for daemon in world.daemons.values()]
        faults = [*world.training_faults[-1:], *world.control_faults[-1:]]
        network = world.network
        return max(network.healed_at, network.broken_at, world.storm_until, *awake, *born, *faults, 0.0)

    def quorum_of(self, node: int) -> set[int] | None:
        """The nodes whose daemons hear each other, with `node`, if these are a quorum of the voters."""
        world, now = self._world, self._world.events.now
        there = {
            n
            for n, daemon in world.daemons.items()
            if daemon.control is not None and daemon.awake_since <= now and not world.agents[n].dark
        }
        if node not in there:
            return None
        # Over connections, which take both ways, from one to the next.
        group, edge = {node}, [node]
        while edge:
            here = edge.pop()
            new = [n for n in there - group if not world.network.apart(here, n)]
            group.update(new)
            edge += new
        return group if is_quorum(world.checks.voters, group, world.witness.down) else None

    def fences(self, node: int, why: str) -> None:
        """A node ends its ranks by itself: not where it can hear a quorum."""
        world = self._world
        self.fenced.add(node)
        steady_s = world.events.now - self.steady_since
        group = self.quorum_of(node)
        control = world.daemons[node].control if node in world.daemons else None
        controls = {n: c for n in group or () if (c := world.daemons[n].control) is not None}
        if group is not None and control is not None and not any(c.leads for c in controls.values()):
            # Only those that can write begin a job, or lead it; what trains goes on without that. Who
            # counts as lost, or has ended by itself, votes and does not lead.
            able = {n for n, c in controls.items() if c.agreement.able and world.takes_votes(n)}
            leads = any(n not in controls[n].losses and controls[n].stage != "ended" for n in able)
            group = group if leads and is_quorum(control.known.voters, able, control.agreement.dead) else None
        if group is not None and steady_s > world.spec.limits.lease_s + 2 * DARK_S + 1.0:
            raise Violation(f"node-{node} ends its ranks, and can hear a quorum of {sorted(group)}: {why}")

    def _look(self) -> None:
        """With a quorum that hears itself for so long, the job trains, moves on or ends."""
        world, now = self._world, self._world.events.now
        if world.over:
            return
        checks = world.checks
        stages = tuple(d.control.stage for d in world.daemons.values() if d.control is not None)
        mark = tuple(checks.newest.values()), world.generation, checks.outcome, stages
        able = world.checks.can_agree()
        quiet_since = max(self.steady_since, *world.full_until.values(), 0.0)
        if mark != self._mark or not world.generation or not able or quiet_since > self._moved_at:
            self._mark, self._moved_at = mark, now
        elif now - self._moved_at > self._patience_s + FORMING_DEADLINE_S * ("forming" in stages):
            raise Violation(f"a quorum is there for {now - self._moved_at:.0f} s, and nothing moves: {mark}")
        world.events.after(LOOK_S, self._look)
