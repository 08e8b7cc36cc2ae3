"""Pure: which step to go on from, and who can give each rank its record and its shard's tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptless.daemon.api.messages import Holdings, Place
from ckptless.daemon.control.faults import NodeView
from ckptless.daemon.control.twins_agree import disputes, sound_holders


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
    return _newest_held(nodes, world_size)[1]


def state_sources(nodes: Mapping[int, NodeView], places: Sequence[Place], progress: int) -> Sources:
    """Where the state of ranks in these places comes from. Raises NoCommonStepError.

    `progress` is the newest step that any rank is known to have committed.
    """
    held, step = _newest_held([nodes[node] for node in sorted(nodes)], len(places))
    if step is None:
        newest = max((s for view in nodes.values() for s in _all_steps(view)), default=progress)
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


def _newest_held(nodes: Iterable[NodeView], world_size: int) -> tuple[_Held, int | None]:
    """What is held, and the step to go on from: one at which twins differ only where there is no other."""
    told = {view.node: one for view in nodes if view.usable and (one := _holdings(view)) is not None}
    held = _held(told, world_size, disputed=False)
    step = _newest_common(held, world_size)
    if step is None and any(holdings.digests for holdings in told.values()):
        held = _held(told, world_size, disputed=True)
        step = _newest_common(held, world_size)
    return held, step


def _held(told: Mapping[int, Holdings], world_size: int, *, disputed: bool) -> _Held:
    held = _Held()
    for (shard, step), givers in sound_holders(told, disputes(told.values()), disputed=disputed).items():
        held.tensors.setdefault(shard, {})[step] = givers
    for node, holdings in told.items():
        for rank, shard, steps in holdings.records:
            if rank < world_size and steps:
                held.shards[rank] = shard
                for step in steps:
                    held.records.setdefault(rank, {}).setdefault(step, []).append(node)
    return held


def _holdings(view: NodeView) -> Holdings | None:
    return view.state.holdings if view.state is not None else None


def _all_steps(view: NodeView) -> list[int]:
    holdings = _holdings(view) if view.usable else None
    if holdings is None:
        return []
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
