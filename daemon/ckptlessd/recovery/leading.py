"""Pure: how the leader of a job takes it from stage to stage, and from a fault to the first new step.

    forming -> joining -> restoring -> running -> (fault) stopping -> joining -> ... -> releasing -> ended

It compares what the agents report with the generation that there is. A generation, and the end, is agreed on
before anybody hears of it; the orders between are the leader's own.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning import event_lines, plan, twins_agree
from ckptless.daemon.ckptlessd.planning.faults import Finding
from ckptless.daemon.ckptlessd.recovery import eviction, ledger_rows
from ckptless.daemon.ckptlessd.recovery.drawing import Drawing
from ckptless.daemon.ckptlessd.recovery.events import Broadcast, NodeLost
from ckptless.daemon.ckptlessd.recovery.fencing import FORMING_DEADLINE_S
from ckptless.daemon.ckptlessd.recovery.following import Following
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY, JobState, cancelled_by
from ckptless.daemon.ckptlessd.recovery.leaving import Leaving
from ckptless.daemon.ckptlessd.recovery.losses import Losses
from ckptless.daemon.ckptlessd.recovery.recovery_log import RecoveryLog
from ckptless.daemon.ckptlessd.recovery.sizes import Sizes
from ckptless.daemon.ckptlessd.recovery.stalls import Stalls
from ckptless.daemon.ckptlessd.recovery.stragglers import Stragglers
from ckptless.daemon.ckptlessd.recovery.voters import Voters
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decree
from ckptless.daemon.protocol.records import DRILL

# An order is said again after so long, and more often where it is short: so often within the time that agents
# have to stop, since whoever has not heard of it by then is given up.
REPEAT_S = 1.0
REPEATS = 3
# So long after training an agent may be gone because the job has ended, which the leader is about to hear.
ENDING_S = 2.0


@dataclass
class Leading:
    """The leader's work; on daemons that follow it only waits.

    `step`: the newest that any rank is known to have committed.
    """

    job: JobState
    following: Following
    log: RecoveryLog
    losses: Losses
    stalls: Stalls
    stragglers: Stragglers
    voters: Voters
    sizes: Sizes
    drawing: Drawing
    leaving: Leaving
    step: int = 0
    _said: float = 0.0
    _killed: set[m.Place] = field(default_factory=set)
    _ending: m.Outcome | None = None
    _progress: GenerationProgress | None = None

    def begin(self, former: int, now: float) -> None:
        """Begin to lead, where `former` did."""
        job = self.job
        if job.stage != "forming":
            old = "nobody else does" if former == NOBODY else f"node-{former} cannot be reached"
            job.note(now, "warning", "leader", f"node-{job.me} leads, since {old}")
            job.since = now
        self._ending = self._progress = None
        self.log.begin_reign()
        self.losses.begin()
        self.sizes.begin()
        self.drawing.begin()
        self.leaving.begin()
        # What the others said last was for another leader; this one waits for what they say now.
        for view in job.nodes.values():
            if view.node != job.me:
                view.state = None
        if job.assignment is not None and job.stage not in ("running", "releasing", "ended"):
            # Half a recovery by the old leader: begin it again.
            self._stop(job.assignment, "the leader was lost during a recovery", now)

    def drive(self, now: float) -> None:
        """Bring the job forward as far as the reports allow."""
        job = self.job
        if job.stage == "ended" or not job.leads:
            return
        progress = self._count(now)
        self.losses.tell(now)
        self.voters.look(now)
        if job.cancelled is not None:
            self._ending = cancelled_by(job.cancelled)
        if self._ending is not None:
            self._propose(job.assignment, self._ending, now)
            return
        assert job.spec is not None  # a daemon that knows no job does not lead
        if progress is None:
            self._form(job.spec, now)
            return
        self.drawing.look(job.spec, progress.assignment, now)
        if job.stage != "stopping":
            self._watch(progress, job.spec.limits, now)
            self._prepare(now)
            self._advance(progress, now)
        if job.stage == "stopping":
            self._replan(progress, job.spec, now)
        if job.stage == "running":
            self._strike(progress, now)
        if job.stage in ("running", "releasing"):
            # A new generation names new voters, too; to ask for them first would only delay it.
            self._mend_voters(now)
        self._repeat(progress, job.spec.limits, now)

    def _count(self, now: float) -> GenerationProgress | None:
        """Return how far the generation is, by all that was reported so far; None before the first one."""
        job, progress = self.job, self._progress
        if job.assignment is None:
            return None
        for line in self.stragglers.take(job.assignment, job.touched):
            job.announce(line, now)
        if progress is None or progress.assignment.generation != job.generation:
            progress = self._progress = GenerationProgress.of(job.assignment, job.nodes)
        else:
            progress.look(job.nodes, job.touched)
        job.touched.clear()
        return progress

    # ---------------------------------------------------------------------------------- agreeing

    def _propose(self, assignment: m.Assignment | None, outcome: m.Outcome | None, now: float) -> None:
        """Have it agreed on, by the voters that there are; those after them are whoever lives then."""
        agreement = self.job.agreement
        if not agreement.ready:
            return  # something else is being agreed on; whoever wants this comes again
        index, voters = agreement.known.index + 1, self.voters.following(now)
        decree = Decree(index=index, voters=voters, assignment=assignment, outcome=outcome)
        agreement.propose(decree, now)

    def _mend_voters(self, now: float) -> None:
        """A voter lost, unable, or away for long is replaced before the next one is, if there are nodes."""
        job, voters = self.job, self.voters
        if job.agreement.ready and voters.may_change(now) and voters.following(now) != job.known.voters:
            self._propose(job.assignment, None, now)

    def _form(self, spec: m.JobSpec, now: float) -> None:
        job = self.job
        waiting = [
            n for n, view in job.nodes.items() if view.lost is None and view.hello is None and not view.late
        ]
        if waiting and now - job.since < FORMING_DEADLINE_S:
            return
        self._give_up(waiting, f"its agent did not come up in {FORMING_DEADLINE_S:.0f} s")
        try:
            first = plan.first_assignment(spec, job.nodes, job.term, job.me)
        except plan.NoPlanError as error:
            self._ending = error.outcome
            return
        self._propose(first, None, now)

    def decided_generation(self, assignment: m.Assignment, now: float) -> None:
        """The generation that this leader has proposed is agreed on."""
        job = self.job
        assert job.spec is not None
        job.share(ledger_rows.job(job.spec, "running", job.started, ranks=len(assignment.places)))
        self.sizes.decided(assignment, now)
        self.leaving.decided()
        self.drawing.decided()
        self.log.agreed(assignment, now)
        self._said = now

    def decided_end(self, outcome: m.Outcome, now: float) -> None:
        """The end that this leader has proposed is agreed on."""
        job = self.job
        self.losses.end()
        self.log.ended(done=outcome.state == "done")
        assert job.spec is not None
        ranks = len(job.assignment.places) if job.assignment is not None else None
        job.share(ledger_rows.job(job.spec, outcome.state, job.started, outcome, now, ranks=ranks))
        job.note(
            now, "info" if outcome.exit_code == 0 else "error", "end", f"{outcome.state}: {outcome.reason}"
        )

    # ------------------------------------------------------------------------- while a generation goes

    def _watch(self, progress: GenerationProgress, limits: m.Limits, now: float) -> None:
        """Any new fault of this generation stops it."""
        assignment = progress.assignment
        parted = self._part(assignment, limits, now) if self.job.stage != "releasing" else None
        findings = twins_agree.ripe(progress.findings, assignment, self.job.nodes, now)
        silent = self.stalls.silent(assignment, limits, now)
        self._give_up(silent, f"its agent has said nothing for {limits.stall_s:.0f} s")
        findings += self.stalls.overdue(assignment, limits, now)
        hung, line = self.stalls.late(assignment, self.step, now)
        findings += hung
        if line is not None:
            self.job.announce(line, now)
        if self.job.stage == "releasing" and now - self.job.since < ENDING_S:
            findings = [finding for finding in findings if finding.kind != "node-lost"]
        for finding in findings:
            self.log.add(finding, assignment, now)
        if self.job.stage == "releasing":
            self._fail_after_training(findings)
        elif findings:
            self._stop(assignment, _what(findings[0]), now, findings[0].age_s, _hanging(findings))
        elif parted is not None:
            self._stop(assignment, parted, now)
        elif (left := self.leaving.due(assignment, self.step, now)) is not None:
            self._stop(assignment, left, now)
        elif (resized := self.sizes.due(assignment, now)) is not None:
            self._stop(assignment, resized, now)
        elif progress.disputed:
            self._stop(assignment, "another leader has stopped it, too", now)

    def _prepare(self, now: float) -> None:
        """Have spares build for the ranks that are about to leave a node."""
        if (order := self.leaving.order) is not None:
            self.leaving.order = None
            self.job.out.append(Broadcast(self.job.term, order))
            self.following.obey(order, now)

    def _part(self, assignment: m.Assignment, limits: m.Limits, now: float) -> str | None:
        """Give up one of two nodes that cannot reach each other; why that stops the generation by itself."""
        if (found := self.stalls.in_the_way(assignment, limits, now)) is None:
            return None
        node, text = found
        self._give_up([node], text)
        # Without ranks it is no fault of the generation; it has copies of others'.
        return f"node-lost: node-{node}: {text}" if not assignment.ranks_on(node) else None

    def _fail_after_training(self, findings: Collection[Finding]) -> None:
        """Training is over and other processes may have ended well: there is nothing to go back to."""
        undone = [f for f in findings if f.kind != "node-lost" or not self._all_done_on(f.node)]
        if undone:
            first = undone[0]
            self._ending = m.Outcome(
                state="failed",
                exit_code=max(1, first.exit_code or 1),
                reason=f"after training: {_what(first)}",
                why="after-training",
                rank=first.rank,
                node=first.node if first.rank is not None else None,
            )

    def _all_done_on(self, node: int) -> bool:
        view = self.job.nodes[node]
        return view.state is not None and all(s.phase in ("exited", "empty") for s in view.state.slots)

    def _advance(self, progress: GenerationProgress, now: float) -> None:
        """joining -> restoring -> running -> releasing -> ended, each when every rank is there."""
        job, generation = self.job, progress.assignment.generation
        self._see_step(progress.step, now)
        if (line := self.stalls.returned_early(progress, now)) is not None:
            job.announce(line, now)
        if job.stage in ("joining", "releasing") and progress.all_have("exited"):
            self._ending = m.Outcome(
                state="done", exit_code=0, reason="every rank ended by itself", why="done"
            )
        elif job.stage == "joining" and progress.all_have("joined"):
            self.log.mark("join", now)
            self._broadcast(m.Go(generation=generation), now)
        elif job.stage == "restoring" and progress.all_have("restored"):
            self.log.mark("restore", now)
            if progress.all_have("stepped"):
                self.log.recovered(progress.assignment, now)
                self._broadcast(m.Running(generation=generation), now)
        elif job.stage == "running" and progress.all_have("ended"):
            self._broadcast(m.Release(generation=generation), now)

    def _see_step(self, newest: int, now: float) -> None:
        if newest > self.step:
            self.step, self.job.moved = newest, now

    def _strike(self, progress: GenerationProgress, now: float) -> None:
        """Have the drill that waits for its step done, if there is one; or tell once why it waits on."""
        drills = self.job.drills
        drill, assignment = drills.waiting, progress.assignment
        # A new leader first hears of all ranks.
        if drill is None or self.step < drill.step or not progress.all_have("restored"):
            return
        if (why := eviction.drill_refusal(self.job, drill)) is not None:
            if drills.waits_for != why:
                drills.waits_for = why
                self.job.note(now, "warning", DRILL, f"{event_lines.drill_text(drill)}; it waits: {why}")
            return
        # Of a node the slot is none in particular.
        node = m.Place(node=drill.node or 0, slot=0)
        place = node if drill.rank is None else assignment.places[drill.rank]
        self.job.announce(event_lines.strike_line(drill, place, self.job.nodes), now)
        self._broadcast(m.Strike(generation=assignment.generation, place=place, drill=drill), now)

    # ------------------------------------------------------------------------------- stop, and plan

    def _stop(  # a stop, and its reason
        self,
        assignment: m.Assignment,
        reason: str,
        now: float,
        age_s: float = 0.0,
        kill: tuple[m.Place, ...] = (),
    ) -> None:
        self.log.stopped(now, age_s)
        self._killed = {*kill}
        self._broadcast(self._stop_order(assignment.generation, reason, kill), now)

    def _stop_order(self, generation: int, reason: str, kill: tuple[m.Place, ...]) -> m.Stop:
        faults = tuple(fault.id for fault in self.log.faults)
        return m.Stop(generation=generation, reason=reason, kill=kill, faults=faults)

    def _replan(self, progress: GenerationProgress, spec: m.JobSpec, now: float) -> None:
        """Once every agent is frozen and every rank is out: the next generation."""
        for finding in progress.take_news():
            # Ranks that stop for that break the collectives of those that have not heard of it yet.
            planned = self.sizes.resizes or self.leaving.nodes
            if not (planned and finding.kind == "broken"):
                self.log.add(finding, progress.assignment, now)
        late = now - self.job.since >= spec.limits.leave_s
        moving = progress.moving
        if late:
            self._give_up(sorted(moving), f"its agent did not stop in {spec.limits.leave_s:.0f} s")
        if moving:
            return
        self.log.mark("stop", now)
        inside = progress.inside
        if late:
            told = sorted({place.node for place in inside if place in self._killed})
            self._give_up(told, "its agent did not end a process that it was told to end")
            self._kill(progress, [place for place in inside if place.node not in told], now)
        if inside:
            return
        self.log.mark("leave", now)
        if self.job.agreement.ready:
            self._plan(progress, spec, now)

    def _plan(self, progress: GenerationProgress, spec: m.JobSpec, now: float) -> None:
        job, assignment = self.job, progress.assignment
        for finding in twins_agree.findings(assignment, job.nodes):
            self.log.add(finding, assignment, now)
        self.log.planned(assignment, now, stepped=progress.all_have("stepped"))
        self._see_step(progress.newest, now)
        situation = plan.Situation(
            spec,
            job.nodes,
            assignment,
            self.log.faults,
            self.step,
            job.term,
            job.me,
            now,
            wanted=job.wanted,
            resizes=self.sizes.resizes,
            leaving=self.leaving.nodes,
        )
        try:
            following = self.leaving.plan(situation)
        except plan.NoPlanError as error:
            if not self.drawing.waits(spec, assignment, error.outcome, now):
                self._ending = error.outcome
            return
        self._propose(following, None, now)

    def _give_up(self, nodes: Collection[int], reason: str) -> None:
        """Nodes that are lost by this leader's word alone: the others must hear it from here."""
        for node in nodes:
            self.job.lose(NodeLost(node, reason, 0.0, source="leader"))
        if nodes:
            self.job.meet()

    def _kill(self, progress: GenerationProgress, places: list[m.Place], now: float) -> None:
        if not places:
            return
        names, why = ", ".join(f"node-{place.node}/{place.slot}" for place in places), "did not leave in time"
        self.job.note(now, "warning", "kill", f"{names} {why}")
        self.job.since = now
        self._killed.update(places)
        generation = progress.assignment.generation
        self._broadcast(self._stop_order(generation, why, tuple(places)), now)

    # --------------------------------------------------------------------------------------- orders

    def _broadcast(self, order: m.Order, now: float) -> None:
        self._said = now
        self.job.out.append(Broadcast(self.job.term, order))
        self.following.obey(order, now)

    def _repeat(self, progress: GenerationProgress, limits: m.Limits, now: float) -> None:
        """Orders are idempotent: say the last one again to whoever has not followed it yet."""
        if now - self._said < min(REPEAT_S, limits.leave_s / REPEATS):
            return
        generation = progress.assignment.generation
        kill = tuple(place for place in progress.inside if place in self._killed)
        orders: dict[str, m.Order] = {
            "stopping": self._stop_order(generation, "repeated", kill),
            "restoring": m.Go(generation=generation),
            "releasing": m.Release(generation=generation),
        }
        if self.job.stage in orders:
            self._broadcast(orders[self.job.stage], now)
        elif self.job.stage == "joining":
            self._said = now
            self.job.meet()


def _hanging(findings: Iterable[Finding]) -> tuple[m.Place, ...]:
    """Return the places of ranks that hang: they would not leave, and are not waited for."""
    return tuple(
        m.Place(node=one.node, slot=one.slot)
        for one in findings
        if one.kind == "hung" and one.source == "leader" and one.slot is not None
    )


def _what(finding: Finding) -> str:
    return f"{finding.kind}: {finding.detail}" if finding.detail else finding.kind
