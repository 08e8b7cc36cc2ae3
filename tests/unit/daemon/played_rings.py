"""Agents' rings with real sockets between the agents, and readers and producers that a test plays."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec import structs
from vaults import DEADLINE_S, Node, Nodes, until

from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.rank_link import RankLink
from ckptless.daemon.agent.ring_peers import RingPeers
from ckptless.daemon.agent.ring_service import RingService
from ckptless.daemon.agent.vault import digest
from ckptless.daemon.api import ring as m
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.api.feed import Feed
from ckptless.daemon.api.messages import PROTOCOL
from ckptless.daemon.peers import messages as p

MANIFEST, OTHER = "ab" * 16, "cd" * 16
LOST = 5


def position(seq: int) -> bytes:
    return f"position {seq}".encode()


def payload(stream: int, seq: int) -> bytes:
    return f"batch {seq} of {stream}".encode() * 5000


def entry_of(stream: int, seq: int, manifest: str = MANIFEST) -> bytes:
    data, after = payload(stream, seq), position(seq + 1)
    digest = entry.body_digest(after, len(data), [(0, data)])
    header = entry.EntryHeader(manifest, stream, seq, len(after), len(data), digest)
    return (entry.encode(header) + after).ljust(header.batch_at, b"\0") + data


def feed(seq: int = 3, manifest: str = MANIFEST) -> Feed:
    return Feed(loader="train", manifest=manifest, stream=LOST, seq=seq, position=position(seq))


class Process:
    """A reader's or producer's end of a connection to the agent, without the connection."""

    def __init__(self, rings: RingService, process: subprocess.Popen[bytes] | None = None) -> None:
        self.rings, self.closed = rings, False
        # The agent kills a producer that it does not want any more.
        self.pid = process.pid if process is not None else os.getpid()
        self.heard: list[Any] = []
        self._process = process
        self.got: dict[int, bytes] = {}
        self.silent = False
        # What a producer says that it took, and what it has made.
        self.took_s = 0.0
        self.made: list[tuple[int, int]] = []
        self.producer: Process | None = None

    @property
    def link(self) -> RankLink:
        return cast(RankLink, self)

    def says(self, message: Any) -> None:
        self.rings.says(self.link, message)

    def send(self, message: Any, fd: int = -1) -> None:
        self.heard.append(message)
        match message:
            case m.RingEntry():
                with mmap.mmap(fd, message.nbytes, prot=mmap.PROT_READ) as mapping:
                    self.got[message.seq] = bytes(mapping)
            case m.RingLease():
                producer = Process(self.rings, subprocess.Popen(["sleep", "60"]))
                producer.silent, producer.took_s, producer.made = self.silent, self.took_s, self.made
                self.producer = producer
                asyncio.get_running_loop().call_soon(
                    producer.says, m.ProducerHello(protocol=PROTOCOL, lease=message.lease)
                )
            case m.RingMake() if not self.silent:
                data = entry_of(message.stream, message.seq)
                self.made.append((message.stream, message.seq))
                os.ftruncate(fd, len(data))
                os.pwrite(fd, data, 0)
                made = m.RingMade(
                    stream=message.stream,
                    seq=message.seq,
                    nbytes=len(data),
                    position=position(message.seq + 1),
                    took_s=self.took_s,
                )
                asyncio.get_running_loop().call_soon(self.says, made)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            asyncio.get_running_loop().call_soon(self.rings.hung_up, self.link)

    def open(
        self,
        stream: int,
        seq: int,
        manifest: str = MANIFEST,
        reader: int = 0,
        budget_nbytes: int = 1 << 30,
    ) -> None:
        opening = m.RingOpen(
            protocol=PROTOCOL,
            loader="train",
            manifest=manifest,
            reader=reader,
            window=8,
            budget_nbytes=budget_nbytes,
        )
        self.says(opening)
        self.says(m.RingSeek(number=1, stream=stream, seq=seq, position=position(seq)))


class Rings:
    """What an agent has of rings."""

    def __init__(self, node: Node) -> None:
        self.node, self.lost = node, False
        self.service = RingService(node.replicas.on_event)
        self.peers = RingPeers(node.number, node.vault, node.replicas, self.service, node.replicas.on_event)
        self.borrowing, self.foresight = self.peers.borrowing, self.peers.foresight
        node.vault.on_held = self.peers.standby.changed

    def rank(
        self, stream: int, seq: int, manifest: str = MANIFEST, *, silent: bool = False, took_s: float = 0.0
    ) -> Process:
        process = Process(self.service)
        process.silent, process.took_s = silent, took_s
        process.open(stream, seq, manifest)
        return process

    @property
    def guests(self) -> int:
        return sum(len(node.guests) for node in self.service._rings.values())

    async def close(self) -> None:
        await self.peers.close()
        await self.service.close()

    async def lose(self) -> None:
        """Its node is gone."""
        self.lost = True
        await self.close()
        await self.node.close()


@asynccontextmanager
async def job(count: int) -> AsyncIterator[tuple[Nodes, list[Rings]]]:
    """Nodes with a rank each, all in generation 2; nothing is left open."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    async with Nodes(count) as nodes:
        rings = [Rings(node) for node in nodes.values()]
        follow(nodes, rings, 2)
        yield nodes, rings
        for one in rings:
            if not one.lost:
                await one.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208


def follow(
    nodes: Nodes,
    rings: list[Rings],
    generation: int,
    places: Sequence[int] | None = None,
    step: int | None = None,
) -> None:
    """The next generation, of rank r on node places[r] (r), from a step on; of nodes that are not lost."""
    lost = [one.node.number for one in rings if one.lost]
    chosen = range(len(nodes)) if places is None else places
    assignment = nodes.assignment(chosen, step, generation=generation, away=lost)
    nodes.follow(assignment)
    for one in rings:
        if not one.lost:
            asyncio.get_running_loop().create_task(one.node.replicas.serving.follow(generation))
            one.node.vault.drop_after(step)
            one.peers.follow(assignment)


def run(play: Any) -> None:
    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def expect(rank: Process, seqs: range) -> None:
    assert list(rank.got) == list(seqs)
    for seq in seqs:
        assert rank.got[seq] == entry_of(LOST, seq)


async def put_record(nodes: Nodes, step: int, seq: int, rank: int = 2, stream: int = LOST) -> Peer:
    """Of a rank, on the node of that number, the record of a step, to node 0."""
    link = await nodes[rank].replicas.dial(nodes[0].info)
    where = structs.replace(feed(seq), stream=stream)
    record = p.PutRecord(
        generation=2, rank=rank, shard=rank, step=step, record=b"r", digest=digest(b"r"), feeds=(where,)
    )
    link.send(record)
    assert await link.receive() == p.Held(generation=2, rank=rank, step=step)
    return link
