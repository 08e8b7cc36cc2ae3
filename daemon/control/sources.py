"""Pure: which step to go on from, and who can give each rank its record and its shard's tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptless.daemon.api.messages import Holdings, Place
from ckptless.daemon.control.faults import NodeView
from ckptless.daemon.control.twins_agree import disputes, sound_holders

# A node, and what it holds.
Told: TypeAlias = tuple[int, Holdings]


class NoCommonStepError(Exception):
    """Steps were committed, and there is none of which everything is held; the text names what is missing."""


@dataclass(frozen=True)
class Sources:
    """As in `Assignment`; all empty where every rank builds anew."""

    step: int | None = None
    shards: tuple[int, ...] = ()
    tensor_nodes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    record_nodes: tuple[tuple[int, ...], ...] = ()


@dataclass
class _Held:
    """Who holds what: by rank, or by shard, and step."""

    shards: dict[int, int] = field(default_factory=dict)
    records: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    tensors: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def steps_of(self, rank: int) -> set[int]:
        """Steps of which somebody has the rank's record, and somebody its shard's tensors."""
        shard = self.shards.get(rank)
        if shard is None:
            return set()
        return self.records[rank].keys() & self.tensors.get(shard, {}).keys()


def recovery_step(nodes: Iterable[NodeView], world_size: int) -> int | None:
    """The newest step of which every rank's record and tensors are held by some usable node.

    One at which twins differ only where there is no other.
    """
    return _newest_held(_told(nodes), world_size)[1]


def state_sources(nodes: Mapping[int, NodeView], places: Sequence[Place], progress: int) -> Sources:
    """Where the state of ranks in these places comes from. Raises NoCommonStepError.

    `progress` is the newest step that any rank is known to have committed.
    """
    return sources_of(_told(nodes[node] for node in sorted(nodes)), places, progress)


def sources_of(told: Sequence[Told], places: Sequence[Place], progress: int = 0) -> Sources:
    """The same, from what these nodes hold. Raises NoCommonStepError."""
    held, step = _newest_held(told, len(places))
    if step is None:
        newest = max((s for _, holdings in told for s in _all_steps(holdings)), default=progress)
        if max(newest, progress) > 0:
            raise NoCommonStepError(_missing(held, len(places)))
        return Sources()
    shards = tuple(held.shards[rank] for rank in range(len(places)))
    return Sources(
        step=step,
        shards=shards,
        tensor_nodes=tuple((shard, tuple(held.tensors[shard][step])) for shard in sorted(set(shards))),
        record_nodes=tuple(
            tuple(sorted(held.records[rank][step], key=lambda node, home=place.node: (node != home, node)))  # type: ignore[misc]
            for rank, place in enumerate(places)
        ),
    )


def _told(nodes: Iterable[NodeView]) -> list[Told]:
    """What the frozen agents of usable nodes have told."""
    states = [(view.node, view.state.holdings) for view in nodes if view.usable and view.state is not None]
    return [(node, holdings) for node, holdings in states if holdings is not None]


def _newest_held(told: Sequence[Told], world_size: int) -> tuple[_Held, int | None]:
    """What is held, and the step to go on from: one at which twins differ only where there is no other."""
    held = _held(told, world_size, disputed=False)
    step = _newest_common(held, world_size)
    if step is None and any(holdings.digests for _, holdings in told):
        held = _held(told, world_size, disputed=True)
        step = _newest_common(held, world_size)
    return held, step


def _held(told: Sequence[Told], world_size: int, *, disputed: bool) -> _Held:
    held = _Held()
    found = disputes(holdings for _, holdings in told)
    for (shard, step), givers in sound_holders(dict(told), found, disputed=disputed).items():
        held.tensors.setdefault(shard, {})[step] = givers
    for node, holdings in told:
        for rank, shard, steps in holdings.records:
            if rank < world_size and steps:
                held.shards[rank] = shard
                for step in steps:
                    held.records.setdefault(rank, {}).setdefault(step, []).append(node)
    return held


def _all_steps(holdings: Holdings) -> list[int]:
    tensors = (step for _, steps in holdings.tensors for step in steps)
    return [*tensors, *(step for _, _, steps in holdings.records for step in steps)]


def _newest_common(held: _Held, world_size: int) -> int | None:
    common: set[int] | None = None
    for rank in range(world_size):
        steps = held.steps_of(rank)
        common = steps if common is None else common & steps
        if not common:
            return None
    return max(common) if common else None


def _missing(held: _Held, world_size: int) -> str:
    """Names the rank that is worst off, and the steps that there are of what it needs."""
    poorest = min(range(world_size), key=lambda rank: max(held.steps_of(rank), default=-1))
    records = sorted(held.records.get(poorest, ()))
    shard = held.shards.get(poorest)
    tensors = sorted(held.tensors.get(shard, ())) if shard is not None else []
    return (
        f"no step that every rank can give: rank {poorest}'s records are held for steps {records}, "
        f"its tensors for steps {tensors}"
    )
