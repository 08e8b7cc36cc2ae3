"""What another user can do to a daemon's Unix socket; each function runs in a forked process of that user."""

from __future__ import annotations

import array
import contextlib
import encodings.idna  # noqa: F401  # a forked child of another user cannot load it any more
import os
import socket
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.codec import Decoder, encode
from ckptless.daemon.api.keeping import KeptList, WhatIsKept

ATTACKER, VICTIM = 65534, 65533
LINGER_S = 30


def forked(uid: int, work: Callable[[], object]) -> int:
    """Do it in a child of that user (which may not read this Python, so it is not started anew); its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # it goes no further than this process
            traceback.print_exc()
        finally:
            os._exit(status)  # nothing of pytest runs in the child
    return child


def connected(address: str) -> socket.socket:
    """A connection to the daemon."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(LINGER_S)
    sock.connect(address)
    return sock


def lingering(seconds: int) -> tuple[socket.socket, object]:
    """A socket of which close(2) takes so long, for who closes it last; and what must live meanwhile."""
    server = socket.create_server(("127.0.0.1", 0))
    sock = socket.create_connection(server.getsockname())
    silent, _ = server.accept()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(b"x" * (1 << 16))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    return sock, (server, silent)


def pass_lingering(address: str, connections: int) -> None:
    """Bytes and a descriptor on each of so many connections, at once and without a hello."""
    kept: list[object] = []
    for _ in range(connections):
        sock, alive = lingering(LINGER_S)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))]
        client = connected(address)
        with contextlib.suppress(OSError):  # the kernel refuses (EPERM), or the daemon has hung up
            client.sendmsg([b"\x10\0\0\0"], rights)
        sock.close()
        kept += [alive, client]
    time.sleep(3 * LINGER_S)


def pour(address: str, connections: int, nbytes: int) -> None:
    """So many bytes into each of so many connections, as the beginning of a message."""
    kept = []
    for _ in range(connections):
        client = connected(address)
        client.settimeout(0.2)
        with contextlib.suppress(OSError):
            client.sendall(nbytes.to_bytes(4, "little"))
            client.sendall(bytes(nbytes))
        kept.append(client)
    time.sleep(3 * LINGER_S)


def be_silent(address: str, connections: int) -> None:
    """Connect, and say nothing."""
    kept = []
    for _ in range(connections):
        with contextlib.suppress(OSError):
            kept.append(connected(address))
    time.sleep(3 * LINGER_S)


def make_noise(address: str, connections: int) -> None:
    """Say what is no message, one connection after the other."""
    for _ in range(connections):
        with contextlib.suppress(OSError), connected(address) as client:
            client.sendall(b"\x20\0\0\0" + b"\xc1" * 32)


def say(address: str, *messages: object, deadline_s: float = 20.0) -> None:
    """Say this, and listen for as long as the daemon has something to say."""
    with contextlib.suppress(OSError), connected(address) as client:
        client.settimeout(deadline_s)
        for message in messages:
            client.sendall(encode(message))
        while client.recv(1 << 16):
            pass


def run_many(address: str, hellos: list[m.AgentHello]) -> None:
    """Agents of so many runs over one connection."""
    say(address, *hellos, deadline_s=2.0)


def asked(address: str) -> socket.socket:
    """A connection, as an ordinary client makes it: it waits while many others are before it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    sock.settimeout(LINGER_S)
    return sock


def longest_answer(address: str, seconds: float, pause_s: float = 0.05) -> float:
    """Ask on a new connection, again and again: the longest time until an answer, in seconds."""
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.monotonic()
        with asked(address) as client:
            client.sendall(encode(WhatIsKept(protocol=m.PROTOCOL)))
            decoder: Decoder[Any] = Decoder(KeptList | m.Denied, 1 << 20)
            while not (answers := decoder.feed(client.recv(1 << 16))):
                pass
            assert isinstance(answers[0], KeptList), answers
        longest = max(longest, time.monotonic() - begun)
        time.sleep(pause_s)
    return longest
