"""Reads a saved step into another number of ranks than it was saved by.

A rank reads the records of all shards, which say what each has, and of the shards only those that it needs,
one after the other. All of it is verified as for the same number of ranks; no rank holds more than its own
part and one shard beside.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol.errors import CkptlessError, RecoveryError
from ckptless.pytorch_hooks.elastic import cut as cutting
from ckptless.pytorch_hooks.elastic.boxes import Box, whole
from ckptless.pytorch_hooks.elastic.cut import NewCut
from ckptless.pytorch_hooks.saving.load import payload_of, record_of
from ckptless.pytorch_hooks.state import Layout, TensorSet, record
from ckptless.pytorch_hooks.state.record import Described
from ckptless.pytorch_hooks.state.tensors import view


@dataclass(frozen=True)
class Recut:
    """A rank's part of a step: its tensors, packed by `layout` (uint8, 1-D, CPU), and a record.

    The record is that of `of_rank`, which is this rank, or where so many did not save, the one whose number
    is the same modulo theirs; `other` is that of another rank, if there was one.
    """

    step: int
    of_rank: int
    record: bytes
    other: bytes | None
    layout: Layout
    payload: torch.Tensor


def world_size_of(folder: Path) -> int:
    """Return how many ranks have saved a step. Raises RecoveryError, which names the folder."""
    try:
        return s.read_manifest(folder).world_size
    except (CkptlessError, OSError) as error:
        raise RecoveryError(f"{folder} cannot be gone on from ({error})") from error


def load_recut(folder: Path, rank: int, tensors: TensorSet) -> Recut:
    """Return this rank's part of a step that another number of ranks has saved.

    Raises RecoveryError, which names the folder.
    """
    try:
        return _load(folder, rank, tensors)
    except (CkptlessError, OSError, EOFError, RuntimeError) as error:
        raise RecoveryError(
            f"{folder} cannot be gone on from by another number of ranks ({error}): take the number that has "
            "saved it, or give another --save-dir"
        ) from error


def _load(folder: Path, rank: int, tensors: TensorSet) -> Recut:
    manifest = s.read_manifest(folder)
    records = {one.rank: one for one in manifest.records}
    of_rank = rank % manifest.world_size
    first = records[of_rank].shard
    # A shard is named by the lowest of the ranks that have it, whose record tells of it.
    shards = {one.shard: one for one in manifest.shards}
    described = {shard: record.describe(record_of(folder, records[shard])) for shard in shards}
    new = cutting.cut(described[first], tensors)
    made_of = cutting.sources(new, described, first)
    payload = torch.zeros(new.layout.nbytes, dtype=torch.uint8)
    for shard in sorted({take.part for takes in made_of.values() for take in takes}):
        theirs = payload_of(folder, shards[shard], described[shard].layout, manifest.step)
        boxes = {name: [take.box for take in takes if take.part == shard] for name, takes in made_of.items()}
        _copy(theirs, described[shard], payload, new, boxes)
    other = records.get(1 if of_rank == 0 else 0)
    return Recut(
        step=manifest.step,
        of_rank=of_rank,
        record=record_of(folder, records[of_rank]),
        other=record_of(folder, other) if other is not None else None,
        layout=new.layout,
        payload=payload,
    )


def _copy(
    theirs: torch.Tensor,
    described: Described,
    payload: torch.Tensor,
    new: NewCut,
    boxes: dict[str, list[Box]],
) -> None:
    """Copy boxes from a shard's payload into the new one."""
    entries = {entry.name: entry for entry in described.layout.entries}
    parts = cutting.boxes_of(described)
    for entry in new.layout.entries:
        for box in boxes[entry.name] if entry.nbytes else ():
            source, target = view(theirs, entries[entry.name]), view(payload, entry)
            at = parts.get(entry.name, whole(entry.shape))
            to = new.boxes.get(entry.name, whole(entry.shape))
            _part(target, box, to).copy_(_part(source, box, at))


def _part(tensor: torch.Tensor, box: Box, of: Box) -> torch.Tensor:
    """Return the view of a box in the whole that lies in a tensor, which is the box `of`."""
    for dimension, (start, count, begin) in enumerate(zip(*box, of.start, strict=True)):
        tensor = tensor.narrow(dimension, start - begin, count)
    return tensor
