"""At which steps this rank commits: the same as every other rank, or nothing could be restored.

A fixed interval follows from the step's number. With "auto" the ranks go by plans, of which each generation
has one sequence: the first follows from the step that is restored, and each later one is written once, by
rank 0, into the generation's key-value store, where everybody reads it before the step that it begins with.
Rank 0 writes it a commit ahead, so that nobody waits for it. A rank that cannot read it does not go on by
itself: it waits, until it can or the generation ends.

What the ranks were told is compared when a generation begins: each looks at what rank 0 was told.
"""

from typing import Any, Protocol

import msgspec

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.commit.cadence import Costs, Meter, Plan, Tuner, first_plan, together
from ckptless.pytorch_hooks.process_groups.fabric import Fabric
from ckptless.pytorch_hooks.torch_private import calls as torch_private


class Cadence(Protocol):
    """When to commit. Main thread only."""

    @property
    def every(self) -> int:
        """The interval in steps, as it is now."""

    def begin(self, step: int, rank: int, world_size: int) -> None:
        """A generation begins at this step, which is committed.

        Raises UsageError where rank 0 was told something else, GenerationEnded, CollectiveFailed.
        """

    def is_due(self, step: int) -> bool:
        """Whether a step is to be committed."""

    def committed(self, step: int) -> None:
        """It has been. Raises GenerationEnded, CollectiveFailed."""


class Fixed:
    """Each step whose number can be divided by `every`, and the first: DDP's buckets are settled in it."""

    def __init__(self, fabric: Fabric, every: int) -> None:
        self._fabric, self.every = fabric, every

    def begin(self, step: int, rank: int, world_size: int) -> None:
        """See Cadence."""
        _compare(self._fabric, rank, world_size, f"commit_every={self.every}")

    def is_due(self, step: int) -> bool:
        """See Cadence."""
        return step == 1 or step % self.every == 0

    def committed(self, step: int) -> None:
        """Nothing follows from it."""


class Agreed:
    """As often as the budget allows, by plans that all ranks have."""

    def __init__(self, fabric: Fabric, meter: Meter, budget: float) -> None:
        self._fabric, self._meter, self._budget = fabric, meter, budget
        self._plan = first_plan(0)
        self._next: Plan | None = None
        self._tuner = Tuner(budget)
        self._rank, self._world_size = 0, 1
        self._generation = 0

    @property
    def every(self) -> int:
        """See Cadence."""
        return self._plan.every

    def begin(self, step: int, rank: int, world_size: int) -> None:
        """See Cadence."""
        self._plan, self._next, self._tuner = first_plan(step), None, Tuner(self._budget)
        self._rank, self._world_size = rank, world_size
        self._generation = self._fabric.generation or 0
        told = f'commit_every="auto" and commit_budget={self._budget:g}'
        _compare(self._fabric, rank, world_size, told)

    def is_due(self, step: int) -> bool:
        """See Cadence."""
        return self._plan.is_due(step)

    def committed(self, step: int) -> None:
        """See Cadence."""
        left = self._plan.left(step)
        if left == 1:
            self._prepare()
        elif left == 0:
            self._plan = self._follow()

    def _prepare(self) -> None:
        """Tell what it has cost here; rank 0 decides."""
        mine, plan = self._meter.take(), self._plan
        if self._rank:
            if mine is not None:
                data = msgspec.json.encode(mine).decode()
                self._fabric.in_store(lambda store: store.set(self._key(f"cost/{self._rank}"), data))
            return
        if mine is not None and self._world_size > 1:
            mine = together(mine, self._fabric.in_store(self._others), plan.every)
        self._next = following = self._tuner.next(plan, mine)
        key, data = self._plan_key(following.after), msgspec.json.encode(following).decode()
        self._fabric.in_store(lambda store: store.set(key, data))

    def _others(self, store: torch_private.Store) -> list[Costs]:
        """As they have told last; nobody is waited for."""
        keys = [self._key(f"cost/{rank}") for rank in range(1, self._world_size)]
        if not store.check(keys):
            return []
        return [msgspec.json.decode(data, type=Costs) for data in store.multi_get(keys)]

    def _follow(self) -> Plan:
        plan = self._next
        if plan is None:
            key = self._plan_key(self._plan.after + self._plan.every * self._plan.commits)
            data: Any = self._fabric.in_store(lambda store: torch_private.store_get(store, key))
            plan = msgspec.json.decode(data, type=Plan)
        self._next = None
        return plan

    def _plan_key(self, after: int) -> str:
        return self._key(f"plan/{after}")

    def _key(self, name: str) -> str:
        return f"ckptless/{self._generation}/cadence/{name}"


def _compare(fabric: Fabric, rank: int, world_size: int, told: str) -> None:
    """Raise UsageError where the rank before was told something else; that is waited for.

    If all ranks are as the one before, all are alike; and no rank's node is asked by all others.
    """

    def key(of: int) -> str:
        return f"ckptless/{fabric.generation or 0}/rank/{of}/told"

    if rank + 1 < world_size:
        fabric.in_store(lambda store: store.set(key(rank), told))
    if rank == 0:
        return
    before: Any = fabric.in_store(lambda store: torch_private.store_get(store, key(rank - 1)))
    if before.decode() != told:
        raise UsageError(
            f"rank {rank} was started with {told}, and rank {rank - 1} with {before.decode()}: "
            "give ckptless.run the same on every rank"
        )
