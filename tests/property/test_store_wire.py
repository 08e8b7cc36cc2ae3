"""What agents and the home of the keys tell each other comes back as it was, and nothing else is taken."""

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.protocol.errors import ProtocolError

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
)
ANSWER = st.one_of(
    st.builds(
        wire.Reply,
        TEXT,
        st.lists(st.none() | TEXT, max_size=3).map(tuple),
        st.lists(NUMBER, max_size=3).map(tuple),
    ),
    st.builds(wire.Refusal, st.text(max_size=9), st.booleans()),
)
TO_HOME = st.lists(
    st.one_of(
        st.builds(wire.Ask, NUMBER, REQUEST), st.builds(wire.Cancel, NUMBER), st.builds(wire.Dropped, TEXT)
    )
)
FROM_HOME = st.lists(st.one_of(st.builds(wire.Told, NUMBER, ANSWER), st.builds(wire.Drop, TEXT)))
BOTH: Any = st.one_of(
    st.tuples(TO_HOME, st.just(wire.TO_HOME)), st.tuples(FROM_HOME, st.just(wire.FROM_HOME))
)
DECODERS: Any = st.sampled_from([wire.TO_HOME, wire.FROM_HOME])


@given(BOTH)
def test_there_and_back(said: tuple[list[wire.Item], Any]) -> None:
    items, decoder = said
    assert [item for body in wire.encode(items) for item in wire.decode(body, decoder)] == items


@given(st.binary(max_size=300), DECODERS)
def test_any_bytes_are_items_or_refused(data: bytes, decoder: Any) -> None:
    with contextlib.suppress(ProtocolError):
        wire.decode(data, decoder)


@given(BOTH, DECODERS, st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_changed_byte_is_items_or_refused(
    said: tuple[list[wire.Item], Any], decoder: Any, place: int, byte: int
) -> None:
    for body in wire.encode(said[0]):
        changed = bytearray(body)
        changed[place % len(changed)] = byte
        with contextlib.suppress(ProtocolError):
            wire.decode(bytes(changed), decoder)


def test_bodies_are_as_large_as_they_need_to_be() -> None:
    items = [wire.Ask(n, protocol.Set(b"k", bytes(400_000))) for n in range(6)]
    assert [len(wire.decode(body, wire.TO_HOME)) for body in wire.encode(items)] == [2, 2, 2]
