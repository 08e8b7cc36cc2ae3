"""Agents' vaults in network namespaces, a process each, that is told by lines of JSON what to do.

`python -m tests.bench.vaults NUMBER ADDRESSES NBYTES RATE`: see `Inside` for what it does. Beside the vault
it has plain sockets, which give bytes of memory to whoever asks: what the same line and machine do for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from ckptless.daemon.agent.versions.connections import Network
from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from tests.unit.daemon.vaults import JOB, Node

from .nets import COMMAND_DEADLINE_S, Nets

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# More than a cache has.
BLOCK_NBYTES = 64 * MIB
ANSWER_DEADLINE_S = 300.0


# ---------------------------------------------------------------------------------- inside of one


def payload_of(step: int, nbytes: int) -> bytes:
    """Return what every node has for a step, in whole MiBs: no chunk of it is one of another step."""
    return random.Random(step).randbytes(MIB) * (nbytes // MIB)


class Inside:
    """One node's work. Every answer is [seconds, this process's CPU seconds], or what it says."""

    def __init__(self, number: int, addresses: list[str], nbytes: int, send_rate: float) -> None:
        self._node = Node(number, 1, addresses[0], Network(tuple(addresses), send_rate))
        self._nbytes, self._step = nbytes, 0
        self._plain = [socket.create_server((address, 0)) for address in addresses]
        self._into: list[bytearray] = []

    async def start(self) -> object:
        await self._node.start()
        for server in self._plain:
            threading.Thread(target=give_plain, args=(server,), daemon=True).start()
        return [msgspec.to_builtins(self._node.info), [server.getsockname() for server in self._plain]]

    async def follow(self, infos: list[object]) -> object:
        """All nodes; node 0 has the only rank."""
        nodes = tuple(msgspec.convert(info, m.NodeInfo) for info in infos)
        assignment = m.Assignment(
            job=JOB,
            generation=1,
            term=1,
            leader=0,
            places=(m.Place(node=0, slot=0),),
            nodes=nodes,
            restore_step=None,
        )
        self._node.replicas.follow(assignment)
        return None

    async def hold(self, step: int) -> object:
        self._node.hold(0, step, payload_of(step, self._nbytes), chunk_nbytes=version.CHUNK_NBYTES)
        return None

    async def push(self) -> object:
        """Give the holder one more version, until it has verified it."""
        self._step += 1
        await self.hold(self._step)
        found = self._node.vault.tensors(0, self._step)
        assert found is not None
        acked = asyncio.Event()
        what = Version(1, 0, self._step, *found)
        begin = now()
        self._node.replicas.push_tensors(what, frozenset({0}), acked.set)
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await acked.wait()
        return since(begin)

    async def fetch(self, step: int, nodes: list[int]) -> object:
        """Get a version from all of these at once, verified."""
        begin = now()
        await self._node.replicas.fetch_tensors(0, step, nodes)
        return since(begin)

    async def get(self, sources: list[tuple[str, int]], nbytes: int) -> object:
        """Over plain sockets, a part of the bytes from each source."""
        while len(self._into) < len(sources):
            self._into.append(bytearray(BLOCK_NBYTES))
        begin = now()
        part = nbytes // len(sources)
        await asyncio.gather(
            *(
                asyncio.to_thread(get_plain, where, part, into)
                for where, into in zip(sources, self._into, strict=False)
            )
        )
        return since(begin)

    async def flow(self, source: tuple[str, int], for_s: float) -> object:
        """Bytes per second of a plain socket that gets for so long."""
        return await asyncio.to_thread(flow_plain, (source[0], source[1]), for_s)

    async def end(self) -> object:
        """Hang up; what happened."""
        await self._node.close()
        return self._node.events


def now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    return time.monotonic() - begin[0], time.process_time() - begin[1]


def give_plain(server: socket.socket) -> None:
    """To whoever connects and says how many bytes."""
    block = memoryview(os.urandom(MIB) * (BLOCK_NBYTES // MIB))

    def give(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            left = int(sock.recv(20))
            while left:
                left -= sock.send(block[: min(left, BLOCK_NBYTES)])

    while True:
        sock, _ = server.accept()
        threading.Thread(target=give, args=(sock,), daemon=True).start()


def get_plain(where: tuple[str, int], nbytes: int, memory: bytearray) -> None:
    with socket.create_connection((where[0], where[1]), ANSWER_DEADLINE_S) as sock:
        sock.sendall(b"%d" % nbytes)
        into, got = memoryview(memory), 0
        while got < nbytes:
            place = got % BLOCK_NBYTES
            came = sock.recv_into(into[place : place + nbytes - got])
            assert came, "hung up on"
            got += came


def flow_plain(where: tuple[str, int], for_s: float) -> float:
    with socket.create_connection(where, ANSWER_DEADLINE_S) as sock:
        sock.sendall(b"%d" % (1 << 60))
        into, got, begin = bytearray(MIB), 0, time.monotonic()
        while time.monotonic() < begin + for_s:
            got += sock.recv_into(into)
        return got / (time.monotonic() - begin)


async def serve(inside: Inside) -> None:
    """Do what the lines of the input say."""
    say(await inside.start())
    # no deadline: whoever started this ends it
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *args = json.loads(line)
        say(await getattr(inside, name)(*args))


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


# ------------------------------------------------------------------------------------- around them


class Vault:
    """The process of a node, in its namespace."""

    def __init__(self, net: Nets, number: int, nbytes: int, send_rate: float = 0.0) -> None:
        words = (number, list(net.addresses[number]), nbytes, send_rate)
        command = ["ip", "netns", "exec", net.names[number], sys.executable, "-m", "tests.bench.vaults"]
        self._process = subprocess.Popen(
            [*command, *map(json.dumps, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = self._process.pid
        self.info, self.plain = self.hear()

    def tell(self, name: str, *args: object) -> None:
        """Have something done."""
        stream = _stream(self._process.stdin)
        stream.write(json.dumps([name, *args]) + "\n")
        stream.flush()

    def hear(self) -> Any:
        """Wait for the answer. Raises TimeoutError, RuntimeError."""
        stream = _stream(self._process.stdout)
        if not select.select([stream], [], [], ANSWER_DEADLINE_S)[0]:
            raise TimeoutError(f"a node does not answer in {ANSWER_DEADLINE_S:.0f} s")
        line = stream.readline()
        if not line:
            raise RuntimeError("a node's process has ended")
        return json.loads(line)

    @property
    def has_answered(self) -> bool:
        return bool(select.select([_stream(self._process.stdout)], [], [], 0)[0])

    def ask(self, name: str, *args: object) -> Any:
        self.tell(name, *args)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(COMMAND_DEADLINE_S)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _stream(stream).close()


class Pair:
    """Two nodes: node 1 holds what node 0 gives it."""

    def __init__(self, net: Nets, nbytes: int, send_rate: float = 0.0) -> None:
        self.nodes = [Vault(net, number, nbytes, send_rate) for number in range(2)]
        introduce(self.nodes)

    def begin(self) -> None:
        """Have one more version given."""
        self.nodes[0].tell("push")

    def took_s(self) -> float:
        """Return how long that took."""
        seconds, _cpu_s = self.nodes[0].hear()
        return float(seconds)

    def end(self) -> list[list[list[str]]]:
        """Both nodes' events, kind and text; who gives ends first, so that nobody is missed."""
        return [node.ask("end") for node in self.nodes]

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def introduce(nodes: Sequence[Vault]) -> None:
    """Let all of them know each other."""
    for node in nodes:
        node.ask("follow", [one.info for one in nodes])


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


if __name__ == "__main__":
    asyncio.run(serve(Inside(*map(json.loads, sys.argv[1:]))))
