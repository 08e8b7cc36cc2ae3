"""Any batch comes back as it was, without a copy of its arrays; any other bytes are refused or decode."""

import gc
import math
import struct
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import codec, raw

FEW = settings(max_examples=100, deadline=None)


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
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind == "b":
        data = bytearray(b & 1 for b in data)
    made = np.frombuffer(data, dtype).reshape(shape) if size else np.empty(shape, dtype)
    return made[()] if draw(st.booleans()) else made.T


leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=40)),
    *(tensors(), tensors(), arrays()),
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


def written(batch: object, start: int = 0) -> bytearray:
    """As it would lie in memory, from `start` on."""
    encoded = codec.encode_apart(batch)
    data = bytearray(start + encoded.nbytes)
    for offset, part in encoded.parts:
        data[start + offset : start + offset + len(part)] = part
    return data


@FEW
@given(batches, st.sampled_from([0, 64, 4096]))
def test_round_trip(batch: Any, start: int) -> None:
    data = written(batch, start)
    back = codec.decode_apart(data, start, len(data) - start)
    # Types, order and bits, as the state's codec, which has tests of its own, tells them apart.
    assert codec.pack(back) == codec.pack(batch)
    assert written(back, start) == data


@FEW
@given(batches)
def test_arrays_are_aligned_and_do_not_overlap(batch: Any) -> None:
    encoded = codec.encode_apart(batch)
    end = 0
    for offset, part in encoded.parts:
        assert offset % 64 == 0
        assert offset >= end
        end = offset + len(part)
    assert end == encoded.nbytes


def test_arrays_are_views() -> None:
    data = written({"x": torch.arange(8), "y": (np.arange(3.0),)})
    batch = codec.decode_apart(data, 0, len(data))
    batch["x"][0], batch["y"][0][0] = 77, 7.5
    again = codec.decode_apart(data, 0, len(data))
    assert again["x"][0] == 77
    assert again["y"][0][0] == 7.5
    assert batch["x"].data_ptr() == again["x"].data_ptr()


class Memory(bytearray):
    """It can be seen to go."""


def test_the_memory_goes_with_the_last_array() -> None:
    memory = Memory(written({"x": torch.arange(8), "y": (np.arange(3.0),)}))
    seen = weakref.ref(memory)
    batch = codec.decode_apart(memory, 0, len(memory))
    gc.disable()
    try:
        del memory
        array = batch.pop("y")[0]
        del batch
        assert seen() is not None
        assert array.tolist() == [0.0, 1.0, 2.0]
        del array
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_written_is_not_a_copy() -> None:
    tensor = torch.arange(1000)
    encoded = codec.encode_apart([tensor])
    tensor[0] = 5
    assert bytes(encoded.parts[1][1][:8]) == struct.pack("<q", 5)


@FEW
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_apart(bytearray(data), 0, len(data))


@FEW
@given(batches, st.data())
def test_a_cut_or_a_longer_one_is_refused(batch: Any, data: st.DataObject) -> None:
    whole = written(batch)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + bytearray(1)):
        with pytest.raises(ProtocolError):
            codec.decode_apart(broken, 0, len(broken))


@FEW
@given(batches, st.data())
def test_changed_bytes_decode_or_are_refused(batch: Any, data: st.DataObject) -> None:
    changed = written(batch)
    for _ in range(3):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        codec.decode_apart(changed, 0, len(changed))


heads = st.one_of(
    st.lists(st.one_of(st.sampled_from(["int64", "<i8", "<b9"]), st.integers()), max_size=4),
    st.tuples(
        st.sampled_from(["int64", "<i8", "|O8", "nothing"]),
        st.lists(st.integers(-1, 1 << 50), max_size=4),
    ).map(list),
)


def of_payload(payload: bytes, more: int) -> bytearray:
    return bytearray(struct.pack("<4sHHQ", b"CKBT", codec.VERSION, 0, len(payload)) + payload + bytes(more))


@FEW
@given(st.lists(st.tuples(st.integers(10, 18), heads), max_size=3), st.integers(0, 300))
def test_any_head_decodes_or_is_refused(found: list[tuple[int, Any]], more: int) -> None:
    made = [msgspec.msgpack.Ext(code, codec.pack(head)) for code, head in found]
    data = of_payload(msgspec.msgpack.encode(made), more)
    with suppress(ProtocolError):
        codec.decode_apart(data, 0, len(data))


def test_an_array_ends_where_the_batch_does() -> None:
    head = msgspec.msgpack.encode(msgspec.msgpack.Ext(16, codec.pack(["int64", [2]])))
    begin = -(-(16 + len(head)) // 64) * 64
    whole = of_payload(head, begin + 16 - 16 - len(head))
    assert codec.decode_apart(whole, 0, len(whole)).tolist() == [0, 0]
    for more in (0, begin + 16 - 16 - len(head) - 1, begin + 16 - 16 - len(head) + 1):
        data = of_payload(head, more)
        with pytest.raises(ProtocolError):
            codec.decode_apart(data, 0, len(data))
    with pytest.raises(ProtocolError, match="apart from a payload that stands alone"):
        codec.unpack(head)


def test_places_outside_are_refused() -> None:
    data = written(1)
    for start, nbytes in ((1, 8), (64, 1 << 20), (0, -1), (0, len(data) + 1)):
        with pytest.raises(ProtocolError):
            codec.decode_apart(data, start, nbytes)


class Pair(NamedTuple):
    """A tuple that is more than one."""

    a: int


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Pair(1),
        torch.zeros(1, requires_grad=True),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, device="meta"),
        np.array([object()]),
        np.array(["text"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_in_a_batch_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^batch.*cannot be "):
        codec.encode_apart({"a": [0, value]})


def test_depth() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        codec.encode_apart(loop)
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    data = written(deep)
    assert codec.decode_apart(data, 0, len(data)) == deep


def test_another_version_is_refused() -> None:
    data = written(1)
    data[4] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        codec.decode_apart(data, 0, len(data))
