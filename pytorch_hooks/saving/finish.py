"""Puts the nodes' parts of a step together, and gives the whole its name; removes what is too old."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.protocol.saving import WritePart
from ckptless.pytorch_hooks.saving import names
from ckptless.pytorch_hooks.saving.write import sync, sync_folder, write_whole
from ckptless.pytorch_hooks.state import raw
from ckptless.pytorch_hooks.torch_private import dcp as torch_dcp

POLL_S = 0.02

_SAVING = re.compile(rf"{re.escape(s.SAVING)}(\d+)-.*")


def finish(asked: WritePart) -> Path:
    """Wait for the parts, and make them a step; its folder. Raises PeerError, ProtocolError, OSError."""
    folder, directory = Path(asked.folder), Path(asked.directory)
    target = directory / s.step_name(asked.step)
    parts = _wait_for_parts(folder, target, asked)
    if parts is None:
        return target  # an earlier try has come to its end meanwhile, with the same bits
    shards = tuple(sorted((one for part in parts for one in part.shards), key=lambda one: one.shard))
    records = tuple(sorted((one for part in parts for one in part.records), key=lambda one: one.rank))
    _write_metadata(folder, shards)
    manifest = s.Manifest(
        format=s.FORMAT,
        step=asked.step,
        job=asked.job,
        generation=asked.generation,
        world_size=asked.world_size,
        saved_at_s=time.time(),
        shards=shards,
        records=records,
    )
    write_whole(folder / s.MANIFEST, msgspec.json.encode(manifest))
    for node in asked.parts:
        (folder / s.part_name(node)).unlink(missing_ok=True)
    s.read_manifest(folder)
    _name(folder, target)
    _point_latest(directory, target)
    return target


def _wait_for_parts(folder: Path, target: Path, asked: WritePart) -> list[s.Part] | None:
    """Every node's part; None where the step is there already."""
    limit = time.monotonic() + asked.deadline_s
    while True:
        missing = [node for node in asked.parts if not (folder / s.part_name(node)).exists()]
        if not missing:
            paths = [folder / s.part_name(node) for node in asked.parts]
            return [s.decode(path.read_bytes(), s.Part, path) for path in paths]
        if s.is_whole(target):
            return None
        for node in missing:
            if (folder / s.skip_name(node)).exists():
                raise PeerError(f"node-{node} could not write its part of step {asked.step}")
        if time.monotonic() > limit:
            raise PeerError(
                f"node-{missing[0]} has not written its part of step {asked.step} in {asked.deadline_s:.0f} s"
            )
        time.sleep(POLL_S)


# ------------------------------------------------------------------------------------- the index


def _write_metadata(folder: Path, shards: Sequence[s.SavedShard]) -> None:
    indexes = []
    for shard in shards:
        path = folder / shard.index.name
        indexes.append((shard, s.decode(s.read_checked(folder, shard.index), s.ShardIndex, path)))
    with (folder / ".metadata").open("wb") as file:
        torch_dcp.write_metadata(metadata(indexes), file)
        sync(file)


def metadata(indexes: Iterable[tuple[s.SavedShard, s.ShardIndex]]) -> Metadata:
    """DCP's index: parts of DTensors from every shard, all the rest from the first that has it."""
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, names.Path] = {}
    storage: dict[MetadataIndex, object] = {}
    for shard, index in indexes:
        for piece in index.pieces:
            key, start = names.key_of(piece.path), torch.Size(piece.start or (0,) * len(piece.shape))
            where = MetadataIndex(key, start)
            known = items.get(key)
            if where in storage or (piece.full is None and known is not None):
                continue
            if known is None:
                known = items[key] = _described(piece)
            if not isinstance(known, TensorStorageMetadata):
                raise ProtocolError(f"{key} is a tensor in one shard and none in another")
            if not all(piece.shape) and all(piece.full or ()):
                continue  # this rank has nothing of it
            known.chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(piece.shape)))
            paths[key] = piece.path
            storage[where] = torch_dcp.storage(shard.tensors.name, piece.offset, piece.nbytes)
        for value in index.plain:
            key = names.key_of(value.path)
            if key not in items:
                items[key], paths[key] = BytesStorageMetadata(), value.path
                storage[MetadataIndex(key)] = torch_dcp.storage(
                    shard.tensors.name, value.offset, value.nbytes
                )
    return Metadata(state_dict_metadata=items, planner_data=paths, storage_data=storage)


def _described(piece: s.Piece) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=raw.DTYPES[piece.dtype]),
        size=torch.Size(piece.full if piece.full is not None else piece.shape),
        chunks=[],
    )


# ------------------------------------------------------------------------------------- the names


def _name(folder: Path, target: Path) -> None:
    """Give the folder its name: from here on it is a step."""
    sync_folder(folder)
    if target.exists():
        # Of an earlier run that this one did not go on from, since it is damaged.
        old = target.with_name(f"{s.SAVING}0-replaced-{target.name}-{os.getpid()}")
        target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(target)
    sync_folder(target.parent)


def _point_latest(directory: Path, target: Path) -> None:
    partial = directory / f".{s.LATEST}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    partial.symlink_to(target.name)
    partial.rename(directory / s.LATEST)


def prune(directory: Path, keep: int) -> str:
    """Remove all steps but the newest `keep`, and what older saves have left half done.

    What cannot be removed stays, is tried again with the next save, and is the answer: the first of it.
    """
    failed: list[str] = []

    def fail(error: BaseException) -> None:
        # Where it is not there any more, somebody else removes it, too.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            failed.append(f"{error.filename}: {error.strerror}")

    steps = s.steps_in(directory)
    for _, path in steps[keep:]:
        # First it loses its name: what has one is whole.
        gone = path.with_name(f"{s.SAVING}0-removed-{path.name}-{os.getpid()}")
        try:
            path.rename(gone)
        except OSError as error:
            fail(error)
    newest = steps[0][0] if steps else 0
    for path in directory.iterdir():
        match = _SAVING.fullmatch(path.name)
        if match and int(match[1]) <= newest:
            shutil.rmtree(path, onerror=lambda _call, _path, raised: fail(raised[1]))
    return failed[0] if failed else ""
