"""Whose a connection is: what the kernel is asked, what its answers mean, and /proc as the second way."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import sock_owner
from ckptless.daemon.agent.kvstore.sock_owner import (
    CannotAskError,
    Owner,
    best_asker,
    decode_reply,
    encode_request,
    find_in_table,
    from_netlink,
    from_proc,
)

OWN, PEER = ("127.0.0.1", 43210), ("127.0.0.1", 6821)
HEADER = struct.Struct("=IHHII")


def answer(uid: int = 1000, inode: int = 77, state: int = 1, ports: tuple[int, int] = (43210, 6821)) -> bytes:
    """A struct inet_diag_msg as linux/inet_diag.h has it."""
    body = struct.pack("=BBBB", socket.AF_INET, state, 0, 0) + struct.pack(">HH", *ports)
    body += bytes(32) + bytes(12) + struct.pack("=IIIII", 0, 0, 0, uid, inode)
    return HEADER.pack(16 + len(body), 20, 0, 1, 0) + body


def refusal(number: int) -> bytes:
    body = struct.pack("=i", -number)
    return HEADER.pack(16 + len(body), 2, 0, 1, 0) + body


def test_a_question_has_the_layout_of_the_kernels_header() -> None:
    request = encode_request(OWN, PEER)
    assert HEADER.unpack_from(request) == (72, 20, 1, 1, 0)
    assert request[16:18] == bytes([socket.AF_INET, socket.IPPROTO_TCP])
    assert struct.unpack_from(">HH", request, 24) == (43210, 6821)
    assert request[28:32] == request[44:48] == socket.inet_aton("127.0.0.1")
    assert request[-8:] == b"\xff" * 8
    six = encode_request(("::1", 1), ("::1", 2))
    assert six[16] == socket.AF_INET6
    assert six[28:44] == socket.inet_pton(socket.AF_INET6, "::1")


def test_answers() -> None:
    assert decode_reply(answer(), OWN, PEER) == Owner(1000, 77)
    # What remains of a closed socket; a socket that only listens there; another connection.
    assert decode_reply(answer(uid=0, inode=0), OWN, PEER) is None
    assert decode_reply(answer(state=10), OWN, PEER) is None
    assert decode_reply(answer(ports=(43210, 1)), OWN, PEER) is None
    assert decode_reply(refusal(errno.ENOENT), OWN, PEER) is None
    with pytest.raises(CannotAskError) as caught:
        decode_reply(refusal(errno.EPERM), OWN, PEER)
    assert caught.value.errno == errno.EPERM


@given(st.binary(max_size=120))
def test_any_other_answer_is_an_error_or_nobody(body: bytes) -> None:
    reply = HEADER.pack(16 + len(body), 20, 0, 1, 0) + body
    try:
        found = decode_reply(reply, OWN, PEER)
    except CannotAskError:
        assert len(body) < 72
    else:
        assert found is None or struct.pack(">HH", 43210, 6821) == body[4:8]


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1AA5 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:A8CA 0100007F:1AA5 01 00000000:00000000 00:00000000 00000000  1000        0 77 1 0 20 4 0 10 -1
   2: 0100007F:1AA5 0100007F:A8CA 01 00000000:00000000 00:00000000 00000000     0        0 78 1 0 20 4 0 10 -1
   3: 0100007F:A8CB 0100007F:1AA5 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0
"""
TABLE6 = """\
   0: 0000000000000000FFFF00000100007F:A8CC 0000000000000000FFFF00000100007F:1AA5 01 0:0 00:0 0  1000  0 79 1
   1: 00000000000000000000000001000000:0001 00000000000000000000000001000000:0002 01 0:0 00:0 0  1001  0 80 1
"""


def test_the_table() -> None:
    lines = TABLE.splitlines()
    assert find_in_table(lines, OWN, PEER) == Owner(1000, 77)
    assert find_in_table(lines, PEER, OWN) == Owner(0, 78)
    assert find_in_table(lines, ("127.0.0.1", 43211), PEER) is None
    assert find_in_table(lines, ("127.0.0.2", 43210), PEER) is None
    six = TABLE6.splitlines()
    assert find_in_table(six, ("127.0.0.1", 43212), PEER) == Owner(1000, 79)
    assert find_in_table(six, ("::1", 1), ("::1", 2)) == Owner(1001, 80)


@contextmanager
def connection(family: socket.AddressFamily, host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(family, socket.SOCK_STREAM) as ours,
    ):
        ours.connect((host, server.getsockname()[1]))
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_both_ways_about_a_connection_of_our_own(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with connection(family, host) as (ours, theirs):
        wanted = Owner(os.getuid(), os.fstat(ours.fileno()).st_ino)
        ends = theirs.getpeername(), theirs.getsockname()
        assert from_netlink(*ends) == from_proc(*ends) == wanted
        ours.close()
        assert from_netlink(*ends) is None
        assert from_proc(*ends) is None


def test_without_netlink_the_table_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "seccomp")

    assert best_asker() is from_netlink
    monkeypatch.setattr(sock_owner, "from_netlink", refused)
    assert best_asker() is from_proc
    monkeypatch.setattr(sock_owner, "_PROC_NET", tmp_path)
    assert best_asker() is None
