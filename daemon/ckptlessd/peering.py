"""Pure: one job's other daemons: whom to be connected to, who lives, and how a message gets there.

A `Peering` is part of a `JobSession`. It sends what the session says to neighbours, and by way of them to
everybody else, and it watches the neighbours. The connections are its `Links`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgspec

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.packing import MissingBaseError, digest_of, pack, unpack
from ckptless.daemon.ckptlessd.membership import watch as w
from ckptless.daemon.ckptlessd.membership.offers import Offers
from ckptless.daemon.ckptlessd.membership.overlay import overlay
from ckptless.daemon.ckptlessd.membership.pulses import Pulses
from ckptless.daemon.ckptlessd.membership.router import MOST_HOPS, Router
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol.messages import AgentEvent
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Decided, Decree, Propose
from ckptless.daemon.protocol.peers.membership import Beat, Have, Saw, Suspect, Want
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.bundles import bundles, check_nodes, unbundle

if TYPE_CHECKING:
    from ckptless.daemon.ckptlessd.session import JobSession

# A pulse that is passed on waits for the next beat of everybody on its way.
PULSE_HOPS = 4
# Where so long no step is made here, the way to a node that is no neighbour may be why. So many of them are
# looked at at a time, for so long that two that are apart both find it out.
STILL_S, AROUND, TURN_S = 5.0, 64, 12.0


@dataclass(frozen=True)
class Roster:
    """A job's nodes, numbered for good when it started; `me` is this daemon's.

    The last `late` numbers are for nodes that may come while it runs.
    """

    me: int
    peers: tuple[Peer, ...]
    late: int = 0

    @property
    def nodes(self) -> tuple[int, ...]:
        """All numbers."""
        return tuple(peer.node for peer in self.peers)

    @property
    def founders(self) -> tuple[int, ...]:
        """The numbers of the nodes that the job begins with."""
        return self.nodes[: len(self.peers) - self.late]

    @cached_property
    def by_node(self) -> dict[int, Peer]:
        """The addresses of the nodes' daemons."""
        return {peer.node: peer for peer in self.peers}


class Links(Protocol):
    """Connections to other daemons: TCP's (`mesh`), or a simulator's."""

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
    """Part of a `JobSession`, whose clock is its own. `times` are in seconds."""

    def __init__(self, session: "JobSession", roster: Roster, links: Links, times: w.Times) -> None:
        self._roster, self._session, self._links = roster, session, links
        self._times, self._now = times, session.now
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
        """Take the result of `Links.look`."""
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
                    self._router.learn(voter, node, clock_ms, self._now())
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
            beat = Beat(pulses=self._pulses.beat({*self._voters, control.leader}, now))
            for node in tuple(self._links.up):
                self._links.send(node, beat)
            self._feel(now)
            apart = self._member.apart(now)
            if apart != self._apart:
                self._apart = apart
                self._session.feed(e.Apart(apart))
            for (origin, serial), node in self._offers.overdue(now):
                self._links.send(node, Want(origin=origin, serial=serial))
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
                self._links.send(node, message)

    # ------------------------------------------------------------------------------------ sending

    def say(self, node: int | None, message: p.Said) -> None:
        """Send it to one daemon, or with None to all others; it is dropped where no way is known.

        States and orders are repeated.
        """
        if node is None:
            self._to_all(message)
        else:
            self._to_daemon(node, message)

    def _to_daemon(self, node: int, message: p.Said) -> None:
        message = self._decrees.pack(message, node)
        if self._links.send(node, message):
            return
        way = self._router.toward(node)
        if way is not None:
            self._queue(way, self._relayed(node, message))

    def _to_all(self, message: p.Said) -> None:
        message = self._decrees.pack(message, None)
        if isinstance(message, p.Rows) and not self.overlay.complete:
            # As many ledgers as there are voters are enough.
            for node in self._keepers():
                self._to_daemon(node, message)
            return
        if self._reaches_all:
            self._send_all(message)
        else:
            self._spread(self._relayed(None, message))

    @property
    def _reaches_all(self) -> bool:
        """Whether there is a connection to each other daemon, but for those of lost nodes."""
        up, losses = self._links.up, self._session.control.losses
        nodes = self._session.control.nodes
        few = len(up) + len(losses) + 1 + self._roster.late >= len(self.overlay.nodes)
        return few and all(
            node in up or node in losses or node == self._me or nodes[node].absent
            for node in self.overlay.nodes
        )

    def _send_all(self, message: p.DaemonMessage, but: Collection[int] = ()) -> None:
        for node in tuple(self._links.up):
            if node not in but:
                self._links.send(node, message)

    def _spread(self, message: p.Relayed, but: Collection[int] = ()) -> None:
        """Send it to all neighbours but those. A decree may be long: it is offered, and taken once."""
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
                self._links.send(node, kept)
        elif not self._router.has(*key) and self._offers.offered(key, node, self._now()):
            self._links.send(node, Want(origin=message.origin, serial=message.serial))

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
            self._links.flush_soon()
        self._queued.setdefault(way, []).append(message)

    def _pass_on(self, sender: int, relayed: tuple[p.Relayed, ...]) -> None:
        batch: list[tuple[int, p.Said]] = []
        for one in relayed:
            if not self._router.heard(sender, one.origin, one.serial, one.clock_ms, self._now()):
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
        way = message.to if message.to in self._links.up else self._router.toward(message.to)
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
                self._to_daemon(node, p.Meeting(job=self._session.job, standing=standing, reports=()))
        return found

    def _said(self, node: int, message: p.Said) -> None:
        if isinstance(message, p.Packed):
            self._session.hear_all(self._unpacked([(node, message)]))
        else:
            self._session.hear(node, message)

    # --------------------------------------------------------------------------------- membership

    def _choose(self, now: float) -> None:
        """Choose the nodes to connect to: neighbours, those in place of neighbours that are away, voters."""
        self._voters = self._session.control.known.voters
        self._away = self._member.away(now)
        agreement = self._session.control.agreement
        asks = self._me in self._voters or agreement.elected or agreement.campaigns
        mine = set(self._voters) if asks else set()
        around = self.overlay.neighbours(self._me) | self.overlay.neighbours(self._me, self._away)
        wanted = frozenset((around | mine) - {self._me})
        self._member.watch(wanted, self._links.up, now, self._strangers)
        self._links.want(wanted)

    def _look_around(self, now: float) -> frozenset[int]:
        """Look at one that is no neighbour, in its turn; two nodes look at each other at the same time."""
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
                self._links.hang_up(output.node, output.why)
            case w.Say():
                self._links.send(output.node, output.message)
            case e.AgentAnswers():
                self._session.feed(output)
            case w.Withdrawn():
                self._note(f"node-{output.node} is not suspected any more: {output.why}")
            case e.NodeLost():
                self._session.lose(output)

    def _look(self, node: int) -> None:
        agent = self._session.agent_address(node)
        if agent is not None:
            self._links.look(node, agent, agent=True)
        elif self._member.was_met(node):
            peer = self._roster.by_node[node]
            self._links.look(node, (peer.address, peer.port), agent=False)
        else:
            self._member.looked(node, "unsure", self._now())

    def _note(self, text: str) -> None:
        self._session.feed(e.Report(self._me, AgentEvent(level="info", kind="suspicion", text=text)))


class Decrees:
    """A job's decrees on their way from daemon to daemon, as what differs from the one before.

    To pack and unpack them it knows the newest that this daemon knows, and the one before.
    """

    def __init__(self, agreement: Agreement, nodes: Collection[int]) -> None:
        self._agreement, self._nodes = agreement, nodes
        self._newest, self._before = agreement.known, agreement.known
        self._packed: tuple[Decree, p.Packed] | None = None
        # Daemons that were sent the newest: who asks for it once more needs the whole.
        self._told: tuple[int, set[int]] = (0, set())

    def pack(self, message: p.Said, to: int | None) -> p.Said:
        """The message as it is sent to a daemon, or to all."""
        if not isinstance(message, p.Agree) or not isinstance(message.say, Propose | Decided):
            return message
        say = message.say
        base = self._known(say.decree.index - 1)
        if base is None or (isinstance(say, Decided) and to is not None and self._was_told(say, to)):
            return message
        if self._packed is None or self._packed[0] is not say.decree:
            body, digest = pack(say.decree, base), digest_of(say.decree)
            if body is None:
                return message
            self._packed = (say.decree, p.Packed(job=message.job, base=base.index, digest=digest, body=body))
        ballot = say.ballot if isinstance(say, Propose) else None
        return msgspec.structs.replace(self._packed[1], ballot=ballot)

    def unpack(self, packed: p.Packed) -> p.Agree | None:
        """Return what was packed; None where that cannot be known here. Raises ProtocolError."""
        base = self._known(packed.base)
        if base is None:
            return None
        try:
            decree = unpack(packed.body, base, packed.digest, self._nodes)
        except MissingBaseError:
            return None
        say = (
            Decided(decree=decree) if packed.ballot is None else Propose(ballot=packed.ballot, decree=decree)
        )
        return p.Agree(job=packed.job, say=say)

    def _was_told(self, say: Decided, node: int) -> bool:
        if self._told[0] != say.decree.index:
            self._told = (say.decree.index, set())
        before = node in self._told[1]
        self._told[1].add(node)
        return before

    def is_old(self, packed: p.Packed) -> bool:
        """Whether it says what this daemon knows already."""
        return packed.ballot is None and self._agreement.known.index > packed.base

    def _known(self, index: int) -> Decree | None:
        if self._agreement.known is not self._newest:
            self._newest, self._before = self._agreement.known, self._newest
        return next((one for one in (self._newest, self._before) if one.index == index), None)
