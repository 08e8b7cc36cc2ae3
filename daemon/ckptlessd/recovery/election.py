"""Pure: who leads a job, as one daemon sees it."""

from dataclasses import dataclass
from hashlib import blake2b

from ckptless.daemon.ckptlessd.recovery.events import Said, Standing
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY, JobState
from ckptless.daemon.protocol.peers.agreement import Ballot, Canvass, Prepare

# Before generation 1 the others may just not have started yet.
FORMING_GRACE_S = 10.0
# Without a leader the first in the order tries at once, each other one so much later than the one before it,
# and up to twice as long: an election takes two round trips, and a write on a quorum's disks between them.
TURN_S = 0.5
# Who has promised another its vote, or whose own try was ended by one, waits so long, and up to twice as
# long; and each time twice as long as before, up to 2 ** DOUBLED times: where disks are slow, daemons would
# end each other's tries for ever, before any is written.
AGAIN_S = 0.3
DOUBLED = 3


@dataclass
class Election:
    """Follows the newest reign, and tries to lead where nobody does and this daemon's time has come.

    E1, whoever hears its leader supports no other, so a bad link deposes nobody. E2, a try that fails changes
    nothing, since it asks first. E3, a reign that is older than the newest one known is not followed. E4,
    each tries after a time of its own: nobody waits for one that cannot be elected. E5, whoever has promised
    another its vote gives it time to be elected.
    """

    job: JobState
    # The ballot by which this daemon leads.
    _leads_by: Ballot | None = None
    # From when on it may try, while it hears no leader; what it has promised, and how often it has waited.
    _alone: float | None = None
    _tried: bool = False
    _promised: Ballot | None = None
    _waits: int = 0
    _campaigns: int = 0

    def hear(self, said: Said, now: float) -> None:
        """Take a message of the agreement from another daemon."""
        job = self.job
        content = said.node != job.leader and (job.lease.held if job.leads else job.hears_leader)
        if content and isinstance(said.say, Canvass | Prepare):
            # It does not know who leads; or has noticed before this daemon that nobody does.
            job.meet(said.node)
        job.agreement.hear(said.node, said.say, now, content=content)

    def won(self) -> bool:
        """Whether this daemon was elected since the last look. Whoever leads no more tells the others."""
        job = self.job
        ballot = job.agreement.ballot if job.agreement.elected else None
        if ballot == self._leads_by:
            return False
        self._leads_by = ballot
        if ballot is not None:
            job.reign, job.leader = ballot, job.me
        elif job.leader == job.me:
            job.leader = NOBODY
        job.meet()
        return ballot is not None

    def campaign_if_due(self, now: float) -> None:
        """Try to lead, where nobody does and this daemon's time has come."""
        job, agreement, turn = self.job, self.job.agreement, self._turn
        if job.stage == "ended" or job.leads or job.spec is None or job.hears_leader or turn is None:
            self._alone, self._waits = None, 0
            if not agreement.elected:
                agreement.resign()
            return
        if agreement.campaigns:
            return
        promised = agreement.durable.promised
        if self._alone is None:
            self._alone = now
        elif self._tried or promised != self._promised:
            self._alone = now + AGAIN_S * 2 ** min(self._waits, DOUBLED) * self._jitter
            self._waits += 1
        self._tried, self._promised = False, promised
        # Of the beginning the lowest is the first, also where it comes late.
        late = job.stage == "forming" and job.me != min(job.nodes)
        from_s = max(self._alone, job.started + (FORMING_GRACE_S if late else 0.0))
        if now >= from_s + turn * TURN_S * self._jitter:
            self._campaigns += 1
            self._tried = True
            agreement.campaign(now)

    @property
    def _turn(self) -> int | None:
        """The number of others it lets try before it; None where it cannot be elected.

        Who led last is first, then the lowest voter: of those that can be reached, and can vote. Where each
        voter's node is lost, whose daemon may vote on, or cannot vote, any node. (Not where it only reaches
        none itself, as most nodes of a large job.)
        """
        job = self.job
        there = job.reachable - job.unable - job.losses.keys()
        able = there.intersection(job.known.voters)
        if job.losses.keys() | job.unable >= set(job.known.voters):
            able = there
        order = sorted(able, key=lambda node: (node != job.reign.node, node))
        return order.index(job.me) if job.me in order else None

    @property
    def _jitter(self) -> float:
        """Return a factor from 1 to 2, another one for each try of each life of a daemon."""
        seed = f"{self.job.me}.{self.job.session}.{self._campaigns}".encode()
        return 1.0 + int.from_bytes(blake2b(seed, digest_size=4).digest()) / 2**32

    # ------------------------------------------------------------------------- whom this daemon follows

    def follow(self, reign: Ballot) -> None:
        """Another daemon leads by the newest ballot known, or a newer one."""
        self.job.reign, self.job.leader = reign, reign.node
        self.job.agreement.resign()

    def compare(self, node: int, theirs: Standing, now: float) -> bool:
        """Take what another daemon tells of who leads: the newer reign holds, until its leader ends it.

        Whether the leader is to hear from here, since it is a new one, or says where it stands.
        """
        job, reign = self.job, Ballot(number=theirs.term, node=theirs.leader)
        before, knows = job.leader, False
        if theirs.leader == job.me and not job.leads:
            # They mean a former reign of this daemon. How far the job is, they know.
            knows = True
            job.reign = max(job.reign, reign)
            if job.me in (job.leader, job.reign.node):
                # It may have followed an older one since: nobody leads after its own.
                job.leader = NOBODY
            job.meet(node)
        elif node == job.leader and theirs.leader == NOBODY and theirs.term >= job.term:
            job.leader = NOBODY
        elif theirs.leader != NOBODY and (reign, theirs.leader == node) > (job.reign, False):
            self.follow(reign)
        elif reign < job.reign and job.leader != NOBODY:
            job.meet(node)
        told = job.follows and (node == job.leader or job.leader != before)
        # A leader that was started again knows of no reign, nor how far the job has come in it.
        current = reign >= job.reign and theirs.index == job.known.index
        if (told or knows) and current and theirs.stage not in ("forming", "ended"):
            job.enter(theirs.stage, now)
        return told
