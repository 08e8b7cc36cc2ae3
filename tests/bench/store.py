"""Stores of many nodes, torch's TCPStore, and simulated ranks that ask them, in a few processes.

Each of N ranks, 8 to a node, does what Gloo does for a full mesh: it sets its key, then waits for and gets
all N. As torch's client sends it by default, that is a WAIT and a GET for each key; with
GLOO_ENABLE_STORE_V2_API=1 a WAIT and a MULTI_GET for each 128 keys. `lazy` is what TORCH_GLOO_LAZY_INIT=1
leaves of it for a ring: two peers' keys. All sockets are real. The stores of all nodes run in two processes,
and so do the clients (an epoll loop each, in place of N processes): so a time is about the sum of what N / 8
nodes would do beside each other. torch's TCPStore is one process, asked by the same clients.
"""

import asyncio
import itertools
import json
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .store_requests import PREFIX, steps

ROOT = Path(__file__).resolve().parents[2]

PER_NODE = 8
PROCESSES = 2
DEADLINE_S = 60
HELLO = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1234)


def exchange(socks: dict[int, tuple[socket.socket, list[tuple[bytes, int]]]]) -> None:
    """All ranks' requests, each rank's one after the other."""
    poll = select.epoll()
    todo: dict[int, list[Any]] = {}
    unsent: dict[int, memoryview] = {}
    for fd, (sock, requests) in socks.items():
        poll.register(fd, select.EPOLLIN)
        todo[fd] = [sock, iter(requests), 0]
    left = len(todo)

    def send(fd: int, data: memoryview) -> None:
        try:
            sent = socks[fd][0].send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            unsent[fd] = data[sent:]
            poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        elif fd in unsent:
            del unsent[fd]
            poll.modify(fd, select.EPOLLIN)

    def begin(fd: int) -> bool:
        entry = todo[fd]
        request = next(entry[1], None)
        if request is None:
            return False
        entry[2] = request[1]
        send(fd, memoryview(request[0]))
        return True

    for fd in todo:
        begin(fd)
    while left:
        ready = poll.poll(DEADLINE_S)
        if not ready:
            text = f"{left} of {len(todo)} clients of this process have had no answer for {DEADLINE_S} s"
            raise TimeoutError(f"{text}; {len(unsent)} could not send")
        for fd, events in ready:
            if events & select.EPOLLOUT and fd in unsent:
                send(fd, unsent[fd])
            if events & select.EPOLLIN:
                entry = todo[fd]
                data = entry[0].recv(1 << 20)
                assert data, "hung up on"
                entry[2] -= len(data)
                if entry[2] == 0 and not begin(fd):
                    left -= 1
    poll.close()


def clients(argv: Sequence[str]) -> None:
    """A process of clients: rounds are begun by lines of its input."""
    plan = json.loads(argv[0])
    socks: list[tuple[int, socket.socket]] = []
    for rank, port in plan["ranks"]:
        sock = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(HELLO)
        try:
            greeting = sock.recv(4, socket.MSG_WAITALL)
        except TimeoutError as error:
            text = f"no greeting in {DEADLINE_S} s, with {len(socks)} clients of this process greeted"
            raise TimeoutError(f"the store at port {port}: {text}") from error
        assert greeting == HELLO[-4:], "hung up on"
        sock.setblocking(False)
        socks.append((rank, sock))
    print("ready", flush=True)
    for line in sys.stdin:
        pattern, where = line.split()
        work = {
            sock.fileno(): (sock, steps(rank, plan["size"], pattern, plan["value"], where))
            for rank, sock in socks
        }
        print("set", flush=True)
        sys.stdin.readline()
        exchange(work)
        print("done", flush=True)


async def servers(argv: Sequence[str]) -> None:
    """A process of stores: the nodes lo to hi, until its input ends.

    Lines of it: all nodes' infos; then {"ranks": nodes with ranks, "nodes": those that can be used} for the
    next generation, which must be ready by then; "counts"; "end NODE".
    """
    from msgspec import to_builtins

    from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
    from tests.unit.daemon.facades import Facade

    lo, hi, per_node = map(int, argv)
    mine = {number: Facade(number, 30.0) for number in range(lo, hi)}
    for facade in mine.values():
        await facade.start()
    print(json.dumps([[to_builtins(facade.info), facade.port] for facade in mine.values()]), flush=True)
    infos = [NodeInfo(**info) for info in json.loads(await asyncio.to_thread(sys.stdin.readline))]
    generation = 0

    def follow(ranks: list[int], nodes: list[int]) -> None:
        assignment = Assignment(
            job="job",
            generation=generation,
            term=1,
            leader=0,
            places=tuple(Place(node=node, slot=slot) for node in ranks for slot in range(per_node)),
            nodes=tuple(infos[node] for node in nodes),
            restore_step=None,
        )
        for number in mine.keys() & set(nodes):
            mine[number].store.follow(assignment, None)

    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line.startswith("{"):
            generation += 1
            follow(**json.loads(line))
            print("ok", flush=True)
        elif line.startswith("end"):
            await mine.pop(int(line.split()[1])).close()
            print("ok", flush=True)
        else:
            counts = {number: count(facade) for number, facade in mine.items()}
            print(json.dumps([counts, time.process_time()]), flush=True)
    for facade in mine.values():
        await facade.close()


def count(facade: Any) -> dict[str, int]:
    """What a node's store has done: `local` and `handshakes` since it is there, all else in this generation.

    `connected` are the connections that it has to others.
    """
    store = facade.store
    ends = [store.way] if store.way is not None else list(store._joined.values())
    return {
        "local": store.server.requests,
        "asked": store.home.asked if store.home is not None else 0,
        "asks": store.server._proxy.asks,
        "connected": len(ends),
        "messages": sum(end.messages for end in ends),
        "handshakes": store.handshakes,
    }


def torchs(_argv: Sequence[str]) -> None:
    """torch's own."""
    from torch._C._distributed_c10d import TCPStore

    store: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


class Child:
    """A process of this script."""

    def __init__(self, role: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.store", role, *args],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a process of the benchmark ended"
        return line

    def close(self) -> None:
        with self.process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


class Clients:
    """The ranks, in a few processes."""

    def __init__(self, ports: Sequence[int], value: int) -> None:
        self._size = len(ports)
        shares = [list(enumerate(ports))[n::PROCESSES] for n in range(PROCESSES)]
        self._children = [
            Child("clients", json.dumps({"ranks": share, "size": len(ports), "value": value}))
            for share in shares
        ]
        for child in self._children:
            child.hear()

    def exchange(self, pattern: str, where: str = f"{PREFIX}0") -> float:
        """One; its seconds."""
        for child in self._children:
            child.tell(f"{pattern} {where}")
        for child in self._children:
            child.hear()
        began = time.perf_counter()
        for child in self._children:
            child.tell("")
        for child in self._children:
            child.hear()
        return time.perf_counter() - began

    def close(self) -> None:
        for child in self._children:
            child.close()


class Stores:
    """The stores of so many nodes, in a few processes; one more for each spare."""

    def __init__(self, nodes: int, per_node: int, spares: int = 0) -> None:
        self._per_node = per_node
        self.with_ranks = list(range(nodes))
        self._usable = list(range(nodes + spares))
        bounds = [len(self._usable) * n // PROCESSES for n in range(PROCESSES + 1)]
        self._ends = bounds[1:]
        self._children = [
            Child("servers", str(lo), str(hi), str(per_node)) for lo, hi in itertools.pairwise(bounds)
        ]
        found = [pair for child in self._children for pair in json.loads(child.hear())]
        for child in self._children:
            child.tell(json.dumps([info for info, _port in found]))
        self._ports = [port for _info, port in found]

    @property
    def ports(self) -> list[int]:
        """By rank."""
        return [self._ports[node] for node in self.with_ranks for _ in range(self._per_node)]

    def follow(self) -> None:
        """The next generation."""
        for child in self._children:
            child.tell(json.dumps({"ranks": self.with_ranks, "nodes": self._usable}))
        for child in self._children:
            child.hear()

    def replace(self, node: int, spare: int) -> None:
        """The agent of `node` ends; from the next generation on its ranks are the spare's."""
        child = self._children[next(n for n, end in enumerate(self._ends) if node < end)]
        child.tell(f"end {node}")
        child.hear()
        self._usable.remove(node)
        self.with_ranks[self.with_ranks.index(node)] = spare

    def counts(self) -> tuple[dict[int, dict[str, int]], float]:
        """Of each node that lives, and CPU seconds of all."""
        for child in self._children:
            child.tell("counts")
        told = [json.loads(child.hear()) for child in self._children]
        found = {int(node): count for counts, _cpu in told for node, count in counts.items()}
        return found, sum(cpu for _counts, cpu in told)

    def close(self) -> None:
        for child in self._children:
            child.close()


if __name__ == "__main__":
    roles = {"clients": clients, "servers": lambda argv: asyncio.run(servers(argv)), "torchs": torchs}
    roles[sys.argv[1]](sys.argv[2:])
