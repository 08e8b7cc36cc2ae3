"""What stores of two agents tell each other comes back as it was, and nothing else is taken."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.agent.kvstore.answers import Refusal, Reply
from ckptless.daemon.api.errors import ProtocolError

NUMBER = st.integers(0, (1 << 62) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.binary(max_size=20)
KEYS = st.lists(TEXT, max_size=3).map(tuple)
REQUEST = st.one_of(
    st.builds(protocol.Set, TEXT, TEXT),
    st.builds(protocol.MultiSet, st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)),
    st.builds(protocol.CompareSet, TEXT, TEXT, TEXT),
    st.builds(protocol.Add, TEXT, INT64),
    st.builds(protocol.Append, TEXT, TEXT),
    st.builds(protocol.Delete, TEXT),
    st.builds(protocol.MultiGet, KEYS),
    st.builds(protocol.Check, KEYS),
    st.builds(protocol.Wait, KEYS),
    st.builds(protocol.Barrier, TEXT, INT64),
    st.builds(protocol.NumKeys),
    st.builds(protocol.ListKeys),
    st.builds(protocol.QueuePush, TEXT, TEXT),
    st.builds(protocol.QueuePop, TEXT),
    st.builds(protocol.QueueLen, TEXT),
    st.builds(wire.Gather, TEXT),
)
ANSWER = st.one_of(
    st.builds(
        Reply,
        INT64,
        st.lists(st.none() | TEXT, max_size=3).map(tuple),
        st.lists(NUMBER, max_size=3).map(tuple),
    ),
    st.builds(Refusal, st.text(max_size=9), st.booleans()),
)
ITEMS = st.lists(
    st.one_of(
        st.builds(wire.Ask, NUMBER, REQUEST),
        st.builds(wire.Told, NUMBER, ANSWER),
        st.builds(wire.Cancel, NUMBER),
        st.builds(wire.Drop, TEXT),
        st.builds(wire.Dropped, TEXT),
    )
)


@given(ITEMS)
def test_there_and_back(items: list[wire.Item]) -> None:
    assert [item for body in wire.encode(items) for item in wire.decode(body)] == items


@given(st.binary(max_size=300))
def test_any_bytes_are_items_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        wire.decode(data)


@given(ITEMS, st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_changed_byte_is_items_or_refused(items: list[wire.Item], place: int, byte: int) -> None:
    for body in wire.encode(items):
        changed = bytearray(body)
        changed[place % len(changed)] = byte
        with contextlib.suppress(ProtocolError):
            wire.decode(bytes(changed))


def test_bodies_are_as_large_as_they_need_to_be() -> None:
    items = [wire.Ask(n, protocol.Set(b"k", bytes(400_000))) for n in range(6)]
    assert [len(wire.decode(body)) for body in wire.encode(items)] == [2, 2, 2]
