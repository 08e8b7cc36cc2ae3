"""At which steps a job commits: all ranks at the same ones, for no more than a share of the time.

A fixed interval follows from the step's number. With "auto" the ranks go by plans. A *plan* holds for some
time ahead and ends with a commit. Each generation has one sequence of them: the first follows from the step
that is restored; each later one is written by rank 0 into the generation's key-value store at the last commit
of the plan before, where every other rank waits for it. Whoever has the same plans commits the same steps.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.torch_private import calls as torch_private

# However dear a commit is: a fault takes no more steps back than this.
MAX_STEPS = 100
# Measured before anything is decided; the first commits write to memory that nobody has touched before.
FIRST_COMMITS = 8
WARM_UP = 4
# How long a plan holds, and over what time the share that is told is averaged, in seconds.
HOLD_S, AVERAGED_S = 10.0, 30.0
MIN_COMMITS, MAX_COMMITS = 2, 1000
# A new interval is to take this part of the budget, and is only made shorter where it can be by this factor.
AIM = 0.8
WORTH = 1.5
# In plans: how long there has to be room before the interval is made shorter, at first and at most; and how
# soon after that a longer one counts as an answer to it.
PATIENCE, MAX_PATIENCE = 2, 64
SOON = 8
# What the newest plan's costs count, beside those before.
NEWEST = 0.5


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After step `after`, which is committed, each `every`-th step is, until there are `commits` of them."""

    after: int
    every: int
    commits: int

    def is_due(self, step: int) -> bool:
        """Whether a step is to be committed."""
        return (step - self.after) % self.every == 0

    @property
    def end(self) -> int:
        """The step of its last commit, after which another plan holds."""
        return self.after + self.every * self.commits


def first_plan(step: int) -> Plan:
    """Return the plan that every rank begins with at a step that is restored, or at 0."""
    return Plan(after=step, every=1, commits=FIRST_COMMITS)


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a commit has held up the training, and that a step has taken besides, on average."""

    commit_s: float
    step_s: float

    def share(self, every: int) -> float:
        """The part of the time that commits take at this interval."""
        whole = every * self.step_s + self.commit_s
        return self.commit_s / whole if whole > 0 else 0.0

    def interval(self, share: float) -> int:
        """The shortest at which they take no more than this part."""
        if self.commit_s <= 0:
            return 1
        if self.step_s <= 0:
            return MAX_STEPS
        wanted = self.commit_s * (1 - share) / (share * self.step_s)
        return max(1, min(MAX_STEPS, math.ceil(wanted - 1e-9)))


def together(mine: Costs, others: Sequence[Costs], every: int) -> Costs:
    """Return the cost for ranks that wait for each other: the slowest commit is everybody's."""
    commit_s = max([mine.commit_s, *(one.commit_s for one in others)])
    cycle_s = mine.commit_s + every * mine.step_s
    return Costs(commit_s, max(0.0, cycle_s - commit_s) / every)


@dataclass
class Meter:
    """The cost of commits on this rank; times are in seconds by any clock that does not go back.

    `share` is the part of the time that they take, over the last some dozen seconds; None before it is known.
    """

    share: float | None = None
    _told_s: float = 0.0
    _later_s: float = 0.0
    _warm: int = 0
    _entered: float | None = None
    _left: float | None = None
    # The newest ones: with a fixed interval nobody ever takes them.
    _commits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_COMMITS))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_COMMITS))

    def begin(self) -> None:
        """A generation begins: what lies between the steps is no step."""
        self._warm, self._left, self._entered, self._later_s = 0, None, None, 0.0
        self._commits.clear()
        self._steps.clear()

    def enter(self, now: float) -> None:
        """The training has made a step, and waits from here on."""
        self._entered = now

    def held_up(self, seconds: float) -> None:
        """Within the step it has waited so long for the commit before."""
        self._later_s += seconds

    def leave(self, now: float, *, committed: bool) -> None:
        """Note that training goes on."""
        entered, left, self._left = self._entered, self._left, now
        later_s, self._later_s = self._later_s, 0.0
        self._warm += committed
        if entered is None or left is None or self._warm <= WARM_UP:
            return
        self._steps.append(entered - left - later_s)
        if self._commits:
            self._commits[-1] += later_s
        if committed:
            self._commits.append(now - entered)
        else:
            self._steps[-1] += now - entered
        self._follow(later_s + (now - entered if committed else 0.0), now - left)

    def _follow(self, held_up_s: float, whole_s: float) -> None:
        """Let what is older fade."""
        self._told_s = min(self._told_s + whole_s, AVERAGED_S)
        if self._told_s > 0:
            known = self.share or 0.0
            self.share = known + (held_up_s - known * whole_s) / max(self._told_s, whole_s)

    def take(self) -> Costs | None:
        """Since this was called last; None where there was nothing."""
        commits, steps = _typical(self._commits), _typical(self._steps)
        self._commits.clear()
        self._steps.clear()
        return None if commits is None or steps is None else Costs(commits, steps)


def _typical(values: Collection[float]) -> float | None:
    """The mean; of more than three without the largest, which may be a stranger's."""
    if len(values) > 3:
        values = sorted(values)[:-1]
    return sum(values) / len(values) if values else None


@dataclass
class Tuner:
    """Chooses plans so that commits take `budget` of the time at most.

    A longer interval comes at once. A shorter one only once there has been room for some time, by a half at
    most; where that turns out to have been wrong, the next time takes twice the patience. So costs that
    depend on the interval itself (copies that are waited for) do not make it swing.
    """

    budget: float
    _known: Costs | None = None
    _calm: int = 0
    _patience: int = PATIENCE
    _since_shorter: int = SOON + 1

    def next(self, plan: Plan, costs: Costs | None) -> Plan:
        """The plan that follows `plan`, under which `costs` were measured."""
        every = plan.every
        if costs is not None:
            known = self._known = self._smooth(costs)
            every = self._interval(known, plan.every)
        return Plan(plan.end, every, self._commits(every))

    def _smooth(self, costs: Costs) -> Costs:
        old = self._known or costs
        return Costs(
            old.commit_s + NEWEST * (costs.commit_s - old.commit_s),
            old.step_s + NEWEST * (costs.step_s - old.step_s),
        )

    def _interval(self, costs: Costs, every: int) -> int:
        self._since_shorter += 1
        wanted = costs.interval(AIM * self.budget)
        if costs.share(every) > self.budget and wanted > every:
            hasty = self._since_shorter <= SOON
            self._patience = min(2 * self._patience, MAX_PATIENCE) if hasty else PATIENCE
            self._calm = 0
            return wanted
        if wanted * WORTH > every:
            self._calm = 0
            return every
        self._calm += 1
        if self._calm < self._patience:
            return every
        self._calm = self._since_shorter = 0
        return max(wanted, math.ceil(every / 2))

    def _commits(self, every: int) -> int:
        if self._known is None:
            return FIRST_COMMITS
        cycle_s = self._known.commit_s + every * self._known.step_s
        wanted = math.ceil(HOLD_S / cycle_s) if cycle_s > 0 else MAX_COMMITS
        return max(MIN_COMMITS, min(MAX_COMMITS, wanted))


class Cadence:
    """The steps at which this rank commits: the same as every other rank's. Main thread only.

    `commit_every`: every that many steps, and the first one, in which DDP settles its buckets; or "auto": as
    often as `budget`, a part of the time, allows. Raises UsageError.
    """

    def __init__(self, groups: ProcessGroups, commit_every: object = 1, budget: float = 0.01) -> None:
        self._fixed = checked(commit_every, budget)
        self._groups, self._budget = groups, budget
        self.meter = Meter()
        self._rank, self._world_size = 0, 1
        self._plan, self._tuner = first_plan(0), Tuner(budget)

    @property
    def every(self) -> int:
        """The interval in steps, as it is now."""
        return self._fixed or self._plan.every

    def begin(self, step: int, rank: int, world_size: int) -> None:
        """Begin a generation at this step, which is committed.

        Compare what this rank and the rank before it were told: if all are as the one before, all are alike,
        and no rank's node is asked by all others. Raises UsageError, GenerationEnded, CollectiveFailed.
        """
        self.meter.begin()
        self._rank, self._world_size = rank, world_size
        self._plan, self._tuner = first_plan(step), Tuner(self._budget)
        told = f"commit_every={self._fixed}"
        if self._fixed is None:
            told = f'commit_every="auto" and commit_budget={self._budget:g}'
        if rank + 1 < world_size:
            self._tell(f"rank/{rank}/told", told)
        if rank and (before := self._hear(f"rank/{rank - 1}/told").decode()) != told:
            raise UsageError(
                f"rank {rank} was started with {told}, and rank {rank - 1} with {before}: "
                "give ckptless.run the same on every rank"
            )

    def is_due(self, step: int) -> bool:
        """Whether a step is to be committed."""
        if self._fixed is not None:
            return step == 1 or step % self._fixed == 0
        return self._plan.is_due(step)

    def committed(self, step: int) -> None:
        """Go on to the next plan where this commit was the last of one.

        A rank that cannot read it does not go on by itself. Raises GenerationEnded, CollectiveFailed.
        """
        if self._fixed is None and step == self._plan.end:
            key = f"cadence/plan/{step}"
            if self._rank == 0:
                self._plan = self._tuner.next(self._plan, self._costs())
                self._tell(key, msgspec.json.encode(self._plan).decode())
                return
            if (mine := self.meter.take()) is not None:
                self._tell(f"cadence/cost/{self._rank}", msgspec.json.encode(mine).decode())
            self._plan = msgspec.json.decode(self._hear(key), type=Plan)

    def _costs(self) -> Costs | None:
        """Return what commits cost, with what the other ranks have told last; none of them is waited for."""
        mine = self.meter.take()
        if mine is None or self._world_size == 1:
            return mine
        keys = [self._key(f"cadence/cost/{rank}") for rank in range(1, self._world_size)]

        def read(store: torch_private.Store) -> list[bytes]:
            return list(store.multi_get(keys)) if store.check(keys) else []

        others = [msgspec.json.decode(data, type=Costs) for data in self._groups.in_store(read)]
        return together(mine, others, self._plan.every)

    def _tell(self, name: str, value: str) -> None:
        self._groups.in_store(lambda store: store.set(self._key(name), value))

    def _hear(self, name: str) -> bytes:
        """The value of a key, as soon as somebody has set it."""
        found: Any = self._groups.in_store(lambda store: torch_private.store_get(store, self._key(name)))
        return bytes(found)

    def _key(self, name: str) -> str:
        # Keys under rank/N are kept on that rank's node: see kvstore/home.py.
        return f"ckptless/{self._groups.generation or 0}/{name}"


def checked(every: object, budget: float) -> int | None:
    """The interval that the user has asked for, None for "auto". Raises UsageError."""
    if not 0 < budget < 1:
        raise UsageError(f"commit_budget={budget!r}: give the part of the time, such as 0.01")
    if every == "auto":
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f'commit_every={every!r}: give a number of steps from 1, or "auto"')
    return every
