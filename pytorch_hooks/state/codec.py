"""Trees of Python values, arrays and tensors to bytes and back, bit for bit and without pickle.

    header   magic "CKPT", version u16, zero u16, length u64, xxh3_64 of the payload u64   (little-endian)
    payload  msgpack; what msgpack has no type for is an extension, its content again msgpack

Lists, strings, bytes, numbers and dicts with string keys are plain msgpack. Types are kept exactly: a
subclass of a known type is refused, not flattened.
"""

import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import msgspec
import torch
import xxhash

from ckptless.daemon.api.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import raw

MAGIC = b"CKPT"
VERSION = 1
LIMIT = 64 << 20
"""Bytes that one encoded tree may have at most, unless the caller says otherwise."""

_HEADER = struct.Struct("<4sHHQQ")
_DEPTH = 64
_BIGINT, _STR, _TUPLE, _DICT, _SET, _FROZENSET, _COUNTER, _ORDERED, _DEQUE = range(1, 10)
_ARRAY, _SCALAR, _TENSOR, _DTYPE, _SIZE, _REF = range(10, 16)
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_NUMPY_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")
_PLAIN = frozenset({type(None), bool, float, bytes})
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


class Ref(msgspec.Struct, frozen=True):
    """A tensor that is kept elsewhere, by name: encodes as its name only."""

    name: str


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
    return _ENCODER.encode(_wire(value, (None, name, 0)))


def unpack(payload: bytes | memoryview) -> Any:
    """Decode what `pack` made; ProtocolError for anything malformed."""
    try:
        return _DECODER.decode(payload)
    except _MALFORMED as error:
        raise ProtocolError(f"malformed record: {error}") from error


# ---- to bytes


def _wire(value: Any, at: _At) -> Any:
    """Turn a value into what msgspec writes as it is: plain values, lists, string dicts and extensions."""
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
        return packer(value, at)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return _from_numpy(value, at)
    raise _refused(value, at)


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


def _items(values: Iterable[Any], at: _At) -> list[Any]:
    deeper = at[2] + 1
    return [v if type(v) in _PLAIN else _wire(v, (at, i, deeper)) for i, v in enumerate(values)]


def _pairs(value: dict[Any, Any], at: _At) -> list[Any]:
    deeper = at[2] + 1
    flat: list[Any] = []
    for key, item in value.items():
        flat.append(_wire(key, (at, key, deeper)))
        flat.append(_wire(item, (at, key, deeper)))
    return flat


def _pack_dict(value: dict[Any, Any], at: _At) -> Any:
    if all(type(key) is str and key.isascii() for key in value):
        deeper = at[2] + 1
        return {k: v if type(v) in _PLAIN else _wire(v, (at, k, deeper)) for k, v in value.items()}
    return _ext(_DICT, _pairs(value, at))


def _pack_set(value: set[Any] | frozenset[Any], at: _At) -> Any:
    # A set has no order of its own: sorting makes equal sets equal bytes, whatever the hash seed.
    content = sorted(_items(value, at), key=_ENCODER.encode)
    return _ext(_SET if type(value) is set else _FROZENSET, content)


def _pack_tensor(value: torch.Tensor, at: _At) -> Any:
    why = raw.why_not(value)
    if why is None and value.device.type not in _DEVICES:
        why = f"it is on a device of type {value.device.type!r}"
    if why is not None:
        raise _refused(value, at, why)
    leaf = value.requires_grad and value.is_leaf
    head = [raw.NAMES[value.dtype], list(value.shape), value.device.type, leaf]
    return _ext(_TENSOR, [*head, raw.to_bytes(value)])


def _pack_dtype(value: torch.dtype, at: _At) -> Any:
    if value not in raw.NAMES:
        raise _refused(value, at, str(value))
    return msgspec.msgpack.Ext(_DTYPE, raw.NAMES[value].encode())


def is_plain_array(value: Any) -> bool:
    """Whether the elements of a numpy array or scalar are numbers or booleans, which is what can be saved."""
    return _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None and value.dtype.fields is None


def _from_numpy(value: Any, at: _At) -> Any:
    name = value.dtype.str
    if not is_plain_array(value):
        raise _refused(value, at, f"its dtype is {value.dtype}")
    if type(value) is sys.modules["numpy"].ndarray:
        return _ext(_ARRAY, [name, list(value.shape), value.tobytes()])
    return _ext(_SCALAR, [name, value.tobytes()])


_PACKERS: dict[type, Callable[[Any, _At], Any]] = {
    list: _items,
    dict: _pack_dict,
    tuple: lambda v, at: _ext(_TUPLE, _items(v, at)),
    set: _pack_set,
    frozenset: _pack_set,
    Counter: lambda v, at: _ext(_COUNTER, _pairs(v, at)),
    OrderedDict: lambda v, at: _ext(_ORDERED, _pairs(v, at)),
    deque: lambda v, at: _ext(_DEQUE, [v.maxlen, _items(v, at)]),
    torch.Tensor: _pack_tensor,
    torch.dtype: _pack_dtype,
    torch.Size: lambda v, _at: _ext(_SIZE, list(v)),
    Ref: lambda v, _at: msgspec.msgpack.Ext(_REF, v.name.encode()),
}


# ---- from bytes


def _hook(code: int, data: memoryview) -> Any:
    maker = _MAKERS.get(code)
    if maker is None:
        raise ValueError(f"extension {code} is unknown")
    return maker(data)


def _list(data: memoryview) -> list[Any]:
    content = _DECODER.decode(data)
    if type(content) is not list:
        raise ValueError("an extension holds no list")
    return content


def _dict(data: memoryview) -> dict[Any, Any]:
    flat = _list(data)
    made = dict(zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(made) != len(flat):
        raise ValueError("a key occurs twice")
    return made


def _set(data: memoryview) -> frozenset[Any]:
    content = _list(data)
    made = frozenset(content)
    if len(made) != len(content):
        raise ValueError("an element of a set occurs twice")
    return made


def _deque(data: memoryview) -> deque[Any]:
    maxlen, content = _list(data)
    if type(content) is not list or (maxlen is not None and not len(content) <= maxlen):
        raise ValueError("a deque breaks its own length")
    return deque(content, maxlen)


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError("a shape is no list of sizes")
    return tuple(value)


def _check_size(shape: tuple[int, ...], itemsize: int, data: Any) -> None:
    size = itemsize
    for n in shape:
        size *= n
    if type(data) is not bytes or len(data) != size:
        raise ValueError("the bytes of an array do not fit its shape")


def _tensor(data: memoryview) -> torch.Tensor:
    name, sizes, device, leaf, content = _list(data)
    shape = _shape(sizes)
    if name not in raw.DTYPES or device not in _DEVICES or type(leaf) is not bool:
        raise ValueError("a tensor has an unknown dtype or device")
    _check_size(shape, raw.DTYPES[name].itemsize, content)
    made = raw.from_bytes(content, raw.DTYPES[name], shape)
    if device != "cpu":
        made = made.to(device)
    return made.requires_grad_(leaf)


def _numpy() -> Any:
    try:
        return import_module("numpy")
    except ImportError as error:
        raise ValueError("it holds a numpy array, and numpy is not installed here") from error


def _array(data: memoryview) -> Any:
    name, sizes, content = _list(data)
    shape = _shape(sizes)
    dtype = numpy_dtype(name)
    _check_size(shape, dtype.itemsize, content)
    made = _numpy().empty(shape, dtype)
    if content:
        made.reshape(-1).view("u1")[:] = bytearray(content)
    return made


def _scalar(data: memoryview) -> Any:
    name, content = _list(data)
    dtype = numpy_dtype(name)
    _check_size((), dtype.itemsize, content)
    return _numpy().frombuffer(content, dtype)[0]


def numpy_dtype(name: Any) -> Any:
    """The dtype that an array's `dtype.str` names. Raises ValueError for one that cannot be saved."""
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError("an array has an unknown dtype")
    return _numpy().dtype(name)


def _dtype(data: memoryview) -> torch.dtype:
    name = bytes(data).decode()
    if name not in raw.DTYPES:
        raise ValueError(f"the dtype {name!r} is unknown")
    return raw.DTYPES[name]


_MAKERS: dict[int, Callable[[memoryview], Any]] = {
    _BIGINT: lambda data: int.from_bytes(data, "little", signed=True),
    _STR: lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    _TUPLE: lambda data: tuple(_list(data)),
    _DICT: _dict,
    _SET: lambda data: set(_set(data)),
    _FROZENSET: _set,
    _COUNTER: lambda data: Counter(_dict(data)),
    _ORDERED: lambda data: OrderedDict(_dict(data)),
    _DEQUE: _deque,
    _ARRAY: _array,
    _SCALAR: _scalar,
    _TENSOR: _tensor,
    _DTYPE: _dtype,
    _SIZE: lambda data: torch.Size(_shape(_list(data))),
    _REF: lambda data: Ref(bytes(data).decode()),
}

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ext_hook=_hook)
