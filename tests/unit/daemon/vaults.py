"""Agents' vaults with their real servers over the loopback, and no processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptless.daemon.agent.versions.connections import ANY_NETWORK, Network
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import SLOTS, HeldRecord, VersionStore, digest, round_up
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.transport.credentials import KeyCredentials

HOST, JOB = "127.0.0.1", "job"
DEADLINE_S = 30.0


async def until(what: Callable[[], object]) -> None:
    """Fails where it does not come true."""
    async with asyncio.timeout(DEADLINE_S):
        while not what():  # noqa: ASYNC110 - of real sockets, whatever it is
            await asyncio.sleep(0.005)


def payload_of(shard: int, step: int, nbytes: int) -> bytes:
    """Return what a shard's tensors of a step are."""
    return random.Random(f"{shard} {step}").randbytes(nbytes)


class Node:
    """One agent's vault, and what serves it to others."""

    def __init__(self, number: int, copies: int, host: str = HOST, network: Network = ANY_NETWORK) -> None:
        """Listen at `host`, and at the other addresses of `network`."""
        self.number, self.host, self.others = number, host, network.sources[1:]
        self.vault = VersionStore()
        self.replicas = Replicas(number, version.Origin(JOB), copies, self.vault, network=network)
        self.replicas.credentials = KeyCredentials(b"key")
        self.events: list[tuple[str, str]] = []
        self.replicas.on_event = lambda kind, text: self.events.append((kind, text))
        self.info: Any = None

    async def start(self) -> None:
        """Serve."""
        port = await self.replicas.start(self.host, *self.others)
        self.info = m.NodeInfo(
            node=self.number,
            name=f"n{self.number}",
            address=self.host,
            agent_port=port,
            interfaces=self.replicas.interfaces,
        )

    def hold(self, shard: int, step: int, payload: bytes, **fields: Any) -> m.TensorsAt:
        """Hold a version whose header says `fields`, and the record of the shard's rank."""
        known: dict[str, Any] = {"job": JOB, "shard": shard, "rank": shard, "step": step, "generation": 1}
        chunk_nbytes = fields.pop("chunk_nbytes", version.PAGE_NBYTES)
        chunks = tuple(version.digest_of(payload[a:b]) for a, b in version.spans(len(payload), chunk_nbytes))
        header = version.Header(
            **{**known, **fields},
            layout="00" * 16,
            nbytes=len(payload),
            chunks=chunks,
            chunk_nbytes=chunk_nbytes,
        )
        region = self.vault.allocate(shard, round_up(header.total_nbytes), SLOTS)
        with region.view(0, header.total_nbytes) as view:
            view[header.header_nbytes :] = payload
            told = version.write_header(view, header)
        at = m.TensorsAt(region=region.number, offset=0, nbytes=header.total_nbytes, digest=told)
        self.vault.put_tensors(shard, step, at)
        record = f"the record of {shard}".encode()
        self.vault.put_record(shard, step, HeldRecord(record, digest(record), shard))
        return at

    def spoil(self, shard: int, step: int, offset: int = -1) -> None:
        """Flip a bit of what is held."""
        found = self.vault.tensors(shard, step)
        assert found is not None
        with found[1].view(found[0].offset, found[0].nbytes) as view:
            view[offset] ^= 1

    def payload(self, shard: int, step: int) -> bytes | None:
        """Return what is held, to its last byte verified."""
        found = self.vault.tensors(shard, step)
        if found is None:
            return None
        with found[1].view(found[0].offset, found[0].nbytes) as view:
            header = version.verify(view, found[0].digest)
            return bytes(view[header.header_nbytes :])

    def told(self, kind: str) -> list[str]:
        """Events of a kind."""
        return [text for known, text in self.events if known == kind]

    async def close(self) -> None:
        """Hang up, and give the memory back."""
        await self.replicas.close()
        self.vault.close()


class Nodes(dict[int, Node]):
    """Some of them; in `async with`. With `hosts`, each at its own address, which it also comes from."""

    def __init__(
        self,
        count: int,
        copies: int = 2,
        network: Network = ANY_NETWORK,
        hosts: Mapping[int, str | tuple[str, ...]] | None = None,
    ) -> None:
        for number in range(count):
            told = hosts[number] if hosts else HOST
            own = told if isinstance(told, tuple) else (told,)
            here = Network(own, network.send_rate) if hosts else network
            self[number] = Node(number, copies, own[0], here)

    async def __aenter__(self) -> Nodes:
        for node in self.values():
            await node.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for node in self.values():
            await node.close()

    def assignment(
        self,
        places: Sequence[int],
        step: int | None,
        *,
        generation: int = 2,
        away: Sequence[int] = (),
        shards: Sequence[int] | None = None,
    ) -> m.Assignment:
        """Rank r on node places[r]; who holds what is as it is."""
        here = [node for number, node in self.items() if number not in away]
        of = tuple(shards if shards is not None else range(len(places)))
        found = step if step is not None else -1
        return m.Assignment(
            job=JOB,
            generation=generation,
            term=1,
            leader=0,
            places=tuple(m.Place(node=node, slot=places[:r].count(node)) for r, node in enumerate(places)),
            nodes=tuple(node.info for node in here),
            restore_step=step,
            shards=of,
            tensor_nodes=tuple(
                (shard, tuple(node.number for node in here if node.vault.tensors(shard, found) is not None))
                for shard in sorted(set(of))
            ),
            record_nodes=tuple(
                tuple(node.number for node in here if node.vault.record(rank, found) is not None)
                for rank in range(len(places))
            ),
        )

    def follow(self, assignment: m.Assignment) -> None:
        """All of them that it knows."""
        for info in assignment.nodes:
            self[info.node].replicas.follow(assignment)
