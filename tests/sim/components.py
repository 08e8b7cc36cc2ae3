"""Faults of components that are drawn apart from the seed's own: disks, frames, partitions, Slurm, agents.

Only where `Shape.components` asks for them, so that the histories of seeds without stay what they are.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from msgspec import structs

from ckptless.daemon.ckptlessd.recovery.events import NodeLost
from ckptless.daemon.ckptlessd.session import is_as_new
from ckptless.daemon.protocol import messages as m

if TYPE_CHECKING:
    from .world import World

EVERY_S = 0.25
STEP_S = 0.25
RESTART_S = 0.4
RESUMED_AFTER_S = 10.0
# How often each kind is drawn, beside the others. What costs a node is rare: jobs have one or two spares.
WEIGHTS = {
    **{"slow-disk": 6, "hung-disk": 6, "full-disk": 4, "lost-disk": 1, "old-disk": 2},
    **{"frame": 10, "split": 2, "away": 1, "agent-link": 4},
    **{"slurm-late": 4, "slurm-fails-over": 3, "slurm-says-no": 2, "slurm-lies": 1, "slurm-resumes": 1},
    **{"restart": 6, "stop": 4},
}
CANCEL_CHANCE = 0.1


@dataclass(frozen=True)
class Broken:
    """`kind` happens at `at_s` after generation 1; `pick` chooses the victim, `twist` the variant."""

    kind: str
    at_s: float
    pick: float
    twist: float


def limits(random: Random) -> m.Limits:
    """Deadlines that do not follow from one another, as a site may set them."""
    return m.Limits(
        pong_s=1.0,
        leave_s=random.uniform(2.0, 6.0),
        join_s=random.uniform(6.0, 12.0),
        stall_s=random.uniform(6.0, 15.0),
        lease_s=random.uniform(2.0, 6.0),
    )


def draw(random: Random, count: int) -> tuple[Broken, ...]:
    """Draw so many, by time; a user may cancel the job among them, or as it ends."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    chosen = random.choices(kinds, weights, k=count)
    lasts_s = EVERY_S * count
    found = [Broken(kind, random.uniform(0.0, lasts_s), random.random(), random.random()) for kind in chosen]
    if random.random() < CANCEL_CHANCE:
        found.append(Broken("cancel", random.uniform(0.5, 1.2) * lasts_s, random.random(), random.random()))
    return tuple(sorted(found, key=lambda one: one.at_s))


def steps(count: int) -> int:
    """A job of so many lives for about as long as its faults take."""
    return math.ceil(EVERY_S * count / STEP_S)


def schedule(world: "World", faults: tuple[Broken, ...]) -> None:
    """They come from generation 1 on."""

    def begin() -> None:
        if not world.generation:
            world.events.after(0.1, begin)
            return
        for fault in faults:
            world.events.after(fault.at_s, lambda fault=fault: happen(world, fault))  # type: ignore[misc]

    begin()


def happen(world: "World", fault: Broken) -> None:
    """It happens now, if there is anything that it can happen to; only then it counts."""
    if not world.over and _KINDS[fault.kind](world, fault):
        world.injected[fault.kind] += 1


def _node(world: "World", fault: Broken) -> int | None:
    nodes = sorted(world.daemons)
    return nodes[int(fault.pick * len(nodes))] if nodes else None


def _tell(world: "World", kind: str, text: str, for_s: float = 0.0) -> bool:
    world.story.tell("fault", text)
    world.faulted(kind)
    if for_s:
        world.events.after(for_s, lambda: world.faulted(kind))
    return True


# ------------------------------------------------------------------------------------------- disks


def _slow_disk(world: "World", fault: Broken) -> bool:
    node, for_s, slow_s = _node(world, fault), 2.0 + 6.0 * fault.twist, 0.2 + 1.5 * fault.twist
    if node is None:
        return False
    world.slow_until[node] = world.events.now + for_s, slow_s
    return _tell(world, "disk", f"each write on node-{node} takes {slow_s:.1f} s for {for_s:.1f} s", for_s)


def _hung_disk(world: "World", fault: Broken) -> bool:
    node, for_s = _node(world, fault), (0.5, 3.0, 12.0)[int(3 * fault.twist)]
    if node is None or node in world.hung:
        return False
    world.hung.add(node)

    def again() -> None:
        world.hung.discard(node)
        world.story.tell("fault", f"the disk of node-{node} hangs no more")
        for job in world.jobs:
            if node in job.daemons:
                job.daemons[node].reach_disk()

    world.events.after(for_s, again)
    return _tell(world, "disk", f"the disk of node-{node} hangs for {for_s:.1f} s", for_s)


def _full_disk(world: "World", fault: Broken) -> bool:
    node, for_s = _node(world, fault), 0.5 + 4.0 * fault.twist
    if node is None or world.is_full(node):
        return False
    world.full_until[node] = world.events.now + for_s
    return _tell(world, "disk", f"the disk of node-{node} is full for {for_s:.1f} s", for_s)


def _restart(world: "World", node: int) -> None:
    world.kill_daemon(node, dark=False, lose=True)
    world.events.after(RESTART_S, lambda: world.start_daemon(node))
    world.events.after(RESTART_S, lambda: world.faulted("daemon"))


def _lost_disk(world: "World", fault: Broken) -> bool:
    """One node of a job at most: where a majority has forgotten, nothing can be agreed on any more."""
    node = _node(world, fault)
    if node is None or world.forgot:
        return False
    _restart(world, node)
    for job in world.jobs:
        job.forgot.add(node)
    return _tell(world, "daemon", f"daemon-{node} is started again, with an empty disk")


def _old_disk(world: "World", fault: Broken) -> bool:
    """A snapshot of before, as of a machine that was put back: its agent knows of later promises."""
    node = _node(world, fault)
    history = world.history.get(node, []) if node is not None else []
    if node is None or not history or world.forgot:
        return False
    _restart(world, node)
    count = 1 + int(fault.twist * len(history))
    at = world.written_at[node][count - 1]
    for job in world.jobs:
        written = bisect_right(job.written_at.get(node, []), at)
        if written and is_as_new(f"row.{written}", f"row.{len(job.history[node])}"):
            job.disks[node] = job.history[node][written - 1]
        elif node in job.history:
            job.forgot.add(node)
    text = f"with the disk of {len(history) - count} votes ago"
    return _tell(world, "daemon", f"daemon-{node} is started again, {text}")


# ----------------------------------------------------------------------------------------- network


def _frame(world: "World", fault: Broken) -> bool:
    """The next frame over a link comes with other bytes, or fewer, or a second time."""
    pairs = [(a, b) for a in sorted(world.daemons) for b in sorted(world.daemons[a].links)]
    if not pairs:
        return False
    pair = pairs[int(fault.pick * len(pairs))]
    world.tampered[pair] = fault.twist
    return _tell(world, "link", f"the next frame of node-{pair[0]} to node-{pair[1]} is not what it was")


def _split(world: "World", fault: Broken) -> bool:
    """Some pairs, often one way only, for longer than every lease."""
    if world.network.broken:
        return False
    nodes, draws = sorted(world.agents), Random(fault.pick)
    one = draws.choice(nodes)
    others = draws.sample([n for n in nodes if n != one], draws.randint(1, len(nodes) - 1))
    pairs = {(one, other) for other in others}
    if fault.twist < 0.7:
        pairs = {(b, a) for a, b in pairs} if fault.twist < 0.35 else pairs | {(b, a) for a, b in pairs}
    world.network.block(pairs, world.spec.limits.lease_s * (1.5 + 2.5 * fault.twist))
    return _tell(world, "cut", f"node-{one} is apart from {sorted(others)}")


def _away(world: "World", fault: Broken) -> bool:
    """A daemon is stopped, and its node is cut off, too."""
    node = _node(world, fault)
    if node is None or world.network.broken:
        return False
    for_s = world.spec.limits.lease_s * (1.5 + 2.5 * fault.twist)
    rest = set(world.agents) - {node}
    world.daemons[node].stop_for(for_s)
    world.network.block({(node, n) for n in rest} | {(n, node) for n in rest}, for_s)
    return _tell(world, "cut", f"daemon-{node} is stopped, and cut off, for {for_s:.1f} s", for_s)


def _agent_link(world: "World", fault: Broken) -> bool:
    """Nothing gets from a living agent to its daemon, or back, for a while; then it does, or it is lost."""
    node, for_s = _node(world, fault), 0.3 + 8.0 * fault.twist**2
    if node is None or not world.agents[node].sound:
        return False
    world.agents[node].hold(world.events.now + for_s)
    world.daemons[node].hold_orders(world.events.now + for_s)
    world.network.deaf_until[node] = world.events.now + for_s
    # Who is not told to stop in time is given up.
    world.network.ever.add(node)
    return _tell(
        world, "node", f"agent-{node} and its daemon do not hear each other for {for_s:.1f} s", for_s
    )


# ------------------------------------------------------------------------------- Slurm, daemons, users


def _slurm_late(world: "World", fault: Broken) -> bool:
    for_s = 2.0 + 8.0 * fault.twist
    world.witness.late_until = world.events.now + for_s
    return _tell(world, "disk", f"Slurm answers late for {for_s:.1f} s", for_s)


def _slurm_fails_over(world: "World", fault: Broken) -> bool:
    for_s = 1.0 + 6.0 * fault.twist
    world.witness.gone_until = world.events.now + for_s
    return _tell(world, "disk", f"Slurm fails over for {for_s:.1f} s", for_s)


def _slurm_says_no(world: "World", fault: Broken) -> bool:
    for_s = 1.0 + 6.0 * fault.twist
    world.witness.says_no_until = world.events.now + for_s
    return _tell(world, "disk", f"Slurm says of whom it marked that they are up, for {for_s:.1f} s", for_s)


def _slurm_lies(world: "World", fault: Broken) -> bool:
    """It says of a living node that it is down: it is believed, and the node is lost."""
    leaders = [node for node in sorted(world.daemons) if world.leads(node)]
    living = [node for node, agent in world.agents.items() if agent.sound and node not in leaders[:1]]
    if not leaders or not living:
        return False
    node = living[int(fault.pick * len(living))]
    world.network.ever.add(node)
    _tell(world, "node", f"Slurm has node-{node} down, which lives")
    world.daemons[leaders[0]].lose(NodeLost(node, "Slurm has it down", 0.0, source="slurm"))
    return True


def _slurm_resumes(world: "World", fault: Broken) -> bool:
    """Somebody resumes a node that was marked; what ran there has ended by then."""
    marked = [
        node
        for node, at in sorted(world.witness.marked.items())
        if node in world.witness.down
        and not world.agents[node].alive
        and world.events.now - at > RESUMED_AFTER_S
    ]
    if not marked:
        return False
    node = marked[int(fault.pick * len(marked))]
    world.witness.down.discard(node)
    world.witness.drained.discard(node)
    return _tell(world, "disk", f"node-{node} is resumed")


def _restarted(world: "World", fault: Broken) -> bool:
    node = _node(world, fault)
    if node is None:
        return False
    _tell(world, "daemon", f"daemon-{node} dies")
    _restart(world, node)
    return True


def _leader(world: "World", fault: Broken) -> bool:
    leaders = [node for node in sorted(world.daemons) if world.leads(node)]
    if not leaders:
        return False
    _tell(world, "daemon", f"daemon-{leaders[0]} dies, which leads")
    _restart(world, leaders[0])
    return True


def _stopped(world: "World", fault: Broken) -> bool:
    node, for_s = _node(world, fault), 0.2 + 1.5 * fault.twist
    if node is None:
        return False
    world.daemons[node].stop_for(for_s)
    world.network.ever.add(node)
    return _tell(world, "daemon", f"daemon-{node} is stopped for {for_s:.1f} s", for_s)


def _cancel(world: "World", fault: Broken) -> bool:
    """The user ends the job, as it may end by itself."""
    living = [agent for agent in world.agents.values() if agent.sound]
    if not living:
        return False
    agent = living[int(fault.pick * len(living))]
    world.cancelled = True
    _tell(world, "cancel", f"{agent.name} is told to end the job")
    agent.say(m.Cancel(exit_code=143, reason="signal 15", restarts=None))
    return True


def of_components(spec: m.JobSpec, random: Random) -> m.JobSpec:
    """The job's own deadlines."""
    return structs.replace(spec, limits=limits(random))


def without(faults: tuple[Broken, ...], left_out: frozenset[int], first: int) -> tuple[Broken, ...]:
    """Those whose number, counted from `first`, is not left out."""
    return tuple(replace(fault) for number, fault in enumerate(faults, first) if number not in left_out)


_KINDS: dict[str, Callable[["World", Broken], bool]] = {
    "slow-disk": _slow_disk,
    "hung-disk": _hung_disk,
    "full-disk": _full_disk,
    "lost-disk": _lost_disk,
    "old-disk": _old_disk,
    "frame": _frame,
    "split": _split,
    "away": _away,
    "agent-link": _agent_link,
    "slurm-late": _slurm_late,
    "slurm-fails-over": _slurm_fails_over,
    "slurm-says-no": _slurm_says_no,
    "slurm-lies": _slurm_lies,
    "slurm-resumes": _slurm_resumes,
    "restart": _restarted,
    "leader": _leader,
    "stop": _stopped,
    "cancel": _cancel,
}
# What counts as a fault of a component, these and those of `faults`: not what ranks do, nor single messages.
COMPONENTS = frozenset(_KINDS) - {"cancel"} | {
    *("agent", "deaf", "node", "daemon", "leader", "link", "cut", "grey", "pause", "starve", "disk", "pair"),
}
