"""Elections beside bad disks, and nothing else: the shipped control planes of a job's daemons, without ranks.

`world` plays everything, and elections are rare there; here are hundreds a second, of daemons that die as
they lead, are cut off, and have disks that are full, slow, hang, or have lost what was promised.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ledger.writer import VOTE_DEADLINE_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decree, Durable

from .events import Channel, Events
from .story import Violation

# Faults come for so long; without more of them there is a leader within `FOUND_S`, and what it proposes is
# known to all within `AGREED_S`: a disk that was full is tried again after 5 s at most, see `agreement`.
FAULTS_S = 12.0
FOUND_S = 10.0
AGREED_S = 12.0
TICK_S = 0.1
DARK_S = 0.6
LEASE_S = 10.0
CANCEL = m.Cancel(reason="scancel", exit_code=143)
WEIGHTS = {"leader": 8, "daemon": 2, "cut": 2, "full": 5, "hung": 4, "slow": 4, "lost": 1}
NODES = (2, 3, 3, 3, 4, 5, 5, 6, 7)


@dataclass
class Disk:
    """The newest that is on it; until when it takes nothing, never answers, or takes `slow_s` for a write."""

    has: Durable
    full_until: float = 0.0
    hung_until: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    lost: bool = False

    def is_bad(self, now: float) -> bool:
        return self.lost or now < max(self.full_until, self.hung_until, self.slow_until)


def _spec(nodes: int) -> m.JobSpec:
    # Agents that never say anything are waited for longer than all of this takes.
    limits = m.Limits(pong_s=30, leave_s=600, join_s=600, stall_s=600, lease_s=LEASE_S)
    return m.JobSpec(job="1", command=("t",), nodes=nodes, spares=0, slots_per_node=1, limits=limits)


def _info(node: int) -> m.NodeInfo:
    return m.NodeInfo(node=node, name=f"n{node}", address="127.0.0.1", agent_port=1)


class Daemon:
    """One life of a daemon: its control plane, its links, what it has given to its disk."""

    def __init__(self, room: "Electorate", node: int) -> None:
        self.room, self.node, self.alive = room, node, True
        self.links: dict[int, Channel[e.Input]] = {}
        self._votes: list[e.Save] = []
        self._writing: list[e.Save] = []
        disk = room.disks[node]
        room.lives += 1
        self.controller = Controller(
            node, f"{room.lives:x}", NodeViews(room.nodes), disk.has, may_vote=not disk.lost
        )
        self.job = self.controller.job
        hello = m.AgentHello(protocol=m.PROTOCOL, spec=room.spec, info=_info(node), pid=1)
        self.feed(e.Report(node, hello))
        room.events.after(room.random.uniform(0.0, TICK_S), self._tick)

    def _tick(self) -> None:
        if self.alive:
            self.feed(e.Tick())
            self.room.events.after(TICK_S, self._tick)

    def feed(self, event: e.Input) -> None:
        if not self.alive:
            return
        led = self.job.leads
        for output in self.controller.handle(event, self.room.events.now):
            self._carry(output)
        if self.job.leads and not led:
            self.room.elected()

    def _carry(self, output: e.Output) -> None:
        match output:
            case e.Broadcast():
                self._say(None, e.OrderFrom(self.node, output.term, output.order))
            case e.Forward():
                self._say(output.node, output.report)
            case e.Meet():
                for report in output.reports:
                    self._say(output.node, report)
                self._say(output.node, e.PeerUp(self.node, output.standing))
            case e.Tell():
                self._tell(output)
            case e.Save():
                self._save(output)

    def _say(self, node: int | None, event: e.Input) -> None:
        for link in self.links.values() if node is None else filter(None, (self.links.get(node),)):
            link.send(event)

    def _tell(self, output: e.Tell | e.Save) -> None:
        if output.say is not None and output.node == self.node:
            self.feed(e.Said(self.node, output.say))
        elif output.say is not None:
            self._say(output.node, e.Said(self.node, output.say))

    def _save(self, save: e.Save) -> None:
        self._votes.append(save)
        self._write()

    def _write(self) -> None:
        """One write at a time, which takes all that waits; see `LedgerWriter`."""
        if self._writing or not self._votes:
            return
        self._writing, self._votes = self._votes, []
        room, disk = self.room, self.room.disks[self.node]
        now, takes_s = room.events.now, room.random.uniform(0.0005, 0.02)
        if now < disk.slow_until:
            takes_s += disk.slow_s
        ends = max(now, disk.hung_until) + takes_s
        late = ends > now + VOTE_DEADLINE_S
        if late:
            room.events.after(VOTE_DEADLINE_S, self._is_late)
        room.events.at(ends, lambda: self._written(late=late))

    def _is_late(self) -> None:
        for _ in self._writing:
            self.feed(e.NotSaved("the disk has not answered"))

    def _written(self, *, late: bool) -> None:
        if not self.alive:
            return
        disk = self.room.disks[self.node]
        saves, self._writing = self._writing, []
        full = self.room.events.now < disk.full_until
        if not full:
            disk.has = saves[-1].durable
        for save in () if late else saves:
            self.feed(e.NotSaved("the disk is full") if full else e.Saved())
            if not full:
                self._tell(save)
        self._write()

    def die(self) -> None:
        """End it: its last write may be on the disk, if that takes anything, and nobody was told."""
        self.alive = False
        disk = self.room.disks[self.node]
        if self._writing and self.room.random.random() < 0.5 and not disk.is_bad(self.room.events.now):
            disk.has = self._writing[-1].durable


class Electorate:
    """The daemons of one job in the middle of it, and what happens to them by one seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(f"election {seed}")
        self.events = Events()
        self.events.now = 1000.0
        self.nodes = tuple(range(self.random.choice(NODES)))
        self.spec = _spec(len(self.nodes))
        self.lives = 0
        self.injected: Counter[str] = Counter()
        places = tuple(m.Place(node=node, slot=0) for node in self.nodes)
        infos = tuple(map(_info, self.nodes))
        first = m.Assignment(
            job="1", generation=1, term=1, leader=0, places=places, nodes=infos, restore_step=None
        )
        known = Decree(index=1, voters=self.nodes, assignment=first)
        promised = NO_BALLOT
        self.disks = {node: Disk(Durable(promised=promised, vote=None, known=known)) for node in self.nodes}
        self.daemons: dict[int, Daemon] = {}
        self._cut: set[int] = set()
        # How long after the last fault all follow a leader that can propose.
        self.found_s = 0.0

    # ---------------------------------------------------------------------------- nodes and links

    def _start(self, node: int) -> None:
        self.daemons[node] = Daemon(self, node)
        for other in self.nodes:
            if other != node and other in self.daemons:
                self._link(node, other)

    def _link(self, one: int, other: int) -> None:
        if one in self._cut or other in self._cut or other in self.daemons[one].links:
            return
        for sender, receiver in ((one, other), (other, one)):
            daemon = self.daemons[receiver]
            self.daemons[sender].links[receiver] = Channel(
                self.events, lambda: self.random.uniform(0.0002, 0.005), daemon.feed
            )
        self.daemons[one].feed(e.Connected(other))
        self.daemons[other].feed(e.Connected(one))

    def _unlink(self, one: int, other: int, *, answers: bool) -> None:
        """Nothing gets from one to the other any more, which each hears of: at once, or by the silence."""
        for node, peer in ((one, other), (other, one)):
            daemon = self.daemons.get(node)
            if daemon is None or (link := daemon.links.pop(peer, None)) is None:
                continue
            link.cut()
            self.events.after(0.001 if answers else DARK_S, self._tell_of(daemon, peer, answers=answers))

    def _tell_of(self, daemon: Daemon, peer: int, *, answers: bool) -> Callable[[], None]:
        def tell() -> None:
            if peer not in daemon.links:
                daemon.feed(e.PeerDown(peer))
                daemon.feed(e.AgentAnswers(peer, answers))

        return tell

    def _kill(self, node: int, for_s: float) -> bool:
        daemon = self.daemons.pop(node, None)
        if daemon is None:
            return False
        daemon.die()
        for peer in tuple(daemon.links):
            self._unlink(peer, node, answers=True)
        for link in daemon.links.values():
            link.cut()
        self.events.after(for_s, lambda: self._start(node))
        return True

    def _cut_off(self, node: int, for_s: float) -> bool:
        if node in self._cut or node not in self.daemons:
            return False
        self._cut.add(node)
        for peer in self.nodes:
            self._unlink(node, peer, answers=False)

        def heal() -> None:
            self._cut.discard(node)
            for peer in self.daemons.keys() - {node}:
                if node in self.daemons:
                    self._link(node, peer)

        self.events.after(for_s, heal)
        return True

    # ------------------------------------------------------------------------------------- faults

    @property
    def leader(self) -> Daemon | None:
        return next((daemon for daemon in self.daemons.values() if daemon.job.leads), None)

    def elected(self) -> None:
        self.injected["election"] += 1
        bad = any(disk.is_bad(self.events.now) for disk in self.disks.values())
        self.injected["election beside a bad disk"] += bad

    def _happen(self) -> None:
        (kind,) = self.random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
        node, now = self.random.choice(self.nodes), self.events.now
        disk = self.disks[node]
        for_s = self.random.choice((0.3, 1.0, 3.0, 8.0)) * self.random.uniform(0.5, 1.5)
        happened = True
        match kind:
            case "leader":
                leader = self.leader
                happened = leader is not None and self._kill(leader.node, min(for_s, 4.0))
            case "daemon":
                happened = self._kill(node, min(for_s, 4.0))
            case "cut":
                happened = self._cut_off(node, min(for_s, 4.0))
            case "full":
                disk.full_until = now + for_s
            case "hung":
                disk.hung_until = now + for_s
            case "slow":
                disk.slow_until, disk.slow_s = now + for_s, self.random.uniform(0.1, 2.0)
            case "lost":
                happened = self._lose(node)
        self.injected[kind] += happened

    def _lose(self, node: int) -> bool:
        """A daemon begins again that may have forgotten what it had promised: it votes no more."""
        unable = sum(disk.lost for disk in self.disks.values())
        if 2 * (unable + 1) >= len(self.nodes) or self.disks[node].lost:
            return False
        self.disks[node].lost = True
        return self._kill(node, 0.2)

    # ---------------------------------------------------------------------------------- the whole

    def run(self) -> None:
        """Until what the last leader proposes is known to all. Raises Violation."""
        for node in self.nodes:
            self._start(node)
        end = self.events.now + FAULTS_S
        while self.events.now < end:
            self._until(self.events.now + self.random.expovariate(2.0))
            self._happen()
        self._until(max(end + 4.0, *(disk.hung_until for disk in self.disks.values())))
        self._stay_bad()
        self.found_s = self._wait(self._is_led, FOUND_S, "no leader")
        leader = self.leader
        assert leader is not None
        leader.feed(e.Report(leader.node, CANCEL))
        self._wait(self._has_ended, AGREED_S, "nothing is agreed on")

    def _stay_bad(self) -> None:
        """A minority of the disks may never be sound again, and all may stay slow; all daemons are there."""
        now, slow_s = self.events.now, max(0.0, self.random.uniform(-1.0, 0.6))
        bad = sum(disk.lost for disk in self.disks.values())
        for disk in self.disks.values():
            disk.full_until = min(disk.full_until, now)
            disk.slow_until, disk.slow_s = now + 1000.0, slow_s
        for node in self.random.sample(self.nodes, len(self.nodes)):
            if 2 * (bad + 1) < len(self.nodes) and self.random.random() < 0.5 and not self.disks[node].lost:
                bad += 1
                self.disks[node].full_until = self.disks[node].hung_until = now + 1000.0
                if self.random.random() < 0.5:
                    self.disks[node].hung_until = now

    def _until(self, when: float) -> None:
        while self.events.now < when and self.events.step():
            pass

    def _wait(self, done: Callable[[], bool], within_s: float, what: str) -> float:
        began = self.events.now
        while not done():
            if self.events.now > began + within_s:
                raise Violation(f"election {self.seed}: {what} within {within_s:.0f} s: {self._state()}")
            self.events.step()
        return self.events.now - began

    def _is_led(self) -> bool:
        leader = self.leader
        return (
            leader is not None
            and leader.job.agreement.ready
            and len(self.daemons) == len(self.nodes)
            and all(
                daemon is leader or (daemon.job.hears_leader and daemon.job.leader == leader.node)
                for daemon in self.daemons.values()
            )
        )

    def _has_ended(self) -> bool:
        return all(daemon.job.known.outcome is not None for daemon in self.daemons.values())

    def _state(self) -> str:
        return "; ".join(
            f"node-{node} follows {daemon.job.leader}, leads: {daemon.job.leads}, "
            f"lost: {sorted(daemon.job.losses)}, unable: {sorted(daemon.job.unable)}, "
            f"votes: {len(daemon._writing)} and {len(daemon._votes)}"
            for node, daemon in sorted(self.daemons.items())
        )


def election(seed: int) -> Electorate:
    """One seed of it. Raises Violation."""
    electorate = Electorate(seed)
    electorate.run()
    return electorate
