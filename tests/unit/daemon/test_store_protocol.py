"""The TCPStore wire format: bytes to requests, however they are cut, and nothing but ProtocolError."""

import itertools
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.parser import StoreParser
from ckptless.daemon.agent.kvstore.protocol import Op, Request
from ckptless.daemon.protocol.errors import ProtocolError

HELLO = struct.pack("<BI", Op.VALIDATE, protocol.MAGIC)


def blob(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


OPCODES: dict[type[Request], int] = {
    protocol.Ping: 13,
    protocol.Set: 1,
    protocol.CompareSet: 2,
    protocol.Get: 3,
    protocol.Add: 4,
    protocol.Check: 5,
    protocol.Wait: 6,
    protocol.NumKeys: 7,
    protocol.Delete: 8,
    protocol.Append: 9,
    protocol.MultiGet: 10,
    protocol.MultiSet: 11,
    protocol.CancelWait: 12,
    protocol.QueuePush: 14,
    protocol.QueuePop: 15,
    protocol.QueueLen: 16,
    protocol.ListKeys: 17,
    protocol.Barrier: 18,
}


def field(value: object) -> bytes:
    match value:
        case bytes():
            return blob(value)
        case int():
            return struct.pack("<q", value)
        case tuple():
            flat = [part for item in value for part in (item if isinstance(item, tuple) else (item,))]
            return struct.pack("<Q", len(value)) + b"".join(map(blob, flat))
    raise TypeError(value)


def to_bytes(request: Request) -> bytes:
    """Return what torch's client sends, as logged between it and its own server."""
    op = bytes([OPCODES[type(request)]])
    if isinstance(request, protocol.Ping):
        return op + struct.pack("<I", request.nonce)
    return op + b"".join(field(getattr(request, name)) for name in request.__struct_fields__)


short = st.binary(max_size=6)
several = st.lists(short, max_size=4).map(tuple)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
requests_of_every_kind: st.SearchStrategy[Request] = st.one_of(
    st.builds(protocol.Ping, st.integers(0, (1 << 32) - 1)),
    st.builds(protocol.Set, short, short),
    st.builds(protocol.CompareSet, short, short, short),
    st.builds(protocol.Get, short),
    st.builds(protocol.Add, short, int64),
    st.builds(protocol.Check, several),
    st.builds(protocol.Wait, several),
    st.builds(protocol.NumKeys),
    st.builds(protocol.Delete, short),
    st.builds(protocol.Append, short, short),
    st.builds(protocol.MultiGet, several),
    st.builds(protocol.MultiSet, st.lists(st.tuples(short, short), max_size=4).map(tuple)),
    st.builds(protocol.CancelWait),
    st.builds(protocol.QueuePush, short, short),
    st.builds(protocol.QueuePop, short),
    st.builds(protocol.QueueLen, short),
    st.builds(protocol.ListKeys),
    st.builds(protocol.Barrier, short, int64),
)


@given(st.lists(requests_of_every_kind, max_size=8), st.lists(st.integers(0, 400)))
def test_any_split_gives_the_same_requests(requests: list[Request], cuts: list[int]) -> None:
    stream = HELLO + b"".join(map(to_bytes, requests))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parser = StoreParser()
    got: list[Request] = []
    for start, end in itertools.pairwise(edges):
        got += parser.feed(stream[start:end])
    assert got == requests


@given(st.lists(requests_of_every_kind, max_size=3), st.lists(st.binary(max_size=40), max_size=6))
def test_random_bytes_raise_nothing_but_protocol_error(requests: list[Request], noise: list[bytes]) -> None:
    parser = StoreParser()
    parser.feed(HELLO + b"".join(map(to_bytes, requests)))
    try:
        for piece in noise:
            parser.feed(piece)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            parser.feed(b"\x07")


@given(st.binary(max_size=64))
def test_a_stranger_is_refused_at_once(data: bytes) -> None:
    parser = StoreParser()
    if HELLO.startswith(data[:5]):
        assert parser.feed(data[:5]) == []
    else:
        with pytest.raises(ProtocolError, match="VALIDATE"):
            parser.feed(data[:5].ljust(5, b"\0"))


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


KEY = blob(b"key")
LARGEST = u64(protocol.MAX_VALUE_NBYTES)
TOO_LARGE = [
    b"\x03" + u64(protocol.MAX_KEY_NBYTES + 1),
    b"\x03" + u64((1 << 64) - 1),
    b"\x01" + KEY + u64(protocol.MAX_VALUE_NBYTES + 1),
    *(bytes([op]) + u64(protocol.MAX_KEYS + 1) for op in (Op.CHECK, Op.WAIT, Op.MULTI_GET, Op.MULTI_SET)),
]


@pytest.mark.parametrize("data", [*TOO_LARGE, b"\x13", b"\xff", HELLO], ids=repr)
def test_refused_before_its_bytes_come(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        StoreParser().feed(HELLO + data)


def test_a_request_as_a_whole_is_bounded_too() -> None:
    parser = StoreParser()
    value = bytes(protocol.MAX_VALUE_NBYTES)
    parser.feed(HELLO + b"\x0b" + u64(3) + KEY + LARGEST)
    parser.feed(value + KEY + LARGEST)
    with pytest.raises(ProtocolError, match="request of more than"):
        parser.feed(value + KEY + LARGEST)


def test_the_limits_themselves_are_allowed() -> None:
    keys = protocol.Check(tuple(b"" for _ in range(protocol.MAX_KEYS)))
    long_key = protocol.Get(bytes(protocol.MAX_KEY_NBYTES))
    assert StoreParser().feed(HELLO + to_bytes(keys) + to_bytes(long_key)) == [keys, long_key]


def test_a_large_value_in_small_pieces_takes_linear_time() -> None:
    def seconds(nbytes: int) -> float:
        parser = StoreParser()
        parser.feed(HELLO + b"\x01" + KEY + u64(nbytes))
        piece, got = bytes(1024), []
        began = time.process_time()
        for _ in range(nbytes // len(piece)):
            got += parser.feed(piece)
        took = time.process_time() - began
        assert got == [protocol.Set(b"key", bytes(nbytes))]
        return took

    # Quadratic would be 256 times as long for 16 times the size; leave room for a busy machine.
    assert seconds(32 << 20) < 80 * max(seconds(2 << 20), 0.002)


def test_answers() -> None:
    assert protocol.encode_nonce(0x01020304) == b"\4\3\2\1"
    assert protocol.encode_number(-2) == b"\xfe" + b"\xff" * 7
    assert (protocol.encode_check(True), protocol.encode_check(False)) == (b"\0", b"\1")
    assert protocol.encode_value(b"ab") == u64(2) + b"ab"
    assert protocol.encode_values([b"ab", b""]) == u64(2) + b"ab" + u64(0)
    assert protocol.encode_keys([b"k"]) == u64(1) + u64(1) + b"k"
    assert protocol.encode_popped(0, None) == u64(0)
    assert protocol.encode_popped(2, b"v") == u64(2) + u64(1) + b"v"


def test_an_answer_that_multiplies_a_value_is_refused() -> None:
    value = bytes(1 << 20)
    with pytest.raises(ProtocolError, match="an answer of"):
        protocol.encode_values([value] * 256)
