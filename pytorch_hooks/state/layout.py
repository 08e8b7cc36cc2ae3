"""The place of each tensor in the one flat buffer."""

import math
import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import private, raw

ALIGN = 64
"""Bytes: every tensor starts at a multiple (a cache line, and enough for every dtype)."""

_PACKED_LIMIT = 64 << 20
_MAX = 1 << 62


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: `dtype` by name, `shape` of this rank's part, `offset` and `nbytes` in bytes.

    `device` is the type of device it lives on ("cpu", "cuda"), `sharding` how it is a DTensor: "" (it is
    none), "param" (as the parameter it belongs to), "replicated" or "other".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    device: str = "cpu"
    sharding: str = ""


class Form(NamedTuple):
    """An entry without its place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    sharding: str


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All entries by ascending offset, the buffer's size in bytes, and the xxh3_128 (hex) of both."""

    entries: tuple[Entry, ...]
    nbytes: int
    digest: str

    @cached_property
    def packed(self) -> bytes:
        """The layout as compressed msgpack (about 10 bytes an entry); made once. `unpack` reads it."""
        return zlib.compress(msgspec.msgpack.encode(self), 1)


class Named(NamedTuple):
    """A tensor with its name; `like` is the parameter that an optimizer's tensor belongs to."""

    name: str
    tensor: torch.Tensor
    like: torch.Tensor | None = None


def plan(tensors: Iterable[Named | tuple[str, torch.Tensor]]) -> Layout:
    """Lay out named tensors (any shape, dtype, device; of a DTensor the local part) in the given order.

    UsageError for a name that occurs twice and for a tensor that cannot be saved.
    """
    forms: list[Form] = []
    for item in tensors:
        name, tensor, like = Named(*item)
        part = private.local(tensor)
        why = raw.why_not(part)
        if why is None and part.is_inference():
            why = "it was made under torch.inference_mode, and nothing can be copied back into it"
        if why is not None:
            raise UsageError(f"{name} cannot be saved: {why}")
        sharding = private.sharding(tensor, like)
        forms.append(Form(name, raw.NAMES[part.dtype], tuple(part.shape), part.device.type, sharding))
    return lay(forms)


def lay(forms: Iterable[Form]) -> Layout:
    """Lay out tensors of these forms in the given order. UsageError for a name that occurs twice."""
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape, device, sharding in forms:
        nbytes = math.prod(shape) * raw.DTYPES[dtype].itemsize
        entries.append(Entry(name, dtype, shape, offset, nbytes, device, sharding))
        offset = _up(offset + nbytes)
    if len({e.name for e in entries}) != len(entries):
        raise UsageError("two tensors of the state have the same name")
    return Layout(tuple(entries), offset, _digest(tuple(entries), offset))


def check(layout: Layout) -> None:
    """Raise ProtocolError unless a layout that came from elsewhere is one that `plan` could have made.

    Known dtypes, sizes that follow from the shapes, aligned offsets, no overlap, nothing outside the buffer,
    names unique, and the digest right.
    """
    end = 0
    for entry in layout.entries:
        if entry.dtype not in raw.DTYPES:
            raise ProtocolError(f"layout: {entry.name} has the unknown dtype {entry.dtype!r}")
        size = raw.DTYPES[entry.dtype].itemsize
        for n in entry.shape:
            if not 0 <= n < _MAX:
                raise ProtocolError(f"layout: {entry.name} has the shape {entry.shape}")
            size *= n
        if size != entry.nbytes or size >= _MAX:
            raise ProtocolError(f"layout: {entry.name} has {entry.nbytes} bytes where its shape has {size}")
        if entry.offset != end:
            raise ProtocolError(f"layout: {entry.name} lies at {entry.offset} where {end} is next")
        end = _up(entry.offset + size)
    if layout.nbytes != end:
        raise ProtocolError(f"layout: it says {layout.nbytes} bytes and its entries take {end}")
    if len({e.name for e in layout.entries}) != len(layout.entries):
        raise ProtocolError("layout: a name occurs twice")
    if layout.digest != _digest(layout.entries, layout.nbytes):
        raise ProtocolError("layout: the digest does not match")


def unpack(data: bytes) -> Layout:
    """Read and `check` what `Layout.packed` gave; ProtocolError for anything else."""
    try:
        unzip = zlib.decompressobj()
        plain = unzip.decompress(data, _PACKED_LIMIT)
        if not unzip.eof or unzip.unused_data:
            raise ProtocolError("layout: truncated or too long")
        layout = msgspec.msgpack.decode(plain, type=Layout)
    except (zlib.error, msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"layout: malformed: {error}") from error
    check(layout)
    return layout


def _up(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def _digest(entries: tuple[Entry, ...], nbytes: int) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((entries, nbytes)))
