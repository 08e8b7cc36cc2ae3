"""Pure: whether this node may go on with its ranks, and what ends them where nobody can be asked any more.

Without a quorum of the voters a node decides nothing, and after its lease it ends its ranks: by then others
may have given them to another node. With exactly half of them it asks the witness.
"""

from dataclasses import dataclass

from ckptless.daemon.ckptlessd.consensus.lease import WITNESS_AFTER_S
from ckptless.daemon.ckptlessd.recovery.events import AskWitness, NodeLost, ToAgent, Witnessed
from ckptless.daemon.ckptlessd.recovery.job_state import JobState, cancelled_by
from ckptless.daemon.protocol import messages as m

# A job begins with the nodes that are there by then; and where they are too few to agree on it, not at all.
FORMING_DEADLINE_S = 120.0
AGREEING_S = 10.0
# A job that is to end ends here by itself where too few are heard to agree on it; or after AGREEING_S.
CANCEL_S = 2.0
# Of two halves that live one asks the witness first, the other so much later, where the lease leaves as long
# as a busy witness takes.
HALF_LATER_S = 3.0
WITNESS_TAKES_S = 5.0
# So often in a lease the agent hears that the node holds it: some that are late do not matter.
RENEWALS = 10


@dataclass
class Fencing:
    """Holds this node's lease; takes the node out of the job, or ends the job, where nobody can be asked."""

    job: JobState
    _renewed: float = 0.0
    _looked: float = 0.0
    # Since when the job is to end.
    _cancelled: float = 0.0

    # ------------------------------------------------------------------------------------ the lease

    def hold_lease(self, now: float) -> None:
        """Renew it where a quorum is heard and tell the agent, which else asks others; or end the ranks."""
        job = self.job
        if job.stage == "ended":
            return
        heard = job.heard_voters
        if job.stage == "forming":
            # Whoever was not met yet may just not have started; the daemon of a lost node votes on.
            heard |= set(job.known.voters) - job.losses.keys()
        job.lease.renew(job.known.voters, heard, job.agreement.dead, now)
        asleep_s, self._looked = now - self._looked, now
        if job.spec is None or job.nodes[job.me].lost is not None:
            return
        limit_s = job.spec.limits.lease_s
        if asleep_s > limit_s / 2 and job.lease.since is not None:
            # A daemon that was stopped hears first what has come meanwhile; its agent asks others by itself.
            job.lease.since = max(job.lease.since, now - limit_s / 2)
        if job.lease.held and now - self._renewed >= limit_s / RENEWALS and not self._is_behind:
            self._renewed = now
            job.out.append(ToAgent(m.Renewed()))
        away_s = job.lease.away_s(now)
        if away_s > limit_s:
            text = f"it heard {len(heard)} of {len(job.known.voters)} voters for {limit_s:.1f} s"
            job.note(now, "error", "fenced", f"node-{job.me} ends its ranks: {text}")
            self._give_up(text, away_s)

    @property
    def _is_behind(self) -> bool:
        """Whether its agent is, or may be, in a generation that this daemon has not heard of in this life."""
        state = self.job.nodes[self.job.me].state
        return self.job.assignment is None and (state is None or state.assigned is not None)

    def _give_up(self, reason: str, age_s: float) -> None:
        self.job.lose(NodeLost(self.job.me, reason, age_s, source="lease"))

    # ---------------------------------------------------------------------------------- the witness

    def ask_witness(self, now: float) -> None:
        """Half of the voters is silent: whether it is dead, the cluster's manager may know.

        One of those left asks, the others in their turn where no word has come by then. Where both halves
        live, that of the lowest voter is first: two that ask at once may both be told no, and it is the one
        that has the batch script as a rule, with which Slurm ends the job.
        """
        job = self.job
        heard = job.heard_voters
        living = sorted(node for node in heard if job.nodes[node].lost is None)
        silent = set(job.known.voters) - heard
        if job.me not in living or job.spec is None:
            return
        room_s = job.spec.limits.lease_s - WITNESS_AFTER_S - WITNESS_TAKES_S
        later_s = max(0.0, min(HALF_LATER_S, room_s)) if min(job.known.voters) in silent else 0.0
        if job.lease.witness_due(now, living.index(job.me), later_s):
            job.note(now, "warning", "witness", f"half of the voters is silent: {_names(silent)}")
            job.out.append(AskWitness(tuple(sorted(silent)), tuple(sorted(heard))))

    def witnessed(self, event: Witnessed, now: float) -> None:
        """Count these as dead. They are in no other quorum: the witness never says the same of this half."""
        nodes = set(event.nodes)
        if not nodes <= self.job.agreement.dead:
            self.job.note(now, "warning", "witness", f"{_names(nodes)} are dead by the cluster's word")
            self.job.agreement.dead |= nodes
            self.job.meet()

    def hear_of_dead(self, node: int, dead: set[int]) -> None:
        """The word is true for all, whoever asked: without it a survivor would end its ranks."""
        mine = self.job.agreement.dead
        if not mine <= dead:
            self.job.meet(node)
        mine |= dead

    # ------------------------------------------------------------------------- ends that nobody agrees on

    def end_by_itself(self, now: float) -> None:
        """End what cannot be ended together: a job never begun, an undecided one, a cancelled one."""
        if self.job.stage == "forming":
            self._end_unformed(now)
        self._end_undecided(now)
        if self.job.cancelled is not None and self.job.stage != "ended":
            self._end_cancelled(self.job.cancelled, now)

    def _end_unformed(self, now: float) -> None:
        job = self.job
        # Another one that leads decides it, and may have begun to wait later than this daemon.
        if now - job.since > AGREEING_S + FORMING_DEADLINE_S * (1 + job.hears_leader):
            few = "too few of them can vote" if job.unable else "too few"
            founders = sum(not view.late for view in job.nodes.values())
            text = f"{len(job.reachable)} of {founders} daemons have met, {few} to begin"
            self._give_up(text, now - job.since)

    def _end_undecided(self, now: float) -> None:
        """A job that stands still is not left so: it ends where nothing is decided for as long as it may.

        Enough voters may be heard, and too few of these can vote: one has lost its disk, another is gone.
        Then nobody is elected, or what the leader proposes is not agreed on.
        """
        job = self.job
        if job.agreement.ready or job.hears_leader or job.spec is None or job.stage in ("forming", "ended"):
            job.led = now
            return
        limit_s = job.spec.limits.join_s + job.spec.limits.stall_s
        hosts = job.assignment.ranks_by_node.keys() if job.assignment is not None else set()
        # A spare makes no steps: it stands still where it hears no daemon of those that would.
        alone = hosts.isdisjoint({job.me, *job.reachable, *job.heartbeats} - job.losses.keys())
        stands = job.stage != "running" or job.still_s(now) > limit_s or alone
        if stands and now - job.led > limit_s:
            unable = job.unable.intersection(job.known.voters)
            few = f": {_names(unable)} cannot vote" if unable else ""
            what = "nothing was agreed on" if job.leads else "nobody was elected leader"
            self._give_up(f"{what} for {limit_s:.0f} s{few}", now - job.led)

    def _end_cancelled(self, cancel: m.Cancel, now: float) -> None:
        job = self.job
        self._cancelled = self._cancelled or now
        nobody = all(job.nodes[node].lost is not None for node in job.reachable)
        # Who hears a quorum waits for what it agrees on, which may be another end.
        limit_s = CANCEL_S if job.stage == "forming" or not job.lease.held else AGREEING_S
        if nobody or now - self._cancelled > limit_s:
            job.ended_here = cancelled_by(cancel)
            job.enter("ended", now)
            job.out.append(ToAgent(m.End(outcome=job.ended_here)))
            # Others end by the same word, where the leader that heard it is this one, or there is none.
            job.meet(reports=True)


def _names(nodes: set[int]) -> str:
    return ", ".join(f"node-{node}" for node in sorted(nodes))
