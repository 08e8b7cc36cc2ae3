"""By what twins' versions are compared: the chunks' digests, without what each rank has for itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.twins import Span, compare, twin_digest
from ckptless.daemon.protocol.version import Header, decode, digest_of, encode, spans

CHUNK = version.PAGE_NBYTES
NBYTES = 3 * CHUNK + 700
LAYOUT = "ab" * 16


def header(payload: bytes, layout: str = LAYOUT, rank: int = 0) -> Header:
    chunks = tuple(digest_of(payload[start:end]) for start, end in spans(len(payload), CHUNK))
    return Header("j", 0, rank, 3, 1, layout, len(payload), chunks, CHUNK)


def digest(payload: bytes, own: tuple[Span, ...] = (), layout: str = LAYOUT) -> str:
    return twin_digest(header(payload, layout), memoryview(payload), own)


@st.composite
def own_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """Ascending, without overlaps; some go over the end of a chunk, some over several."""
    cuts = sorted(draw(st.sets(st.integers(0, NBYTES), max_size=8)))
    return tuple((cuts[i], cuts[i + 1]) for i in range(0, len(cuts) - 1, 2))


@given(own_spans(), st.integers(0, NBYTES - 1), st.integers(0, 7))
def test_any_bit_tells_twins_apart_unless_it_is_ones_own(own: tuple[Span, ...], at: int, bit: int) -> None:
    payload = bytes(i * 37 % 251 for i in range(NBYTES))
    flipped = payload[:at] + bytes([payload[at] ^ 1 << bit]) + payload[at + 1 :]
    mine = any(start <= at < end for start, end in own)
    assert compare(digest(payload, own), digest(flipped, own)) == ("equal" if mine else "differ")


def test_what_is_laid_out_in_another_way_is_not_compared() -> None:
    payload = bytes(NBYTES)
    other = b"\1" * NBYTES
    assert compare(digest(payload), digest(other, layout="cd" * 16)) == "incomparable"
    assert compare(digest(payload), digest(other, ((64, 128),))) == "incomparable"
    assert compare(digest(payload), digest(other[:-1])) == "incomparable"
    assert compare(digest(payload), "") == compare("", "") == "incomparable"
    assert compare(digest(payload), digest(other)) == "differ"


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, CHUNK + 1])
def test_small_ones(nbytes: int) -> None:
    payload = bytes(nbytes)
    assert compare(digest(payload), digest(payload)) == "equal"


def test_without_own_bytes_the_payload_is_not_read() -> None:
    payload = bytes(range(256)) * 64
    assert twin_digest(header(payload), memoryview(b""), ()) == digest(payload)


def test_a_header_carries_it() -> None:
    payload = bytes(NBYTES)
    plain = header(payload)
    assert decode(encode(plain)).twins == ""
    compared = replace(plain, twins=digest(payload))
    assert decode(encode(compared)).twins == compared.twins
    # Whoever wrote it, and in which generation, makes no difference.
    assert twin_digest(header(payload, rank=2), memoryview(payload)) == compared.twins
