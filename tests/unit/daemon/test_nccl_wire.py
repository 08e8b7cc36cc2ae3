"""The bytes of NCCL's bootstrap: every layout, in any pieces, and what is refused."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.nccl import wire
from ckptless.daemon.protocol.errors import ProtocolError

from .nccl_rank import decode_id, encode_check_in

V4 = wire.Address("10.0.0.7", 40123)
V6 = wire.Address("fe80::1", 40123, scope=3)

ADDRESSES = st.one_of(
    st.builds(wire.Address, st.ip_addresses(v=4).map(str), st.integers(1, 65535)),
    st.builds(wire.Address, st.ip_addresses(v=6).map(str), st.integers(1, 65535), st.integers(0, 9)),
)


def check_in(nbytes: int, listen: wire.Address = V4) -> wire.CheckIn:
    """Return what the third of five ranks says, in so far as that layout has it."""
    root, roots = (0, 1) if nbytes == 64 else (1, 2)
    opaque = bytes(range(1, 1 + wire.LAYOUTS[nbytes].next_nbytes))
    return wire.CheckIn(2, 5, root, roots, 0, listen, opaque)


@pytest.mark.parametrize(
    ("nbytes", "ints", "listen_at", "connect_at", "connect_nbytes"),
    [
        (64, (2, 5), 8, 36, 28),
        (172, (2, 5, 1, 2), 16, 44, 128),
        (176, (2, 5, 1, 2, 0), 20, 48, 128),
    ],
)
def test_a_check_in_lies_where_that_nccl_puts_it(
    nbytes: int, ints: tuple[int, ...], listen_at: int, connect_at: int, connect_nbytes: int
) -> None:
    said = check_in(nbytes)
    data = encode_check_in(said, nbytes)
    assert len(data) == nbytes
    assert struct.unpack_from(f"<{len(ints)}i", data) == ints
    assert data[listen_at : listen_at + 8] == b"\x02\x00" + struct.pack(">H", 40123) + bytes([10, 0, 0, 7])
    assert data[connect_at:] == said.connect
    assert len(said.connect) == connect_nbytes
    assert wire.decode_check_in(data) == said


@given(ADDRESSES)
def test_addresses_there_and_back(address: wire.Address) -> None:
    assert wire.decode_address(wire.encode_address(address)) == address


def test_what_stands_behind_an_ipv4_address_does_not_matter() -> None:
    assert wire.decode_address(wire.encode_address(V4)[:8] + b"\xff" * 20) == V4


@pytest.mark.parametrize(
    "data", [bytes(28), b"\x02\x00" + bytes(26), b"\x07\x00\x01\x01" + bytes(24), b"\x02\x00\x01\x01" * 6]
)
def test_what_is_no_address_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_address(data)


@pytest.mark.parametrize("root", [V4, V6])
def test_a_unique_id_is_what_every_nccl_from_2_16_on_reads(root: wire.Address) -> None:
    data = wire.encode_id(wire.UniqueId(0x1122334455667788, root))
    assert len(data) == 128
    assert data[:8] == bytes.fromhex("8877665544332211")
    assert not any(data[36:]), "where 2.29 has the number of ranks, which is 0 but for ncclCommGrow"
    assert decode_id(data) == wire.UniqueId(0x1122334455667788, root)


@pytest.mark.parametrize("at", [36, 40, 127])
def test_a_unique_id_with_more_in_it_is_none_of_ours(at: int) -> None:
    data = bytearray(wire.encode_id(wire.UniqueId(1, V4)))
    data[at] = 1
    with pytest.raises(ProtocolError):
        decode_id(bytes(data))


@pytest.mark.parametrize("nbytes", [0, -1, 63, 65, 128, 180, 184, 2**31 - 1])
def test_an_unknown_length_is_refused_by_name_before_it_is_read(nbytes: int) -> None:
    with pytest.raises(wire.UnknownLayoutError, match=r"176 \(NCCL 2.29 to 2.32\)"):
        wire.decode_opening(struct.pack("<QIi", 99, 1, nbytes))


def test_another_type_of_socket_is_refused() -> None:
    with pytest.raises(ProtocolError, match="type 2"):
        wire.decode_opening(struct.pack("<QIi", 99, 2, 176))


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=300))
def test_any_bytes_are_a_check_in_or_refused(opening: bytes, body: bytes) -> None:
    for decode, data in ((wire.decode_opening, opening), (wire.decode_check_in, body)):
        with suppress(ProtocolError):
            decode(data)


@given(st.sampled_from(sorted(wire.LAYOUTS)), st.data())
def test_any_check_in_behind_a_right_opening_is_read_or_refused(nbytes: int, data: st.DataObject) -> None:
    body = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    try:
        said = wire.decode_check_in(body)
    except ProtocolError:
        return
    assert wire.decode_check_in(encode_check_in(said, nbytes)) == said
