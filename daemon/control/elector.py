"""Pure: who leads, as one daemon sees it; and whether it hears enough of the others to go on."""

from dataclasses import dataclass

from ckptless.daemon.api import messages as m
from ckptless.daemon.control.decree import Prepare
from ckptless.daemon.control.edges import (
    AskWitness,
    Forward,
    Meet,
    NodeLost,
    Said,
    Standing,
    ToAgent,
    Witnessed,
)
from ckptless.daemon.control.knowledge import NOBODY, Knowledge

# A job begins with the nodes that are there by then; and where they are too few to agree on it, not at all.
FORMING_DEADLINE_S = 120.0
AGREEING_S = 10.0
# Before generation 1 the others may just not have started yet.
FORMING_GRACE_S = 10.0
# A daemon that was started again has not met the others yet: somebody leads already, most likely.
MEETING_GRACE_S = 2.0
# A ballot that was not won: somebody else may be trying, too.
BACKOFF_S = 0.3
# A job that is to end, and cannot agree on it, ends here by itself.
CANCEL_S = 2.0


def _names(nodes: set[int]) -> str:
    return ", ".join(f"node-{node}" for node in sorted(nodes))


@dataclass
class Elector(Knowledge):
    """Takes part in the agreement: campaigns where it is due, follows what is decided, holds its lease."""

    def _on_said(self, event: Said, now: float) -> None:
        content = self._content(event)
        if content and isinstance(event.say, Prepare):
            # It does not know who leads.
            self._out.append(Meet(event.node, self.short_standing, ()))
        self.agreement.hear(event.node, event.say, now, content=content)

    def _content(self, said: Said) -> bool:
        """Whether this daemon has a leader that it hears, and that is not the one who asks."""
        if self.leads:
            return said.node != self.me and self._lease.held
        living = self.leader in self.reachable and self.nodes[self.leader].lost is None
        return self.leader != NOBODY and self.leader not in (self.me, said.node) and living

    def _follow(self, now: float) -> None:
        """What has been agreed since the last look, and whether this daemon was elected by it, or deposed."""
        if self.agreement.elected and not self._led and self.agreement.ballot is not None:
            self._led, self._wanted = True, False
            former, self.leader = self.leader, self.me
            self.term = self.agreement.ballot.number
            if self._reign != self.me:
                self._reign = self.me
                self._elected(former, now)
            self._out.append(Meet(None, self.short_standing, ()))
        elif self._led and not self.agreement.elected:
            self._led = False
            if self.leader == self.me:
                # Refused, for a promise to somebody who may never lead: then this one does again.
                self.leader, self._wanted = NOBODY, True
                self._out.append(Meet(None, self.short_standing, ()))
        if self.known.index == self._followed:
            return
        self._followed = self.known.index
        if not self.leads:
            self._reign = NOBODY
        if self.known.outcome is not None:
            if self.stage != "ended":
                self._decided_end(self.known.outcome, now)
                self._enter("ended", now)
                self._out.append(ToAgent(m.End(outcome=self.known.outcome)))
        elif self.assignment is not None and self.assignment.generation > self._generation:
            self._generation = self.assignment.generation
            self._enter("joining", now)
            self._decided_generation(self.assignment, now)
            self._out.append(ToAgent(m.Assign(assignment=self.assignment)))

    def _campaign_if_due(self, now: float) -> None:
        """The lowest voter that can be reached tries to lead when nobody leads."""
        if self.stage == "ended" or self.leads or self.nodes[self.me].lost is not None:
            return
        gone = self.leader not in self.reachable or self.nodes[self.leader].lost is not None
        mine = self.agreement.able and (self._is_first() or self._wanted)
        if not gone or self.spec is None or not mine:
            self.agreement.resign()
            return
        grace_s = MEETING_GRACE_S
        if self.stage == "forming":
            grace_s = 0.0 if self.me == min(self.nodes) else FORMING_GRACE_S
        early = now - self._started < grace_s and not self._wanted
        if early or self.agreement.ballot is not None or now - self._campaigned < BACKOFF_S:
            return
        self._campaigned = now
        self.agreement.campaign(now)

    def _is_first(self) -> bool:
        """Whether it is this daemon's turn: of the voters; or of all, where the voters' nodes are lost.

        Who cannot vote cannot be elected, either.
        """
        there = self.reachable - self.unable
        living = [v for v in self.known.voters if v in there and self.nodes[v].lost is None]
        if not living and all(v in self.losses for v in self.known.voters):
            living = [node for node in there if node not in self.losses]
        return min(living, default=NOBODY) == self.me

    def _end_by_itself(self, now: float) -> None:
        """Cancelled, or never begun, and not enough of the others are there to agree on it."""
        # Another one that leads decides it, and may have begun to wait later than this daemon.
        led = self.leader in self.reachable - {self.me} and self.nodes[self.leader].lost is None
        limit_s = AGREEING_S + FORMING_DEADLINE_S * (1 + led)
        if self.stage == "forming" and now - self._since > limit_s:
            text = f"{len(self.reachable)} of {len(self.nodes)} daemons have met, too few to begin"
            self._lose(NodeLost(self.me, text, now - self._since, source="lease"))
        if self._cancelled is None or self.stage == "ended":
            return
        self._cancelled_at = self._cancelled_at or now
        nobody = all(self.nodes[node].lost is not None for node in self.reachable)
        if nobody or now - self._cancelled_at > CANCEL_S:
            cancel = self._cancelled
            self._ended_here = m.Outcome(
                state="stopped", exit_code=cancel.exit_code, reason=cancel.reason, why="cancelled"
            )
            self._enter("ended", now)
            self._out.append(ToAgent(m.End(outcome=self._ended_here)))

    def _settle_leader(self, node: int, theirs: Standing, now: float) -> None:
        """Two daemons agree on who leads: whoever has the higher ballot does."""
        before, mine = self.leader, (self.term, self.leader)
        if theirs.leader == self.me:
            self._taken_for_leader(node, theirs.term)
        elif node == self.leader and theirs.leader == NOBODY:
            self.leader = NOBODY
        elif theirs.leader != NOBODY and (theirs.term, theirs.leader) > mine:
            self._obey_leader(theirs.term, theirs.leader)
        elif (theirs.term, theirs.leader) < mine and self.leader != NOBODY:
            self._out.append(Meet(node, self.standing, ()))
        told = node == self.leader or self.leader != before
        knows = (told and self.leader not in (NOBODY, self.me)) or (
            theirs.leader == self.me and not self.leads
        )
        begun = theirs.stage not in ("forming", "ended") and theirs.newest == self.known.index
        if knows and begun:
            self._enter(theirs.stage, now)
        if told and self.leader not in (NOBODY, self.me):
            self._introduce()

    def _taken_for_leader(self, node: int, term: int) -> None:
        """They mean a former life of this daemon. How far the job is, they know."""
        if self.leads:
            return
        if (term, self.me) < (self.term, self.leader) and self.leader != NOBODY:
            self._out.append(Meet(node, self.standing, ()))
        elif self.leader not in (NOBODY, self.me) or not self._wanted:
            # Whom this one followed led before it did. Said once: whoever hears it introduces itself, which
            # would be an answer without an end.
            self.term, self.leader, self._wanted = max(term, self.term), NOBODY, True
            self._out.append(Meet(node, self.standing, ()))

    def _obey_leader(self, term: int, leader: int) -> None:
        self.term, self.leader, self._wanted, self._reign = term, leader, False, leader
        self.agreement.resign()

    def _introduce(self) -> None:
        """Tell the leader all: first where this daemon stands, so that it does not plan without it."""
        self._out.append(Meet(self.leader, self.short_standing, ()))
        self._out.extend(Forward(self.leader, report) for report in self._own_reports())

    def _hold_lease(self, now: float) -> None:
        """Without a quorum of the voters this node decides nothing, and after a while ends its ranks."""
        if self.stage == "ended":
            return
        heard = self.heard_voters
        if self.stage == "forming":
            # Whoever was not met yet may just not have started.
            heard = set(self.known.voters) - self.losses.keys()
        self._lease.renew(self.known.voters, heard, self.agreement.dead, now)
        mine = self.nodes[self.me]
        limit_s = self.spec.limits.lease_s if self.spec is not None else None
        if limit_s is None or mine.lost is not None or self._lease.away_s(now) <= limit_s:
            return
        voters = self.known.voters
        text = f"it heard {len(heard)} of {len(voters)} voters for {limit_s:.1f} s"
        self._note(now, "error", "fenced", f"node-{self.me} ends its ranks: {text}")
        self._lose(NodeLost(self.me, text, self._lease.away_s(now), source="lease"))

    def _ask_witness(self, now: float) -> None:
        """Half of the voters is silent: whether it is dead, the cluster's manager may know."""
        heard = self.heard_voters
        speaks = min((node for node in heard if self.nodes[node].lost is None), default=None) == self.me
        silent = set(self.known.voters) - heard
        if speaks and self._lease.witness_due(now):
            self._note(now, "warning", "witness", f"half of the voters is silent: {_names(silent)}")
            self._out.append(AskWitness(tuple(sorted(silent)), tuple(sorted(heard))))

    def _witnessed(self, event: Witnessed, now: float) -> None:
        """They can be in no other quorum any more: the witness never says the same of this half."""
        self._note(now, "warning", "witness", f"{_names(set(event.nodes))} are dead by the cluster's word")
        self.agreement.dead.update(event.nodes)
