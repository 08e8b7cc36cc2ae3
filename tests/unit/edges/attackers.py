"""What another user can do to a daemon's Unix socket, and anybody to a port: each in a forked process."""

from __future__ import annotations

import array
import contextlib
import encodings.idna  # noqa: F401  # a forked child of another user cannot load it any more
import os
import select
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import Decoder, encode
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.requests import TABLES, Page, Read

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


def ask_and_stay(address: str, connections: int) -> None:
    """Ask what everybody may on each of so many connections, and ask again, without end."""
    kept: dict[int, socket.socket] = {}
    while True:
        for number in range(connections):
            try:
                if number not in kept:
                    time.sleep(5 * PACE_S)
                    kept[number] = connected(address)
                    kept[number].setblocking(False)
                kept[number].sendall(encode(WhatIsKept(protocol=m.PROTOCOL)))
                kept[number].recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                kept.pop(number, None)
        time.sleep(1.0)


def make_noise(address: str, connections: int) -> None:
    """Say what is no message, one connection after the other."""
    for _ in range(connections):
        with contextlib.suppress(OSError), connected(address) as client:
            client.sendall(b"\x20\0\0\0" + b"\xc1" * 32)


def say(address: str, *messages: object, deadline_s: float = 20.0) -> None:
    """Say this, and listen until the daemon hangs up, or so long: an agent it tells something again."""
    with contextlib.suppress(OSError), connected(address) as client:
        client.settimeout(deadline_s)
        for message in messages:
            client.sendall(encode(message))
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and client.recv(1 << 16):
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


def read_slowly(address: str) -> None:
    """Ask for the story of a job on many connections, again and again, and read none of it."""
    kept = []
    asks = encode(Read(protocol=m.PROTOCOL, job="1", tables=TABLES)) * 50
    while True:
        with contextlib.suppress(OSError):
            client = connected(address)
            client.settimeout(0.2)
            kept.append(client)
            client.sendall(asks)
        time.sleep(0.05)
        del kept[:-60]


def reads(address: str, job: str, seconds: float, pause_s: float = 0.05) -> list[float]:
    """Ask for all tables of a job, as ckptctl does, again and again: how long each time took, in seconds."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.monotonic()
        with asked(address) as client:
            client.sendall(encode(Read(protocol=m.PROTOCOL, job=job, tables=TABLES)))
            decoder: Decoder[Any] = Decoder(Page | m.Denied, 4 << 20)
            while not (answers := decoder.feed(client.recv(1 << 16))):
                pass
            assert isinstance(answers[0], Page), answers
            assert answers[0].records, "nothing is told of a job that is there"
        times.append(time.monotonic() - begun)
        time.sleep(pause_s)
    return times


# ------------------------------------------------------------------------------------ the network
#
# What anybody can do to a TCP port, before any proof. Each goes on until it is killed. None but `flood` makes
# more connections in a second than this: who makes as many as he can takes a part of the machine, as any
# process does that he starts, and what it costs the others depends on how many cores there are.

Ports = Sequence[tuple[str, int]]
PACE_S = 1 / 300


def _source(chance: Random) -> tuple[str, int]:
    """One of the addresses that a process of this machine has for its own."""
    return f"127.{chance.randrange(1, 255)}.{chance.randrange(256)}.{chance.randrange(1, 255)}", 0


def _dialled(at: tuple[str, int], chance: Random) -> socket.socket:
    """A connection that is begun, from an address that nobody else has."""
    time.sleep(PACE_S)
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # it is not of this machine's own
        sock.bind(_source(chance))
    sock.connect_ex(at)
    return sock


def hold_many(ports: Ports, connections: int, first: bytes = b"") -> None:
    """So many connections to each, in which no more is said; those that are closed are made anew."""
    chance = Random(1)
    held: dict[socket.socket, tuple[str, int]] = {}
    watch = select.epoll()
    by_fd: dict[int, socket.socket] = {}
    for at in [at for _ in range(connections) for at in ports]:
        held[sock := _dialled(at, chance)] = at
        by_fd[sock.fileno()] = sock
        watch.register(sock, select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if first else 0))
    while True:
        for fd, what in watch.poll(1.0):
            sock = by_fd[fd]
            if what & select.EPOLLOUT and not what & (select.EPOLLERR | select.EPOLLHUP):
                with contextlib.suppress(OSError):
                    sock.send(first)
                watch.modify(sock, select.EPOLLIN | select.EPOLLRDHUP)
                continue
            at = held.pop(by_fd.pop(fd))
            sock.close()
            held[sock := _dialled(at, chance)] = at
            by_fd[sock.fileno()] = sock
            watch.register(sock, select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if first else 0))


def flood(ports: Ports, first: bytes) -> None:
    """Connect and say that, as fast as it goes, and have the newest of them stay."""
    held: deque[socket.socket] = deque()
    while True:
        for at in ports:
            held.append(sock := socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect_ex(at)
                sock.send(first)
            if len(held) > 900:
                held.popleft().close()


def drip(ports: Ports, connections: int, data: bytes) -> None:
    """A byte of a greeting now and then, in each of so many connections (slowloris)."""
    chance = Random(2)
    held = [(_dialled(at, chance), at, 0) for _ in range(connections) for at in ports]
    while True:
        for number, (sock, at, said) in enumerate(held):
            try:
                sock.send(data[said : said + 1])
                held[number] = (sock, at, (said + 1) % len(data))
            except BlockingIOError:
                continue
            except OSError:
                sock.close()
                held[number] = (_dialled(at, chance), at, 0)
        time.sleep(0.2)


def slam(ports: Ports, first: bytes) -> None:
    """Connect, say that, and reset the connection, as fast as it goes."""
    while True:
        for at in ports:
            with contextlib.suppress(OSError), socket.socket() as sock:
                sock.settimeout(1.0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.connect(at)
                if first:
                    sock.send(first)
            time.sleep(PACE_S)


def pour_over(ports: Ports, first: bytes) -> None:
    """That, and as many bytes as are taken, over one connection after the other."""
    rest = b"\xc1" * (1 << 20)
    while True:
        for at in ports:
            with contextlib.suppress(OSError), socket.create_connection(at, 1.0) as sock:
                sock.sendall(first)
                for _ in range(64):
                    sock.sendall(rest)
            time.sleep(PACE_S)


def half_close(ports: Ports, first: bytes) -> None:
    """Say that, and then that nothing more comes; listen to what is said to it."""
    while True:
        for at in ports:
            with contextlib.suppress(OSError), socket.create_connection(at, 1.0) as sock:
                sock.sendall(first)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            time.sleep(PACE_S)
