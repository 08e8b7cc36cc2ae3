"""The agent's decisions on its daemon's orders, its ranks' words, and starts and deaths of processes.

Every input is a method that takes the time (s, of the agent's clock) and appends to `out` what the edge has
to do. The edge carries that out in order, before the next input.
"""

import itertools
from collections.abc import Callable

from ckptless.daemon.agent.core.actions import (
    Action,
    AssignRank,
    EndJob,
    FollowAssignment,
    GiveAhead,
    KillAgent,
    KillProcess,
    NoteEvent,
    PauseProcess,
    PrefetchState,
    PrepareRank,
    ReleaseReplicas,
    ReportState,
    SendToRank,
    StartProcess,
    StopAccepting,
)
from ckptless.daemon.agent.core.slots import Occupant, Slot
from ckptless.daemon.protocol import messages as m


class AgentCore:
    """The slots of one node, and the generation that they are in.

    `assignment` is the newest one; `frozen` its generation once that was stopped. `pong_s`: who does not
    answer for so long is killed.
    """

    def __init__(self, node: int, slots: int, pong_s: float) -> None:
        self.node = node
        self.slots = [Slot(index) for index in range(slots)]
        self.assignment: m.Assignment | None = None
        self.frozen: int | None = None
        self.out: list[Action] = []
        self._pong_s = pong_s
        self._births = itertools.count()
        self._closing = False

    def rank(self, slot: Slot) -> int | None:
        """Return the rank that is to be in a slot, if any."""
        if self.assignment is None:
            return None
        return self.assignment.rank_at(m.Place(node=self.node, slot=slot.index))

    def occupied(self, birth: int) -> Slot | None:
        """Return the slot that a process is in; None once another is to be there."""
        one = self._occupant(birth)
        return self.slots[one.slot] if one is not None else None

    def _occupant(self, birth: int) -> Occupant | None:
        found = (one for slot in self.slots if (one := slot.occupant) is not None and one.birth == birth)
        return next(found, None)

    # -------------------------------------------------------------------------------- the daemon

    def obey(self, order: m.Order, now: float) -> None:
        """Take an order of the daemon."""
        match order:
            case m.Stop():
                self._stop(order, now)
            case m.Assign():
                self._assign(order.assignment, now)
            case m.Go() | m.Release():
                if self.assignment is not None and order.generation == self.assignment.generation:
                    self._tell_ranks(order)
                    if isinstance(order, m.Release):
                        self.out.append(ReleaseReplicas())
            case m.Strike():
                self._strike(order)
            case m.Prepare():
                self._prepare(order, now)
            case m.End():
                self.out += [ReleaseReplicas(), EndJob(order.outcome, order.here_only)]
            case m.Running():
                pass

    def _tell_ranks(self, message: m.Stop | m.Go | m.Release) -> None:
        for slot in self.slots:
            one = slot.occupant
            if one is not None and one.hooked and self.rank(slot) is not None:
                one.released = isinstance(message, m.Release)
                self.out.append(SendToRank(one.birth, message))

    def _stop(self, order: m.Stop, now: float) -> None:
        """Freeze, tell the ranks; processes without hooks cannot be told, so they end."""
        if self.assignment is None or order.generation != self.assignment.generation:
            self.out.append(ReportState())
            return
        if self.frozen != order.generation:
            self.frozen = order.generation
            self.out.append(StopAccepting())
            self._tell_ranks(order)
            for slot in self.slots:
                one = slot.living
                if one is not None and not one.hooked and self.rank(slot) is not None:
                    self._retire(slot, one)
                    slot.enter("exited", slot.generation, now, m.Cause(kind="stop"))
        for place in order.kill:
            hanging = self.slots[place.slot].living if place.node == self.node else None
            if hanging is not None:
                self._kill(hanging, "did not leave its training function in time and was killed")
        self.out.append(ReportState())

    def _strike(self, order: m.Strike) -> None:
        """Do what a drill is, while its generation goes on."""
        current = self.assignment.generation if self.assignment is not None else None
        if order.place.node != self.node or order.generation != current or self.frozen is not None:
            return
        drill = order.drill
        if drill.kind == "kill-agent":
            self.out.append(KillAgent())
        elif (one := self.slots[order.place.slot].living) is not None:
            pause = drill.kind == "pause-rank"
            self.out.append(PauseProcess(one.birth, drill.for_s) if pause else KillProcess(one.birth))

    def _prepare(self, order: m.Prepare, now: float) -> None:
        """Have spares build for the ranks that they are to get, where nothing has come between."""
        current, ahead = self.assignment, order.assignment
        if self.frozen is not None or current is None or current.generation != ahead.generation - 1:
            return
        if len(current.places) != len(ahead.places):
            return  # then all build anew
        if order.state:
            self.out.append(GiveAhead(ahead))
        for slot in self.slots:
            if order.state and slot.phase == "prepared":
                slot.step = None
            rank, one = ahead.rank_at(m.Place(node=self.node, slot=slot.index)), slot.living
            if rank is not None and one is not None and slot.phase == "waiting":
                one.ahead, slot.step = ahead, None
                slot.enter("preparing", ahead.generation, now)
                self.out += [PrepareRank(one.birth, rank, ahead), ReportState()]

    def _assign(self, assignment: m.Assignment, now: float) -> None:
        """Take the next generation: state first, then every slot as it says."""
        if self.assignment is not None and assignment.generation <= self.assignment.generation:
            self.out.append(ReportState())
            return
        before, self.assignment, self.frozen = self.assignment, assignment, None
        self.out.append(FollowAssignment(assignment))
        resized = before is not None and len(before.places) != len(assignment.places)
        goes_on = before is not None and before.cut == assignment.cut and assignment.restore_step is not None
        for slot in self.slots:
            one = slot.living
            keeps = one is not None and (one.reuse == "any" or (goes_on and one.reuse == "going-on"))
            self._settle(slot, assignment, now, keeps=keeps)
            place = m.Place(node=self.node, slot=slot.index)
            if resized and slot.phase == "empty" and place not in assignment.bad:
                # The job may grow again: what left it is a spare.
                self._start(slot, None, now)
        self.out.append(ReportState())

    def _settle(self, slot: Slot, assignment: m.Assignment, now: float, *, keeps: bool) -> None:
        """Make a slot what an assignment says: a rank that goes on, a new process, a spare, or nothing.

        `keeps`: the process that is there is good for a rank.
        """
        place = m.Place(node=self.node, slot=slot.index)
        rank, one = assignment.rank_at(place), slot.living
        if rank is None:
            if one is not None and one.ahead is not None:
                # It has built for a generation that has not come.
                self._retire(slot, one)
                self._start(slot, None, now)
            elif one is not None and one.lived:
                self._retire(slot, one)
                slot.enter("empty", assignment.generation, now)
            elif slot.phase == "empty" or (slot.phase == "exited" and place not in assignment.bad):
                # Also where the rank has moved away from a process that has ended: the job may come back.
                self._start(slot, None, now)
        elif (
            one is not None
            and one.hooked
            and keeps
            and place not in assignment.renew
            and one.fits(assignment)
        ):
            self._give(slot, one, rank, now)
        else:
            if one is not None:
                self._retire(slot, one)
            self._start(slot, assignment, now)
            self.out.append(PrefetchState(rank))

    def _give(self, slot: Slot, one: Occupant, rank: int, now: float) -> None:
        """Give its rank to a process that has said Hello."""
        assert self.assignment is not None
        slot.enter("assigned", self.assignment.generation, now)
        self.out.append(AssignRank(one.birth, rank, fresh=not one.lived))
        one.lived, one.ahead = True, None

    # ----------------------------------------------------------------- starts and ends of processes

    def _start(self, slot: Slot, assignment: m.Assignment | None, now: float) -> None:
        birth = next(self._births)
        slot.hooked, slot.exit_code, slot.occupant, slot.birth = False, None, None, birth
        slot.enter("starting", assignment.generation if assignment is not None else 0, now)
        self.out.append(StartProcess(slot.index, birth, assignment))

    def born(self, index: int, birth: int, pid: int, now: float) -> None:
        """A process was forked. It ends at once where another was to be started in its slot meanwhile."""
        slot = self.slots[index]
        if self._closing or slot.birth != birth:
            self.out.append(KillProcess(birth))
            return
        slot.occupant = Occupant(index, birth, pid, now)
        self.out.append(ReportState())

    def not_born(self, index: int, birth: int, why: str, now: float) -> None:
        """A process could not be forked."""
        slot = self.slots[index]
        self.out.append(NoteEvent("spawn-failed", f"slot {index}: {why}"))
        if slot.birth == birth:
            slot.exit_code = 1
            slot.enter("exited", slot.generation, now, m.Cause(kind="died", text=why))
            self.out.append(ReportState())

    def exited(self, birth: int, code: int, how: str, now: float) -> None:
        """A process has ended with `code` (as in subprocess); `how` says so in words."""
        one = self._occupant(birth)
        if one is None:
            return
        slot, one.alive = self.slots[one.slot], False
        cause: m.Cause | None = m.Cause(kind="died", text=how)
        if one.retired:
            cause = m.Cause(kind="stop")
        elif code == 0 and (slot.phase == "finished" or one.released or not one.hooked):
            cause = None
        elif one.hung:
            cause = m.Cause(kind="hung", text=one.hung)
        slot.exit_code = code
        slot.enter("exited", slot.generation, now, cause)
        self.out.append(ReportState())

    def _retire(self, slot: Slot, one: Occupant) -> None:
        """End a process whose time is over."""
        slot.occupant = None
        self.out.append(KillProcess(one.birth))

    def _kill(self, one: Occupant, why: str) -> None:
        """End a process that does not do what it is told."""
        one.hung = why
        self.out.append(KillProcess(one.birth, hung=one.hooked))

    def heard(self, birth: int, now: float) -> Slot | None:
        """A process has sent something: it lives. Return its slot, unless another is to be there."""
        one = self._occupant(birth)
        if one is None:
            return None
        one.heard_at = now
        return self.slots[one.slot]

    def check_answers(self, starved_s: float, now: float) -> None:
        """Kill the processes that were silent for `pong_s`.

        For `starved_s` since the last time the agent itself got no CPU, so it could not have heard.
        """
        for slot in self.slots:
            one = slot.living
            if one is None or not one.hooked or one.released:
                continue
            one.heard_at += starved_s
            if now - one.heard_at > self._pong_s and not one.hung:
                self._kill(one, f"did not answer for {self._pong_s:.1f} s and was killed")

    def stands(self, birth: int, still: m.Still | None, until: float | None = None) -> None:
        """A process does not get on, or does again; by its script's word it may be at it until then."""
        one = self._occupant(birth)
        if one is not None and self.slots[one.slot].stands(still, until):
            self.out.append(ReportState(soon=True))

    def close(self) -> None:
        """The agent ends: no death of a process is a fault any more, and none that is just forked stays."""
        self._closing = True
        for slot in self.slots:
            if slot.occupant is not None:
                slot.occupant.retired = True

    # --------------------------------------------------------------------------------- the ranks

    def hello(self, birth: int, now: float) -> None:
        """A process has connected to the agent; it gets its rank, if it has one."""
        one = self._occupant(birth)
        if one is None:
            return
        slot = self.slots[one.slot]
        one.hooked, one.heard_at, slot.hooked = True, now, True
        rank = self.rank(slot)
        if rank is not None and self.frozen is None:
            self._give(slot, one, rank, now)
        else:
            slot.enter("waiting", slot.generation, now)
        self.out.append(ReportState())

    def admits(self, slot: Slot, generation: int, what: str) -> bool:
        """Whether a rank's message is of its slot's generation; one of another is refused."""
        assert slot.occupant is not None  # it has sent this
        if generation == slot.generation:
            return True
        text = f"{what} of slot {slot.index}, generation {generation}, here {slot.generation}"
        self.out.append(NoteEvent("stale-message", text))
        self.out.append(SendToRank(slot.occupant.birth, m.Refused(generation=generation, what=what)))
        return False

    def advance(
        self,
        slot: Slot,
        message: m.Prepared | m.Left | m.Broken | m.Joined | m.Restored | m.Finished,
        now: float,
    ) -> None:
        """Take a rank's own word on how far it is; it is of the slot's generation."""
        match message:
            case m.Prepared():
                if slot.phase == "preparing":
                    slot.enter("prepared", message.generation, now)
            case m.Left() if (one := slot.occupant) is not None and one.ahead is not None:
                # It cannot be entered again in the same generation; who comes in its place builds then.
                self.out.append(NoteEvent("not-prepared", f"slot {slot.index}: {message.cause.text}"))
                self._retire(slot, one)
                self._start(slot, None, now)
            case m.Left():
                assert slot.occupant is not None  # it has sent this
                slot.occupant.reuse = message.reuse
                slot.enter("left", message.generation, now, message.cause)
            case m.Broken():
                slot.blame(m.Cause(kind="broken", text=message.text), now)
            case m.Joined():
                slot.enter("joined", message.generation, now)
            case m.Restored():
                # A step that was made before the fault is none of this generation's.
                assert self.assignment is not None  # without one nothing was started
                slot.step = self.assignment.restore_step
                slot.enter("restored", message.generation, now)
            case m.Finished():
                slot.enter("finished", message.generation, now)
        self.out.append(ReportState())

    def arrived(self, newest: Callable[[int], int | None]) -> bool:
        """Note how new the state is that is here of ranks that spares have built for; whether to tell that.

        `newest`: the newest step of a rank that everything is held of. What comes first after the order to
        give it is told at once, so that the ranks move before they have committed another step.
        """
        told = False
        for slot in self.slots:
            one = slot.living
            if one is None or one.ahead is None:
                continue
            rank = one.ahead.rank_at(m.Place(node=self.node, slot=slot.index))
            step = newest(rank) if rank is not None else None
            if step != one.held and slot.phase == "prepared" and slot.step is None:
                slot.step, told = step, True
            one.held = step
        if told:
            self.out.append(ReportState())
        return told

    def stepped(self, slot: Slot, message: m.Commit | m.Stepped, *, first: bool) -> None:
        """Note a rank's step; `first`: the first new one of its slot in this generation."""
        slot.step, slot.loss = message.step, message.loss
        slot.every, slot.share = message.every, message.share
        slot.stepped |= first
        self.out.append(ReportState(soon=not first))

    def unused_slots(self, assignment: m.Assignment) -> list[int]:
        """Return the slots that no rank is in."""
        mine = {place.slot for place in assignment.places if place.node == self.node}
        return [slot.index for slot in self.slots if slot.index not in mine]
