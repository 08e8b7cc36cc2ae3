"""The agent's socket for its ranks: messages, descriptors beside them, and ranks that misbehave."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks import link as rank_link
from ckptless.daemon.agent.ranks.link import Heard, RankLink, RankServer
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import ProtocolError

DEADLINE_S = 20.0


class Rig:
    """A server, what it has heard, and clients of it in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[Heard] = []
        self.links: list[RankLink] = []
        self.closed: list[RankLink] = []
        self.refuse = False
        self.server = RankServer(name, self._message, self.closed.append)
        self._clients: list[socket.socket] = []

    def _message(self, link: RankLink, message: Heard) -> None:
        if self.refuse:
            raise ProtocolError("not now")
        self.heard.append(message)
        if link not in self.links:
            self.links.append(link)

    def client(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.name)
        sock.setblocking(False)
        self._clients.append(sock)
        return sock

    async def hello(self) -> tuple[socket.socket, RankLink]:
        sock = self.client()
        before = len(self.links)
        sock.sendall(encode(m.Hello(protocol=1)))
        await self.until(lambda: len(self.links) > before)
        return sock, self.links[-1]

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not what():  # noqa: ASYNC110  # it polls what is no event
                await asyncio.sleep(0.005)

    def close(self) -> None:
        self.server.close()
        for sock in self._clients:
            sock.close()


def run(scenario: Callable[[Rig], Awaitable[None]], name: str = "") -> Rig:
    async def main() -> Rig:
        rig = Rig(name or f"{tempfile.gettempdir()}/ckptless-test-{secrets.token_hex(6)}")
        rig.server.start()
        try:
            await scenario(rig)
        finally:
            rig.close()
        return rig

    return asyncio.run(main())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def receive(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """So many bytes, and every descriptor that came with them."""
    data = b""
    fds: list[int] = []
    while len(data) < nbytes:
        try:
            more, came, _, _ = socket.recv_fds(sock, nbytes - len(data), 16)
        except BlockingIOError:
            await asyncio.sleep(0.005)
            continue
        assert more, "hung up"
        data, fds = data + more, fds + came
    return data, fds


def test_messages_in_pieces_and_in_one_go() -> None:
    async def scenario(rig: Rig) -> None:
        sock = rig.client()
        data = encode(m.Hello(protocol=1)) + encode(m.Joined(generation=1)) + encode(m.Finished(generation=1))
        for byte in data[:20]:
            sock.send(bytes([byte]))
            await asyncio.sleep(0)
        sock.sendall(data[20:])
        await rig.until(lambda: len(rig.heard) == 3)
        assert rig.heard == [m.Hello(protocol=1), m.Joined(generation=1), m.Finished(generation=1)]
        assert rig.links[0].pid == os.getpid()
        assert rig.links[0].uid == os.getuid()

    run(scenario)


def test_descriptors_come_in_order_and_none_is_kept() -> None:
    async def scenario(rig: Rig) -> None:
        sock, link = await rig.hello()
        before = open_files()
        files = [os.memfd_create(f"test-{n}") for n in range(3)]
        sent = b""
        for number, fd in enumerate(files):
            os.write(fd, str(number).encode())
            for message, with_fd in ((m.Ping(seq=number), None), (m.Allocated(region=number), fd)):
                link.send(message, with_fd)
                sent += encode(message)
            os.close(fd)
        data, fds = await receive(sock, len(sent))
        assert data == sent
        assert [os.pread(fd, 1, 0) for fd in fds] == [b"0", b"1", b"2"]
        for fd in fds:
            os.close(fd)
        assert open_files() == before

    run(scenario)


def test_a_rank_that_reads_late_gets_everything() -> None:
    async def scenario(rig: Rig) -> None:
        sock, link = await rig.hello()
        before = open_files()
        fd = os.memfd_create("test")
        # Far more than a socket's buffer holds; the descriptor is behind it.
        for number in range(40):
            link.send(m.Fetched(step=number, record=bytes(100_000)))
        link.send(m.Allocated(region=7), fd)
        os.close(fd)
        decoder: Decoder[m.ToRank] = Decoder(m.ToRank, RANK_LIMIT)
        got: list[m.ToRank] = []
        fds: list[int] = []
        while len(got) < 41:
            data, came = await receive(sock, 1)
            got, fds = got + decoder.feed(data), fds + came
            try:
                data, came, _, _ = socket.recv_fds(sock, 1 << 16, 16)
                got, fds = got + decoder.feed(data), fds + came
            except BlockingIOError:
                await asyncio.sleep(0)
        assert [message.step for message in got if isinstance(message, m.Fetched)] == list(range(40))
        assert got[-1] == m.Allocated(region=7)
        assert len(fds) == 1
        os.close(fds[0])
        assert open_files() == before
        assert link.open

    run(scenario)


def test_a_rank_that_never_reads_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "UNSENT_LIMIT", 1 << 20)

    async def scenario(rig: Rig) -> None:
        sock, link = await rig.hello()
        before = open_files()
        fd = os.memfd_create("test")
        for number in range(100):
            link.send(m.Fetched(step=number, record=bytes(100_000)), fd)
        os.close(fd)
        assert not link.open
        assert rig.closed == [link]
        # What could not be sent is not kept: at most what is in flight inside the kernel.
        assert open_files() <= before
        link.send(m.Ping(seq=1))
        link.close()
        assert rig.closed == [link]
        sock.close()

    run(scenario)


@pytest.mark.parametrize(
    "noise",
    [
        struct.pack("<I", RANK_LIMIT + 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        encode({"type": "Nobody"}),
        encode(m.Go(generation=1)),
    ],
)
def test_noise_ends_the_connection_and_no_other(noise: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        good, link = await rig.hello()
        bad, other = await rig.hello()
        bad.sendall(noise)
        await rig.until(lambda: rig.closed)
        assert rig.closed == [other]
        good.sendall(encode(m.Joined(generation=1)))
        await rig.until(lambda: m.Joined(generation=1) in rig.heard)
        assert link.open

    run(scenario)


def test_a_message_that_is_refused_ends_the_connection() -> None:
    async def scenario(rig: Rig) -> None:
        sock, link = await rig.hello()
        rig.refuse = True
        sock.sendall(encode(m.Joined(generation=1)))
        await rig.until(lambda: rig.closed)
        assert rig.closed == [link]

    run(scenario)


def test_a_rank_hangs_up() -> None:
    async def scenario(rig: Rig) -> None:
        sock, link = await rig.hello()
        sock.close()
        await rig.until(lambda: rig.closed)
        assert not link.open
        link.send(m.Ping(seq=1))

    before = open_files()
    run(scenario)
    assert open_files() == before


def test_a_socket_file_is_the_users_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    path.touch()  # left behind by one that was killed

    async def scenario(rig: Rig) -> None:
        assert path.stat().st_mode & 0o777 == 0o600
        await rig.hello()

    run(scenario, str(path))
    assert not path.exists()
