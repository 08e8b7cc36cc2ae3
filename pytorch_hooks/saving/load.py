"""Reads a rank's part of a saved step back, bit for bit: its record, and its shard's tensors as packed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import CkptlessError, ProtocolError, RecoveryError
from ckptless.pytorch_hooks.state import Layout, raw, record

THREADS = 2


@dataclass(frozen=True)
class Loaded:
    """A rank's record of a step, and the packed tensors (uint8, 1-D, CPU) of its `shard`."""

    step: int
    shard: int
    record: bytes
    payload: torch.Tensor


def load(folder: Path, rank: int, world_size: int) -> Loaded:
    """Return this rank's part; every byte of it is verified. Raises RecoveryError, which names the folder."""
    try:
        return _load(folder, rank, world_size)
    except (CkptlessError, OSError, EOFError, RuntimeError) as error:
        raise RecoveryError(
            f"{folder} cannot be gone on from ({error}): remove it, or give another --save-dir"
        ) from error


def _load(folder: Path, rank: int, world_size: int) -> Loaded:
    manifest = s.read_manifest(folder)
    if manifest.world_size != world_size:
        raise ProtocolError(f"it is of {manifest.world_size} ranks, here are {world_size}")
    mine = next(one for one in manifest.records if one.rank == rank)
    kept = record_of(folder, mine)
    shard = next(one for one in manifest.shards if one.shard == mine.shard)
    view = record.read(kept)
    if view.step != manifest.step:
        raise ProtocolError(f"the record of rank {rank} is of step {view.step}")
    return Loaded(manifest.step, mine.shard, kept, payload_of(folder, shard, view.layout, manifest.step))


def record_of(folder: Path, one: s.SavedRecord) -> bytes:
    """Return a rank's record, verified. Raises ProtocolError, OSError."""
    return s.read_checked(folder, one.file)


def payload_of(folder: Path, shard: s.SavedShard, layout: Layout, step: int) -> torch.Tensor:
    """Return the packed tensors of a shard, verified to the last byte. Raises ProtocolError, OSError."""
    index = s.decode(s.read_checked(folder, shard.index), s.ShardIndex, folder / shard.index.name)
    if (index.step, index.layout) != (step, layout.digest):
        raise ProtocolError(f"record and tensors of shard {shard.shard} are not of one step and layout")
    payload = _payload(folder / shard.tensors.name, index, layout)
    _verify(payload, index)
    return payload


def _payload(path: Path, index: s.ShardIndex, layout: Layout) -> torch.Tensor:
    """The tensors where the layout has them; between them are zeros, as when they were packed."""
    payload = torch.zeros(index.payload_nbytes, dtype=torch.uint8)
    pieces = {piece.name: piece for piece in index.pieces}
    if layout.nbytes != index.payload_nbytes or pieces.keys() != {e.name for e in layout.entries}:
        raise ProtocolError(f"{path} does not hold the tensors of the layout")
    with path.open("rb") as file:
        for entry in layout.entries:
            piece = pieces[entry.name]
            file.seek(piece.offset)
            tensor = torch.load(BytesIO(file.read(piece.nbytes)), map_location="cpu", weights_only=True)
            if (tuple(tensor.shape), tensor.dtype) != (entry.shape, raw.DTYPES[entry.dtype]):
                raise ProtocolError(f"{entry.name} is {tuple(tensor.shape)} {tensor.dtype} in {path}")
            if entry.nbytes:
                flat = payload[entry.offset : entry.offset + entry.nbytes]
                flat.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return payload


def _verify(payload: torch.Tensor, index: s.ShardIndex) -> None:
    """Against the digests of the version that was committed."""
    window = raw.window(payload)
    spans = version.spans(index.payload_nbytes, index.chunk_nbytes)
    with ThreadPoolExecutor(THREADS) as threads:
        found = tuple(threads.map(version.digest_of, [window[start:end] for start, end in spans]))
    if found != index.chunks:
        raise ProtocolError(f"the tensors of shard {index.shard} do not match their digests")
