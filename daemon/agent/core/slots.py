"""The slots of a node and the training processes in them, as its agent knows them. Times in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ckptless.daemon.protocol.messages import Assignment, Cause, Pace, Phase, Reuse, SlotState, Spent, Still
from ckptless.daemon.protocol.page import MOST_S


@dataclass(eq=False)
class Occupant:
    """A training process. `birth` tells all processes that one agent starts apart.

    `hooked`: it has said Hello. `lived`: it has been given a rank. `released`: its training is over, so it
    owes no answer any more. `retired`: its agent ends, so its death is no fault. `hung`: why it was
    killed. `heard_at`: when it was heard last. `reuse`: what it is good for, now that it has left. `ahead`:
    the assignment that it builds for, of which nobody knows yet whether it comes; `held`: the newest step of
    its rank there that everything is held of here.
    """

    slot: int
    birth: int
    pid: int
    heard_at: float
    alive: bool = True
    hooked: bool = False
    lived: bool = False
    released: bool = False
    retired: bool = False
    hung: str = ""
    reuse: Reuse = "any"
    ahead: Assignment | None = None
    held: int | None = None

    def fits(self, assignment: Assignment) -> bool:
        """Whether what it has built is what this assignment wants, if it was told to build ahead."""
        ahead = self.ahead
        return ahead is None or (
            (ahead.generation, ahead.cut, ahead.places)
            == (assignment.generation, assignment.cut, assignment.places)
            and assignment.former is None
            and assignment.restore_step is not None
        )


@dataclass
class Slot:
    """A slot's state. What the daemon is told of it outlives the process.

    `birth` is that of the newest process that was to be started here, if any. `shard`: the generation, and
    the shard that its rank has said to have tensors of in it. `since`: when the phase or its cause changed.
    """

    index: int
    occupant: Occupant | None = None
    birth: int | None = None
    phase: Phase = "empty"
    generation: int = 0
    step: int | None = None
    stepped: bool = False
    loss: float | None = None
    every: int | None = None
    share: float | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    hooked: bool = False
    shard: tuple[int, int] = (0, -1)
    since: float = 0.0
    # Set while its process does not get on; of its last steps.
    still: Still | None = None
    # Until when what it is at may last, by its script's word.
    until: float | None = None
    pace: Pace | None = None
    # Of all processes that were in it, and when the newest step was done.
    spent: Spent | None = None
    done_at: float = 0.0

    @property
    def living(self) -> Occupant | None:
        """The occupant, unless it is known to be dead."""
        return self.occupant if self.occupant is not None and self.occupant.alive else None

    def enter(self, phase: Phase, generation: int, now: float, cause: Cause | None = None) -> None:
        """Begin a new phase."""
        self.stepped &= generation == self.generation
        if generation != self.generation:
            self.pace = None
        self.phase, self.generation, self.cause, self.since = phase, generation, cause, now
        self.still = self.until = None

    def blame(self, cause: Cause, now: float) -> None:
        """Note that something is wrong with the process; its phase stays."""
        self.cause, self.since = cause, now

    def spend(self, parts: Sequence[float], done_at: float) -> None:
        """Note what steps have taken since the last call, as `Spent` has it, and when the newest was done."""
        before = self.spent or Spent()
        # Within what goes over the wire, whatever a rank writes.
        told = (before.training_s, before.data_s, before.commit_s, before.checkpoint_s, before.redone_s)
        sums = [min(MOST_S, one + more) for one, more in zip(told, parts, strict=True)]
        self.spent = Spent(
            training_s=sums[0], data_s=sums[1], commit_s=sums[2], checkpoint_s=sums[3], redone_s=sums[4]
        )
        self.done_at = max(self.done_at, done_at)

    def stands(self, still: Still | None, until: float | None) -> bool:
        """Note how its process stands still, if it does, and until when it may. Whether that is news."""
        before, self.still = self.still, still
        another, self.until = until != self.until, until
        if before is None or still is None:
            return another or before is not still
        return another or _news(before) != _news(still)

    def told(self, now: float) -> SlotState:
        """Return the slot as the daemon is told."""
        return SlotState(
            slot=self.index,
            phase=self.phase,
            generation=self.generation,
            pid=self.occupant.pid if self.occupant is not None else None,
            hooked=self.hooked,
            step=self.step,
            stepped=self.stepped,
            still=self.still,
            allowed_s=max(0.0, self.until - now) if self.until is not None else None,
            pace=self.pace,
            spent=replace(self.spent, since_s=now - self.done_at) if self.spent is not None else None,
            loss=self.loss,
            every=self.every,
            share=self.share,
            cause=self.cause,
            exit_code=self.exit_code,
            age_s=now - self.since,
        )


def _news(still: Still) -> tuple[object, ...]:
    """Return what of it a daemon is told of at once; the rest only grows older."""
    return still.late, still.how, still.phase, still.over, still.call, still.queued, still.at
