"""The control plane of one job in one daemon: a state machine, `handle(input, now) -> outputs`.

Every daemon of the job runs it. One leads: it compares what the agents report with the current assignment,
and takes the job from fault to first new step:

    forming -> joining -> restoring -> running -> (fault) stopping -> joining -> ... -> releasing -> ended

The others follow its orders and keep what they need to take over: reports are whole states, so a new leader
knows everything after one report of each node. Generations and the job's end are agreed on (`agreement`)
before anybody hears of them; other orders are the leader's alone, and refused where its ballot is an old one.

`now` is in seconds; the daemon feeds a monotonic clock that was set to the Unix time when it started.
"""

from dataclasses import dataclass, field
from typing import Literal

from ckptless.daemon.api import messages as m
from ckptless.daemon.control import pairs, plan, story, telling, twins_agree
from ckptless.daemon.control.decree import Decree, choose_voters
from ckptless.daemon.control.edges import Broadcast, Meet, NodeIsDark, NodeLost, ToAgent, Write
from ckptless.daemon.control.elector import FORMING_DEADLINE_S
from ckptless.daemon.control.faults import SECONDARY, FaultLog, Finding
from ckptless.daemon.control.follower import Follower
from ckptless.daemon.control.knowledge import NOBODY
from ckptless.daemon.control.tally import Tally
from ckptless.daemon.control.timeline import Timeline

# An order is said again after so long, and more often where it is short: so often within the time that agents
# have to stop, since whoever has not heard of it by then is given up.
REPEAT_S = 1.0
REPEATS = 3
# So long after training an agent may be gone because the job has ended, which the leader is about to hear.
ENDING_S = 2.0
# So long a voter's daemon may be away while its node lives; restarts and upgrades are shorter.
VOTER_AWAY_S = 30.0
# A voter that cannot vote is left out, also where there is nobody else, while so many others can.
LEAST_ABLE = 2
# A node that nobody could reach for so long has lost more than a cable for a moment.
DARK_FOR_GOOD_S = 30.0
# Without a step for so long, two nodes that cannot reach each other are why.
APART_S = 3.0
# Many find out about one bad port, one after the other: so long after the last one it is said who gives way,
# but before the longest stall is over.
SETTLED_S = 1.0


@dataclass
class Controller(Follower):
    """A daemon's control plane: follows, and leads where it is its turn."""

    _said: float = 0.0
    _noted: set[int] = field(default_factory=set)
    _killed: set[m.Place] = field(default_factory=set)
    _ending: m.Outcome | None = None
    # The recovery that the last stop came into.
    _cut: Timeline | None = None
    # Since when some of this generation's ranks are done and others not; told once.
    _early: tuple[int, float, bool] = (0, 0.0, False)
    _told_early: str = ""
    # What the job's output is still to hear of ranks that were ended by SIGTERM.
    _ended_so: list[str] = field(default_factory=list)
    _tally: Tally | None = None
    _mended: tuple[int, int, frozenset[int], frozenset[int], frozenset[int]] | None = None
    # Nodes that cannot reach each other, by what was said last, and since when it is these.
    _pairs: set[tuple[int, int]] = field(default_factory=set)
    _paired: float = 0.0
    # Since when the leader has not reached a voter's daemon, whose node lives.
    _away: dict[int, float] = field(default_factory=dict)

    def _drive(self, now: float) -> None:
        """Bring the job forward as far as the reports allow."""
        if self.stage == "ended" or not self.leads:
            self._tally = None
            self._touched.clear()
            return
        self._count()
        self._note_losses(now)
        self._note_away(now)
        if self._cancelled is not None:
            cancel = self._cancelled
            self._ending = m.Outcome(
                state="stopped", exit_code=cancel.exit_code, reason=cancel.reason, why="cancelled"
            )
        if self._ending is not None:
            self._propose(self.assignment, self._ending, now)
            return
        if self.stage == "forming":
            self._form(now)
        elif self.stage in ("joining", "restoring", "running", "releasing"):
            self._part(now)
            self._watch(now)
            assert self._tally is not None
            if self.stage not in ("stopping", "releasing") and self._tally.disputed:
                self._stop("another leader has stopped it, too", now)
            self._advance(now)
        if self.stage == "stopping":
            self._replan(now)
        self._mend_voters(now)
        self._repeat(now)

    def _count(self) -> None:
        """What was reported since the last time."""
        if self.assignment is not None:
            if self._tally is None or self._tally.assignment.generation != self.assignment.generation:
                self._tally = Tally.of(self.assignment, self.nodes)
            else:
                self._tally.look(self.nodes, self._touched)
        self._touched.clear()

    def _propose(self, assignment: m.Assignment | None, outcome: m.Outcome | None, now: float) -> None:
        """Have it agreed on, by the voters that there are; those after them are whoever lives then."""
        if not self.agreement.ready:
            return  # something else is being agreed on; whoever wants this comes again
        voters = self._next_voters(now)
        decree = Decree(index=self.known.index + 1, voters=voters, assignment=assignment, outcome=outcome)
        self.agreement.propose(decree, now)

    def _next_voters(self, now: float) -> tuple[int, ...]:
        # Who reaches others, but not this leader, is no help to it.
        sound = self.reachable - self.losses.keys() - self.unable
        living = sound | (set(self.known.voters) - self.losses.keys())
        if len(living - self.unable) >= LEAST_ABLE:
            # Fewer votes are easier to come by than those of all others beside one that never comes.
            living -= self.unable
        domains = self.spec.domains if self.spec is not None else ()
        return choose_voters(self.known.voters, living, sound, domains, set(self._away_long(now)))

    def _away_long(self, now: float) -> frozenset[int]:
        return frozenset(node for node, since in self._away.items() if now - since >= VOTER_AWAY_S)

    def _note_away(self, now: float) -> None:
        """Only what this leader has seen itself counts: an older one may have been the one that was away."""
        heard = self.reachable | self.pulsing
        voters = [node for node in self.known.voters if node not in heard and node not in self.losses]
        self._away = {node: self._away.get(node, now) for node in voters}

    def _mend_voters(self, now: float) -> None:
        """A voter lost, unable, or away for long is replaced before the next one is, if there are nodes."""
        if self.stage not in ("running", "releasing"):
            # The next generation names new ones, too; to ask these first would only delay it.
            return
        there, away = frozenset(self.reachable), self._away_long(now)
        mended = (self.known.index, len(self.losses), there, away, frozenset(self.unable))
        if mended == self._mended or not self.agreement.ready:
            return
        self._mended = mended
        voters = self._next_voters(now)
        if voters != self.known.voters:
            self._propose(self.assignment, None, now)

    def _note_losses(self, now: float) -> None:
        for node in sorted(self.losses.keys() - self._noted):
            loss = self.losses[node]
            self._noted.add(node)
            self._announce(telling.loss_line(loss, self.nodes[node], self.assignment), now)
            if loss.dark and node not in self.agreement.dead:  # else it is marked already
                self._dark[node] = now
                self._out.append(NodeIsDark(node, loss.reason, "dark"))
        self._note_gone([node for node, since in self._dark.items() if now - since >= DARK_FOR_GOOD_S])

    def _note_gone(self, nodes: list[int]) -> None:
        """They stay dark, by all that anybody can know."""
        for node in nodes:
            del self._dark[node]
            self._out.append(NodeIsDark(node, self.losses[node].reason, "gone"))

    def _elected(self, former: int, now: float) -> None:
        if self.stage != "forming":
            old = "nobody else does" if former == NOBODY else f"node-{former} cannot be reached"
            self._note(now, "warning", "leader", f"node-{self.me} leads, since {old}")
        self._log, self._timeline, self._ending = FaultLog(), None, None
        self._away.clear()
        self._moved = now
        if self.stage != "forming":
            self._since = now
        planned = {info.node for info in self.assignment.nodes} if self.assignment is not None else set()
        # Losses that a generation has been planned without were told of by whoever led then.
        self._noted = self.losses.keys() - planned
        # What the others said last was for another leader; this one waits for what they say now.
        for view in self.nodes.values():
            if view.node != self.me:
                view.state = None
        self._tally = None
        if self.stage not in ("forming", "running", "releasing") and self.assignment is not None:
            # Half a recovery by the old leader: begin it again.
            self._stop("the leader was lost during a recovery", now)

    def _repeat(self, now: float) -> None:
        """Orders are idempotent: say the last one again to whoever has not followed it yet."""
        if self.assignment is None or self.spec is None:
            return
        if now - self._said < min(REPEAT_S, self.spec.limits.leave_s / REPEATS):
            return
        generation = self.assignment.generation
        assert self._tally is not None
        orders: dict[str, m.Order] = {
            "stopping": m.Stop(
                generation=generation,
                reason="repeated",
                kill=tuple(place for place in self._tally.inside if place in self._killed),
            ),
            "restoring": m.Go(generation=generation),
            "releasing": m.Release(generation=generation),
        }
        if self.stage in orders:
            self._broadcast(orders[self.stage], now)
        elif self.stage == "joining":
            self._said = now
            self._out.append(Meet(None, self.short_standing, ()))

    def _form(self, now: float) -> None:
        waiting = [n for n, view in self.nodes.items() if view.lost is None and view.hello is None]
        if waiting and now - self._since < FORMING_DEADLINE_S:
            return
        self._give_up(waiting, f"its agent did not come up in {FORMING_DEADLINE_S:.0f} s")
        assert self.spec is not None
        try:
            first = plan.first_assignment(self.spec, self.nodes, self.term, self.me)
        except plan.NoPlanError as error:
            self._ending = error.outcome
            return
        self._propose(first, None, now)

    def _give_up(self, nodes: list[int], reason: str) -> None:
        """Nodes that are lost by this leader's word alone: the others must hear it from here."""
        for node in nodes:
            self._lose(NodeLost(node, reason, 0.0, source="leader"))
        if nodes:
            self._out.append(Meet(None, self.short_standing, ()))

    def _part(self, now: float) -> None:
        """Of two nodes that live and cannot reach each other, one leaves the job: its ranks go to a spare.

        Without a spare it is waited for as long as for any step: the job ends then, and says why.
        """
        assert self.assignment is not None
        assert self.spec is not None
        still_s = now - max(self._since, self._moved)
        if self.stage == "releasing" or still_s < APART_S:
            return
        self._apart.say(self.me, self.apart, now)
        hosts = {place.node for place in self.assignment.places} - self.losses.keys()
        usable = {node for node, view in self.nodes.items() if view.usable}
        found = pairs.pairs(self._apart.fresh(now - 3 * self._remind_s), usable, hosts)
        if found != self._pairs:
            self._pairs, self._paired = found, now
        if now - self._paired < SETTLED_S < self.spec.limits.stall_s - still_s:
            return
        if not found or (usable <= hosts and still_s < self.spec.limits.stall_s):
            return
        node = pairs.gives_way(found, hosts, self.me)
        others = ", ".join(f"node-{b if a == node else a}" for a, b in sorted(found) if node in (a, b))
        text = f"it and {others} cannot reach each other, though others see both; no step in {still_s:.1f} s"
        self._give_up([node], text)
        if node not in hosts:
            # It has no ranks that would be missed, but copies of others'.
            self._stop(f"node-lost: node-{node}: {text}", now)

    def _watch(self, now: float) -> None:
        """Any new fault of this generation stops it."""
        assert self._tally is not None
        findings = twins_agree.ripe(self._tally.findings, self._tally.assignment, self.nodes, now)
        findings += self._overdue(now)
        if self.stage == "releasing" and now - self._since < ENDING_S:
            findings = [finding for finding in findings if finding.kind != "node-lost"]
        fresh = [finding for finding in findings if self._log_fault(finding, now)]
        if not fresh:
            return
        worst = fresh[0]
        what = f"{worst.kind}: {worst.detail}" if worst.detail else worst.kind
        if self.stage != "releasing":
            self._stop(what, now, worst.age_s)
            return
        # Training is over and other processes may have ended well: there is nothing to go back to.
        undone = [f for f in fresh if f.kind != "node-lost" or not self._all_done_on(f.node)]
        if undone:
            first = undone[0]
            self._ending = m.Outcome(
                state="failed",
                exit_code=max(1, first.exit_code or 0),
                reason=f"after training: {what}",
                why="after-training",
                rank=first.rank,
                node=first.node if first.rank is not None else None,
            )

    def _overdue(self, now: float) -> list[Finding]:
        """Deadlines of joining, restoring and of steps. Only processes with hooks tell how far they are."""
        assert self.assignment is not None
        assert self.spec is not None
        limits = self.spec.limits
        to_join = self.stage in ("joining", "restoring") and now - self._since > limits.join_s
        stalled = now - max(self._since, self._moved) > limits.stall_s
        if not to_join and not stalled:
            return []
        places = enumerate(self.assignment.places)
        slots = [(rank, place, self.nodes[place.node].slot(place.slot)) for rank, place in places]
        hosts = {place.node for _, place, _ in slots} - self.losses.keys()
        silent = sorted(node for node in hosts if self.nodes[node].state is None)
        if stalled and silent:
            # A new leader has not heard a word of it: its agent may be stopped.
            self._give_up(silent, f"its agent has said nothing for {limits.stall_s:.0f} s")
        if not any(slot is not None and slot.hooked for _, _, slot in slots):
            return []
        if to_join:
            want = ("joined",) if self.stage == "joining" else ("restored", "finished")
            # At the very start a script may take its time before it comes to ckptless.run.
            first = self.assignment.generation == 1
            late = [
                Finding(
                    kind="hung",
                    node=place.node,
                    slot=place.slot,
                    rank=rank,
                    detail=f"not {want[0]} in {limits.join_s:.0f} s",
                    source="leader",
                )
                for rank, place, slot in slots
                if slot is not None and slot.phase not in want and (slot.hooked or not first)
            ]
            if late:
                return late
        training = any(slot is not None and slot.phase == "restored" for _, _, slot in slots)
        if training and stalled:
            node = self.assignment.places[0].node
            text = f"no step in {limits.stall_s:.0f} s"
            if (early := telling.returned_early(self.assignment, self.nodes)) is not None:
                text += f": {early.text}"
            return [Finding("stall", node, None, None, text, source="leader")]
        return []

    def _advance(self, now: float) -> None:
        """joining -> restoring -> running -> releasing -> ended, each when every rank is there."""
        assert self.assignment is not None
        assert self._tally is not None
        tally, generation = self._tally, self.assignment.generation
        self._follow_progress(tally.progress, now)
        self._note_early(now)
        if self.stage in ("joining", "releasing") and tally.all_have("exited"):
            self._ending = m.Outcome(
                state="done", exit_code=0, reason="every rank ended by itself", why="done"
            )
        elif self.stage == "joining" and tally.all_have("joined"):
            self._mark("join", now)
            self._broadcast(m.Go(generation=generation), now)
        elif self.stage == "restoring" and tally.all_have("restored"):
            self._mark("restore", now)
            if tally.all_have("stepped"):
                self._recovered(now)
        elif self.stage == "running" and tally.all_have("ended"):
            self._broadcast(m.Release(generation=generation), now)

    def _follow_progress(self, newest: int, now: float) -> None:
        if newest > self.progress:
            self.progress, self._moved = newest, now

    def _recovered(self, now: float) -> None:
        assert self.assignment is not None
        self._moved = now
        self._mark("first step", now)
        if self._timeline is not None:
            self._share(story.recovery(self.assignment, self._timeline, "recovered"))
            took_s = self._timeline.total_s(now)
            text = f"generation {self.assignment.generation} trains, {took_s:.3f} s after the fault"
            self._announce(telling.Line("info", "recovered", text), now)
            self._timeline = None
        self._broadcast(m.Running(generation=self.assignment.generation), now)

    # ------------------------------------------------------------------------- stop, plan, assign

    def _stop(self, reason: str, now: float, age_s: float = 0.0) -> None:
        assert self.assignment is not None
        self._cut, self._timeline = self._timeline, Timeline(started_s=now - age_s)
        self._timeline.mark("detect", now)
        self._killed.clear()
        self._broadcast(m.Stop(generation=self.assignment.generation, reason=reason), now)

    def _replan(self, now: float) -> None:
        """Once every agent is frozen and every rank is out: the next generation."""
        assert self.assignment is not None
        assert self.spec is not None
        assert self._tally is not None
        for finding in self._tally.take_news():
            self._log_fault(finding, now)
        late = now - self._since >= self.spec.limits.leave_s
        moving = self._tally.moving
        if moving and late:
            self._give_up(sorted(moving), f"its agent did not stop in {self.spec.limits.leave_s:.0f} s")
        if moving:
            return
        self._mark("stop", now)
        inside = self._tally.inside
        if late:
            told = sorted({place.node for place in inside if place in self._killed})
            self._give_up(told, "its agent did not end a process that it was told to end")
            self._kill([place for place in inside if place.node not in told], now)
        if inside:
            return
        self._mark("leave", now)
        if not self.agreement.ready:
            return
        for finding in twins_agree.findings(self.assignment, self.nodes):
            self._log_fault(finding, now)
        self._settle_cut()
        self._follow_progress(self._tally.newest, now)
        self._held.clear()
        situation = plan.Situation(
            self.spec, self.nodes, self.assignment, self._log.faults, self.progress, self.term, self.me, now
        )
        if (alone := telling.only_consequences(self._log.faults)) is not None:
            self._announce(telling.fault_line(alone, self.nodes), now)
        try:
            following = plan.next_assignment(situation)
        except plan.NoPlanError as error:
            self._ending = error.outcome
            return
        self._propose(following, None, now)

    def _settle_cut(self) -> None:
        """Say how the recovery ended that was cut off: well, where every rank had made its first step."""
        cut, self._cut = self._cut, None
        if cut is None:
            return
        assert self._timeline is not None
        assert self.assignment is not None
        assert self._tally is not None
        well = self._tally.all_have("stepped")
        if well:
            # Who heard of a rank's end before its step could not say when that was: by then.
            for phase in ("join", "restore", "first step"):
                cut.mark(phase, self._timeline.ends["detect"])
        self._share(story.recovery(self.assignment, cut, "recovered" if well else "superseded"))

    def _note_early(self, now: float) -> None:
        """Ranks that are done long before others, which wait for them in the next collective."""
        assert self.assignment is not None
        assert self._tally is not None
        generation, since, told = self._early
        if not 0 < self._tally.counts["ended"] < len(self.assignment.places):
            return
        if generation != self.assignment.generation:
            self._early = self.assignment.generation, now, False
        elif not told and now - since >= telling.EARLY_S:
            self._early = generation, since, True
            line = telling.returned_early(self.assignment, self.nodes)
            # Where it comes again in every generation, it is told once.
            if line is not None and line.text != self._told_early:
                self._told_early = line.text
                self._announce(line, now)

    def _kill(self, places: list[m.Place], now: float) -> None:
        assert self.assignment is not None
        if not places:
            return
        names, why = ", ".join(f"node-{place.node}/{place.slot}" for place in places), "did not leave in time"
        self._note(now, "warning", "kill", f"{names} {why}")
        self._since = now
        self._killed.update(places)
        stop = m.Stop(generation=self.assignment.generation, reason=why, kill=tuple(places))
        self._broadcast(stop, now)

    def _decided_generation(self, assignment: m.Assignment, now: float) -> None:
        self._held.clear()
        if not self.leads:
            if self._row is not None and self.spec is not None:
                # It forms no more; the leader's word of it may be lost on its way.
                self._row = None
                self._out.append(Write((story.job(self.spec, "running", self._started),), share=False))
            return
        self._mark("agree", now)
        self._share(story.generation(assignment, now))
        assert self.spec is not None
        self._share(story.job(self.spec, "running", self._started))
        if self._timeline is not None:
            self._share(story.recovery(assignment, self._timeline, None))
        self._out += [ToAgent(m.Announce(text=text[: m.MAX_ANNOUNCED])) for text in self._ended_so]
        self._ended_so.clear()
        self._note(now, "info", "generation", story.describe(assignment))
        if assignment.origin:
            self._note(now, "info", "start", assignment.origin)
        self._log = FaultLog()
        self._said = now

    def _decided_end(self, outcome: m.Outcome, now: float) -> None:
        super()._decided_end(outcome, now)
        if not self.leads:
            return
        # Slurm waits for what it takes to run there.
        self._note_gone(list(self._dark))
        if self._timeline is not None and self.assignment is not None:
            self._share(story.failed_recovery(self.assignment, self._timeline, plan.causes(self._log.faults)))
        assert self.spec is not None
        self._share(story.job(self.spec, outcome.state, self._started, outcome, now))
        level: Literal["info", "error"] = "info" if outcome.exit_code == 0 else "error"
        self._note(now, level, "end", f"{outcome.state}: {outcome.reason}")

    def _broadcast(self, order: m.Order, now: float) -> None:
        self._said = now
        self._out.append(Broadcast(self.term, order))
        self._obey(order, now)

    def _mark(self, phase: str, now: float) -> None:
        if self._timeline is not None:
            self._timeline.mark(phase, now)

    def _all_done_on(self, node: int) -> bool:
        view = self.nodes[node]
        return view.state is not None and all(s.phase in ("exited", "empty") for s in view.state.slots)

    def _log_fault(self, finding: Finding, now: float) -> bool:
        assert self.assignment is not None
        fault_id = f"g{self.assignment.generation}.t{self.term}.{len(self._log.faults) + 1}"
        fault = self._log.add(finding, fault_id)
        if fault is not None:
            self._share(story.fault(self.assignment, fault, now))
            if finding.kind not in SECONDARY and finding.kind != "node-lost":
                self._tell_of(finding, now)
        return fault is not None

    def _tell_of(self, finding: Finding, now: float) -> None:
        line = telling.fault_line(finding, self.nodes)
        if finding.exit_code == telling.BY_SIGTERM:
            # Most likely the whole job is told to end, and its output says so; else the next generation does.
            self._tell(line, now)
            self._ended_so.append(line.text)
        else:
            self._announce(line, now)
