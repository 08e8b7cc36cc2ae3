"""The version format: one way to write a header, nothing but that is read, and every changed bit is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.version import PAGE_NBYTES, ChunkDigests, Header

CHUNK = PAGE_NBYTES

payloads = st.binary(max_size=3 * CHUNK + 100)
names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=40)
numbers = st.integers(0, (1 << 32) - 1)
steps = st.integers(0, version.STEP_LIMIT - 1)


def header_of(payload: bytes, **fields: object) -> Header:
    chunks = tuple(version.digest_of(payload[a:b]) for a, b in version.spans(len(payload), CHUNK))
    plain = Header("job", 1, 2, 3, 4, "ab" * 16, len(payload), chunks, CHUNK, run="cd" * 16)
    return replace(plain, **fields)  # type: ignore[arg-type]


def written(payload: bytes) -> tuple[bytearray, str]:
    """A slot with a version, and the header's digest."""
    header = header_of(payload)
    slot = bytearray(header.total_nbytes)
    slot[header.header_nbytes :] = payload
    return slot, version.write_header(memoryview(slot), header)


@given(payloads, names, numbers, numbers, steps, steps)
def test_what_was_written_is_read(
    payload: bytes, job: str, shard: int, rank: int, step: int, generation: int
) -> None:
    header = header_of(payload, job=job, shard=shard, rank=rank, step=step, generation=generation)
    encoded = version.encode(header)
    assert len(encoded) == header.header_nbytes
    assert len(encoded) % PAGE_NBYTES == 0
    found = version.decode(encoded)
    assert replace(found, digest="") == header
    assert version.encode(found) == encoded
    assert version.decode(encoded, found.digest) == found


@given(st.binary(max_size=2 * PAGE_NBYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    for prefix in (b"", version.MAGIC, version.MAGIC + b"\1\0"):
        with pytest.raises(BadVersionError):
            version.decode(prefix + data)


@given(payloads, st.data())
def test_a_truncated_version_is_refused(payload: bytes, data: st.DataObject) -> None:
    slot, digest = written(payload)
    cut = bytes(slot[: data.draw(st.integers(0, len(slot) - 1))])
    with pytest.raises(BadVersionError):
        version.verify(memoryview(cut), digest)


def test_every_single_bit_of_a_header_counts() -> None:
    slot, _ = written(b"x" * (CHUNK + 1))
    encoded = memoryview(bytearray(slot[:PAGE_NBYTES]))
    for bit in range(8 * len(encoded)):
        encoded[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadVersionError):
            version.decode(encoded)
        encoded[bit // 8] ^= 1 << bit % 8
    assert version.decode(encoded).step == 3


@given(payloads.filter(bool), st.data())
def test_a_flipped_bit_of_the_payload_names_its_chunk(payload: bytes, data: st.DataObject) -> None:
    slot, digest = written(payload)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    slot[len(slot) - len(payload) + bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadVersionError) as caught:
        version.verify(memoryview(slot), digest)
    assert caught.value.chunk == bit // 8 // CHUNK


@settings(max_examples=50)
@given(payloads, st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=6))
def test_a_payload_is_digested_in_pieces_of_any_size(payload: bytes, sizes: list[int]) -> None:
    digests, upto, number = ChunkDigests(memoryview(payload), CHUNK), 0, 0
    while upto < len(payload):
        upto = min(upto + sizes[number % len(sizes)], len(payload))
        digests.came(upto)
        number += 1
    assert digests.finish() == header_of(payload).chunks


def test_more_than_the_version_is_refused() -> None:
    slot, digest = written(b"abc")
    with pytest.raises(BadVersionError, match="the header says"):
        version.verify(memoryview(bytes(slot) + b"d"), digest)


def test_another_sound_header_than_that_told_of_is_refused() -> None:
    slot, _ = written(b"abc")
    _, other = written(b"abd")
    with pytest.raises(BadVersionError, match="told of"):
        version.decode(memoryview(slot), other)


def test_an_invalidated_slot_holds_no_version() -> None:
    slot, digest = written(b"abc")
    version.invalidate(memoryview(slot))
    with pytest.raises(BadVersionError, match="not written to its end"):
        version.verify(memoryview(slot), digest)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"job": ""}, "name of 0 bytes", id="no job"),
        pytest.param({"job": "x" * 257}, "name of 257 bytes", id="a long job"),
        pytest.param({"job": "a\0"}, "NUL", id="a NUL"),
        pytest.param({"shard": 1 << 32}, "shard 4294967296", id="shard"),
        pytest.param({"rank": -1}, "rank -1", id="rank"),
        pytest.param({"step": 1 << 62}, "step", id="step"),
        pytest.param({"generation": -1}, "generation -1", id="generation"),
        pytest.param({"chunk_nbytes": 100}, "chunks of 100", id="small chunks"),
        pytest.param({"nbytes": CHUNK + 1}, "digests", id="a chunk without digest"),
    ],
)
def test_fields_beyond_their_limits_are_not_written(fields: dict[str, object], words: str) -> None:
    with pytest.raises(BadVersionError, match=words):
        version.encode(header_of(b"abc", **fields))


def test_a_version_of_something_else_is_refused() -> None:
    header = header_of(b"abc")
    mine = version.Origin("job", "cd" * 16)
    header.check(mine, 1, 3, 4)
    foreign = [mine._replace(job="boj"), mine._replace(run="dc" * 16), version.Origin("job")]
    for origin in foreign:
        with pytest.raises(BadVersionError, match="a version of") as caught:
            header.check(origin, 1, 3, 4)
        assert str(origin) in str(caught.value)
    for shard, step, newest in ((2, 3, 4), (1, 4, 4), (1, 3, 3)):
        with pytest.raises(BadVersionError, match="a version of"):
            header.check(mine, shard, step, newest)
