"""Pure: who leads, as one daemon sees it; and whether it hears enough of the others to go on."""

from dataclasses import dataclass
from hashlib import blake2b

from ckptless.daemon.api import messages as m
from ckptless.daemon.control.decree import Ballot, Canvass, Prepare
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
from ckptless.daemon.control.lease import WITNESS_AFTER_S

# A job begins with the nodes that are there by then; and where they are too few to agree on it, not at all.
FORMING_DEADLINE_S = 120.0
AGREEING_S = 10.0
# Before generation 1 the others may just not have started yet.
FORMING_GRACE_S = 10.0
# Without a leader the first in the order tries at once, each other one so much later than the one before it,
# and up to twice as long: an election takes two round trips, and a write on a quorum's disks between them.
TURN_S = 0.5
# A try that somebody else has ended: again after so long, and up to twice as long.
AGAIN_S = 0.3
# A job that is to end ends here by itself where too few are heard to agree on it; or after AGREEING_S.
CANCEL_S = 2.0
# Of two halves that live one asks the witness first, the other so much later, where the lease leaves as long
# as a busy witness takes.
HALF_LATER_S = 3.0
WITNESS_TAKES_S = 5.0
# So often in a lease the agent hears that the node holds it: some that are late do not matter.
RENEWALS = 10


def _names(nodes: set[int]) -> str:
    return ", ".join(f"node-{node}" for node in sorted(nodes))


@dataclass
class Elector(Knowledge):
    """Takes part in the agreement: campaigns where it is due, follows what is decided, holds its lease.

    E1, whoever hears its leader supports no other, so a bad link deposes nobody. E2, a try that fails changes
    nothing, since it asks first. E3, a reign that is older than the newest one known is not followed. E4,
    each tries after a time of its own, whatever the others do: nobody waits for one that cannot be elected.
    """

    def _on_said(self, event: Said, now: float) -> None:
        content = self._content(event)
        if content and isinstance(event.say, Canvass | Prepare):
            # It does not know who leads; or has noticed before this daemon that nobody does.
            self._out.append(Meet(event.node, self.short_standing, ()))
            if isinstance(event.say, Canvass):
                self._refused[event.node] = event
        self.agreement.hear(event.node, event.say, now, content=content)

    def _content(self, said: Said) -> bool:
        """Whether this daemon has a leader that it hears, and that is not the one who asks."""
        if self.leads:
            return said.node != self.me and self._lease.held
        return said.node != self.leader and self._hears_leader

    @property
    def _hears_leader(self) -> bool:
        """Whether it is there, by whatever way. A pulse is newer than the end of its connection to here."""
        leader = self.leader
        heard = leader in self.reachable or leader in self.pulsing
        return leader not in (NOBODY, self.me) and heard and self.nodes[leader].lost is None

    def _support_late(self, now: float) -> None:
        """Who was refused for a leader that is heard no more need not ask again."""
        if not self.leads and not self._hears_leader:
            for event in self._refused.values():
                self.agreement.hear(event.node, event.say, now, content=False)
            self._refused.clear()

    def _follow(self, now: float) -> None:
        """What has been agreed since the last look, and whether this daemon was elected by it, or deposed."""
        ballot = self.agreement.ballot
        if self.agreement.elected and not self._led and ballot is not None:
            former, again = self.leader, self._continues
            self._led = self._continues = True
            self._reign, self.leader = ballot, self.me
            if not again:
                self._elected(former, now)
            self._out.append(Meet(None, self.short_standing, ()))
        elif self._led and not self.agreement.elected:
            self._led = False
            if self.leader == self.me:
                self.leader = NOBODY
                self._out.append(Meet(None, self.short_standing, ()))
        if self.known.index == self._followed:
            return
        self._followed = self.known.index
        if not self.leads:
            self._continues = False
        if self.known.outcome is not None:
            # It holds also where this node has ended by itself before.
            self._decided_end(self.known.outcome, now)
            self._enter("ended", now)
            self._out.append(ToAgent(m.End(outcome=self.known.outcome)))
        elif self.assignment is not None and self.assignment.generation > self._generation:
            self._generation = self.assignment.generation
            self._enter("joining", now)
            self._decided_generation(self.assignment, now)
            self._out.append(ToAgent(m.Assign(assignment=self.assignment)))

    def _campaign_if_due(self, now: float) -> None:
        """Try to lead, where nobody does and this daemon's time has come."""
        turn = self._order
        if self.stage == "ended" or self.leads or self.spec is None or self._hears_leader or turn is None:
            self._alone, self._tried = None, False
            if not self.agreement.elected:
                self.agreement.resign()
            return
        if self.agreement.campaigns:
            return
        if self._alone is None:
            self._alone = now
        elif self._tried:
            self._alone = now + AGAIN_S * self._jitter
        self._tried = False
        # Of the beginning the lowest is the first, also where it comes late.
        late = self.stage == "forming" and self.me != min(self.nodes)
        from_s = max(self._alone, self._started + (FORMING_GRACE_S if late else 0.0))
        if now >= from_s + turn * TURN_S * self._jitter:
            self._campaigns += 1
            self._tried = True
            self.agreement.campaign(now)

    @property
    def _order(self) -> int | None:
        """How many others it lets try before it; None where it cannot be elected.

        Who led last is first, then the lowest voter: of those that can be reached, and can vote. Where each
        voter's node is lost, whose daemon may vote on, or cannot vote, any node.
        """
        there = self.reachable - self.unable - self.losses.keys()
        voters = there.intersection(self.known.voters)
        if not voters and self.losses.keys() | self.unable >= set(self.known.voters):
            voters = there
        order = sorted(voters, key=lambda node: (node != self._reign.node, node))
        return order.index(self.me) if self.me in order else None

    @property
    def _jitter(self) -> float:
        """From 1 to 2, another one for each try of each life of a daemon, which its session is drawn for."""
        seed = f"{self.me}.{self.session}.{self._campaigns}".encode()
        return 1.0 + int.from_bytes(blake2b(seed, digest_size=4).digest()) / 2**32

    def _end_by_itself(self, now: float) -> None:
        """Cancelled, or never begun, and not enough of the others are there to agree on it."""
        # Another one that leads decides it, and may have begun to wait later than this daemon.
        limit_s = AGREEING_S + FORMING_DEADLINE_S * (1 + self._hears_leader)
        if self.stage == "forming" and now - self._since > limit_s:
            few = "too few of them can vote" if self.unable or not self.agreement.able else "too few"
            text = f"{len(self.reachable)} of {len(self.nodes)} daemons have met, {few} to begin"
            self._lose(NodeLost(self.me, text, now - self._since, source="lease"))
        self._end_without_leader(now)
        if self._cancelled is None or self.stage == "ended":
            return
        self._cancelled_at = self._cancelled_at or now
        nobody = all(self.nodes[node].lost is not None for node in self.reachable)
        # Who hears a quorum waits for what it agrees on, which may be another end.
        limit_s = CANCEL_S if self.stage == "forming" or not self._lease.held else AGREEING_S
        if nobody or now - self._cancelled_at > limit_s:
            cancel = self._cancelled
            self._ended_here = m.Outcome(
                state="stopped", exit_code=cancel.exit_code, reason=cancel.reason, why="cancelled"
            )
            self._enter("ended", now)
            self._out.append(ToAgent(m.End(outcome=self._ended_here)))

    def _end_without_leader(self, now: float) -> None:
        """A job that stands still is not left so: it ends where no leader was found for as long as it may.

        Enough voters may be heard, and too few of these can vote: one has lost its disk, another is gone.
        """
        if self.leads or self._hears_leader or self.spec is None or self.stage in ("forming", "ended"):
            self._led_at = now
            return
        limit_s = self.spec.limits.join_s + self.spec.limits.stall_s
        hosts = self.assignment.ranks_by_node.keys() if self.assignment is not None else set()
        stands = self.stage != "running" or self.still_s(now) > limit_s or hosts <= self.losses.keys()
        if stands and now - self._led_at > limit_s:
            unable = self.unable.intersection(self.known.voters)
            few = f": {_names(unable)} cannot vote" if unable else ""
            text = f"nobody was elected leader for {limit_s:.0f} s{few}"
            self._lose(NodeLost(self.me, text, now - self._led_at, source="lease"))

    def _settle_leader(self, node: int, theirs: Standing, now: float) -> None:
        """Two daemons agree on who leads: who has the higher ballot, until it says that it leads no more."""
        before, reign = self.leader, Ballot(number=theirs.term, node=theirs.leader)
        if theirs.leader == self.me and not self.leads:
            # They mean a former reign of this daemon. How far the job is, they know.
            self._reign = max(self._reign, reign)
            if self.me in (self.leader, self._reign.node):
                # It may have followed an older one since: nobody leads after its own.
                self.leader = NOBODY
            self._out.append(Meet(node, self.standing, ()))
        elif node == self.leader and theirs.leader == NOBODY and theirs.term >= self.term:
            self.leader = NOBODY
        elif theirs.leader != NOBODY and (reign, theirs.leader == node) > (self._reign, False):
            self._obey_leader(reign)
        elif reign < self._reign and self.leader != NOBODY:
            self._out.append(Meet(node, self.standing, ()))
        told = node == self.leader or self.leader != before
        knows = (told and self.leader not in (NOBODY, self.me)) or (
            theirs.leader == self.me and not self.leads
        )
        # A leader that was started again knows of no reign, nor how far the job has come in it.
        current = reign >= self._reign and theirs.newest == self.known.index
        begun = current and theirs.stage not in ("forming", "ended")
        if knows and begun:
            self._enter(theirs.stage, now)
        if told and self.leader not in (NOBODY, self.me):
            self._introduce()

    def _obey_leader(self, reign: Ballot) -> None:
        if reign != self._reign:
            self._refused.clear()
        self._reign, self.leader, self._continues = reign, reign.node, False
        self.agreement.resign()

    def _introduce(self) -> None:
        """Tell the leader all: first where this daemon stands, so that it does not plan without it."""
        self._out.append(Meet(self.leader, self.short_standing, ()))
        self._out.extend(Forward(self.leader, report) for report in self._own_reports())

    def _hold_lease(self, now: float) -> None:
        """Without a quorum of the voters this node decides nothing, and after a while ends its ranks.

        As long as it has one its agent is told so: else that asks others (`agent.orphan`).
        """
        if self.stage == "ended":
            return
        heard = self.heard_voters
        if self.stage == "forming":
            # Whoever was not met yet may just not have started; the daemon of a lost node votes on.
            heard |= set(self.known.voters) - self.losses.keys()
        self._lease.renew(self.known.voters, heard, self.agreement.dead, now)
        if self.spec is None or self.nodes[self.me].lost is not None:
            return
        limit_s = self.spec.limits.lease_s
        if self._lease.held and now - self._renewed >= limit_s / RENEWALS and not self._is_behind:
            self._renewed = now
            self._out.append(ToAgent(m.Renewed()))
        if self._lease.away_s(now) <= limit_s:
            return
        voters = self.known.voters
        text = f"it heard {len(heard)} of {len(voters)} voters for {limit_s:.1f} s"
        self._note(now, "error", "fenced", f"node-{self.me} ends its ranks: {text}")
        self._lose(NodeLost(self.me, text, self._lease.away_s(now), source="lease"))

    @property
    def _is_behind(self) -> bool:
        """Whether its agent is, or may be, in a generation that this daemon has not heard of in this life."""
        state = self.nodes[self.me].state
        return self.assignment is None and (state is None or state.assigned is not None)

    def _ask_witness(self, now: float) -> None:
        """Half of the voters is silent: whether it is dead, the cluster's manager may know.

        One of those left asks, the others in their turn where no word has come by then. Where both halves
        live, that of the lowest voter is first: two that ask at once may both be told no, and it is the one
        that has the batch script as a rule, with which Slurm ends the job.
        """
        heard = self.heard_voters
        living = sorted(node for node in heard if self.nodes[node].lost is None)
        silent = set(self.known.voters) - heard
        if self.me not in living or self.spec is None:
            return
        room_s = self.spec.limits.lease_s - WITNESS_AFTER_S - WITNESS_TAKES_S
        later_s = max(0.0, min(HALF_LATER_S, room_s)) if min(self.known.voters) in silent else 0.0
        if self._lease.witness_due(now, living.index(self.me), later_s):
            self._note(now, "warning", "witness", f"half of the voters is silent: {_names(silent)}")
            self._out.append(AskWitness(tuple(sorted(silent)), tuple(sorted(heard))))

    def _witnessed(self, event: Witnessed, now: float) -> None:
        """They can be in no other quorum any more: the witness never says the same of this half."""
        nodes = set(event.nodes)
        if not nodes <= self.agreement.dead:
            self._note(now, "warning", "witness", f"{_names(nodes)} are dead by the cluster's word")
            self.agreement.dead |= nodes
            self._out.append(Meet(None, self.short_standing, ()))

    def _hear_of_dead(self, node: int, dead: set[int]) -> None:
        """The word is true for all, whoever asked: without it a survivor would end its ranks."""
        if not dead <= self.agreement.dead:
            self.agreement.dead |= dead
        elif not self.agreement.dead <= dead:
            self._out.append(Meet(node, self.short_standing, ()))
