"""A state as another number of ranks has it: for this rank's tensors the layout, and the box of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks.elastic.boxes import Box, take, whole
from ckptless.pytorch_hooks.state import Layout, TensorSet, catalog, layout, optim
from ckptless.pytorch_hooks.state.layout import Entry, Form
from ckptless.pytorch_hooks.state.objects import parts_of
from ckptless.pytorch_hooks.state.private import local
from ckptless.pytorch_hooks.state.record import Described
from ckptless.pytorch_hooks.torch_private import dcp as torch_dcp

Taken: TypeAlias = dict[str, list[Box]]
"""Boxes in the wholes, by names of tensors."""


@dataclass(frozen=True)
class NewCut:
    """A rank's tensors in another world: how they are packed there, and each one's part of the whole.

    `boxes` has those that are DTensors, by name; all others are the same on every rank of their shard.
    """

    layout: Layout
    boxes: Mapping[str, Box]


def cut(saved: Described, tensors: TensorSet) -> NewCut:
    """Return how what a rank had committed is cut for what is built here, of the same model.

    `saved` is of any rank of the world before: names, dtypes and shapes of the wholes are the same on all.
    Raises RecoveryError where the model is another, or a part cannot be told from its shape.
    """
    wholes = {index: shape for index, shape, _start in saved.catalog.parts}
    parameters = _parameters(tensors)
    forms: list[Form] = []
    boxes: dict[str, Box] = {}
    for index, entry in enumerate(saved.layout.entries):
        here = parameters.get(_parameter_of(entry.name))
        box = _box(entry, wholes.get(index), here)
        if box is not None:
            boxes[entry.name] = box
        shape = entry.shape if box is None else box.shape
        forms.append(Form(entry.name, entry.dtype, shape, entry.device, entry.sharding))
    return NewCut(layout.lay(forms), boxes)


def check(tensors: TensorSet) -> None:
    """Raise UsageError where a state, as it is now, could not be cut for another number of ranks."""
    try:
        cut(Described(tensors.layout, catalog.read(tensors.catalog), {}), tensors)
    except RecoveryError as error:
        raise UsageError(f"the job is elastic, and its state cannot be cut anew: {error}") from error


def sources(
    new: NewCut, shards: Iterable[int], first: int, described: Callable[[int], Described]
) -> dict[int, Taken]:
    """Return what is taken of each shard, no element twice; of what is no DTensor all from shard `first`.

    `described(shard)` is what it says of its tensors; no more of them are asked for than it takes. Raises
    ProtocolError where none has some of it.
    """
    filled = [entry for entry in new.layout.entries if entry.nbytes]
    left = {entry.name: [new.boxes[entry.name]] for entry in filled if entry.name in new.boxes}
    plain = {entry.name: [whole(entry.shape)] for entry in filled if entry.name not in new.boxes}
    found: dict[int, Taken] = {first: plain}
    unread = sorted(shards)
    guess = _Guess(described(first), unread)
    shard = first
    while True:
        unread.remove(shard)
        boxes = boxes_of(described(shard))
        for name in [name for name in left if name in boxes]:
            taken, rest = take(left.pop(name), boxes[name])
            if taken:
                found.setdefault(shard, {})[name] = taken
            if rest:
                left[name] = rest
        if not left:
            return found
        name, (box, *_) = next(iter(left.items()))
        if not unread:
            raise ProtocolError(f"nobody has the elements of {name} from {box.start} on, {box.shape} of them")
        shard = guess.nearest(name, box, unread)


class _Guess:
    """Guesses which shard has something: as torch cuts a dimension, into so many parts of one size."""

    def __init__(self, known: Described, shards: Sequence[int]) -> None:
        entries = known.layout.entries
        self._places = {shard: place for place, shard in enumerate(shards)}
        self._wholes = {entries[i].name: full for i, full, _start in known.catalog.parts}
        self._known = boxes_of(known)

    def nearest(self, name: str, box: Box, shards: Sequence[int]) -> int:
        """Return that of these shards which is the nearest to the one that probably has the box's begin."""
        likely = 0
        for start, part, full in zip(box.start, self._known[name].shape, self._wholes[name], strict=True):
            if part < full:
                likely = start // -(-full // len(self._places))
                break
        return min(shards, key=lambda shard: abs(self._places[shard] - likely))


def boxes_of(saved: Described) -> dict[str, Box]:
    """Return the boxes of a shard's DTensors, by name."""
    entries = saved.layout.entries
    return {entries[i].name: Box(start, entries[i].shape) for i, _whole, start in saved.catalog.parts}


def _parameters(tensors: TensorSet) -> dict[str, torch.Tensor]:
    """Return the parameters that are built here: by their own names, and by their places in optimizers."""
    found = {name: tensor for name, tensor in tensors.living.items() if name.startswith("p:")}
    for name, optimizer in parts_of(tensors.state).optimizers.items():
        found |= {f"o:{name}:{place}": parameter for place, parameter in optim.parameters(optimizer)}
    return found


def _parameter_of(name: str) -> str:
    """Return by what name `_parameters` has the one that a tensor is, or belongs to."""
    return name if name[0] != "o" else ":".join(name.split(":", 3)[:3])


def _box(entry: Entry, full: Sequence[int] | None, here: torch.Tensor | None) -> Box | None:
    """Return the part of an entry that this rank has; None where it is no DTensor. Raises RecoveryError."""
    if entry.name[0] != "b" and here is None:
        raise RecoveryError(f"{entry.name} was saved and its parameter is not here")
    where = torch_dcp.part_of(here) if here is not None else None
    if full is None:
        if where is not None and entry.sharding == "" and entry.shape:
            raise RecoveryError(
                f"{entry.name} is of a sharded parameter and no DTensor: nobody can tell which part it is, "
                "so it cannot be cut for another number of ranks"
            )
        return None
    if entry.sharding == "replicated" and entry.name[0] == "o":
        return whole(tuple(full))
    if here is None or where is None or tuple(here.shape) != tuple(full):
        raise RecoveryError(
            f"{entry.name} was a DTensor of {tuple(full)}, and here it is "
            f"{'none' if where is None or here is None else f'one of {tuple(here.shape)}'}"
        )
    if entry.sharding == "other" and entry.name[0] == "o":
        raise RecoveryError(f"the optimizer state {entry.name} is a DTensor that cannot be made anew")
    return Box(where, tuple(local(here).shape))
