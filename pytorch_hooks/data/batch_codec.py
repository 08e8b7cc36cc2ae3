"""Batches to bytes and back: trees of Python values, whose tensors and arrays come back without a copy.

    head     magic "CKBT", version u16, zero u16, bytes of the table u64   (little-endian)
    table    state.codec: [what each tensor or array is, the batch with references in their place, encoded]
    arrays   the bytes of each, in that order, each at the next multiple of 64

Where an array lies follows from the sizes before it, so that no two can overlap. There is no checksum: what
holds the bytes has one (daemon/api/ring_entry.py). No pickle.
"""

import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ckptless.daemon.api.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import codec, raw

MAGIC = b"CKBT"
VERSION = 1
ALIGN_NBYTES = 64
TABLE_LIMIT = 64 << 20
ARRAYS_LIMIT = 1 << 20
DIMENSIONS_LIMIT = 64
PLAN_LIMIT = 16 << 10
"""Bytes of a table that is remembered, since the next batch has the same one most often."""
PLANS_LIMIT = 16
DEPTH_LIMIT = 60
"""Of containers in each other: state.codec's, less the table's own."""

_HEAD = struct.Struct("<4sHHQ")

# What sizes that nobody can have make torch and numpy raise.
_MALFORMED = (TypeError, ValueError, OverflowError, MemoryError, RuntimeError)

Buffer: TypeAlias = Any
"""What has the buffer protocol, is writable, and lives as long as anybody refers to it: an mmap, say."""


@dataclass(frozen=True)
class Encoded:
    """A batch as bytes: `parts` are (offset, bytes), ascending; what lies between them is zero."""

    nbytes: int
    parts: tuple[tuple[int, memoryview], ...]
    # The views are of memory that these own.
    owners: tuple[object, ...]


@dataclass(frozen=True)
class _Array:
    """A tensor or an array as the table has it."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Plan:
    """A table that was read: each array and how far behind the batch's begin it lies, and the tree."""

    arrays: list[tuple[int, _Array]]
    tree: Any


_PLANS: dict[tuple[int, bytes], _Plan] = {}


def align(offset: int) -> int:
    """The next multiple of ALIGN_NBYTES."""
    return -(-offset // ALIGN_NBYTES) * ALIGN_NBYTES


# ---- to bytes


def encode(batch: object) -> Encoded:
    """Encode a batch; large arrays are not copied, so it must not change before it is written.

    Raises UsageError for what cannot be in a batch, with its place: types that state.codec does not know,
    tensors that are not on the CPU or require a gradient.
    """
    arrays: list[tuple[_Array, memoryview]] = []
    owners: list[object] = []
    tree = _taken_out(batch, ("batch",), arrays, owners)
    if len(arrays) > ARRAYS_LIMIT:
        raise UsageError(f"a batch with {len(arrays)} tensors and arrays; the limit is {ARRAYS_LIMIT}")
    heads = [[array.kind, array.dtype, list(array.shape)] for array, _ in arrays]
    table = codec.pack([heads, codec.pack(tree, name="batch")])
    if len(table) > TABLE_LIMIT:
        raise UsageError(
            f"what is not tensors and arrays in a batch takes {len(table)} bytes; the limit is {TABLE_LIMIT}"
        )
    parts = [(0, memoryview(_HEAD.pack(MAGIC, VERSION, 0, len(table)) + table))]
    end = len(parts[0][1])
    for array, data in arrays:
        if array.nbytes:
            start = align(end)
            parts.append((start, data))
            end = start + array.nbytes
    return Encoded(end, tuple(parts), tuple(owners))


def _taken_out(
    value: Any, place: tuple[Any, ...], arrays: list[tuple[_Array, memoryview]], owners: list[object]
) -> Any:
    """The tree with references in place of tensors and arrays, which go into `arrays`."""
    kind = type(value)
    if kind is torch.Tensor:
        return _keep(_tensor(value, place, owners), arrays)
    if kind in (list, tuple, dict, OrderedDict):
        if len(place) > DEPTH_LIMIT:
            raise UsageError(f"{_name(place)[:80]}...: nested deeper than {DEPTH_LIMIT}")
        if kind in (dict, OrderedDict):
            return kind((k, _taken_out(v, (*place, k), arrays, owners)) for k, v in value.items())
        return kind(_taken_out(v, (*place, i), arrays, owners) for i, v in enumerate(value))
    if kind is codec.Ref:
        raise UsageError(f"{_name(place)}: cannot be in a batch: {kind.__name__}")
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and codec.is_plain_array(value):
        plain = numpy.ascontiguousarray(value)
        owners.append(plain)
        data = memoryview(plain.reshape(-1).view("u1")) if plain.nbytes else memoryview(b"")
        return _keep((_Array("array", value.dtype.str, value.shape, plain.nbytes), data), arrays)
    return value


def _keep(array: tuple[_Array, memoryview], arrays: list[tuple[_Array, memoryview]]) -> codec.Ref:
    arrays.append(array)
    return codec.Ref(str(len(arrays) - 1))


def _tensor(value: torch.Tensor, place: tuple[Any, ...], owners: list[object]) -> tuple[_Array, memoryview]:
    why = raw.why_not(value)
    if why is None and value.device.type != "cpu":
        why = f"it is on {value.device}, and batches are made on the CPU"
    if why is None and value.requires_grad:
        why = "it requires a gradient: detach it"
    if why is not None:
        raise UsageError(f"{_name(place)}: a tensor that cannot be in a batch: {why}")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    owners.append(plain)
    nbytes = plain.numel() * plain.element_size()
    return _Array("tensor", raw.NAMES[plain.dtype], tuple(plain.shape), nbytes), raw.window(plain)


def _name(place: tuple[Any, ...]) -> str:
    return "".join([str(place[0]), *(f"[{step!r}]" for step in place[1:])])


# ---- from bytes


def decode(data: Buffer, start: int, nbytes: int) -> Any:
    """The batch in bytes `start` (a multiple of 64) to `start + nbytes` of `data`; its tensors lie there.

    They keep `data` alive. Raises ProtocolError for anything that `encode` does not make.
    """
    try:
        return _decode(data, start, nbytes)
    except _MALFORMED as error:
        raise ProtocolError(f"malformed batch: {error}") from error


def _decode(data: Buffer, start: int, nbytes: int) -> Any:
    view = memoryview(data)
    if start % ALIGN_NBYTES or not 0 <= start <= start + nbytes <= len(view):
        raise ProtocolError(f"a batch at bytes {start} to {start + nbytes} of {len(view)}")
    if nbytes < _HEAD.size:
        raise ProtocolError(f"{nbytes} bytes are no batch")
    magic, version, zero, table_nbytes = _HEAD.unpack_from(view, start)
    if magic != MAGIC or zero != 0:
        raise ProtocolError("not a batch: the magic number is wrong")
    if version != VERSION:
        raise ProtocolError(f"the batch has version {version}, this ckptless reads {VERSION}")
    end = _HEAD.size + table_nbytes
    if table_nbytes > TABLE_LIMIT or end > nbytes:
        raise ProtocolError(f"a table of {table_nbytes} bytes in a batch of {nbytes}")
    table = bytes(view[start + _HEAD.size : start + end])
    del view
    plan = _PLANS.get((nbytes, table))
    if plan is None:
        plan = _plan(table, end, nbytes)
        if len(table) <= PLAN_LIMIT and _is_immutable(plan.tree):
            if len(_PLANS) >= PLANS_LIMIT:
                _PLANS.clear()
            _PLANS[nbytes, table] = plan
    made = [_MAKERS[array.kind](data, start + offset, array) for offset, array in plan.arrays]
    return _put_back(plan.tree, made)


def _plan(table: bytes, end: int, nbytes: int) -> _Plan:
    """What a table says of a batch of `nbytes` bytes, whose arrays begin behind `end`; checked."""
    arrays, tree = _read_table(memoryview(table))
    placed: list[tuple[int, _Array]] = []
    for array in arrays:
        offset = align(end) if array.nbytes else end
        end = offset + array.nbytes
        if end > nbytes:
            raise ProtocolError(f"array {len(placed)} of a batch ends at {end} of {nbytes} bytes")
        placed.append((offset, array))
    if end != nbytes:
        raise ProtocolError(f"a batch of {nbytes} bytes that says {end}")
    used = [False] * len(placed)
    _check_references(tree, used)
    if not all(used):
        raise ProtocolError("an array of a batch is in no place of it")
    return _Plan(placed, tree)


def _read_table(data: memoryview) -> tuple[list[_Array], Any]:
    found = codec.unpack(data)
    if type(found) is not list or [type(part) for part in found] != [list, bytes]:
        raise ProtocolError("the table of a batch is of another form")
    if len(found[0]) > ARRAYS_LIMIT:
        raise ProtocolError(f"a batch of {len(found[0])} arrays; the limit is {ARRAYS_LIMIT}")
    return [_read_head(head) for head in found[0]], codec.unpack(found[1])


def _read_head(head: Any) -> _Array:
    if type(head) is not list or len(head) != 3 or head[0] not in _MAKERS or type(head[1]) is not str:
        raise ProtocolError("the table of a batch has an array of another form")
    kind, dtype, sizes = head
    if type(sizes) is not list or not all(type(n) is int and 0 <= n < 1 << 48 for n in sizes):
        raise ProtocolError("a shape in the table of a batch is no list of sizes")
    if len(sizes) > DIMENSIONS_LIMIT:
        raise ProtocolError(f"an array of {len(sizes)} dimensions in a batch")
    if kind == "tensor":
        if dtype not in raw.DTYPES:
            raise ProtocolError(f"a tensor of the unknown type {dtype!r} in a batch")
        itemsize = raw.DTYPES[dtype].itemsize
    else:
        try:
            itemsize = codec.numpy_dtype(dtype).itemsize
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"an array of the unknown type {dtype!r} in a batch") from error
    return _Array(kind, dtype, tuple(sizes), math.prod(sizes) * itemsize)


def _make_tensor(data: Buffer, offset: int, array: _Array) -> torch.Tensor:
    dtype = raw.DTYPES[array.dtype]
    if not array.nbytes:
        return torch.empty(array.shape, dtype=dtype)
    count = array.nbytes // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    return flat if array.shape == (count,) else flat.view(array.shape)


def _make_array(data: Buffer, offset: int, array: _Array) -> Any:
    numpy = sys.modules["numpy"]
    dtype = numpy.dtype(array.dtype)
    if not array.nbytes:
        return numpy.empty(array.shape, dtype)
    count = array.nbytes // dtype.itemsize
    return numpy.frombuffer(data, dtype, count, offset).reshape(array.shape)


def _check_references(value: Any, used: list[bool]) -> None:
    kind = type(value)
    if kind is codec.Ref:
        index = int(value.name) if value.name.isdecimal() and len(value.name) < 10 else -1
        if not 0 <= index < len(used) or used[index]:
            raise ProtocolError(f"a batch refers to array {value.name[:20]!r}, of {len(used)}")
        used[index] = True
    elif kind in (dict, OrderedDict, list, tuple):
        for item in value.values() if kind in (dict, OrderedDict) else value:
            _check_references(item, used)


def _put_back(value: Any, made: list[Any]) -> Any:
    """The tree with the arrays in it; every container is a new one."""
    kind = type(value)
    if kind is codec.Ref:
        return made[int(value.name)]
    if kind is dict:
        return {k: _put_back(v, made) for k, v in value.items()}
    if kind is list:
        return [_put_back(v, made) for v in value]
    if kind is tuple:
        return tuple([_put_back(v, made) for v in value])
    if kind is OrderedDict:
        return OrderedDict((k, _put_back(v, made)) for k, v in value.items())
    return value


def _is_immutable(value: Any) -> bool:
    """Whether nothing but the containers that `_put_back` makes anew could be changed by who gets it."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(_is_immutable(part) for item in value.items() for part in item)
    if kind in (list, tuple):
        return all(_is_immutable(part) for part in value)
    return kind in _IMMUTABLE


_IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes, codec.Ref})

_MAKERS: dict[str, Callable[[Buffer, int, _Array], Any]] = {"tensor": _make_tensor, "array": _make_array}
