"""Copies over one and two interfaces, whose rate the kernel limits: which part of that rate they reach.

`python -m tests.local.bench_interfaces` (root, iproute2): two network namespaces with a pair of veth for each
interface, an agent's vault in each, one version after the other from the one to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from ckptless.daemon.agent.versions.connections import Network
from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from tests.unit.daemon.vaults import JOB, Node, until

ROOT = Path(__file__).parents[2]
COMMAND_DEADLINE_S = 20.0
MIB = 1 << 20


def run(*words: str) -> str:
    """Return what a command says. Raises CalledProcessError where it is not permitted here."""
    return subprocess.check_output(words, stderr=subprocess.PIPE, text=True, timeout=COMMAND_DEADLINE_S)


class Nets:
    """Two namespaces, `count` pairs of interfaces between them of so many Mbit/s each way."""

    def __init__(self, count: int, rate_mbit: int) -> None:
        self.names = [f"ckptless-{os.getpid()}-{node}" for node in range(2)]
        self.addresses = [tuple(f"10.77.{pair}.{node + 1}" for pair in range(count)) for node in range(2)]
        self._count, self._rate = count, rate_mbit

    def make(self) -> None:
        """Raises CalledProcessError, FileNotFoundError where this machine does not have or permit it."""
        for name in self.names:
            run("ip", "netns", "add", name)
        for pair in range(self._count):
            ends = [("name", f"net{pair}", "netns", name) for name in self.names]
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node, name in enumerate(self.names):
                limit = ("root", "tbf", "rate", f"{self._rate}mbit", "burst", "512kb", "latency", "50ms")
                inside = ("ip", "netns", "exec", name)
                run(*inside, "ip", "address", "add", f"{self.addresses[node][pair]}/24", "dev", f"net{pair}")
                run(*inside, "ip", "link", "set", f"net{pair}", "up")
                run(*inside, "tc", "qdisc", "add", "dev", f"net{pair}", *limit)

    def pull(self, pair: int) -> None:
        """Take node 1's end down: node 0 has no carrier, and nobody is told that a connection has ended."""
        run("ip", "-netns", self.names[1], "link", "set", f"net{pair}", "down")

    def sent_nbytes(self, pair: int) -> int:
        """Bytes that node 0 has sent over an interface."""
        shown = run("ip", "-netns", self.names[0], "-json", "-stats", "link", "show", "dev", f"net{pair}")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


@contextlib.contextmanager
def nets(count: int, rate_mbit: int) -> Iterator[Nets]:
    found = Nets(count, rate_mbit)
    try:
        found.make()
        yield found
    finally:
        found.close()


# ---------------------------------------------------------------------------------- inside of one


def payload_of(step: int, nbytes: int) -> bytes:
    """Return what has no chunk in common with another step."""
    chunk = step.to_bytes(8, "little") + os.urandom(MIB - 8)
    return (chunk * (nbytes // MIB + 1))[:nbytes]


async def one_node(number: int, addresses: list[str], nbytes: int) -> None:
    """Node 1 holds what node 0 gives it: a version for each line of its input, whose seconds it prints."""
    node = Node(number, 1, addresses[0], Network(tuple(addresses)))
    await node.start()
    say(msgspec.json.encode(node.info).decode())
    infos = tuple(msgspec.json.decode(line, type=m.NodeInfo) for line in (await read(), await read()))
    assignment = m.Assignment(
        job=JOB,
        generation=1,
        term=1,
        leader=0,
        places=(m.Place(node=0, slot=0),),
        nodes=infos,
        restore_step=None,
    )
    node.replicas.follow(assignment)
    step = 0
    while await read():
        step += 1
        node.hold(0, step, payload_of(step, nbytes), chunk_nbytes=version.CHUNK_NBYTES)
        say(str(await push(node, step)))
    say(json.dumps(node.events))
    await node.close()


async def push(node: Node, step: int) -> float:
    acked: list[float] = []
    found = node.vault.tensors(0, step)
    assert found is not None
    begin = time.monotonic()
    there = lambda: acked.append(time.monotonic())  # noqa: E731
    node.replicas.push_tensors(Version(1, 0, step, *found), frozenset({0}), there)
    await until(lambda: acked)
    return acked[0] - begin


def say(line: str) -> None:
    print(line, flush=True)


async def read() -> str:
    # no deadline: whoever started this ends it
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


# ------------------------------------------------------------------------------------- around both


class Pair:
    """The two nodes, in their namespaces."""

    def __init__(self, net: Nets, nbytes: int) -> None:
        self._nodes = [self._start(net, number, nbytes) for number in range(2)]
        infos = [_stream(node.stdout).readline() for node in self._nodes]
        for node in self._nodes:
            _stream(node.stdin).write("".join(infos))
            _stream(node.stdin).flush()

    def _start(self, net: Nets, number: int, nbytes: int) -> subprocess.Popen[str]:
        what = json.dumps([number, net.addresses[number], nbytes])
        inside = ("ip", "netns", "exec", net.names[number])
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.local.bench_interfaces", "--node", what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def begin(self) -> None:
        """Have one more version given."""
        _stream(self._nodes[0].stdin).write("next\n")
        _stream(self._nodes[0].stdin).flush()

    def took_s(self) -> float:
        """Return how long that took."""
        return float(_stream(self._nodes[0].stdout).readline())

    def end(self) -> list[list[list[str]]]:
        """Both nodes' events, kind and text; who gives ends first, so that nobody is missed."""
        found: list[list[list[str]]] = []
        for node in self._nodes:
            _stream(node.stdin).close()
            found.append(json.loads(_stream(node.stdout).readline()))
            node.wait(COMMAND_DEADLINE_S)
        return found

    def kill(self) -> None:
        for node in self._nodes:
            node.kill()
            node.wait(COMMAND_DEADLINE_S)
            for stream in (node.stdin, node.stdout):
                with contextlib.suppress(BrokenPipeError):
                    _stream(stream).close()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def measure(count: int, rate_mbit: int, nbytes: int, times: int) -> dict[str, Any]:
    """Return the part of the lines' rates that copies have reached: the median, the least and the most."""
    with nets(count, rate_mbit) as net:
        pair = Pair(net, nbytes)
        try:
            found: list[float] = []
            for _ in range(times + 1):
                pair.begin()
                found.append(nbytes * 8 / pair.took_s() / (count * rate_mbit * 1e6))
            events = pair.end()
        finally:
            pair.kill()
    assert events == [[], []], events
    # The first one makes the holder's memory.
    shares = found[1:]
    middle = statistics.median(shares)
    return {"interfaces": count, "median": middle, "least": min(shares), "most": max(shares)}


@click.command()
@click.option("--rate", default=1000, help="Mbit/s of each interface.")
@click.option("--size", default=256, help="MiB of a version.")
@click.option("--times", default=7)
@click.option("--node", help="For this script alone.")
def command(rate: int, size: int, times: int, node: str | None) -> None:
    """Measure with one interface and with two, in turn."""
    if node is not None:
        asyncio.run(one_node(*json.loads(node)))
        return
    for _ in range(2):
        for count in (1, 2):
            print(json.dumps(measure(count, rate, size * MIB, times)), flush=True)


if __name__ == "__main__":
    command()
