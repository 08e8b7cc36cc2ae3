"""Writes one node's part of a step: its shards' tensors, an index of each, records. Every file is synced."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, ProtocolError
from ckptless.daemon.protocol.saving import WriteRecord
from ckptless.pytorch_hooks.saving import names
from ckptless.pytorch_hooks.state import raw, record
from ckptless.pytorch_hooks.state.layout import Entry


@dataclass(frozen=True)
class Shard:
    """A version to write: all of its bytes (uint8, 1-D, CPU), and the digest of its header."""

    number: int
    data: torch.Tensor
    digest: str


def write_part(
    folder: Path, node: int, step: int, shards: Sequence[Shard], records: Sequence[WriteRecord]
) -> s.Part:
    """Write all of it; a shard only once it is verified. Raises ProtocolError, OSError."""
    described = {one.shard: one for one in records}
    wrote = []
    for shard in shards:
        header = version.verify(raw.window(shard.data), shard.digest)
        if (header.shard, header.step) != (shard.number, step):
            raise BadVersionError(f"a version of step {header.step}, shard {header.shard}")
        if shard.number not in described:
            raise ProtocolError(f"no record of shard {shard.number} came with it")
        wrote.append(_write_shard(folder, shard, header, described[shard.number].record))
    kept = tuple(_write_record(folder, one) for one in records)
    part = s.Part(node=node, shards=tuple(wrote), records=kept)
    write_whole(folder / s.part_name(node), msgspec.json.encode(part))
    return part


def _write_record(folder: Path, one: WriteRecord) -> s.SavedRecord:
    if xxhash.xxh3_128_hexdigest(one.record) != one.digest:
        raise BadVersionError(f"the record of rank {one.rank} does not match its digest")
    file = write_whole(folder / s.record_name(one.rank), one.record)
    return s.SavedRecord(rank=one.rank, shard=one.shard, file=file)


def _write_shard(folder: Path, shard: Shard, header: version.Header, told: bytes) -> s.SavedShard:
    about = record.describe(told)
    if about.layout.digest != header.layout:
        raise BadVersionError(f"record and tensors of shard {shard.number} are not of one layout")
    payload = shard.data[header.header_nbytes :]
    paths = names.tensor_paths(about.layout, about.catalog, about.optimizers)
    parts = {index: (full, start) for index, full, start in about.catalog.parts}
    path = folder / s.tensors_name(shard.number)
    with path.open("wb") as file:
        pieces = tuple(
            _write_piece(file, payload, entry, paths[index], parts.get(index))
            for index, entry in enumerate(about.layout.entries)
        )
        values = names.optimizer_values(about.layout, about.catalog, about.optimizers)
        plain = tuple(_write_value(file, where, value) for where, value in values)
        nbytes = file.tell()
        sync(file)
    index = s.ShardIndex(
        shard=shard.number,
        step=header.step,
        layout=header.layout,
        payload_nbytes=header.nbytes,
        chunk_nbytes=header.chunk_nbytes,
        chunks=header.chunks,
        pieces=pieces,
        plain=plain,
    )
    listed = write_whole(folder / s.index_name(shard.number), msgspec.json.encode(index))
    return s.SavedShard(shard=shard.number, tensors=s.SavedFile(name=path.name, nbytes=nbytes), index=listed)


def _write_piece(
    file: BinaryIO,
    payload: torch.Tensor,
    entry: Entry,
    path: names.Path,
    part: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> s.Piece:
    flat = payload[entry.offset : entry.offset + entry.nbytes]
    # A tensor of its own: of a view torch.save would write all that lies under it.
    tensor = flat.clone().view(raw.DTYPES[entry.dtype]).view(entry.shape)
    offset = file.tell()
    torch.save(tensor, file)
    return s.Piece(
        name=entry.name,
        path=path,
        dtype=entry.dtype,
        shape=entry.shape,
        offset=offset,
        nbytes=file.tell() - offset,
        full=part[0] if part is not None else None,
        start=part[1] if part is not None else (),
    )


def _write_value(file: BinaryIO, path: names.Path, value: object) -> s.Plain:
    offset = file.tell()
    torch.save(value, file)
    return s.Plain(path=path, offset=offset, nbytes=file.tell() - offset)


def sync(file: BinaryIO) -> None:
    """Write it to the disk, not only to the system."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> s.SavedFile:
    """A file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(data)
        sync(file)
    partial.rename(path)
    return s.SavedFile(name=path.name, nbytes=len(data), digest=xxhash.xxh3_128_hexdigest(data))
