"""Measures verified transfers between two agents' regions, against a bare socket: `bench_bulk.py`.

Two processes over loopback, in turn: the bytes over a Link with its handshake, as a holder is given them, to
a region and with the digest verified; one version as a newcomer fetches it, in chunks from as many sources as
there are streams, dialled anew each time; and the same bytes from memory to memory by sendall and recv_into,
once with MSG_WAITALL and once without: the better of the two is what the ratio is of. Then once more with
each 16 MiB digested when it has come, by the thread that got it: what verified bytes cost without ours.

With several streams, one bare socket alone is measured as well, in the same run: of its rate is the ratio
that counts a fetch as one transfer, which it is for whoever waits for it. CPU time is given of both ends
together: unlike the rates, it hardly depends on what else the machine does.

One bare stream keeps one core busy at each end. Several keep both cores of a machine with two, so that none
is left to make digests on, and nobody's verified bytes come at the bare rate: there the second ratio tells
what ours costs.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import mmap
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.serving import receive_payload
from ckptless.daemon.agent.versions.store import Region, VersionStore
from ckptless.daemon.agent.versions.ways import Ways
from ckptless.daemon.protocol.messages import NodeInfo, TensorsAt
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.version import (
    Header,
    Origin,
    decode,
    digest_of,
    header_nbytes,
    spans,
    write_header,
)
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import (
    Link,
    Route,
)
from tests.unit.daemon.served import serve

JOB = "bench"
HOST = "127.0.0.1"
DIAL_S = 10.0
# Slots of a region: the first transfers get their memory from the kernel, and are counted apart.
COLD = 3
AgentLink = Link[p.AgentMessage]


def filled(nbytes: int) -> Region:
    """A region of random bytes."""
    region = Region(1, 0, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, 1)
    block = secrets.token_bytes(1 << 20)
    with region.view(0, nbytes) as view:
        for start in range(0, nbytes, len(block)):
            view[start : start + len(block)] = block[: nbytes - start]
    return region


# ------------------------------------------------------------------------------------------ sender


def main_sender(nbytes: int, streams: int) -> None:
    """Serves links, and bare sockets on another port; each transfer is asked for."""
    region = filled(nbytes)
    bare = socket.create_server((HOST, 0), backlog=streams)
    threading.Thread(target=send_bare, args=(bare, region, nbytes), daemon=True).start()
    asyncio.run(send_links(region, nbytes, bare.getsockname()[1]))


def send_bare(server: socket.socket, region: Region, nbytes: int) -> None:
    """A thread for each connection."""
    while True:
        sock, _ = server.accept()
        threading.Thread(target=answer_bare, args=(sock, region.view(0, nbytes)), daemon=True).start()


def answer_bare(sock: socket.socket, view: memoryview) -> None:
    """As often as it is asked."""
    with sock:
        while sock.recv(1):
            sock.sendall(view)


async def send_links(region: Region, nbytes: int, bare_port: int) -> None:
    """Until the other process hangs up: whole versions on one port, chunks on the other."""
    vault = VersionStore()
    vault._regions[region.number] = region
    with region.view(0, nbytes) as view:
        payload = nbytes - header_nbytes(nbytes)
        data = view[-payload:]
        chunks = tuple(digest_of(data[start:end]) for start, end in spans(payload))
        told = write_header(view, Header(JOB, 0, 0, 0, 1, "0" * 32, payload, chunks))
        data.release()
    vault.put_tensors(0, 0, TensorsAt(region=region.number, offset=0, nbytes=nbytes, digest=told))
    replicas = Replicas(0, Origin(JOB), 0, vault)
    replicas.core.generation = replicas.integrity.generation = 1
    replicas.core.accepting = True
    ended = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: AgentLink = await Link.accept(
            (reader, writer), lambda _job: 0, KeyCredentials(JOB.encode() * 8), p.AgentMessage
        )
        with contextlib.suppress(ConnectionError):
            while True:
                await link.receive()
                with region.view(0, header_nbytes(nbytes)) as view:
                    link.send(p.TensorsReply(header=bytes(view)))
                with region.view(nbytes - payload, payload) as view:
                    await link.send_bulk(view)
        link.close()
        ended.set()

    def give_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(
            asyncio.create_task(replicas.serving.serve((reader, writer), KeyCredentials(JOB.encode() * 8)))
        )

    server, port = await serve(HOST, 0, lambda *streams: tasks.add(asyncio.create_task(give(*streams))))
    _, chunks_port = await serve(HOST, 0, give_chunks)
    sys.stdout.write(f"{port} {chunks_port} {bare_port}\n")
    sys.stdout.flush()
    await ended.wait()
    server.close()


# ---------------------------------------------------------------------------------------- receiver


class Links:
    """So many links, which all get the bytes at the same time."""

    def __init__(self, vault: VersionStore, links: list[AgentLink]) -> None:
        self._vault, self._links = vault, links
        # A step of its own each time: so the region's slots are used in turn, as an agent does.
        self._steps = itertools.count(1)

    async def get_all(self) -> None:
        """One transfer on each."""
        await asyncio.gather(*map(self._get, self._links))

    async def _get(self, link: AgentLink) -> None:
        link.send(p.GetTensors(cut=1, shard=0, step=0))
        reply = await link.receive()
        assert isinstance(reply, p.TensorsReply)
        with self._vault.incoming(decode(reply.header)) as coming:
            await receive_payload(link, coming)
            self._vault.put_tensors(0, next(self._steps), coming.finish())


class Fetches:
    """One version, from so many sources at once."""

    def __init__(self, vault: VersionStore, port: int, sources: int) -> None:
        self._vault, self._port = vault, port
        self._infos = [NodeInfo(node=n, name=f"n{n}", address=HOST, agent_port=port) for n in range(sources)]

    async def get(self) -> None:
        """All of it, dialled anew."""
        fetch = TensorsFetch((Origin(JOB), 0, 0, 1), Ways((), self._connect), self._refuse, 1)
        await fetch.run(self._infos, self._vault)

    async def _connect(self, route: Route) -> AgentLink:
        vouch = KeyCredentials(JOB.encode() * 8)
        return await Link.dial(route.address, (JOB, 1), vouch, p.AgentMessage, DIAL_S)

    def _refuse(self, kind: str, text: str) -> None:
        raise RuntimeError(f"{kind}: {text}")


class Bare:
    """So many sockets, each with its thread and memory."""

    def __init__(self, port: int, streams: int, nbytes: int) -> None:
        self._sockets = [socket.create_connection((HOST, port)) for _ in range(streams)]
        self._memory = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(streams)]

    def get_all(self, flags: int = 0, *, verify: bool = False) -> None:
        """One transfer on each."""
        get = self._get_verified if verify else self._get
        if len(self._sockets) == 1:
            get(0, flags)
            return
        threads = [threading.Thread(target=get, args=(n, flags)) for n in range(len(self._sockets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _get(self, number: int, flags: int) -> None:
        sock, into = self._sockets[number], self._memory[number]
        sock.sendall(b"?")
        got = 0
        while got < len(into):
            got += sock.recv_into(into[got:], 0, flags)

    def _get_verified(self, number: int, flags: int) -> None:
        sock, into = self._sockets[number], self._memory[number]
        sock.sendall(b"?")
        for start, end in spans(len(into)):
            got = start
            while got < end:
                got += sock.recv_into(into[got:end], 0, flags)
            digest_of(into[start:end])


def seconds(work: Callable[[], Any], sender: int) -> tuple[float, float, float]:
    """(wall, this process's CPU, the sender's CPU) of it."""
    clock = ~sender << 3 | 2  # clock_getcpuclockid(3): another process's
    wall, used, used_there = time.perf_counter(), time.process_time(), time.clock_gettime(clock)
    work()
    there = time.clock_gettime(clock) - used_there
    return time.perf_counter() - wall, time.process_time() - used, there


@contextlib.contextmanager
def other_process(nbytes: int, streams: int) -> Iterator[tuple[int, int, int, int]]:
    """The sender, which ends when its links do: its three ports, and its id."""
    command = [sys.executable, __file__, "--sender", "--nbytes", str(nbytes), "--streams", str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        link_port, chunks_port, bare_port = map(int, sender.stdout.readline().split())
        try:
            yield link_port, chunks_port, bare_port, sender.pid
        finally:
            sender.terminate()


def measure(nbytes: int, streams: int, rounds: int) -> dict[str, Any]:
    """Both ways by turns."""
    vault = VersionStore()
    with (
        other_process(nbytes, streams) as (link_port, chunks_port, bare_port, pid),
        asyncio.Runner() as runner,
    ):

        async def dial() -> AgentLink:
            vouch = KeyCredentials(JOB.encode() * 8)
            return await Link.dial((HOST, link_port), (JOB, 1), vouch, p.AgentMessage, DIAL_S)

        links = Links(vault, [runner.run(dial()) for _ in range(streams)])
        fetches = Fetches(vault, chunks_port, streams)
        bare, one = Bare(bare_port, streams, nbytes), Bare(bare_port, 1, nbytes)
        works: dict[str, Callable[[], object]] = {
            "bare": bare.get_all,
            "bare_waitall": lambda: bare.get_all(socket.MSG_WAITALL),
            "bare_verified": lambda: bare.get_all(verify=True),
            "one_bare": one.get_all,
            "one_bare_waitall": lambda: one.get_all(socket.MSG_WAITALL),
            "link": lambda: runner.run(links.get_all()),
            "fetch": lambda: runner.run(fetches.get()),
        }
        cold = [seconds(works["link"], pid)[0] for _ in range(COLD)]
        bare.get_all()
        one.get_all()
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(seconds(work, pid))
    vault.close()
    found = reckon(times, nbytes / 1e9, streams)
    found["link_into_new_memory_gb_per_s"] = streams * nbytes / 1e9 / statistics.median(cold)
    return {"nbytes": nbytes, "streams": streams, "rounds": rounds, **found}


def reckon(
    times: dict[str, list[tuple[float, float, float]]], gigabytes: float, streams: int
) -> dict[str, Any]:
    """Rates, what they are of each other, and what they cost, of versions of so many gigabytes."""
    # Of a fetch the sources give a part each, not all of it.
    once = {"fetch", "one_bare", "one_bare_waitall"}
    moved = {name: gigabytes if name in once else gigabytes * streams for name in times}
    rates = {name: moved[name] / statistics.median(wall for wall, _, _ in times[name]) for name in times}
    best = max(rates["bare"], rates["bare_waitall"])
    best_one = max(rates["one_bare"], rates["one_bare_waitall"])
    return {
        "gb_per_s": rates,
        "best_bare_gb_per_s": best,
        "best_one_bare_gb_per_s": best_one,
        "ratio": rates["link"] / best,
        "fetch_ratio": rates["fetch"] / best,
        "ratio_of_one": rates["link"] / best_one,
        "fetch_ratio_of_one": rates["fetch"] / best_one,
        "ratio_of_verified": rates["link"] / rates["bare_verified"],
        "fetch_ratio_of_verified": rates["fetch"] / rates["bare_verified"],
        "receiver_cpu_s_per_gb": {
            name: statistics.median(here for _, here, _ in found) / moved[name]
            for name, found in times.items()
        },
        "cpu_s_per_gb": {
            name: statistics.median(here + there for _, here, there in found) / moved[name]
            for name, found in times.items()
        },
        "seconds": {name: [wall for wall, _, _ in found] for name, found in times.items()},
        "load": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=256 << 20)
    parser.add_argument("--streams", type=int, default=1, help="transfers at the same time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sender:
        main_sender(args.nbytes, args.streams)
        return
    found = measure(args.nbytes, args.streams, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    sys.stdout.write(told(found))


def told(found: dict[str, Any]) -> str:
    """In lines."""
    rates, used = found["gb_per_s"], found["cpu_s_per_gb"]
    lines = [
        f"{found['streams']} x {found['nbytes'] >> 20} MiB, median of {found['rounds']}, at load "
        f"{found['load']:.1f}; in GB/s: bare sockets {found['best_bare_gb_per_s']:.2f}, one of them alone "
        f"{found['best_one_bare_gb_per_s']:.2f}, with digests {rates['bare_verified']:.2f}; "
        f"link into new memory {found['link_into_new_memory_gb_per_s']:.2f}"
    ]
    for name, kind in (("link, verified", "link"), ("fetch in chunks", "fetch")):
        of = "" if kind == "link" else "fetch_"
        lines.append(
            f"{name} {rates[kind]:.2f}: {found[of + 'ratio']:.2f} of the bare sockets, "
            f"{found[of + 'ratio_of_one']:.2f} of one alone, {found[of + 'ratio_of_verified']:.2f} of those "
            f"with digests; CPU s/GB {used[kind]:.2f} of {min(used['bare'], used['bare_waitall']):.2f} bare"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
