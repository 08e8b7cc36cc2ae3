"""Pure: how the daemons of a job agree on its decrees, so that no two of them ever know different ones.

Paxos with a leader, one instance for each decree. A daemon that wants to lead takes a ballot higher than any
it knows, and asks the voters of the newest decree for promises. With a quorum of them it is elected: it must
propose what one of them has voted for already (in the highest ballot), else what it likes. A decree is chosen
once a quorum has accepted it in one ballot. While the voters stay the same, the promises are good for the
decrees after it, too; where a decree names others, these are asked before the next.

Each decree holds the whole agreed state: whoever has missed some needs only the newest. (Lamport, Paxos made
simple, 2001; that the voters of an instance are named by the one before: section 3 there. That whoever would
lead asks first whether it would be elected, so that a try which fails changes nothing: pre-vote, section 9.6
of Ongaro, Consensus: bridging theory and practice, 2014.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.consensus.quorum import is_quorum
from ckptless.daemon.protocol.limits import NodeNumber
from ckptless.daemon.protocol.peers.agreement import (
    NO_BALLOT,
    Accepted,
    Ballot,
    Canvass,
    Decided,
    Decree,
    Durable,
    Prepare,
    Promise,
    Propose,
    Refusal,
    Say,
    Support,
    Vote,
)

REPEAT_S = 0.2
# A disk that has not taken a vote is tried again after so long, and each time twice as long, up to the last.
RETRY_S = 1.0
RETRY_MOST_S = 5.0
# A voter whose disk was not written for so long tries it: that it is full must be known before it matters.
PROBE_S = 10.0


@dataclass(frozen=True)
class Tell:
    """Say something to agree to one daemon (this one, too), or with None to all others."""

    node: NodeNumber | None
    say: Say


@dataclass(frozen=True)
class Save:
    """Keep this on the disk; once it is there, and not before, say `say` to a daemon.

    Where the disk does not take it, `NotSaved` comes back, and nothing is said.
    """

    durable: Durable
    node: NodeNumber | None = None
    say: Say | None = None


@dataclass
class Agreement:
    """The agreement as the daemon of node `me` takes part in it. What it puts out collects in `out`.

    `may_vote`: not for a daemon that has forgotten what it had promised. `dead`: voters that can never again
    be part of another quorum, by a witness. `trouble`: why the disk takes nothing, None while it does.
    `sought`: the ballot for which it asks whether a quorum would promise it; then it is `ballot`.
    """

    me: int
    durable: Durable
    may_vote: bool = True
    dead: set[int] = field(default_factory=set)
    out: list[Save | Tell] = field(default_factory=list)
    sought: Ballot | None = None
    ballot: Ballot | None = None
    elected: bool = False
    highest: Ballot = NO_BALLOT
    prepared: bool = False
    proposal: Decree | None = None
    trouble: str | None = None
    _pause_s: float = RETRY_S
    _disk_due: float | None = None
    _index: int = 0
    _supporters: set[int] = field(default_factory=set)
    _promises: dict[int, Vote | None] = field(default_factory=dict)
    _accepted: set[int] = field(default_factory=set)
    _said: float = 0.0

    @property
    def known(self) -> Decree:
        """The newest decree that this daemon knows to be chosen."""
        return self.durable.known

    @property
    def ready(self) -> bool:
        """Whether it may propose: elected, by the voters of the newest decree, and nothing is open."""
        return self.prepared and self.proposal is None

    @property
    def campaigns(self) -> bool:
        """Whether it tries to be elected."""
        return not self.elected and (self.sought is not None or self.ballot is not None)

    @property
    def able(self) -> bool:
        """Whether this daemon can vote, and so be elected."""
        return self.may_vote and self.trouble is None

    # ------------------------------------------------------------------------------------ the disk

    def saved(self) -> None:
        """The disk takes votes again."""
        self.trouble, self._pause_s = None, RETRY_S

    def not_saved(self, reason: str, now: float) -> None:
        """The disk takes no vote. What should have been said is asked for again, by whoever leads."""
        if self.trouble is None:
            self.trouble, self._disk_due = reason, now + self._pause_s
        if not self.elected:
            # Its ballot may not be on the disk: another daemon tries.
            self.resign()

    def _try_disk(self, now: float) -> None:
        """Write again where that has failed, or where nothing was written for long."""
        votes = self.may_vote and (self.me in self.known.voters or self.trouble is not None)
        if self._disk_due is None or self.known.outcome is not None or not votes:
            self._disk_due = now + PROBE_S
        elif now >= self._disk_due:
            if self.trouble is not None:
                self._pause_s = min(2 * self._pause_s, RETRY_MOST_S)
            self._disk_due = now + (PROBE_S if self.trouble is None else self._pause_s)
            self.out.append(Save(self.durable))

    # ------------------------------------------------------------------------------ for the leader

    def campaign(self, now: float) -> None:
        """Try to be elected, with a ballot above all known: ask first whether a quorum would promise it."""
        self.resign()
        if not self.able:
            return
        highest = max(self.highest, self.durable.promised)
        self.sought = self.highest = Ballot(number=highest.number + 1, node=self.me)
        self._index, self._supporters = self.known.index, {self.me}
        self._ask(Canvass(ballot=self.sought, index=self._index), self._supporters, now)
        self._count(now)

    def _stand(self, ballot: Ballot, now: float) -> None:
        """A quorum would promise it, a moment ago."""
        self.sought, self.ballot, self._promises, self._said = None, ballot, {}, now
        # The others are asked once this is on the disk: no ballot is used twice, also not in another life.
        self._answer(self.me, Prepare(ballot=ballot, index=self._index), content=False)

    def resign(self) -> None:
        """Lead no more, and try no more."""
        self.sought, self.ballot, self.elected, self.proposal, self.prepared = None, None, False, None, False

    def propose(self, decree: Decree, now: float) -> None:
        """Have the voters choose it. Only where `ready`."""
        if not self.ready or decree.index != self.known.index + 1:
            raise ValueError(f"decree {decree.index} cannot be proposed now")
        self._propose(decree, now)

    def repeat(self, now: float) -> None:
        """Ask again whoever has not answered; at most every `REPEAT_S`. Also the disk, see `not_saved`."""
        self._try_disk(now)
        if now - self._said < REPEAT_S:
            return
        if self.sought is not None:
            self._ask(Canvass(ballot=self.sought, index=self._index), self._supporters, now)
        elif self.ballot is None:
            return
        elif self.proposal is not None:
            self._ask(Propose(ballot=self.ballot, decree=self.proposal), self._accepted, now)
        elif not self.prepared and self.me in self._promises:
            self._ask(Prepare(ballot=self.ballot, index=self._index), self._promises, now)
        # What it has may have become a quorum by what is known of the dead.
        self._count(now)

    def _propose(self, decree: Decree, now: float) -> None:
        assert self.ballot is not None
        self.proposal, self._accepted = decree, set()
        self._ask(Propose(ballot=self.ballot, decree=decree), (), now)

    def _ask(self, say: Canvass | Prepare | Propose, answered: Iterable[int], now: float) -> None:
        self._said = now
        missing = sorted(set(self.known.voters).difference(answered))
        self.out += [Tell(node, say) for node in missing if node != self.me]
        if self.me in missing:
            self._answer(self.me, say, content=False)

    def _has(self, answers: Iterable[int]) -> bool:
        return is_quorum(self.known.voters, set(answers), self.dead)

    def _count(self, now: float) -> None:
        """Would it be elected? Is it? Is something chosen?"""
        if self.sought is not None:
            if self._has(self._supporters):
                self._stand(self.sought, now)
        elif self.proposal is not None:
            if self._has(self._accepted):
                self._choose(self.proposal, now)
        elif not self.prepared and self.me in self._promises and self._has(self._promises):
            self.prepared = self.elected = True
            votes = [vote for vote in self._promises.values() if vote is not None]
            newest = max(votes, key=lambda vote: vote.ballot, default=None)
            if newest is not None:
                # It may have been chosen, for all that can be known.
                self._propose(newest.decree, now)

    def _choose(self, decree: Decree, now: float) -> None:
        assert self.ballot is not None
        voters = self.known.voters
        self.proposal = None
        self._learn(decree)
        self.out.append(Tell(None, Decided(decree=decree)))
        self._index = decree.index
        if decree.voters != voters:
            self._promises, self.prepared = {self.me: None}, False
            self._ask(Prepare(ballot=self.ballot, index=self._index), (), now)

    # ------------------------------------------------------------------------------ for all of them

    def hear(self, node: int, say: Say, now: float, *, content: bool) -> None:
        """Take what another daemon says, or the own one. `content`: this one hears its leader."""
        match say:
            case Canvass():
                self.highest = max(self.highest, say.ballot)
                self._answer(node, say, content=content)
            case Support() if say.ballot == self.sought and say.index == self._index:
                self._supporters.add(node)
                self._count(now)
            case Prepare() | Propose():
                self.highest = max(self.highest, say.ballot)
                self._answer(node, say, content=content and isinstance(say, Prepare))
            case Promise() if say.ballot == self.ballot and say.index == self._index:
                self._promised(node, say, now)
            case Accepted() if say.ballot == self.ballot and self._is_open(say.index):
                self._accepted.add(node)
                self._count(now)
            case Refusal() if say.ballot in (self.ballot, self.sought):
                self._refused(node, say, now)
            case Decided():
                self.learn(say.decree)
            case _:
                pass  # an answer to what was asked before

    def learn(self, decree: Decree) -> None:
        """Learn that a decree is chosen, by whatever way. Whoever led until now does so no more."""
        if decree.index > self.known.index:
            self._learn(decree)
            self.resign()

    def beware(self, node: int, promised: Ballot) -> None:
        """A voter has promised somebody so much. A leader below that could agree on nothing any more.

        It must know without being refused: whoever was led by more obeys no order of it.
        """
        self.highest = max(self.highest, promised)
        if node in self.known.voters and self.ballot is not None and promised > self.ballot:
            self.resign()

    def _learn(self, decree: Decree) -> None:
        """Know the decree. It need not be on this disk: a quorum has it, and the next promise has it."""
        vote = self.durable.vote
        kept = vote if vote is not None and vote.decree.index > decree.index else None
        self.durable = Durable(promised=self.durable.promised, vote=kept, known=decree)

    def _promised(self, node: int, say: Promise, now: float) -> None:
        begins = node == self.me and not self._promises
        self._promises[node] = say.vote
        if begins:
            self._ask(Prepare(ballot=say.ballot, index=say.index), self._promises, now)
        self._count(now)

    def _is_open(self, index: int) -> bool:
        return self.proposal is not None and self.proposal.index == index

    def _refused(self, node: int, say: Refusal, now: float) -> None:
        self.highest = max(self.highest, say.promised)
        if say.index < self.known.index:
            self.out.append(Tell(node, Decided(decree=self.known)))
        if self.sought is not None and say.promised > self.sought:
            self.campaign(now)  # above that: nobody was asked for a promise yet
        elif self.ballot is not None and say.promised > self.ballot:
            self.resign()

    def _answer(self, node: int, say: Canvass | Prepare | Propose, *, content: bool) -> None:
        base = say.decree.index - 1 if isinstance(say, Propose) else say.index
        if base < self.known.index:
            self.out.append(Tell(node, Decided(decree=self.known)))
            return
        promised, vote = self.durable.promised, self.durable.vote
        if base > self.known.index or say.ballot < promised or content or not self.able:
            refusal = Refusal(ballot=say.ballot, promised=promised, index=self.known.index, content=content)
            self.out.append(Tell(node, refusal))
            return
        if isinstance(say, Canvass):
            self.out.append(Tell(node, Support(ballot=say.ballot, index=base)))
            return
        answer: Promise | Accepted = Promise(ballot=say.ballot, index=base, vote=vote)
        if isinstance(say, Propose):
            vote = Vote(ballot=say.ballot, decree=say.decree)
            answer = Accepted(ballot=say.ballot, index=say.decree.index)
        self.durable = Durable(promised=say.ballot, vote=vote, known=self.known)
        self.out.append(Save(self.durable, node, answer))
        mine = self.ballot or self.sought
        if mine is not None and say.ballot > mine:
            self.resign()
