"""Any tree comes back as it was, and any bytes decode or are refused."""

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import codec, raw

FEW = settings(max_examples=150, deadline=None)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs", "Lu"])),
    st.binary(max_size=40),
)
keys = st.recursive(scalars, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(raw.DTYPES.values())))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(b & 1 for b in data)
    made = raw.from_bytes(data, dtype, shape)
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["<f8", ">f4", "<f2", "|b1", "|u1", "<i8", ">u2", "<c16"])))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(b & 1 for b in data)
    made = np.frombuffer(bytearray(data), dtype).reshape(shape) if size else np.empty(shape, dtype)
    return made[()] if draw(st.booleans()) else made


leaves = st.one_of(
    scalars,
    tensors(),
    arrays(),
    st.sampled_from(list(raw.DTYPES.values())),
    st.lists(st.integers(0, 1 << 40), max_size=3).map(torch.Size),
    # Lists of whole numbers alone are packed at once, where all fit.
    st.lists(st.sampled_from((0, -(1 << 63), (1 << 64) - 1, -(1 << 63) - 1, 1 << 64, True)), max_size=4),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inner, max_size=4)
    maps = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        many,
        many.map(tuple),
        many.map(deque),
        many.map(lambda v: deque(v, maxlen=6)),
        maps,
        maps.map(OrderedDict),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    )


trees = st.recursive(leaves, containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and raw.to_bytes(
            a
        ) == raw.to_bytes(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, (set, frozenset)):
        left, right = (sorted(codec.pack(v) for v in s) for s in (a, b))
        return left == right
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for p, q in zip(a.items(), b.items(), strict=True) for x, y in zip(p, q, strict=True)
        )
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@FEW
@given(trees)
def test_round_trip(tree: Any) -> None:
    data = codec.encode(tree)
    back = codec.decode(data)
    assert same(back, tree)
    assert codec.encode(back) == data


@FEW
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(data)


@FEW
@given(trees, st.data())
def test_a_flipped_bit_or_a_cut_is_refused(tree: Any, data: st.DataObject) -> None:
    whole = codec.encode(tree)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    for broken in (bytes(flipped), whole[: bit // 8], whole + b"\0"):
        with pytest.raises(ProtocolError):
            codec.decode(broken)


def decodes_or_refuses(payload: bytes) -> None:
    # With a good header: what an attacker or a bug could write, not what a bad link does.
    with suppress(ProtocolError):
        codec.decode(codec.seal(payload))


@FEW
@given(st.binary(max_size=300))
def test_any_payload_decodes_or_is_refused(payload: bytes) -> None:
    decodes_or_refuses(payload)


@FEW
@given(st.integers(-128, 127), st.binary(max_size=80), trees)
def test_any_extension_decodes_or_is_refused(code: int, content: bytes, tree: Any) -> None:
    for body in (content, codec.pack(tree)):
        decodes_or_refuses(
            b"\xc8" + len(body).to_bytes(2, "big") + code.to_bytes(1, "big", signed=True) + body
        )


@FEW
@given(trees, st.data())
def test_a_changed_payload_decodes_or_is_refused(tree: Any, data: st.DataObject) -> None:
    payload = bytearray(codec.pack(tree))
    for _ in range(3):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(payload))


def test_bombs() -> None:
    for payload in (
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
    ):
        with pytest.raises(ProtocolError):
            codec.decode(codec.seal(payload))
    nested = codec.pack(None)
    for _ in range(3000):
        nested = b"\xc9" + len(nested).to_bytes(4, "big") + b"\x03" + b"\x91" + nested
    decodes_or_refuses(nested)
    # A tensor that claims more than it brings: refused before memory is asked for.
    for head in (["float32", [1 << 40], "cpu", False], ["float32", [0, 1 << 62], "cpu", False]):
        body = codec.pack([*head, b""])
        decodes_or_refuses(b"\xc7" + bytes([len(body), 12]) + body)


class Colour(IntEnum):
    """An int that is more than an int."""

    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: 0,
        Colour.RED,
        defaultdict(int),
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, device="meta"),
        np.array([object()]),
        np.array(["text"]),
        np.datetime64("2020-01-01"),
        1j,
        range(3),
    ],
    ids=lambda v: type(v).__name__,
)
def test_refused_types_name_their_place(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^s\['a'\]\[1\]\[\(2, 3\)\]: cannot be saved: "):
        codec.encode({"a": [0, {(2, 3): value}]}, name="s")


def test_depth_cycles_and_size() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        codec.encode(loop)
    with pytest.raises(UsageError, match="keep large tensors"):
        codec.encode(bytes(1000), limit=900)
    data = codec.encode(bytes(1000))
    with pytest.raises(ProtocolError, match="allowed"):
        codec.decode(data, limit=900)


def test_version_and_grad() -> None:
    data = bytearray(codec.encode(1))
    data[4] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        codec.decode(data)
    weight = torch.ones(2, requires_grad=True)
    assert codec.decode(codec.encode(weight)).requires_grad
    assert not codec.decode(codec.encode(weight * 2)).requires_grad
    assert codec.decode(codec.encode(codec.Ref("x"))) == codec.Ref("x")
