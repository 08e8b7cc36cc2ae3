"""What one seed does to its job: the job's shape, and faults by time or by the stage of the recovery."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, get_args

from ckptless.daemon.ckptlessd.recovery.events import Stage
from ckptless.daemon.protocol import messages as m

from .ranks import SIGKILL, Process

if TYPE_CHECKING:
    from .world import World

LIMITS = m.Limits(pong_s=1.0, leave_s=3.0, join_s=8.0, stall_s=8.0)
TEXTS = ("ValueError: a bad batch", "OSError: a full disk")
RESTART_S = (0.05, 0.6)
RELINK_S = (0.05, 1.2)
FULL_S = (0.5, 4.0, 20.0)
PAIR_S = 45.0
FAULTS_MAX = 5
LEADER_LINK_CHANCE = 0.7
STICKY_CHANCE = 0.08
MANY_CHANCE = 0.2
NETWORK_CHANCE = 0.3
BIG_CHANCE = 0.05
TWINS_CHANCE = 0.5
LONG_CHANCE = 0.25
MANY = 12
AGREEING = ("electing", "proposing", "voting")
STAGES = (*(stage for stage in get_args(Stage) if stage not in ("ended", "forming")), *AGREEING)
OF_RANKS = ("kill", "raise", "hang", "freeze", "start")
# All others happen to whatever runs there.
OF_A_JOB = (*OF_RANKS, "agent", "deaf", "cancel")
CONTROL_KINDS = ("daemon", "leader", "link", "storm", "cut", "grey", "pause", "starve")
HALF_CHANCE = 0.4
DISK_CHANCE = 0.2
PAIR_CHANCE = 0.1


@dataclass(frozen=True)
class Fault:
    """`kind` happens `delay` seconds after the start of the job, or after a leader has entered `stage`.

    `pick` in [0, 1) chooses the victim, `twist` the kind's variant. Of the agreement, too, there are stages:
    somebody wants to lead, a decree is proposed, a vote is on a disk.
    """

    kind: str
    stage: str | None
    delay: float
    pick: float
    twist: float


@dataclass(frozen=True)
class Shape:
    """What is not left to the seed; 0: it is. `without`: faults that are left out, by their numbers.

    `others`: whether disks and cables have faults, too. `components`: so many faults of components more.
    `guest`: whether another job runs on some of its nodes. `elastic`: whether it may have other sizes, and
    somebody asks for them. `cost_s`: the CPU time in s that a daemon takes
    for each message, and does nothing else.
    """

    nodes: int = 0
    faults: int = 0
    without: frozenset[int] = frozenset()
    others: bool = True
    spares: int = 0
    limits: m.Limits = LIMITS
    components: int = 0
    guest: bool = False
    elastic: bool = False
    cost_s: float = 0.0


ANY = Shape()


@dataclass(frozen=True)
class Job:
    """The job: `sticky` is a rank and step at which the script itself always raises.

    Of `twins` ranks in a row all have the same tensors: all ranks (DDP), one (FSDP), or some (HSDP).
    `long_step` takes a good part of what any step may take; 0: none does.
    """

    spec: m.JobSpec
    steps: int
    compute_s: tuple[float, float]
    sticky: tuple[int, int] | None
    faults: tuple[Fault, ...]
    twins: int = 1
    long_step: int = 0

    def raises_at(self, rank: int, step: int) -> str | None:
        """Return what the script raises there."""
        return "KeyError: a bug in the script" if self.sticky == (rank, step) else None


def draw(random: Random, shape: Shape, name: str, others: Random) -> Job:
    """A job with its faults; who is whose neighbour follows from its name.

    `others` draws the faults of disks and cables, so that the seed's own draws stay what they are.
    """
    total, spares = random.randint(4, 6), random.randint(1, 2)
    if random.random() < BIG_CHANCE:
        # More than a daemon has neighbours.
        total = random.randint(10, 14)
    total, spares = shape.nodes or total, shape.spares or spares
    slots = random.randint(1, 2)
    spec = m.JobSpec(
        job=name,
        command=("train",),
        nodes=total - spares,
        spares=spares,
        slots_per_node=slots,
        limits=shape.limits,
    )
    steps = random.randint(5, 12)
    slow = random.uniform(0.05, 0.3)
    sticky = None
    if random.random() < STICKY_CHANCE:
        sticky = random.randrange(spec.world_size), random.randint(1, steps)
    most = MANY if random.random() < MANY_CHANCE else FAULTS_MAX
    if random.random() < NETWORK_CHANCE:
        # All is well with the ranks; nobody should be lost.
        steps, sticky, most = 3 * steps, None, MANY
        kinds: tuple[str, ...] = CONTROL_KINDS
    else:
        kinds = tuple(_ACTIONS)
    count = random.randint(1, most)
    faults = tuple(_draw_fault(random, kinds) for _ in range(shape.faults or count))
    faults += _draw_others(others) if shape.others else ()
    faults = tuple(fault for number, fault in enumerate(faults) if number not in shape.without)
    return Job(spec, steps, (0.01, slow), sticky, faults)


def share(job: Job, random: Random) -> Job:
    """Say which ranks are twins, and which step is long: not by the seed's own draws, which stay the same."""
    world_size = job.spec.world_size
    twins = world_size if random.random() < TWINS_CHANCE else random.choice((1, 1, 2, 3))
    # A job without faults is one that a test gives its own to, with deadlines of its own.
    long_step = random.randint(1, job.steps) if random.random() < LONG_CHANCE and job.faults else 0
    return replace(job, twins=min(twins, world_size), long_step=long_step)


def _draw_fault(random: Random, kinds: tuple[str, ...], agreeing: tuple[str, ...] = CONTROL_KINDS) -> Fault:
    by_stage = random.random() < 0.6  # more often at a stage than at a time
    stage = random.choice(STAGES) if by_stage else None
    delay = random.uniform(0.0, 0.4) if by_stage else random.uniform(0.0, 8.0)
    kind = random.choice(kinds)
    if stage in AGREEING:
        # It takes milliseconds.
        delay = random.choice([0.0, random.uniform(0.0, 0.02)])
        kind = random.choice(agreeing) if random.random() < 0.7 else kind
    return Fault(kind, stage, delay, random.random(), random.random())


def _draw_others(random: Random) -> tuple[Fault, ...]:
    chances = (("disk", DISK_CHANCE), ("disk", DISK_CHANCE), ("pair", PAIR_CHANCE))
    kinds = [kind for kind, chance in chances if random.random() < chance]
    return tuple(_draw_fault(random, (kind,), (kind,)) for kind in kinds)


# -------------------------------------------------------------------------------- what a fault does


def happen(world: "World", fault: Fault) -> None:
    """It happens now, if it still can."""
    if world.over:
        return
    world.faulted(fault.kind)
    before = len(world.story.lines)
    (_ACTIONS | _OTHERS)[fault.kind](world, fault)
    if fault.kind in OF_RANKS or len(world.story.lines) > before:
        # One that found nobody to happen to has told of nothing.
        world.injected[fault.kind] += 1


def _victim(world: "World", fault: Fault, *, linked: bool = False) -> Process | None:
    processes = [
        process
        for agent in world.agents.values()
        if agent.alive
        for process in agent.living
        if (process.linked or not linked)
        # What a script does after its training takes as long as it takes.
        and not (process.rank >= 0 and agent.phase(process) == "finished")
    ]
    return processes[int(fault.pick * len(processes))] if processes else None


def _kill(world: "World", fault: Fault) -> None:
    process = _victim(world, fault)
    if process is not None:
        process.die(SIGKILL)


def _raise(world: "World", fault: Fault) -> None:
    process = _victim(world, fault)
    if process is not None:
        process.raises = TEXTS[int(fault.twist * len(TEXTS))]


def _hang(world: "World", fault: Fault) -> None:
    # At the very start there is no deadline for a script to come to ckptless.run.
    process = _victim(world, fault, linked=not world.hooked)
    if process is not None:
        process.stuck = True
        world.story.tell("fault", f"process {process.pid} (rank {process.rank}) is stuck")


def _freeze(world: "World", fault: Fault) -> None:
    process = _victim(world, fault, linked=not world.hooked)
    if process is not None:
        process.stopped = True
        world.story.tell("fault", f"process {process.pid} (rank {process.rank}) is stopped")
        world.events.after(LIMITS.pong_s + 0.3 * fault.twist, lambda: process.agent.silent(process))


def _start(world: "World", fault: Fault) -> None:
    world.fates.append("hangs" if fault.twist < 0.5 else "dies")


def _agent(world: "World", fault: Fault) -> None:
    living = [agent for agent in world.agents.values() if agent.alive]
    if living:
        agent = living[int(fault.pick * len(living))]
        world.story.tell("fault", f"{agent.name} dies")
        agent.die(dark=False)


def _deaf(world: "World", fault: Fault) -> None:
    """An agent is stopped: it answers nobody, and its ranks run on."""
    # At the very start, and after the training, nothing has a deadline.
    if not 1 <= min(world.checks.newest.values()) < world.job.steps or world.ending:
        return
    sound = [agent for agent in world.agents.values() if agent.sound]
    if sound:
        agent = sound[int(fault.pick * len(sound))]
        world.story.tell("fault", f"{agent.name} is stopped")
        agent.deaf = True


def _node(world: "World", fault: Fault) -> None:
    living = [agent for agent in world.agents.values() if agent.alive]
    if living:
        node, dark = living[int(fault.pick * len(living))].node, fault.twist < 0.5
        world.story.tell("fault", f"node-{node} dies{', dark' if dark else ''}")
        world.kill_node(node, dark=dark)


def _daemon(world: "World", fault: Fault) -> None:
    _restart(world, sorted(world.daemons), fault)


def _leader(world: "World", fault: Fault) -> None:
    _restart(world, [node for node in sorted(world.daemons) if world.leads(node)], fault)


def _restart(world: "World", nodes: list[int], fault: Fault) -> None:
    if nodes:
        node = nodes[int(fault.pick * len(nodes))]
        world.story.tell("fault", f"daemon-{node} dies")
        world.kill_daemon(node, dark=False, lose=fault.twist < 0.5)
        away_s = RESTART_S[0] + fault.twist * (RESTART_S[1] - RESTART_S[0])
        world.events.after(away_s, lambda: world.start_daemon(node))


def _link(world: "World", fault: Fault) -> None:
    pairs = [(a, b) for a in sorted(world.daemons) for b in sorted(world.daemons[a].links) if a < b]
    leaders = [pair for pair in pairs if world.leads(pair[0]) or world.leads(pair[1])]
    if leaders and fault.pick * len(pairs) % 1.0 < LEADER_LINK_CHANCE:
        pairs = leaders
    if pairs:
        pair = pairs[int(fault.pick * len(pairs))]
        world.story.tell("fault", f"the link of node-{pair[0]} and node-{pair[1]} drops")
        world.drop(*pair, RELINK_S[0] + fault.twist * (RELINK_S[1] - RELINK_S[0]))


def _cut(world: "World", fault: Fault) -> None:
    """Any split, halves more often than others; for less than a lease, or for more."""
    nodes = sorted(world.agents)
    if world.network.broken or not world.generation:
        return
    lease_s = world.spec.limits.lease_s
    count = len(nodes) // 2 if fault.pick < HALF_CHANCE else 1 + int(fault.twist * (len(nodes) - 1))
    side = frozenset(world.random.sample(nodes, count))
    world.witness.place = world.random.choice([None, min(side), min(set(nodes) - side)])
    world.network.cut(side, world.random.choice([0.4, 1.5, lease_s, 3 * lease_s]))


def _grey(world: "World", fault: Fault) -> None:
    """Some pairs of nodes cannot talk, often one way only; each may reach all others."""
    if world.network.broken or not world.generation:
        return
    pairs = [(a, b) for a in sorted(world.agents) for b in sorted(world.agents) if a != b]
    chosen = set(world.random.sample(pairs, 1 + int(fault.pick * len(pairs) / 3)))
    if fault.twist < 0.5:
        chosen |= {(b, a) for a, b in chosen}
    world.network.block(chosen, world.random.choice([0.4, 1.5, world.spec.limits.lease_s]))


def _pause(world: "World", fault: Fault) -> None:
    """A daemon is stopped for a while (SIGSTOP, or no CPU); its agent is not."""
    if world.daemons:
        node = sorted(world.daemons)[int(fault.pick * len(world.daemons))]
        for_s = world.random.choice([0.3, 1.0, 5.0]) * (0.5 + fault.twist)
        world.story.tell("fault", f"daemon-{node} is stopped for {for_s:.2f} s")
        world.daemons[node].stop_for(for_s)
        if for_s > world.spec.limits.leave_s / 2:
            # A recovery that is due meanwhile does not wait for it.
            world.network.ever.add(node)
        world.events.after(for_s, lambda: world.faulted("daemon"))


def _starve(world: "World", fault: Fault) -> None:
    """A daemon gets hardly any CPU for a while."""
    if not world.daemons:
        return
    node = sorted(world.daemons)[int(fault.pick * len(world.daemons))]
    until = world.events.now + 1.0 + 5.0 * fault.twist
    world.story.tell("fault", f"daemon-{node} is starved until {until:.3f}")
    world.network.ever.add(node)

    def again() -> None:
        daemon = world.daemons.get(node)
        if daemon is not None and world.events.now < until:
            daemon.stop_for(world.random.uniform(0.1, 1.2))
            world.events.after(world.random.uniform(0.2, 1.3), again)
            world.faulted("daemon")

    again()


def _storm(world: "World", fault: Fault) -> None:
    """Have what daemons say come late, twice, out of order or not at all; disks are slow."""
    for_s = 0.5 + 2.5 * fault.twist
    world.story.tell("fault", f"a storm between the daemons, for {for_s:.2f} s")
    for job in world.jobs:
        job.storm_until = max(job.storm_until, world.events.now + for_s)
    world.events.after(for_s, lambda: world.faulted("link"))


def _disk(world: "World", fault: Fault) -> None:
    """A node's disk is full for a while: no vote gets there."""
    nodes = [node for node in sorted(world.daemons) if not world.is_full(node)]
    if nodes:
        # The next one to lead more often than others.
        node = nodes[0] if fault.twist < 0.3 else nodes[int(fault.pick * len(nodes))]
        for_s = FULL_S[int(fault.pick * 100) % len(FULL_S)]
        world.story.tell("fault", f"the disk of node-{node} is full for {for_s:.1f} s")
        world.full_until[node] = world.events.now + for_s
        world.events.after(for_s, lambda: world.faulted("disk"))


def _pair(world: "World", fault: Fault) -> None:
    """One node does not reach another for long, one way or both; all others reach both."""
    if world.network.broken or not world.generation:
        return
    pairs = [(a, b) for a in sorted(world.agents) for b in sorted(world.agents) if a != b]
    one, other = pairs[int(fault.pick * len(pairs))]
    world.network.block({(one, other), (other, one)} if fault.twist < 0.3 else {(one, other)}, PAIR_S)


_ACTIONS: dict[str, Callable[["World", Fault], None]] = {
    "kill": _kill,
    "raise": _raise,
    "hang": _hang,
    "freeze": _freeze,
    "start": _start,
    "agent": _agent,
    "deaf": _deaf,
    "node": _node,
    "daemon": _daemon,
    "leader": _leader,
    "link": _link,
    "cut": _cut,
    "grey": _grey,
    "pause": _pause,
    "starve": _starve,
    "storm": _storm,
}
# Drawn apart from the others, see `draw`.
_OTHERS: dict[str, Callable[["World", Fault], None]] = {"disk": _disk, "pair": _pair}
