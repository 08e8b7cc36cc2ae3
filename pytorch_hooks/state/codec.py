"""Trees of Python values, arrays and tensors to bytes and back, bit for bit and without pickle.

    header   magic "CKPT", version u16, zero u16, length u64, xxh3_64 of the payload u64   (little-endian)
    payload  msgpack; what msgpack has no type for is an extension, its content again msgpack

Lists, strings, bytes, numbers and dicts with string keys are plain msgpack. Types are kept exactly: a
subclass of a known type is refused, not flattened.

Batches of training data are encoded *apart*: the bytes of tensors and arrays lie behind the payload, and come
back from there without a copy.

    head     magic "CKBT", version u16, zero u16, bytes of the payload u64
    payload  as above, but of a tensor or array it has only the type and shape
    arrays   the bytes of each, in the payload's order, each at the next multiple of 64

Where an array lies follows from the sizes before it, so that no two can overlap. There is no checksum.
"""

import math
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import raw

MAGIC = b"CKPT"
APART_MAGIC = b"CKBT"
VERSION = 2
"""Raised also where what adapters or loaders put into a record changes: a saved step outlives an upgrade."""
LIMIT = 64 << 20
"""Bytes that one encoded tree may have at most, unless the caller says otherwise."""
PAYLOAD_LIMIT = 2 << 30
"""The same of one whose arrays lie apart; they do not count."""
ALIGN_NBYTES = 64

_HEADER = struct.Struct("<4sHHQQ")
_APART_HEAD = struct.Struct("<4sHHQ")
_DEPTH = 64
_BIGINT, _STR, _TUPLE, _DICT, _SET, _FROZENSET, _COUNTER, _ORDERED, _DEQUE = range(1, 10)
_ARRAY, _SCALAR, _TENSOR, _DTYPE, _SIZE, _REF, _TENSOR_APART, _ARRAY_APART = range(10, 18)
_NUMPY_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")
_PLAIN = frozenset({type(None), bool, float, bytes})
_PLAIN_OR_CHECKED = frozenset({*_PLAIN, int, str})
# What a malformed payload can make msgspec, numpy, torch or a constructor below raise.
_MALFORMED = (
    msgspec.DecodeError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
    RuntimeError,
    AssertionError,
)

_At = tuple[Any, Any, int]
"""Where a value is in the tree: the place of its container, its key there, how deep that is."""

Buffer: TypeAlias = Any
"""What has the buffer protocol, is writable, and lives as long as anybody refers to it: an mmap, say."""


class Ref(msgspec.Struct, frozen=True):
    """A tensor that is kept elsewhere, by name: encodes as its name only."""

    name: str


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """Stands for a tensor on a device, of which a copy is on its way to the CPU; is encoded as that one."""

    copy: torch.Tensor
    device: str
    is_leaf: bool


@dataclass(frozen=True)
class Encoded:
    """A tree whose arrays lie apart: `parts` are (offset, bytes), ascending; what lies between is zero."""

    nbytes: int
    parts: tuple[tuple[int, memoryview], ...]
    # The views are of memory that these own.
    owners: tuple[object, ...]


def sent_off(tree: Any) -> tuple[Any, set[torch.device]]:
    """Queue copies of a tree's tensors on devices; return what encodes as the tree does, once they are there.

    It shares nothing with the tree. The tree itself, and no device, where none of it is on one, or where it
    has other things than numbers, words, tensors, lists, tuples and dicts.
    """
    devices: set[torch.device] = set()
    made = _send_off(tree, devices, 0)
    return (tree, set()) if made is _CANNOT or not devices else (made, devices)


_CANNOT = object()


def _send_off(value: Any, devices: set[torch.device], depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or kind in (int, str):
        return value
    if kind is torch.Tensor and raw.why_not(value) is None:
        leaf = _is_leaf(value)
        if value.device.type != "cpu":
            devices.add(value.device)
        copy = value.detach().to("cpu", non_blocking=True, copy=True)
        return _OnItsWay(copy, value.device.type, leaf)
    if kind not in (list, tuple, dict) or depth > _DEPTH:
        return _CANNOT
    items = [_send_off(one, devices, depth + 1) for one in (value.values() if kind is dict else value)]
    if any(one is _CANNOT for one in items):
        return _CANNOT
    return dict(zip(value, items, strict=True)) if kind is dict else kind(items)


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether gradients gather in a tensor itself."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:
        return False  # A view made under `no_grad`, of what was written to since: autograd refuses to say.


def encode(value: object, *, name: str = "state", limit: int = LIMIT) -> bytes:
    """Encode a tree, with a header; `name` is what error messages call its root.

    UsageError for a type that cannot be saved (with its place in the tree), a tree nested deeper than 64, or
    more than `limit` bytes.
    """
    return seal(pack(value, name=name), name=name, limit=limit)


def decode(data: bytes | bytearray | memoryview, *, limit: int = LIMIT) -> Any:
    """Decode what `encode` made. Tensors come back on the type of device they were on.

    ProtocolError for anything else: wrong magic, version, length or checksum, malformed or too long content.
    """
    return unpack(unseal(data, limit=limit))


def seal(payload: bytes, *, name: str = "state", limit: int = LIMIT) -> bytes:
    """Put the header in front of a payload; UsageError if the whole is longer than `limit` bytes."""
    if len(payload) + _HEADER.size > limit:
        raise UsageError(
            f"{name} takes {len(payload)} bytes where {limit} are the limit: keep large tensors in a module"
        )
    return _HEADER.pack(MAGIC, VERSION, 0, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def unseal(data: bytes | bytearray | memoryview, *, limit: int = LIMIT) -> memoryview:
    """Check the header of `data` and give the payload behind it, without a copy; else ProtocolError."""
    view = memoryview(data).cast("B")
    if not _HEADER.size <= len(view) <= limit:
        raise ProtocolError(f"{len(view)} bytes are no record: {_HEADER.size} to {limit} are allowed")
    magic, version, zero, length, digest = _HEADER.unpack_from(view)
    payload = view[_HEADER.size :]
    if magic != MAGIC or zero != 0:
        raise ProtocolError("not a record: the magic number is wrong")
    if version != VERSION:
        raise ProtocolError(f"the record has version {version}, this ckptless reads {VERSION}")
    if length != len(payload):
        raise ProtocolError(f"the record says {length} bytes and has {len(payload)}")
    if digest != xxhash.xxh3_64_intdigest(payload):
        raise ProtocolError("the record's checksum does not match its content")
    return payload


def pack(value: object, *, name: str = "state") -> bytes:
    """Encode a tree without a header, to be part of something that has one; errors as for `encode`."""
    return _ENCODER.encode(_PACKER.wire(value, (None, name, 0)))


def unpack(payload: bytes | memoryview) -> Any:
    """Decode what `pack` made; ProtocolError for anything malformed."""
    return _UNPACKER.unpack(payload)


def are_plain(values: Collection[Any]) -> bool:
    """Whether there are numbers, words and bytes only."""
    return {*map(type, values)} <= _PLAIN_OR_CHECKED


def encode_plain(values: Collection[Any]) -> bytes | None:
    """Encode numbers, words and bytes at once, to be compared; None where anything else is among them."""
    if not are_plain(values):
        return None
    try:
        return _ENCODER.encode([*values])
    except (OverflowError, UnicodeEncodeError):
        return None


def encode_apart(value: object, *, name: str = "batch") -> Encoded:
    """Encode a tree; large arrays are not copied, so it must not change before it is written.

    UsageError as for `encode`, and for tensors that are not on the CPU or require a gradient.
    """
    packer = _Packer(apart=[])
    payload = _ENCODER.encode(packer.wire(value, (None, name, 0)))
    if len(payload) > PAYLOAD_LIMIT:
        raise UsageError(
            f"what is no tensor or array in {name} takes {len(payload)} bytes; the limit is {PAYLOAD_LIMIT}"
        )
    parts = [(0, memoryview(_APART_HEAD.pack(APART_MAGIC, VERSION, 0, len(payload)) + payload))]
    end = len(parts[0][1])
    for data, _owner in packer.apart or ():
        if len(data):
            parts.append((_align(end), data))
            end = _align(end) + len(data)
    return Encoded(end, tuple(parts), tuple(owner for _data, owner in packer.apart or ()))


def decode_apart(memory: Buffer, start: int, nbytes: int) -> Any:
    """Decode the tree in bytes `start` (a multiple of 64) to `start + nbytes` of `memory`.

    Its tensors and arrays lie there, and keep `memory` alive. ProtocolError for anything that `encode_apart`
    does not make.
    """
    view = memoryview(memory)
    if start % ALIGN_NBYTES or not 0 <= start <= start + nbytes <= len(view):
        raise ProtocolError(f"a batch at bytes {start} to {start + nbytes} of {len(view)}")
    if nbytes < _APART_HEAD.size:
        raise ProtocolError(f"{nbytes} bytes are no batch")
    magic, version, zero, payload_nbytes = _APART_HEAD.unpack_from(view, start)
    if magic != APART_MAGIC or zero != 0:
        raise ProtocolError("not a batch: the magic number is wrong")
    if version != VERSION:
        raise ProtocolError(f"the batch has version {version}, this ckptless reads {VERSION}")
    arrays_at = start + _APART_HEAD.size + payload_nbytes
    if arrays_at > start + nbytes:
        raise ProtocolError(f"a payload of {payload_nbytes} bytes in a batch of {nbytes}")
    unpacker = _Unpacker(memory, arrays_at, start + nbytes)
    found = unpacker.unpack(bytes(view[start + _APART_HEAD.size : arrays_at]))
    if unpacker.end != start + nbytes:
        raise ProtocolError(f"a batch of {nbytes} bytes whose arrays end at {unpacker.end - start}")
    return found


def _align(offset: int) -> int:
    return -(-offset // ALIGN_NBYTES) * ALIGN_NBYTES


# ---- to bytes


class _Packer:
    """Turns values into what msgspec writes as it is: plain values, lists, string dicts and extensions.

    Where there is a list `apart`, the bytes of tensors and arrays go there, each with what owns them.
    """

    def __init__(self, apart: list[tuple[memoryview, object]] | None = None) -> None:
        self.apart = apart

    def wire(self, value: Any, at: _At) -> Any:
        """Turn one value; `at` is its place. Raises UsageError."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else msgspec.msgpack.Ext(_BIGINT, _big(value))
        if kind is str:
            return value if value.isascii() else _text(value)
        if at[2] >= _DEPTH:
            raise UsageError(f"{_place(at)}: cannot be saved: nested deeper than {_DEPTH}")
        packer = _PACKERS.get(kind)
        if packer is not None:
            return packer(self, value, at)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._numpy(value, at)
        raise _refused(value, at)

    def items(self, values: Collection[Any], at: _At) -> list[Any]:
        # Tokens that a loader has put aside, say: thousands of them.
        if {*map(type, values)} == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 64:
            return [*values]
        deeper = at[2] + 1
        return [v if type(v) in _PLAIN else self.wire(v, (at, i, deeper)) for i, v in enumerate(values)]

    def pairs(self, value: dict[Any, Any], at: _At) -> list[Any]:
        deeper = at[2] + 1
        flat: list[Any] = []
        for key, item in value.items():
            flat.append(self.wire(key, (at, key, deeper)))
            flat.append(self.wire(item, (at, key, deeper)))
        return flat

    def mapping(self, value: dict[Any, Any], at: _At) -> Any:
        if all(type(key) is str and key.isascii() for key in value):
            deeper = at[2] + 1
            return {k: v if type(v) in _PLAIN else self.wire(v, (at, k, deeper)) for k, v in value.items()}
        return _ext(_DICT, self.pairs(value, at))

    def tensor(self, value: torch.Tensor, at: _At) -> Any:
        why = raw.why_not(value)
        if why is None and self.apart is not None and value.device.type != "cpu":
            why = f"it is on {value.device}, and batches are made on the CPU"
        if why is None and self.apart is not None and value.requires_grad:
            why = "it requires a gradient: detach it"
        if why is not None:
            raise _refused(value, at, why)
        name, shape = raw.NAMES[value.dtype], list(value.shape)
        if self.apart is not None:
            plain = value.detach().resolve_conj().resolve_neg().contiguous()
            self.apart.append((raw.window(plain), plain))
            return _ext(_TENSOR_APART, [name, shape])
        leaf = _is_leaf(value)
        device = "cpu" if value.is_cpu else value.device.type
        return _ext(_TENSOR, [name, shape, device, leaf, raw.to_bytes(value)])

    def on_its_way(self, value: _OnItsWay, _at: _At) -> Any:
        name, shape = raw.NAMES[value.copy.dtype], list(value.copy.shape)
        return _ext(_TENSOR, [name, shape, value.device, value.is_leaf, raw.to_bytes(value.copy)])

    def _numpy(self, value: Any, at: _At) -> Any:
        numpy, name = sys.modules["numpy"], value.dtype.str
        if not is_plain_array(value):
            raise _refused(value, at, f"its dtype is {value.dtype}")
        if type(value) is not numpy.ndarray:
            return _ext(_SCALAR, [name, value.tobytes()])
        if self.apart is None:
            return _ext(_ARRAY, [name, list(value.shape), value.tobytes()])
        plain = numpy.ascontiguousarray(value)
        self.apart.append((memoryview(plain.reshape(-1).view("u1") if plain.nbytes else b""), plain))
        return _ext(_ARRAY_APART, [name, list(value.shape)])


def _place(at: _At) -> str:
    steps: list[str] = []
    while at[0] is not None:
        steps.append(f"[{at[1]!r}]")
        at = at[0]
    return "".join([str(at[1]), *reversed(steps)])


def _refused(value: object, at: _At, why: str = "") -> UsageError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UsageError(f"{_place(at)}: cannot be saved: {name}{why and f' ({why})'}")


def _ext(code: int, content: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _ENCODER.encode(content))


def _big(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return msgspec.msgpack.Ext(_STR, value.encode("utf-8", "surrogatepass"))
    return value


def _pack_set(value: set[Any] | frozenset[Any], at: _At) -> Any:
    # A set has no order of its own: sorting makes equal sets equal bytes, whatever the hash seed. Nothing of
    # it is apart, where the order counts.
    content = sorted(_PACKER.items(value, at), key=_ENCODER.encode)
    return _ext(_SET if type(value) is set else _FROZENSET, content)


def _pack_dtype(value: torch.dtype, at: _At) -> Any:
    if value not in raw.NAMES:
        raise _refused(value, at, str(value))
    return msgspec.msgpack.Ext(_DTYPE, raw.NAMES[value].encode())


def is_plain_array(value: Any) -> bool:
    """Whether the elements of a numpy array or scalar are numbers or booleans, which is what can be saved."""
    return _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None and value.dtype.fields is None


_PACKERS: dict[type, Callable[[_Packer, Any, _At], Any]] = {
    list: _Packer.items,
    dict: _Packer.mapping,
    tuple: lambda packer, v, at: _ext(_TUPLE, packer.items(v, at)),
    set: lambda _packer, v, at: _pack_set(v, at),
    frozenset: lambda _packer, v, at: _pack_set(v, at),
    Counter: lambda packer, v, at: _ext(_COUNTER, packer.pairs(v, at)),
    OrderedDict: lambda packer, v, at: _ext(_ORDERED, packer.pairs(v, at)),
    deque: lambda packer, v, at: _ext(_DEQUE, [v.maxlen, packer.items(v, at)]),
    torch.Tensor: _Packer.tensor,
    _OnItsWay: _Packer.on_its_way,
    torch.dtype: lambda _packer, v, at: _pack_dtype(v, at),
    torch.Size: lambda _packer, v, _at: _ext(_SIZE, list(v)),
    Ref: lambda _packer, v, _at: msgspec.msgpack.Ext(_REF, v.name.encode()),
}


# ---- from bytes


class _Unpacker:
    """Makes values of a payload; those that are apart of `memory`, from byte `end` on, to `limit` at most."""

    def __init__(self, memory: Buffer | None = None, end: int = 0, limit: int = 0) -> None:
        self._memory, self.end, self._limit = memory, end, limit

    def unpack(self, payload: bytes | memoryview) -> Any:
        """Make the whole tree. Raises ProtocolError."""
        try:
            return self._decoded(payload)
        except _MALFORMED as error:
            raise ProtocolError(f"malformed record: {error}") from error

    def _decoded(self, data: bytes | memoryview) -> Any:
        # Not by a Decoder of this object's: in a circle the two would keep the memory.
        return msgspec.msgpack.decode(data, ext_hook=self._hook)

    def _hook(self, code: int, data: memoryview) -> Any:
        maker = _MAKERS.get(code)
        if maker is None:
            raise ValueError(f"extension {code} is unknown")
        return maker(self, data)

    def items(self, data: memoryview) -> list[Any]:
        """Make what an extension holds, which is always a list."""
        content = self._decoded(data)
        if type(content) is not list:
            raise ValueError("an extension holds no list")
        return content

    def mapping(self, data: memoryview) -> dict[Any, Any]:
        flat = self.items(data)
        made = dict(zip(flat[::2], flat[1::2], strict=True))
        if 2 * len(made) != len(flat):
            raise ValueError("a key occurs twice")
        return made

    def members(self, data: memoryview) -> frozenset[Any]:
        content = self.items(data)
        made = frozenset(content)
        if len(made) != len(content):
            raise ValueError("an element of a set occurs twice")
        return made

    def queue(self, data: memoryview) -> deque[Any]:
        maxlen, content = self.items(data)
        if type(content) is not list or (maxlen is not None and not len(content) <= maxlen):
            raise ValueError("a deque breaks its own length")
        return deque(content, maxlen)

    def tensor(self, data: memoryview) -> torch.Tensor:
        name, sizes, device, leaf, content = self.items(data)
        shape, dtype = _shape(sizes), _torch_dtype(name)
        if type(device) is not str or type(leaf) is not bool or torch.device(device).type != device:
            raise ValueError("a tensor has an unknown device")
        _check_size(shape, dtype.itemsize, content)
        made = raw.from_bytes(content, dtype, shape)
        if device != "cpu":
            made = made.to(device)
        return made.requires_grad_(leaf)

    def array(self, data: memoryview) -> Any:
        name, sizes, content = self.items(data)
        shape, dtype = _shape(sizes), _numpy_dtype(name)
        _check_size(shape, dtype.itemsize, content)
        made = _numpy().empty(shape, dtype)
        if content:
            made.reshape(-1).view("u1")[:] = bytearray(content)
        return made

    def scalar(self, data: memoryview) -> Any:
        name, content = self.items(data)
        dtype = _numpy_dtype(name)
        _check_size((), dtype.itemsize, content)
        return _numpy().frombuffer(content, dtype)[0]

    def tensor_apart(self, data: memoryview) -> torch.Tensor:
        name, sizes = self.items(data)
        shape, dtype = _shape(sizes), _torch_dtype(name)
        count, at = self._next_apart(shape, dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(shape)

    def array_apart(self, data: memoryview) -> Any:
        name, sizes = self.items(data)
        shape, dtype = _shape(sizes), _numpy_dtype(name)
        count, at = self._next_apart(shape, dtype.itemsize)
        if not count:
            return _numpy().empty(shape, dtype)
        return _numpy().frombuffer(self._memory, dtype, count, at).reshape(shape)

    def _next_apart(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
        """Say how many elements the next array has, and at which byte it begins."""
        if self._memory is None:
            raise ValueError("an array lies apart from a payload that stands alone")
        count = math.prod(shape)
        begin = _align(self.end) if count else self.end
        self.end = begin + count * itemsize
        if self.end > self._limit:
            raise ValueError(f"an array ends at {self.end} of {self._limit} bytes")
        return count, begin


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError("a shape is no list of sizes")
    return tuple(value)


def _check_size(shape: tuple[int, ...], itemsize: int, data: Any) -> None:
    if type(data) is not bytes or len(data) != itemsize * math.prod(shape):
        raise ValueError("the bytes of an array do not fit its shape")


def _torch_dtype(name: Any) -> torch.dtype:
    if name not in raw.DTYPES:
        raise ValueError("a tensor has an unknown dtype")
    return raw.DTYPES[name]


def _numpy() -> Any:
    try:
        return import_module("numpy")
    except ImportError as error:
        raise ValueError("it holds a numpy array, and numpy is not installed here") from error


def _numpy_dtype(name: Any) -> Any:
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError("an array has an unknown dtype")
    return _numpy().dtype(name)


_MAKERS: dict[int, Callable[[_Unpacker, memoryview], Any]] = {
    _BIGINT: lambda _unpacker, data: int.from_bytes(data, "little", signed=True),
    _STR: lambda _unpacker, data: bytes(data).decode("utf-8", "surrogatepass"),
    _TUPLE: lambda unpacker, data: tuple(unpacker.items(data)),
    _DICT: _Unpacker.mapping,
    _SET: lambda unpacker, data: set(unpacker.members(data)),
    _FROZENSET: _Unpacker.members,
    _COUNTER: lambda unpacker, data: Counter(unpacker.mapping(data)),
    _ORDERED: lambda unpacker, data: OrderedDict(unpacker.mapping(data)),
    _DEQUE: _Unpacker.queue,
    _ARRAY: _Unpacker.array,
    _SCALAR: _Unpacker.scalar,
    _TENSOR: _Unpacker.tensor,
    _DTYPE: lambda _unpacker, data: _torch_dtype(bytes(data).decode()),
    _SIZE: lambda unpacker, data: torch.Size(_shape(unpacker.items(data))),
    _REF: lambda _unpacker, data: Ref(bytes(data).decode()),
    _TENSOR_APART: _Unpacker.tensor_apart,
    _ARRAY_APART: _Unpacker.array_apart,
}

_ENCODER = msgspec.msgpack.Encoder()
_PACKER = _Packer()
_UNPACKER = _Unpacker()
