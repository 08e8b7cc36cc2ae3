"""The whole: nodes with their daemons and agents, the links between them, time, chance, and the faults."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar

from ckptless.daemon.ckptlessd.membership.overlay import overlay
from ckptless.daemon.ckptlessd.recovery.fencing import FORMING_DEADLINE_S
from ckptless.daemon.ckptlessd.session import LIFE_BITS, Kept
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Ballot, Decree, Durable
from ckptless.daemon.protocol.records import JobRecord
from ckptless.daemon.settings.options import TwinsMode

from . import components, resizes
from .agents import Agent
from .checks import Checks
from .daemons import LAUNCH, Daemon
from .events import Channel, Events
from .faults import ANY, OF_A_JOB, Fault, Job, Shape, draw, happen, share
from .frames import tamper
from .living import Living
from .network import Network, Witness
from .protected import Protected
from .ranks import Barriers, Process
from .story import Story, Violation

T = TypeVar("T")

# A clock like a daemon's, which is never 0.
EPOCH_S = 100_000.0
# With no more faults, a job is over within this time, and what its steps take, their replicas late.
BOUND_S = 60.0
STEP_BOUND_S = 0.5
EVENTS_MAX = 1_000_000
# The number of the first of the faults that are drawn apart, see `Shape.without`.
FIRST_COMPONENT = 1000
SLOW_CHANCE = 0.03
LATE_CHANCE = 0.3
# How often something of an earlier job of the same number lies on disks, or of this job's start before.
FORMER_CHANCE = 0.3
# Within so many seconds another job begins beside it.
GUEST_S = 8.0
FORMER_LAUNCH = "a" * 32


class World:
    """One job, from its start to its end; where its shape says so, with a `guest` on the same nodes.

    That is a job of its own, which shares with it, its `host`, what two jobs on the same nodes do: time, the
    daemons' processes and disks, the network, and Slurm. All that happens to these happens to both.
    """

    def __init__(self, seed: int, shape: Shape = ANY, host: "World | None" = None) -> None:
        self.seed, self.random, self.host = seed, Random(seed), host
        self.events: Events = Events() if host is None else host.events
        self.story: Story = Story(lambda: self.events.now) if host is None else host.story.of("guest ")
        job = draw(self.random, shape, f"sim-{seed}", Random(f"disks and cables of {seed}"))
        chance, self._broken = Random(f"{seed}-components"), tuple[components.Broken, ...]()
        if shape.components:
            job = replace(job, spec=components.of_components(job.spec, chance))
            drawn = components.draw(chance, shape.components)
            job = replace(job, steps=components.steps(shape.components), sticky=None)
            self._broken = components.without(drawn, shape.without, FIRST_COMPONENT)
        if shape.elastic:
            job = replace(job, spec=resizes.elastic(job.spec, Random(f"sizes of {seed}")))
        if host is not None:
            job = replace(job, faults=tuple(fault for fault in job.faults if fault.kind in OF_A_JOB))
        self.job: Job = share(job, Random(f"shards of {seed}"))
        self.spec: m.JobSpec = self.job.spec
        self.checks, self.protected = Checks(self), Protected(self)
        self.barriers = Barriers(self)
        self.agents: dict[int, Agent] = {}
        self.daemons: dict[int, Daemon] = {}
        self.dead_nodes: set[int] = set()
        # What each daemon has on its disk, which outlasts it.
        self.disks: dict[int, Durable] = {}
        # What any daemon has written of the job as a whole.
        self.job_rows: list[JobRecord] = []
        self.network = Network(self)
        self.witness: Witness = Witness(self) if host is None else host.witness
        self.living = Living(self)
        self.fates: list[str] = []
        self.raised: Counter[str] = Counter()
        # Faults that happened, and messages that were lost or doubled, or held up by a broken network.
        self.injected: Counter[str] = Counter()
        nodes = range(self.most_nodes)
        self.graph = overlay(self.spec.job, tuple(nodes))
        self.deaths: Counter[tuple[int, int]] = Counter()
        self.interrupted: list[tuple[int, int]] = []
        # When the training itself had a fault, and when one that only the control plane feels came.
        self.training_faults: list[float] = []
        self.control_faults: list[float] = []
        # Drills that an agent has done.
        self.struck = 0
        # How often a spare has built ahead, and has got state then.
        self.prepared = self.got_ahead = 0
        self.generation, self.formed_at = 0, 0.0
        # Whether anything has changed that `checks.after_event` looks at.
        self.touched = False
        self.storm_until = 0.0
        # Until when each write of a node takes how much longer; what was ever on its disk.
        self.slow_until: dict[int, tuple[float, float]] = {}
        self.history: dict[int, list[Durable]] = {}
        self.written_at: dict[int, list[float]] = {}
        # By node the daemons, of whatever job, that have something to write: one after the other does.
        self.writers: dict[int, list[Daemon]] = {}
        # Links, from and to, whose next frame is not what was sent; whether the user has ended the job.
        self.tampered: dict[tuple[int, int], float] = {}
        self.cancelled = False
        # Nodes that a health check was ever against, and why.
        self.unwell: dict[int, str] = {}
        # Until when a node's disk takes nothing.
        self.full_until: dict[int, float] = {}
        # Nodes on which no write ever ends.
        self.hung: set[int] = set()
        self.former = self._former_job()
        # Nodes whose daemon has lost what it had promised.
        self.forgot: set[int] = set()
        self._pid = 100
        self._lives = Random(f"lives of {seed}")
        self.cost_s = shape.cost_s
        # Whether twins are compared, which takes no draw of the seed's.
        self.twins: TwinsMode = "off"
        # How many values have changed where they lay.
        self.flips = 0
        self.twin_chance = Random(f"twins of {seed}")
        self.bulk_chance = Random(f"bulk transfers of {seed}")
        self._waiting: list[Fault] = []
        self.drawing = resizes.Drawing(self)
        # Whether it is over, and was looked at then.
        self.done = False
        self.guest: World | None = None
        if host is not None:
            self.dead_nodes, self.hung, self.writers = host.dead_nodes, host.hung, host.writers
            self.full_until, self.slow_until = host.full_until, host.slow_until
        elif shape.guest:
            self.guest = _guest(self, shape)

    @property
    def most_nodes(self) -> int:
        """The nodes that the job begins with, and those that may come."""
        return self.spec.nodes + self.spec.spares + self.spec.late

    @property
    def jobs(self) -> "tuple[World, ...]":
        """Those on these nodes that are not over."""
        return tuple(job for job in (self, self.guest) if job is not None and not job.done)

    # ------------------------------------------------------------------------------------- disks

    def _former_job(self) -> dict[int, Kept]:
        """What lies on some disks of a job of the same number, or of this one before it was requeued."""
        chance = Random(f"former job of {self.seed}")
        if chance.random() > FORMER_CHANCE:
            return {}
        nodes = range(self.spec.nodes + self.spec.spares)
        end = m.Outcome(state="done", exit_code=0, reason="every rank has ended", why="done")
        last = Decree(index=chance.randint(2, 9), voters=tuple(nodes), outcome=end)
        begin = Decree(index=0, voters=tuple(nodes))
        return {
            node: (
                FORMER_LAUNCH + "0" * 16,
                Durable(
                    promised=Ballot(number=chance.randint(1, 99), node=node),
                    vote=None,
                    known=chance.choice((last, begin)),
                ),
            )
            for node in nodes
            if chance.random() < 0.7
        }

    def row(self, node: int) -> Kept | None:
        """Return what a daemon finds under the job's name on its disk."""
        mine = self.disks.get(node)
        return (LAUNCH + "0" * 16, mine) if mine is not None else self.former.get(node)

    # ----------------------------------------------------------------------------------- running

    def run(self) -> None:
        """Until the job is over. Raises Violation."""
        self.begin()
        if self.guest is not None:
            self.events.after(self._lives.uniform(0.0, GUEST_S), self.guest.begin)
        for _ in range(EVENTS_MAX):
            for job in self.jobs:
                job.look()
            if (self.done and not self.jobs) or not self.events.step():
                break
        if self.jobs:
            raise Violation(f"not over after {EVENTS_MAX} events")

    def look(self) -> None:
        """Check what has changed. Raises Violation."""
        if self.touched:
            self.touched = False
            self.checks.after_event()
        if self.agents and self.over:
            self.done = True
            self.checks.finished()
            if self.host is not None:
                for daemon in self.daemons.values():
                    daemon.alive = False
        elif self._is_late():
            raise Violation(f"not over {self._bound_s:.0f} s after the last fault")

    @property
    def _bound_s(self) -> float:
        return BOUND_S + STEP_BOUND_S * self.job.steps

    def _is_late(self) -> bool:
        newest = max([self.formed_at, *self.training_faults[-1:], *self.control_faults[-1:]])
        late_s = self.events.now - newest - self._bound_s
        if late_s <= 0:
            return False
        controls = [daemon.control for daemon in self.daemons.values()]
        if not self.generation or any(c is not None and c.stage == "forming" for c in controls):
            # Nobody who lives may know that there was a first generation.
            return late_s > 2 * FORMING_DEADLINE_S
        return True

    def begin(self) -> None:
        """Its agents start, and daemons where none are."""
        spec = self.spec
        shape = f"{spec.nodes} nodes, {spec.spares} spares, {spec.slots_per_node} slots each"
        self.story.tell("job", f"seed {self.seed}: {shape}, {self.job.steps} steps, sticky {self.job.sticky}")
        # On a machine that is busy, or with many nodes, the first ones lead before the last ones come.
        pace = 10.0 if self._lives.random() < LATE_CHANCE else 1.0
        for node in range(spec.nodes + spec.spares):
            self.begin_node(node, pace)
        for fault in self.job.faults:
            where = f"{fault.delay:.3f} s after {fault.stage or 'the start'}"
            self.story.tell("job", f"fault: {fault.kind}, {where}")
            if fault.stage is None:
                self.events.after(fault.delay, lambda fault=fault: happen(self, fault))  # type: ignore[misc]
            else:
                self._waiting.append(fault)
        components.schedule(self, self._broken)
        if spec.elastic:
            resizes.schedule(self, Random(f"resizes of {self.seed}"))

    def begin_node(self, node: int, pace: float = 1.0) -> None:
        """A node's agent starts, and a daemon where none is."""
        self.agents[node] = Agent(self, node)
        if node in self.dead_nodes | self.witness.down:
            self.agents[node].die(dark=True)
        self.events.after(self.random.uniform(0.0, 0.3), lambda: self.start_daemon(node))
        self.events.after(pace * self.random.uniform(0.0, 0.6), self.agents[node].connect)

    @property
    def crowded(self) -> bool:
        """Whether faults of components come again and again."""
        return bool(self._broken) or (self.host is not None and self.host.crowded)

    @property
    def over(self) -> bool:
        """No agent lives, and whoever could know the end does."""
        if any(agent.sound for agent in self.agents.values()):
            return False
        if self.checks.outcome is None:
            # Every agent died: nobody is left to be told.
            return True
        controls = [d.control for d in self.daemons.values() if d.alive and d.control is not None]
        unaware = [control for control in controls if control.outcome is None]
        # Where all that knew it have died, each of the others has given itself up.
        return not unaware or (unaware == controls and all(one.me in one.losses for one in unaware))

    @property
    def hooked(self) -> bool:
        """Whether a process has come to ckptless.run, in a generation that has a deadline for it."""
        here = [slot for agent in self.agents.values() if agent.sound for slot in agent.slots]
        return self.generation > 1 and any(slot.hooked and slot.generation for slot in here)

    @property
    def ending(self) -> bool:
        """Whether the training of somebody is over: nothing has a deadline after it."""
        return any(
            slot.phase in ("finished", "exited") for agent in self.agents.values() for slot in agent.slots
        )

    def stage_entered(self, stage: str) -> None:
        """A leader has brought the job, or the agreement, to a stage: what waits for that is due."""
        due = next((fault for fault in self._waiting if fault.stage == stage), None)
        if due is not None:
            self._waiting.remove(due)
            self.events.after(due.delay, lambda: happen(self, due))

    # -------------------------------------------------------------------------- time and chance

    def wall_clock(self) -> float:
        """Return what a daemon's clock shows."""
        return EPOCH_S + self.events.now

    def next_life(self) -> int:
        """A number of no other life of a daemon; the seed's own draws stay what they are."""
        return self._lives.getrandbits(LIFE_BITS)

    def soon(self, action: Callable[[], None]) -> None:
        """In a moment."""
        self.events.after(self.random.uniform(0.0005, 0.02), action)

    def channel(self, deliver: Callable[[T], None]) -> Channel[T]:
        """One direction of a new connection."""
        return Channel(self.events, self.delay_s, deliver)

    def delay_s(self) -> float:
        """Draw how long one message is on its way, in seconds."""
        if self.random.random() < SLOW_CHANCE:
            return self.random.uniform(0.05, 0.3)
        return self.random.uniform(0.0005, 0.01)

    def disk_delay(self) -> float:
        """For one write that outlasts a power failure."""
        if self._stormy(0.3):
            return self.random.uniform(0.02, 0.3)
        return self.random.uniform(0.05, 0.5) if self.random.random() < SLOW_CHANCE else 0.003

    def is_full(self, node: int) -> bool:
        """Whether a node's disk takes nothing now."""
        return self.events.now < self.full_until.get(node, 0.0)

    def takes_votes(self, node: int) -> bool:
        """Whether a node's disk takes anything now."""
        return node not in self.hung and not self.is_full(node)

    def slow_s(self, node: int) -> float:
        """Return how much longer a write takes there."""
        until, slow_s = self.slow_until.get(node, (0.0, 0.0))
        return slow_s if self.events.now < until else 0.0

    @staticmethod
    def noise(generation: int) -> int:
        """Return by how much a generation's steps differ from what another would make of them."""
        return generation

    def next_pid(self) -> int:
        """A new number for a process."""
        self._pid += 1
        return self._pid

    def start_fate(self) -> str | None:
        """Return what happens to a process that is just being started."""
        if not self.fates or self.generation <= 1:
            return None
        self.faulted("start")
        return self.fates.pop(0)

    # ------------------------------------------------------------------------------ bookkeeping

    def faulted(self, kind: str) -> None:
        """A fault happens now; one that is not this job's own happens to its guest, too."""
        control = ("daemon", "leader", "link", "storm", "pause", "starve", "disk")
        faults = self.control_faults if kind in control else self.training_faults
        faults.append(self.events.now)
        if self.guest is not None and kind not in OF_A_JOB:
            self.guest.faulted(kind)

    def note_raise(self, process: Process, text: str) -> None:
        """A rank's script raises."""
        self.raised[text] += 1
        self.faulted("raise")

    # ------------------------------------------------------------------------- daemons and links

    def leads(self, node: int) -> bool:
        """Whether this node's daemon thinks that it leads."""
        daemon = self.daemons.get(node)
        return daemon is not None and daemon.control is not None and daemon.control.leads

    def start_daemon(self, node: int) -> None:
        """A daemon's life begins: it dials the others, and is dialled."""
        if node in self.daemons or node in self.dead_nodes:
            return
        if self.host is not None and node not in self.host.daemons:
            return  # it begins with the host's, which is the same process
        self.daemons[node] = Daemon(self, node)
        for other in sorted(self.graph.neighbours(node)):
            self.dial(min(node, other), max(node, other))
        for job in self.jobs:
            if job is not self and node in job.agents:
                job.start_daemon(node)

    def kill_daemon(self, node: int, *, dark: bool, lose: bool) -> None:
        """A daemon's life ends."""
        for job in self.jobs:
            daemon = job.daemons.pop(node, None)
            if daemon is not None:
                daemon.die(dark=dark, lose=lose)
        self.writers.pop(node, None)

    def kill_node(self, node: int, *, dark: bool) -> None:
        """A node is no more, with all that runs on it."""
        self.kill_daemon(node, dark=dark, lose=True)
        for job in self.jobs:
            if node in job.agents and job.agents[node].alive:
                job.agents[node].die(dark=dark)
        self.dead_nodes.add(node)

    def dial(self, low: int, high: int) -> None:
        """One of them dials the other, until it answers."""
        self.events.after(self.random.uniform(0.01, 0.3), lambda: self._connect(low, high))

    def _connect(self, low: int, high: int) -> None:
        one, two = self.daemons.get(low), self.daemons.get(high)
        if one is None or two is None or (high in one.links and low in two.links):
            return
        if self.network.apart(low, high):
            return  # dialled again when it heals
        if one.control is None or two.control is None:
            # Whoever has not heard of the job from its own agent hangs up.
            self.dial(low, high)
            return
        if high not in self.graph.neighbours(low) and high not in one.wanted and low not in two.wanted:
            return
        if high in one.links or low in two.links:
            # One side has not noticed yet that the old connection is gone.
            self.dial(low, high)
            return
        one.peer_up(high, self._link(low, two))
        two.peer_up(low, self._link(high, one))

    def _link(self, sender: int, receiver: Daemon) -> Channel[p.DaemonMessage]:
        def deliver(message: p.DaemonMessage) -> None:
            twist = self.tampered.pop((sender, receiver.node), None)
            if twist is not None:
                why = tamper(message, twist)
                self.story.tell(receiver.name, f"ends the link of node-{sender}: {why}")
                self.hang_up(receiver, sender, why)
                return

            def hear() -> None:
                if link.is_open:
                    receiver.peer_says(sender, message)

            def arrive() -> None:
                # TCP sends again what a cut has held up, as long as nobody has closed the connection.
                self.network.when_joined(sender, receiver.node, hear)

            for _ in range(self._copies()):
                if self._stormy(0.3):
                    self.events.after(self.random.uniform(0.0, 0.5), arrive)
                else:
                    arrive()

        link: Channel[p.DaemonMessage] = self.channel(deliver)
        return link

    def _stormy(self, chance: float) -> bool:
        return self.events.now < self.storm_until and self.random.random() < chance

    def _copies(self) -> int:
        copies = 0 if self._stormy(0.15) else 2 if self._stormy(0.15) else 1
        if copies != 1:
            self.injected["message"] += 1
        return copies

    def drop(self, low: int, high: int, away_s: float) -> None:
        """A link is cut, and what is under way on it is lost; it comes back later."""
        one, two = self.daemons.get(low), self.daemons.get(high)
        if one is None or two is None:
            return
        for daemon, other in ((one, high), (two, low)):
            link = daemon.links.get(other)
            if link is not None:
                link.cut()
        why = "the link dropped"
        self.soon(lambda: one.peer_down(high, why))
        self.soon(lambda: two.peer_down(low, why))
        self.events.after(away_s, lambda: self._restore_link(low, high))

    def hang_up(self, daemon: Daemon, node: int, why: str) -> None:
        """A daemon ends a link that it hears nothing over."""
        link = daemon.links.get(node)
        if link is None:
            return
        link.cut()
        there = self.daemons.get(node)
        back = there.links.get(daemon.node) if there is not None else None
        if there is not None and back is not None:
            back.cut()
            self.network.when_joined(
                daemon.node, node, lambda: self.soon(lambda: self._reset(there, daemon.node, back))
            )
        self.soon(lambda: daemon.peer_down(node, why))

    @staticmethod
    def _reset(daemon: Daemon, node: int, link: Channel[p.DaemonMessage]) -> None:
        """The other end of a link has ended it."""
        if daemon.links.get(node) is link:
            daemon.peer_down(node, "the other end hung up")

    def _restore_link(self, low: int, high: int) -> None:
        # For as long as it was away, two leaders may have disagreed.
        self.faulted("link")
        self._connect(low, high)


def _guest(host: World, shape: Shape) -> World:
    """Another job, on some of the host's nodes, with faults of its own ranks and agents."""
    most = host.spec.nodes + host.spec.spares
    nodes = Random(f"guest of {host.seed}").randint(min(4, most), most)
    return World(-1 - host.seed, replace(shape, nodes=nodes, components=0, others=False, guest=False), host)


def simulate(seed: int, shape: Shape = ANY) -> World:
    """Run one seed. Raises Violation, with the story."""
    world = World(seed, shape)
    try:
        world.run()
    except Violation as violation:
        world.story.tell("CHECK", str(violation))
        raise Violation(f"seed {seed}: {violation}\n{world.story.render()}") from violation
    return world


def shrink(seed: int, shape: Shape) -> Shape:
    """The same seed with as few of its faults as it takes to fail, in whatever way it then does."""
    left = list(range(len(World(seed, shape).job.faults)))
    left += range(FIRST_COMPONENT, FIRST_COMPONENT + shape.components + 1)
    without: set[int] = set()
    for number in left:
        smaller = replace(shape, without=frozenset(without | {number}))
        try:
            World(seed, smaller).run()
        except Violation:
            without.add(number)
    return replace(shape, without=frozenset(without))
