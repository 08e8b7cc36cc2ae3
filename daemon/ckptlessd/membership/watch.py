"""Pure: which of the watched nodes are gone: SWIM's suspicion, Lifeguard's health. Inputs in, outputs out.

A node is watched by its neighbours. Silent for half of `dark_s`, it is suspected: the watcher looks whether
anything on the node answers (a connection to its agent, which its kernel takes even where every process is
stopped or starved), and asks three others to look as well.
The verdict takes `dark_s` without a sign of life where all who were asked say the same, up to three times as
long where they do not, each times what this daemon's own health is (`suspicion.LocalHealth`).

A node whose machine answers, but has no agent any more, is lost at once.
(Das, Gupta and Motivala, SWIM, 2002.)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from ckptless.daemon.ckptlessd.membership.suspicion import LocalHealth, Suspicion, suspicion_s
from ckptless.daemon.ckptlessd.recovery.events import AgentAnswers, NodeLost
from ckptless.daemon.protocol.peers.membership import Saw, Suspect

# What came of looking at a node, at its agent: "open", "refused" (the machine lives, the agent does not) or
# "silent". Where no agent of it is known, at its daemon: "lives" or "silent". "unsure": nobody knows where to
# look, or this daemon was too late itself to see the answer.
Answer = Literal["open", "refused", "lives", "silent", "unsure"]

LOOK_EVERY_S = 0.1
ASKED = 3
# A node that others see, and this one has not reached for so many times `dark_s`, is apart from it.
APART = 3.0


class Times(Protocol):
    """The times by which daemons watch each other, in seconds; see `config.Timers`."""

    @property
    def beat_s(self) -> float:
        """Between two signs of life."""

    @property
    def dark_s(self) -> float:
        """The time from the last sign of life to the verdict."""


# ------------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True)
class Look:
    """See whether anything on the node answers; the answer is given to `looked`."""

    node: int


@dataclass(frozen=True)
class HangUp:
    """The connection to its daemon is silent: end it."""

    node: int
    why: str


@dataclass(frozen=True)
class Say:
    """Say something to one daemon that there is a connection to."""

    node: int
    message: Suspect | Saw


@dataclass(frozen=True)
class Withdrawn:
    """A suspicion is over: nothing on a node had answered this daemon, and yet it lives."""

    node: int
    why: str


Output: TypeAlias = Look | HangUp | Say | AgentAnswers | NodeLost | Withdrawn


@dataclass
class _Watched:
    """`heard`: the last word of its daemon; `lived`: the last sign of life of the node. Or the beginning.

    `seen`: the last sign of life that this daemon has seen itself; what others say comes late. `why` the last
    connection to its daemon has ended. `dark`: at the last look nothing answered. `blind`: since when nothing
    there has answered this daemon; `vouched`: when another one that was asked saw it last.
    """

    heard: float
    lived: float
    linked: bool
    seen: float = 0.0
    why: str | None = None
    blind: float | None = None
    vouched: float = 0.0
    gone: bool = False
    looked: float = 0.0
    dark: bool = False
    suspicion: Suspicion | None = None
    cut_off: bool = False


@dataclass
class Membership:
    """The membership as the daemon of node `me` sees it."""

    me: int
    times: Times
    health: LocalHealth = field(default_factory=LocalHealth)
    _watched: dict[int, _Watched] = field(default_factory=dict)
    _looking: set[int] = field(default_factory=set)
    _askers: dict[int, set[int]] = field(default_factory=dict)
    _due: float = 0.0
    _wanted: frozenset[int] = frozenset()
    _seldom: frozenset[int] = frozenset()
    _out: list[Output] = field(default_factory=list)

    def take(self) -> list[Output]:
        """Return what is to be done since the last time."""
        out, self._out = self._out, []
        return out

    @property
    def watched(self) -> Collection[int]:
        """The nodes that it watches."""
        return self._watched.keys()

    def was_met(self, node: int) -> bool:
        """Whether there was a connection to the daemon of a watched node before."""
        return node in self._watched and self._watched[node].why is not None

    def apart(self, now: float) -> frozenset[int]:
        """Return the nodes that this daemon has not reached for long, while others say that they see them.

        A look is answered by the kernel there, however busy the node is: it is the way there that is broken.
        """
        patience_s = self.times.dark_s * self.health.factor
        return frozenset(
            node
            for node, one in self._watched.items()
            if one.blind is not None
            and not one.gone
            and now - one.blind >= APART * self.times.dark_s
            and one.vouched >= one.blind
            and now - one.vouched <= APART * patience_s
        )

    def away(self, now: float) -> set[int]:
        """Return the nodes to whose daemon there has been no connection for some time."""
        long_s = 2 * self.times.dark_s
        return {
            node
            for node, one in self._watched.items()
            if not one.linked and now - one.heard > long_s and node not in self._seldom
        }

    # ------------------------------------------------------------------------------ what happens

    def watch(
        self,
        nodes: Collection[int],
        links: Collection[int],
        now: float,
        seldom: Collection[int] = (),
    ) -> None:
        """Judge these, and no others, from now on; to some of them there are connections already.

        To those that are looked at `seldom` nobody here wants one: their agents are enough. A connection to
        any other is ended where it is silent, as long as it is there: over it that daemon counts as heard.
        """
        self._seldom = frozenset(seldom) - frozenset(nodes)
        self._wanted = wanted = frozenset(nodes) | self._seldom
        for node in self._watched.keys() - wanted:
            if not self._watched[node].linked:
                self._forget(node)
        for node in sorted(wanted - self._watched.keys()):
            self._watched[node] = _Watched(heard=now, lived=now, linked=node in links)

    def _forget(self, node: int) -> None:
        del self._watched[node]
        # Nobody looks any more: that it answered once must not stand for ever.
        self._out.append(AgentAnswers(node, answers=False))

    def linked(self, node: int, now: float) -> None:
        """There is a connection to its daemon."""
        one = self._watched.setdefault(node, _Watched(heard=now, lived=now, linked=True))
        one.linked, one.gone, one.heard, one.seen = True, False, now, now
        one.blind = None
        self._lives(node, one, now, "its daemon has connected")

    def unlinked(self, node: int, why: str, now: float) -> None:
        """There is none any more."""
        one = self._watched.get(node)
        if one is None:
            return
        if node not in self._wanted:
            self._forget(node)
            return
        one.linked, one.why, one.looked = False, why, 0.0
        self._look(node, one, now)

    def heard(self, node: int, now: float) -> None:
        """Take note that a node's daemon has said something."""
        one = self._watched.get(node)
        if one is not None:
            one.heard = one.seen = now
            one.blind = None
            self._lives(node, one, now, "it was heard again")

    def known_gone(self, node: int) -> None:
        """Stop asking about a node: its fate is decided."""
        if node in self._watched:
            self._watched[node].gone = True

    def lived_since(self, when: float) -> set[int]:
        """Return the nodes that have given this daemon itself a sign of life since then."""
        return {node for node, one in self._watched.items() if one.seen > when}

    def tick(self, now: float, judge: Callable[[float], bool]) -> bool:
        """Time has passed; whether a beat is due.

        `judge(when)`: whether this node has heard a quorum since `when`, and may say that one is lost which
        it has not heard since.
        """
        beat = now >= self._due
        if beat:
            self._be_honest(now)
        for node, one in self._watched.items():
            if one.linked and now - one.heard > self.times.dark_s:
                # However this daemon is: what it does not hear keeps no lease of its own alive.
                self._out.append(HangUp(node, f"its daemon was silent for {now - one.heard:.1f} s"))
            if not one.gone and node in self._wanted:
                self._consider(node, one, now, judge)
        return beat

    def looked(self, node: int, answer: Answer, now: float) -> None:
        """Take the result of a Look."""
        self._looking.discard(node)
        askers = self._askers.pop(node, set())
        if answer != "unsure":
            self._out += [Say(asker, Saw(node=node, lives=answer != "silent")) for asker in sorted(askers)]
        one = self._watched.get(node)
        if one is None or one.gone:
            return
        if answer in ("open", "lives"):
            one.seen, one.blind = now, None
        elif answer == "silent":
            one.blind = now if one.blind is None else one.blind
        if answer == "open":
            self._lives(node, one, now, "its agent answers")
        if answer in ("open", "silent") and not one.linked:
            self._out.append(AgentAnswers(node, answer == "open"))
        if answer == "lives":
            self._lives(node, one, now, "its machine answers")
        one.dark = answer == "silent"
        if answer == "refused" and not one.linked:
            self._lose(node, one, "its agent is gone", now, dark=False)

    def hear(self, sender: int, message: Suspect | Saw, now: float) -> None:
        """Take another daemon's word about who lives."""
        match message:
            case Suspect():
                self._asked(sender, message, now)
            case Saw():
                self._answered(sender, message, now)

    # ---------------------------------------------------------------------------------- judging

    def _be_honest(self, now: float) -> None:
        """A daemon that was late itself has missed what came meanwhile: that silence was its own."""
        late_s = now - self._due if self._due else 0.0
        on_time = self._due and late_s <= self.times.beat_s
        self._due = (self._due if on_time else now) + self.times.beat_s
        if late_s <= self.times.beat_s:
            self.health.on_time(now)
            return
        self.health.worse(now, int(late_s / self.times.beat_s))
        for one in self._watched.values():
            one.heard, one.lived = min(now, one.heard + late_s), min(now, one.lived + late_s)

    def _consider(self, node: int, one: _Watched, now: float, judge: Callable[[float], bool]) -> None:
        patience_s = self.times.dark_s * self.health.factor
        if now - one.lived > patience_s / 2 and (one.linked or one.dark):
            self._suspect(node, one, now)
        if one.suspicion is not None or not one.linked:
            self._look(node, one, now)
        if one.suspicion is None or not one.dark:
            return
        # Of a cut, all on the other side fall silent at about the same time.
        since = max(one.lived, now - self.times.dark_s) + self.times.dark_s / 2
        was_cut_off, one.cut_off = one.cut_off, not judge(since)
        if one.cut_off:
            return
        if was_cut_off:
            # What was seen then says nothing: look, and ask, again.
            one.dark, one.suspicion = False, None
            return
        confirmed, asked = len(one.suspicion.confirmed), len(one.suspicion.asked)
        if confirmed < asked and now - one.suspicion.since < self.times.dark_s / 2:
            return  # they were asked only now, and may see it
        if now - one.lived >= suspicion_s(patience_s, confirmed, asked):
            what = f"nothing on it answers, {confirmed} of {asked} others say the same"
            self._lose(node, one, what, now, dark=True)

    def _suspect(self, node: int, one: _Watched, now: float) -> None:
        old = one.suspicion
        if old is not None and now - old.asked_at < self.times.dark_s / 2:
            return
        asked = self._whom_to_ask(node, one)
        confirmed = old.confirmed & asked if old is not None else set()
        since = old.since if old is not None and old.asked else now
        one.suspicion = Suspicion(asked, now, confirmed, since)
        self._out += [Say(other, Suspect(node=node)) for other in sorted(asked - confirmed)]

    def _whom_to_ask(self, node: int, one: _Watched) -> frozenset[int]:
        sound = [other for other, its in self._watched.items() if its.linked and its.lived > one.lived]
        # Each watcher of a node asks others than the next one does.
        start = (self.me + node) % len(sound) if sound else 0
        return frozenset((sound[start:] + sound[:start])[:ASKED])

    def _look(self, node: int, one: _Watched, now: float) -> None:
        rests = node in self._seldom and one.suspicion is None
        every_s = self.times.dark_s if rests else LOOK_EVERY_S
        if node not in self._looking and now - one.looked >= every_s and not one.gone:
            one.looked = now
            self._looking.add(node)
            self._out.append(Look(node))

    def _lives(self, node: int, one: _Watched, now: float, why: str) -> None:
        if one.suspicion is not None and one.dark:
            self._out.append(Withdrawn(node, why))
        one.lived, one.dark, one.suspicion = now, False, None

    def _lose(self, node: int, one: _Watched, what: str, now: float, *, dark: bool) -> None:
        one.gone = True
        age_s = now - one.lived
        before = (one.why,) if one.why is not None else () if one.linked else ("its daemon was never met",)
        heard = (f"node-{self.me} has heard nothing of it for {age_s:.1f} s",) if dark else ()
        reason = "; ".join((*before, *heard, what))
        self._out.append(NodeLost(node, reason, age_s, dark, source="membership"))

    # ----------------------------------------------------------------------------------- others

    def _asked(self, sender: int, message: Suspect, now: float) -> None:
        node = message.node
        one = self._watched.get(node)
        if one is not None and one.linked and now - one.heard < self.times.dark_s / 2:
            self._out.append(Say(sender, Saw(node=node, lives=True)))
        else:
            self._askers.setdefault(node, set()).add(sender)
            if node not in self._looking:
                self._looking.add(node)
                self._out.append(Look(node))

    def _answered(self, sender: int, message: Saw, now: float) -> None:
        one = self._watched.get(message.node)
        if one is None or one.suspicion is None or sender not in one.suspicion.asked:
            return
        if message.lives:
            self.health.worse(now)
            one.vouched = now
            self._lives(message.node, one, now, f"node-{sender} sees it")
            if not one.linked:
                self._out.append(AgentAnswers(message.node, answers=True))
        else:
            one.suspicion.confirmed.add(sender)
