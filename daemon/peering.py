"""One job's other daemons, without any I/O: whom to be connected to, who lives, and how a message gets there.

Between the control plane (`jobs`) and the connections (`mesh`, or a simulator's): sends what it is given to
neighbours, and by way of them to everybody else; watches the neighbours.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from ckptless.daemon.api.messages import AgentEvent
from ckptless.daemon.control import edges as e
from ckptless.daemon.decrees import Decrees
from ckptless.daemon.jobs import JobSession
from ckptless.daemon.membership import watch as w
from ckptless.daemon.membership.messages import Beat, Have, Saw, Suspect, Want
from ckptless.daemon.membership.offers import Offers
from ckptless.daemon.membership.overlay import overlay
from ckptless.daemon.membership.pulses import Pulses
from ckptless.daemon.membership.router import MOST_HOPS, Router
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bundles import bundles, unbundle
from ckptless.daemon.peers.checks import check_nodes
from ckptless.daemon.roster import Roster

logger = logging.getLogger(__name__)

# A pulse that is passed on waits for the next beat of everybody on its way.
PULSE_HOPS = 4
# Where so long no step is made here, the way to a node that is no neighbour may be why. So many of them are
# looked at at a time, for so long that two that are apart both find it out.
STILL_S, AROUND, TURN_S = 5.0, 64, 12.0


class Wires(Protocol):
    """Connections to other daemons."""

    @property
    def up(self) -> Collection[int]:
        """Nodes to whose daemon there is one."""

    def want(self, nodes: frozenset[int]) -> None:
        """Keep connections to these; those that dial this daemon are taken, too."""

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """Queue a message; False where there is no connection."""

    def hang_up(self, node: int, why: str) -> None:
        """End a connection; `Peering.unlinked` follows."""

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        """See whether anything listens there, the node's agent or its daemon; `Peering.looked` follows."""

    def flush_soon(self) -> None:
        """Call `Peering.flush` in a few milliseconds."""


class Peering:
    """Owned by the daemon's event loop. `times` are in seconds, as is what `now` gives."""

    def __init__(
        self, roster: Roster, session: JobSession, wires: Wires, times: w.Times, now: Callable[[], float]
    ) -> None:
        self._roster, self._session, self._wires = roster, session, wires
        self._times, self._now = times, now
        self._me = roster.me
        self.overlay = overlay(session.job, roster.nodes)
        self._member = w.Membership(self._me, times)
        self._router = Router(self._me, session.life)
        self._pulses = Pulses(self._me)
        self._offers: Offers[p.Relayed] = Offers()
        self._queued: dict[int, list[p.Relayed]] = {}
        self._decrees = Decrees(session.control.agreement, roster.by_node)
        self._voters: tuple[int, ...] = ()
        self._away: set[int] = set()
        self._fresh: frozenset[int] = frozenset()
        self._apart: frozenset[int] = frozenset()
        self._strangers: frozenset[int] = frozenset()

    # ------------------------------------------------------------------------------ what happens

    def start(self) -> None:
        """Say whom to be connected to."""
        self._choose(self._now())

    def linked(self, node: int) -> None:
        """There is a connection to a daemon."""
        self._member.linked(node, self._now())
        self._session.feed(e.Connected(node))
        self._carry()

    def unlinked(self, node: int, why: str) -> None:
        """There is none any more."""
        self._router.forget(node)
        self._pulses.doubt(node, 2 * self._times.beat_s)
        self._feel(self._now())
        self._session.feed(e.PeerDown(node))
        self._member.unlinked(node, why, self._now())
        self._carry()

    def looked(self, node: int, answer: w.Answer) -> None:
        """What came of `Wires.look`."""
        self._member.looked(node, answer, self._now())
        self._carry()

    def hear(self, node: int, message: p.DaemonMessage) -> None:
        """A message of the daemon at the other end of a connection. Raises ProtocolError."""
        relayed = unbundle(message) if isinstance(message, p.Bundle) else ()
        for one in relayed or (message,):
            check_nodes(one, self._roster.by_node)
        self._member.heard(node, self._now())
        match message:
            case Beat():
                for voter, clock_ms, _ in self._pulses.hear(message.pulses, self._now()):
                    self._router.learn(voter, node, clock_ms)
            case Suspect() | Saw():
                self._member.hear(node, message, self._now())
            case Have() | Want():
                self._trade(node, message)
            case p.Relayed():
                self._pass_on(node, (message,))
            case p.Bundle():
                self._pass_on(node, relayed)
            case p.JobKey():
                raise TypeError("a key is the runtime's business")
            case _:
                self._said(node, message)
        self._carry()

    def tick(self) -> None:
        """Time has passed."""
        now, control = self._now(), self._session.control
        strangers = self._look_around(now)
        moved = control.known.voters != self._voters or self._member.away(now) != self._away
        if moved or strangers != self._strangers:
            self._strangers = strangers
            self._choose(now)
        for node in self._lost_links():
            self._member.known_gone(node)
        if self._member.tick(now, self._may_judge):
            beat = Beat(pulses=self._pulses.beat(self._voters, now))
            for node in tuple(self._wires.up):
                self._wires.send(node, beat)
            self._feel(now)
            apart = self._member.apart(now)
            if apart != self._apart:
                self._apart = apart
                self._session.feed(e.Apart(apart))
            for (origin, serial), node in self._offers.overdue(now):
                self._wires.send(node, Want(origin=origin, serial=serial))
        self._carry()

    def _feel(self, now: float) -> None:
        fresh = self._pulses.fresh(now, self._times.dark_s + PULSE_HOPS * self._times.beat_s)
        if fresh != self._fresh:
            self._fresh = fresh
            self._session.feed(e.Heartbeats(fresh))

    def flush(self) -> None:
        """Send what was kept for a moment, to go together."""
        queued, self._queued = self._queued, {}
        for node, relayed in queued.items():
            for message in bundles(self._session.job, relayed):
                self._wires.send(node, message)

    # ------------------------------------------------------------------------------------ sending

    def to_daemon(self, node: int, message: p.Said) -> None:
        """To one daemon; dropped where no way is known (states and orders are repeated)."""
        message = self._decrees.pack(message, node)
        if self._wires.send(node, message):
            return
        way = self._router.toward(node)
        if way is not None:
            self._queue(way, self._relayed(node, message))

    def to_all(self, message: p.Said) -> None:
        """To every other daemon."""
        message = self._decrees.pack(message, None)
        if isinstance(message, p.Rows) and not self.overlay.complete:
            # As many ledgers as there are voters are enough.
            for node in self._keepers():
                self.to_daemon(node, message)
            return
        if self._reaches_all:
            self._send_all(message)
        else:
            self._spread(self._relayed(None, message))

    @property
    def _reaches_all(self) -> bool:
        """Whether there is a connection to each other daemon, but for those of lost nodes."""
        up, losses = self._wires.up, self._session.control.losses
        few = len(up) + len(losses) + 1 >= len(self.overlay.nodes)
        return few and all(node in up or node in losses or node == self._me for node in self.overlay.nodes)

    def _send_all(self, message: p.DaemonMessage, but: Collection[int] = ()) -> None:
        for node in tuple(self._wires.up):
            if node not in but:
                self._wires.send(node, message)

    def _spread(self, message: p.Relayed, but: Collection[int] = ()) -> None:
        """To all neighbours, but to those. A decree may be long: it is offered, and each takes it once."""
        if isinstance(message.said, p.Agree | p.Packed):
            self._offers.keep((message.origin, message.serial), message)
            self._send_all(Have(origin=message.origin, serial=message.serial), but)
        else:
            self._send_all(message, but)

    def _trade(self, node: int, message: Have | Want) -> None:
        key = (message.origin, message.serial)
        if isinstance(message, Want):
            kept = self._offers.asked(key)
            if kept is not None:
                self._wires.send(node, kept)
        elif not self._router.has(*key) and self._offers.offered(key, node, self._now()):
            self._wires.send(node, Want(origin=message.origin, serial=message.serial))

    def _keepers(self) -> Collection[int]:
        control = self._session.control
        return set(self._voters) - {self._me} if control.leads else {control.leader} - {self._me, -1}

    def _relayed(self, to: int | None, message: p.Said) -> p.Relayed:
        return p.Relayed(
            job=self._session.job,
            origin=self._me,
            to=to,
            serial=self._router.next_serial(),
            clock_ms=self._pulses.clock_ms(self._now()),
            hops=MOST_HOPS,
            said=message,
        )

    def _queue(self, way: int, message: p.Relayed) -> None:
        if not self._queued:
            self._wires.flush_soon()
        self._queued.setdefault(way, []).append(message)

    def _pass_on(self, sender: int, relayed: tuple[p.Relayed, ...]) -> None:
        batch: list[tuple[int, p.Said]] = []
        for one in relayed:
            if not self._router.heard(sender, one.origin, one.serial, one.clock_ms):
                continue
            if one.to is None or one.to == self._me:
                batch.append((one.origin, one.said))
            if one.to != self._me and 0 < one.hops <= MOST_HOPS:
                self._forward(sender, one)
        self._session.hear_all(self._unpacked(batch))

    def _forward(self, sender: int, message: p.Relayed) -> None:
        onward = msgspec.structs.replace(message, hops=message.hops - 1)
        if message.to is None:
            self._spread(onward, but=(sender, message.origin))
            return
        way = message.to if message.to in self._wires.up else self._router.toward(message.to)
        if way is not None and way != sender:
            self._queue(way, onward)

    def _unpacked(self, said: Sequence[tuple[int, p.Said]]) -> list[tuple[int, p.Said]]:
        """The same with whole decrees; who does not know the one before asks for all of it."""
        found: list[tuple[int, p.Said]] = []
        for node, message in said:
            if not isinstance(message, p.Packed):
                found.append((node, message))
            elif self._decrees.is_old(message):
                continue
            elif (whole := self._decrees.unpack(message)) is not None:
                found.append((node, whole))
            else:
                standing = self._session.control.standing
                self.to_daemon(node, p.Meeting(job=self._session.job, standing=standing, reports=()))
        return found

    def _said(self, node: int, message: p.Said) -> None:
        if isinstance(message, p.Packed):
            self._session.hear_all(self._unpacked([(node, message)]))
        else:
            self._session.hear(node, message)

    # --------------------------------------------------------------------------------- membership

    def _choose(self, now: float) -> None:
        """Whom to be connected to: neighbours, those in place of neighbours that are away, other voters."""
        self._voters = self._session.control.known.voters
        self._away = self._member.away(now)
        agreement = self._session.control.agreement
        asks = self._me in self._voters or agreement.elected or agreement.campaigns
        mine = set(self._voters) if asks else set()
        around = self.overlay.neighbours(self._me) | self.overlay.neighbours(self._me, self._away)
        wanted = frozenset((around | mine) - {self._me})
        self._member.watch(wanted, self._wires.up, now, self._strangers)
        self._wires.want(wanted)

    def _look_around(self, now: float) -> frozenset[int]:
        """Who is no neighbour, and looked at in its turn; two nodes look at each other at the same time."""
        still_s = self._session.control.still_s(now)
        if self.overlay.complete or still_s < STILL_S:
            return frozenset()
        nodes = self.overlay.nodes
        turns = -(-len(nodes) // AROUND)
        turn = int(still_s / TURN_S) % turns
        return frozenset(nodes[(turn - self._me) % turns :: turns]) - {self._me}

    def _may_judge(self, when: float) -> bool:
        control = self._session.control
        given_up = control.nodes[self._me].lost is not None
        if not control.decides or control.outcome is not None or given_up:
            return False
        return control.is_quorum(self._member.lived_since(when) | self._pulses.seen_since(when))

    def _lost_links(self) -> list[int]:
        nodes = self._session.control.nodes
        return [node for node in self._member.watched if nodes[node].lost is not None]

    def _carry(self) -> None:
        while outputs := self._member.take():
            for output in outputs:
                self._do(output)

    def _do(self, output: w.Output) -> None:
        match output:
            case w.Look():
                self._look(output.node)
            case w.HangUp():
                self._wires.hang_up(output.node, output.why)
            case w.Say():
                self._wires.send(output.node, output.message)
            case e.AgentAnswers():
                self._session.feed(output)
            case w.Withdrawn():
                self._note(f"node-{output.node} is not suspected any more: {output.why}")
            case e.NodeLost():
                self.lose(output)

    def _look(self, node: int) -> None:
        agent = self._session.agent_address(node)
        if agent is not None:
            self._wires.look(node, agent, agent=True)
        elif self._member.was_met(node):
            peer = self._roster.by_node[node]
            self._wires.look(node, (peer.address, peer.port), agent=False)
        else:
            self._member.looked(node, "unsure", self._now())

    def _note(self, text: str) -> None:
        self._session.feed(e.Report(self._me, AgentEvent(level="info", kind="suspicion", text=text)))

    def lose(self, loss: e.NodeLost) -> None:
        """A node is lost, of which only this daemon may know; the others hear it from here."""
        if self._session.control.nodes[loss.node].lost is not None:
            return
        self._session.feed(loss)
        told = p.Gone(
            job=self._session.job,
            node=loss.node,
            reason=loss.reason,
            age_s=loss.age_s,
            source=loss.source,
            dark=loss.dark,
        )
        self.to_all(told)
