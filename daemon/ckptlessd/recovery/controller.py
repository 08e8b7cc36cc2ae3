"""The control plane of one job in one daemon: a state machine, `handle(input, now) -> outputs`.

Every daemon of the job runs it. One leads (`leading`), the others follow its orders and keep what they need
to take over (`following`). Generations and the job's end are agreed on (`agreement`) before anybody hears of
them; other orders are the leader's alone, and refused where its ballot is an old one (`election`). Whoever
hears too few of the others decides nothing, and ends its ranks (`fencing`).

`now` is in seconds; the daemon feeds a monotonic clock that was set to the Unix time when it started.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.drawing import Drawing
from ckptless.daemon.ckptlessd.recovery.election import Election
from ckptless.daemon.ckptlessd.recovery.fencing import Fencing
from ckptless.daemon.ckptlessd.recovery.following import Following
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.leading import Leading
from ckptless.daemon.ckptlessd.recovery.leaving import Leaving
from ckptless.daemon.ckptlessd.recovery.losses import Losses
from ckptless.daemon.ckptlessd.recovery.recovery_log import RecoveryLog
from ckptless.daemon.ckptlessd.recovery.sizes import Sizes
from ckptless.daemon.ckptlessd.recovery.snapshots import Snapshots
from ckptless.daemon.ckptlessd.recovery.stalls import Stalls
from ckptless.daemon.ckptlessd.recovery.stragglers import Stragglers
from ckptless.daemon.ckptlessd.recovery.voters import Voters
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decided, Durable
from ckptless.daemon.protocol.records import VOTE_AGAIN, VOTE_LOST


class Controller:
    """A daemon's control plane for one job: `job` is its state, for others to read.

    `durable` is what an earlier life of this daemon had on the disk; see `Agreement` for `may_vote`, and
    `JobState` for the rest. `founders`: the nodes that the job begins with; None: all.
    """

    def __init__(
        self,
        me: int,
        session: str,
        nodes: Mapping[int, NodeView],
        durable: Durable | None = None,
        *,
        may_vote: bool = True,
        founders: tuple[int, ...] | None = None,
    ) -> None:
        out: list[e.Output] = []
        first = first_decree(tuple(nodes) if founders is None else founders)
        durable = durable or Durable(promised=NO_BALLOT, vote=None, known=first)
        # One list for both: what a vote says goes out in its place among the other outputs.
        agreement = Agreement(me, durable, may_vote, out=cast(list[e.Save | e.Tell], out))
        self.job = JobState(me, session, nodes, agreement, out, reachable={me})
        if not may_vote:
            self.job.unable.add(me)
        self._followed = 0
        self._fencing = Fencing(self.job)
        self._election = Election(self.job)
        self._snapshots = Snapshots(self.job)
        self._following = Following(self.job, self._snapshots, self._election)
        self._losses, self._stalls = Losses(self.job), Stalls(self.job)
        self._leading = Leading(
            self.job,
            self._following,
            RecoveryLog(self.job),
            self._losses,
            self._stalls,
            Stragglers(self.job),
            Voters(self.job),
            Sizes(self.job),
            Drawing(self.job),
            Leaving(self.job),
        )

    def handle(self, event: e.Input, now: float) -> list[e.Output]:
        """One input in, all outputs out."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[e.Input], now: float) -> list[e.Output]:
        """Take inputs that came at one time; what follows from them is looked at once."""
        job = self.job
        if not job.started:
            job.since = job.moved = job.led = job.started = now
        for event in events:
            self._take(event, now)
        self._look(now)
        self._fencing.hold_lease(now)
        if job.lease.held:
            self._election.campaign_if_due(now)
            self._leading.drive(now)
        self._fencing.end_by_itself(now)
        job.agreement.repeat(now)
        self._snapshots.write_job(now)
        out = job.out.copy()
        job.out.clear()
        return out

    def _take(self, event: e.Input, now: float) -> None:  # noqa: C901, PLR0912, PLR0915  # a line for each
        job = self.job
        match event:
            case e.Report():
                self._following.take(event, now)
            case e.Connected():
                job.out.append(e.Meet(event.node, job.standing, job.own_reports(short=False)))
            case e.PeerUp():
                self._meet(event, now)
            case e.PeerDown():
                job.reachable.discard(event.node)
                job.answering.discard(event.node)
            case e.AgentAnswers():
                # Of a lost node it is an answer to a question of before.
                answers = event.answers and job.nodes[event.node].lost is None
                (job.answering.add if answers else job.answering.discard)(event.node)
            case e.Heartbeats():
                job.heartbeats = event.nodes
            case e.Apart():
                job.apart = event.nodes
                if job.follows:
                    job.meet(job.leader)
            case e.Unwell() | e.Drained():
                self._leaving(event)
            case e.NodeLost():
                drilled = event.source == "membership" and job.drills.cuts_off(
                    event.node, job.generation, now
                )
                job.lose(replace(event, source="drill", dark=False) if drilled else event)
            case e.LeaveAsked():
                job.asked[event.node] = event.leave
            case e.DrillAsked():
                self._following.drill_asked(event, now)
            case e.OrderFrom():
                self._following.order(event, now)
            case e.Said():
                self._election.hear(event, now)
            case e.Witnessed():
                self._fencing.witnessed(event, now)
            case e.Saved() | e.NotSaved():
                self._note_disk(event, now)
            case e.Suspended():
                job.since = min(now, job.since + event.seconds)
                job.moved = min(now, job.moved + event.seconds)
                job.led = min(now, job.led + event.seconds)
            case e.Stopped():
                job.note_stopped(job.me, event.stopped)
                job.meet()
            case e.Tick():
                self._fencing.ask_witness(now)
                self._following.tick(now)

    def _leaving(self, event: e.Unwell | e.Drained) -> None:
        """Nodes are to be left, or may stay again."""
        if isinstance(event, e.Drained):
            self.job.drained = dict(event.nodes)
            return
        self._take_unwell(self.job.me, event.leave)
        if self.job.follows:
            self.job.meet(self.job.leader)

    def _take_unwell(self, node: int, leave: e.Leave | None) -> None:
        if leave is not None:
            self.job.unwell[node] = leave
        else:
            self.job.unwell.pop(node, None)

    def _look(self, now: float) -> None:
        """See what has been agreed since the last look, and whether this daemon was elected by it."""
        job, former = self.job, self.job.leader
        if self._election.won():
            self._leading.begin(former, now)
        if job.known.index == self._followed:
            return
        self._followed = job.known.index
        assignment, outcome = job.assignment, job.known.outcome
        if outcome is not None:
            # It holds also where this node has ended by itself before. The next snapshot would come too late.
            self._snapshots.write_snapshot(now)
            if job.leads:
                self._leading.decided_end(outcome, now)
            job.enter("ended", now)
            job.out.append(e.ToAgent(m.End(outcome=outcome)))
        elif assignment is not None and assignment.generation > job.generation:
            self._following.begin_generation(assignment, now)
            if job.leads:
                self._leading.decided_generation(assignment, now)
            else:
                self._snapshots.job_runs()

    def _note_disk(self, event: e.Saved | e.NotSaved, now: float) -> None:
        """The disk takes votes no more, or again: the others hear of it, and do without this vote."""
        job, agreement, before = self.job, self.job.agreement, self.job.agreement.able
        if isinstance(event, e.NotSaved):
            agreement.not_saved(event.reason, now)
            if before:
                job.note(now, "error", VOTE_LOST, f"node-{job.me} cannot vote: {event.reason}")
        else:
            agreement.saved()
            if not before and agreement.able:
                job.note(now, "info", VOTE_AGAIN, f"node-{job.me} can vote again: its disk takes votes")
        if agreement.able != before:
            (job.unable.discard if agreement.able else job.unable.add)(job.me)
            job.meet()

    def _meet(self, event: e.PeerUp, now: float) -> None:
        """Another daemon says where it stands."""
        job, node, theirs = self.job, event.node, event.standing
        if event.direct:
            job.reachable.add(node)
        if job.leads:
            self._losses.heard(node, now)
        (job.unable.discard if theirs.able else job.unable.add)(node)
        self._stalls.apart.say(node, theirs.apart, now)
        self._fencing.hear_of_dead(node, set(theirs.dead))
        self._take_unwell(node, theirs.unwell)
        job.note_stopped(node, theirs.stopped)
        for asked, leave in theirs.asked:
            job.asked.setdefault(asked, leave)
        if job.has_a_say(node):
            for lost, reason, source in theirs.lost:
                job.lose(e.NodeLost(lost, reason, 0.0, source=source))
        if theirs.index < job.known.index:
            job.out.append(e.Tell(node, Decided(decree=job.known)))
            job.meet(node)
        elif theirs.index > job.known.index:
            # It answers with what this one lacks.
            job.meet(node)
        job.agreement.beware(node, theirs.promised)
        self._look(now)
        if self._election.compare(node, theirs, now):
            self._following.introduce()
