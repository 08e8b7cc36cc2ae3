"""Frames: whole messages however the bytes come, and nothing but ProtocolError for bytes that are none."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.codec import PROTOCOL, Decoder, encode
from ckptless.daemon.protocol.errors import BadVersionError, MismatchError, ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.requests import Drilled, DrillJob, Evict, Evicted, Resized, ResizeJob

LIMIT = 1 << 16

texts = st.text(max_size=20)
numbers = st.integers(0, 2**31 - 1)
causes = st.builds(m.Cause, kind=texts, text=texts)
tensors = st.builds(m.TensorsAt, region=numbers, offset=numbers, nbytes=numbers, digest=texts)
from_rank = st.one_of(
    st.builds(m.Hello, protocol=numbers),
    st.builds(m.Left, generation=numbers, cause=causes),
    st.builds(m.Joined, generation=numbers),
    st.builds(m.Fetch, generation=numbers, step=numbers),
    st.builds(
        m.Commit,
        generation=numbers,
        step=numbers,
        record=st.binary(max_size=200),
        digest=texts,
        tensors=st.none() | tensors,
        loss=st.none() | st.floats(allow_nan=False),
    ),
)
evictions = st.builds(
    Evict,
    protocol=numbers,
    job=st.text(min_size=1, max_size=20),
    node=st.text(min_size=1, max_size=20),
    source=st.sampled_from(("operator", "health")),
    reason=texts,
    force=st.booleans(),
)
KINDS: list[Any] = [
    *(m.FromRank, m.ToRank, m.FromAgent, m.Order, p.DaemonMessage, p.AgentMessage),
    m.FromAgent | m.Notice | Evict | DrillJob | ResizeJob,
    Evicted | m.Denied,
    Resized | m.Denied,
    Drilled | m.Denied,
]
EVICT = {"type": "Evict", "protocol": 1, "job": "7", "node": "n1", "source": "operator"}
DRILL = {"type": "DrillJob", "protocol": 1, "job": "7", "kind": "pause-rank", "target": "3", "for_s": 1.0}
RESIZE = {"type": "ResizeJob", "protocol": 1, "job": "7", "nodes": None}


def decoder(kind: Any = m.FromRank, limit: int = LIMIT) -> Decoder[Any]:
    return Decoder(kind, limit)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(st.lists(from_rank, max_size=6), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_messages_come_whole_however_the_bytes_are_cut(sent: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(encode, sent))
    taker, got = decoder(), []
    position = 0
    while position < len(data):
        cut = cuts[position % len(cuts)]
        got += taker.feed(data[position : position + cut])
        position += cut
    assert got == sent


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    for kind in KINDS:
        with contextlib.suppress(ProtocolError):
            assert decoder(kind).feed(noise) == []
        with contextlib.suppress(ProtocolError):
            decoder(kind).feed(frame(noise))


@given(from_rank | evictions, st.data())
def test_one_changed_byte_is_another_message_or_none(sent: Any, data: st.DataObject) -> None:
    body = bytearray(encode(sent)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        (got,) = decoder(Evict if isinstance(sent, Evict) else m.FromRank).feed(frame(bytes(body)))
        assert isinstance(got, msgspec.Struct)


def test_a_frame_over_the_limit_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match=f"limit here is {LIMIT}"):
        decoder().feed(struct.pack("<I", LIMIT + 1))
    assert decoder().feed(struct.pack("<I", LIMIT)) == []


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Hello", "protocol": 1, "more": 2},
        {"type": "Hello"},
        {"type": "Hello", "protocol": "one"},
        {"type": "Stop", "generation": 1, "reason": ""},  # of another edge
        {"type": "Nobody"},
        {"protocol": 1},
        {"type": "Left", "generation": 1, "cause": {"kind": "stop", "why": ""}},
        [],
        None,
    ],
)
def test_what_is_not_of_this_edge_is_refused(message: object) -> None:
    with pytest.raises(ProtocolError, match="not a message of this edge"):
        decoder().feed(frame(msgspec.msgpack.encode(message)))


@pytest.mark.parametrize("kind", KINDS)
def test_endless_nesting_is_refused(kind: Any) -> None:
    deep = b"\x91" * 50_000 + b"\x01"
    for body in (deep, b"\x81\xa4type" + deep, b"\x82\xa1x" + deep + b"\xa4type\xa4Ping"):
        with pytest.raises(ProtocolError):
            decoder(kind).feed(frame(body))


@pytest.mark.parametrize(
    "change",
    [
        {"source": "slurm"},
        {"source": None},
        {"job": ""},
        {"job": "7" * 257},
        {"node": 1},
        {"node": ""},
        {"reason": "x" * 201},
        {"force": 1},
        {"uid": 0},
    ],
)
def test_an_eviction_is_taken_strictly(change: dict[str, object]) -> None:
    kind = m.FromAgent | m.Notice | Evict
    (good,) = decoder(kind).feed(frame(msgspec.msgpack.encode(EVICT)))
    assert good == Evict(protocol=1, job="7", node="n1", source="operator")
    with pytest.raises(ProtocolError):
        decoder(kind).feed(frame(msgspec.msgpack.encode({**EVICT, **change})))


def test_text_that_is_no_text() -> None:
    with pytest.raises(ProtocolError):
        decoder().feed(frame(b"\x82\xa4type\xa4Left\xa5cause\x81\xa4kind\xa2\xff\xfe"))


def test_messages_before_a_bad_one_are_not_lost_silently() -> None:
    """The whole chunk is given up: the connection is closed after it."""
    with pytest.raises(ProtocolError):
        decoder().feed(encode(m.Joined(generation=1)) + frame(b"\xc1"))


@pytest.mark.parametrize(
    "first",
    [
        {"type": "AgentHello", "protocol": 99, "no such field": 1},
        {"type": "no such message", "protocol": 99},
        {"opening": {"protocol": 99, "more": [1]}},
    ],
)
def test_what_another_version_says_first_names_the_versions(first: dict[str, object]) -> None:
    """Whatever its fields are by then."""
    with pytest.raises(MismatchError, match="the other end speaks protocol 99, this end 1"):
        Decoder(m.FromAgent, 1000).feed(encode(first))


@pytest.mark.parametrize(
    "first",
    [{"protocol": PROTOCOL, "no": 1}, {"protocol": True}, {"protocol": "99"}, {"opening": 7}, [99], 99],
)
def test_what_names_no_other_version_is_just_not_understood(first: object) -> None:
    with pytest.raises(ProtocolError, match="not a message of this edge") as caught:
        Decoder(m.FromAgent, 1000).feed(encode(first))
    assert not isinstance(caught.value, MismatchError)


def test_a_version_of_the_state_in_another_format() -> None:
    """Of a newer ckptless that has used the same memory."""
    header = version.Header("job", 0, 0, 1, 1, "00" * 16, 0, ())
    slot = bytearray(version.encode(header))
    slot[8] = 99
    with pytest.raises(BadVersionError, match="a version of format 99; this is 1"):
        version.decode(bytes(slot))


@pytest.mark.parametrize(
    "change",
    [
        *({"job": job} for job in ("", "7" * 257, None)),
        *({"nodes": nodes} for nodes in (-1, 65537, 1.5, "max")),
        {"uid": 0},
    ],
)
def test_a_wish_for_another_size_is_taken_strictly(change: dict[str, object]) -> None:
    kind = m.FromAgent | m.Notice | Evict | ResizeJob
    (good,) = decoder(kind).feed(frame(msgspec.msgpack.encode(RESIZE)))
    assert good == ResizeJob(protocol=1, job="7", nodes=None)
    with pytest.raises(ProtocolError):
        decoder(kind).feed(frame(msgspec.msgpack.encode({**RESIZE, **change})))
    without = {name: value for name, value in RESIZE.items() if name != "nodes"}
    with pytest.raises(ProtocolError):
        decoder(kind).feed(frame(msgspec.msgpack.encode(without)))


@pytest.mark.parametrize(
    "change",
    [
        *({"job": job} for job in ("", "7" * 257, None)),
        *({"kind": kind} for kind in ("kill", "cut", "", None)),
        *({"target": target} for target in ("", "7" * 257, 3)),
        *({"step": step} for step in (-1, 1 << 62, 1.5, None)),
        *({"for_s": for_s} for for_s in (-0.1, 3600.1, None, "1")),
        *({"deadline_s": deadline_s} for deadline_s in (0.0, -1.0, 86400.5)),
        *({"force": 1}, {"uid": 0}),
    ],
)
def test_a_drill_is_taken_strictly(change: dict[str, object]) -> None:
    kind = m.FromAgent | m.Notice | Evict | DrillJob
    (good,) = decoder(kind).feed(frame(msgspec.msgpack.encode(DRILL)))
    assert good == DrillJob(protocol=1, job="7", kind="pause-rank", target="3", for_s=1.0)
    with pytest.raises(ProtocolError):
        decoder(kind).feed(frame(msgspec.msgpack.encode({**DRILL, **change})))


@pytest.mark.parametrize(
    "drill",
    [
        *({"kind": kind} for kind in ("kill-rank", "pause-rank", "kill-agent", "cut-node")),
        {"kind": "kill-rank", "rank": 1, "node": 1},
        {"kind": "kill-agent", "rank": 1},
        {"kind": "kill-agent", "node": 1 << 16},
        {"kind": "kill-rank", "rank": 1 << 18},
        {"kind": "kill-rank", "rank": 1, "step": -2},
    ],
)
def test_what_is_no_drill_does_not_come_from_a_daemon(drill: dict[str, object]) -> None:
    asked = {
        "type": "DrillAsked",
        "job": "7",
        "drill": {"kind": "kill-rank", "rank": 1, "uid": 0},
        "left_s": 1.0,
    }
    (good,) = decoder(p.DaemonMessage).feed(frame(msgspec.msgpack.encode(asked)))
    assert good == p.DrillAsked(job="7", drill=m.Drill(kind="kill-rank", rank=1, uid=0), left_s=1.0)
    with pytest.raises(ProtocolError):
        decoder(p.DaemonMessage).feed(frame(msgspec.msgpack.encode({**asked, "drill": {**drill, "uid": 0}})))
