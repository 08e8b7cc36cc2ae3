"""The files in a directory of saved steps, and how the newest whole one is found.

    DIR/step-00000100/            a step in the format of torch.distributed.checkpoint
        .metadata                 its index, for plain DCP
        __0_0.distcp ...          the tensors of shard 0, ...
        ckptless.json             the manifest: what else is needed to go on bit for bit
        ckptless-shard-0 ...      what lies where in a shard's file, and the digests of its version
        ckptless-record-0 ...     the record of rank 0, ...
    DIR/latest                    a link to the newest
    DIR/.saving-...               a step that is being written: nobody reads it

A step's folder gets its name when all of it is on the disk: what has the name is whole.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.model import Value

FORMAT = 1
MANIFEST = "ckptless.json"
LATEST = "latest"
SAVING = ".saving-"

_NAME = re.compile(r"step-(\d{8,})")
T = TypeVar("T")


class Piece(Value, frozen=True, kw_only=True):
    """One tensor of a shard, `nbytes` at `offset` of the shard's file, as torch.save writes it.

    `name` is the layout's; `path` that in a state_dict. `full` and `start`: shape of the whole, and where
    this part begins in it; None where it is no DTensor.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    full: tuple[int, ...] | None = None
    start: tuple[int, ...] = ()


class Plain(Value, frozen=True, kw_only=True):
    """A value of a state_dict that is no tensor, where it lies in the shard's file."""

    path: tuple[str | int, ...]
    offset: int
    nbytes: int


class ShardIndex(Value, frozen=True, kw_only=True):
    """The index of a shard's file. `layout`, `payload_nbytes`, `chunks`: see version.Header."""

    shard: int
    step: int
    layout: str
    payload_nbytes: int
    chunk_nbytes: int
    chunks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    plain: tuple[Plain, ...] = ()


class SavedFile(Value, frozen=True, kw_only=True):
    """A file of the step: its size, and its xxh3_128 (hex), but for tensors, whose chunks have theirs."""

    name: str
    nbytes: int
    digest: str = ""


class SavedShard(Value, frozen=True, kw_only=True):
    """A shard's two files."""

    shard: int
    tensors: SavedFile
    index: SavedFile


class SavedRecord(Value, frozen=True, kw_only=True):
    """A rank's record, and what it has tensors of."""

    rank: int
    shard: int
    file: SavedFile


class Part(Value, frozen=True, kw_only=True):
    """The part of a step that one node has written."""

    node: int
    shards: tuple[SavedShard, ...]
    records: tuple[SavedRecord, ...]


class Manifest(Value, frozen=True, kw_only=True):
    """A whole step. `saved_at_s`: Unix time in seconds."""

    format: int
    step: int
    job: str
    generation: int
    world_size: int
    saved_at_s: float
    shards: tuple[SavedShard, ...]
    records: tuple[SavedRecord, ...]

    def files(self) -> Iterator[SavedFile]:
        """All of them."""
        for shard in self.shards:
            yield shard.tensors
            yield shard.index
        for record in self.records:
            yield record.file


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a folder that has such a name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def tensors_name(shard: int) -> str:
    """The file of a shard's tensors, as DCP names it."""
    return f"__{shard}_0.distcp"


def index_name(shard: int) -> str:
    """The file that tells what lies where in a shard's."""
    return f"ckptless-shard-{shard}"


def record_name(rank: int) -> str:
    """The file of a rank's record."""
    return f"ckptless-record-{rank}"


def part_name(node: int) -> str:
    """Return the name of a node's part, which it leaves for whoever puts the parts together."""
    return f"part-{node}.json"


def skip_name(node: int) -> str:
    """A node leaves this instead where it cannot write its part."""
    return f"no-part-{node}"


def steps_in(directory: Path) -> list[tuple[int, Path]]:
    """The saved steps, the newest first; nothing of them is looked at. Raises OSError."""
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    found = [(step, path) for path in entries if (step := step_of(path)) is not None]
    return sorted(found, reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step, whose files are there in their sizes. Raises ProtocolError, OSError."""
    manifest = decode((folder / MANIFEST).read_bytes(), Manifest, folder / MANIFEST)
    if manifest.format != FORMAT:
        raise ProtocolError(f"{folder} is of format {manifest.format}, this ckptless reads {FORMAT}")
    ranks = sorted(record.rank for record in manifest.records)
    known = {shard.shard for shard in manifest.shards}
    # Counted first: the number may be any, and a list of that length the end of the node.
    whole = len(ranks) == manifest.world_size and ranks == list(range(len(ranks)))
    if not whole or not {r.shard for r in manifest.records} <= known:
        raise ProtocolError(f"{folder / MANIFEST} does not name every rank's part")
    for file in manifest.files():
        if (size := (folder / file.name).stat().st_size) != file.nbytes:
            raise ProtocolError(f"{folder / file.name} has {size} bytes and should have {file.nbytes}")
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether it is a saved step that could be gone on from, as far as its manifest and sizes tell."""
    try:
        read_manifest(folder)
    except (ProtocolError, OSError):
        return False
    return True


def read_checked(folder: Path, file: SavedFile) -> bytes:
    """A file that has its digest. Raises ProtocolError, OSError."""
    data = (folder / file.name).read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise ProtocolError(f"{folder / file.name} does not match its digest")
    return data


def decode(data: bytes, kind: type[T], path: Path) -> T:
    """JSON of one of the structs above. Raises ProtocolError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{path} is damaged: {error}") from error
