"""Stock NCCL binaries against the agents' roots: their bootstrap, on CPU, each rank a process."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.agent.nccl import wire as nccl_wire
from ckptless.daemon.agent.nccl.blocks import block
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.agent.nccl.server import NcclServer
from ckptless.daemon.agent.nccl.service import NcclService
from ckptless.daemon.agent.nccl.wire import Address
from ckptless.daemon.agent.ranks import environment
from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from tests.unit.daemon.store_client import Client

from .nccl_wheels import RECORDED, library

pytestmark = pytest.mark.timeout(900)

# The newest with each of the two layouts that torch's versions may meet; one that is older than torch's.
NEWEST = ("2.28.9", "2.32.3")
OLD = ("2.21.5", "2.22.3")
ALL = [v if v in NEWEST else pytest.param(v, marks=pytest.mark.slow) for v in RECORDED]
SCALABLE = ALL[len(OLD) :]

KEY = b"k" * 32
LONG_S = 240.0
T = TypeVar("T")

# (its ranks, which number in the job; its ids), as one process after the other makes it.
Communicator = tuple[Sequence[int], list[bytes]]


class Agents:
    """The roots of some nodes, each at a loopback address of its own."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.told = asyncio.Event()
        self.servers: list[NcclServer] = []
        self.addresses: list[Address] = []
        self.generation = 1

    def _tell(self, kind: str, text: str) -> None:
        self.events.append((kind, text))
        self.told.set()

    async def start(self, count: int) -> None:
        for node in range(count):
            server = NcclServer()
            server.on_event = self._tell
            host = f"127.0.0.{2 + node}"
            self.servers.append(server)
            self.addresses.append(Address(host, await server.start(host)))
            server.learn_key(KEY)
            server.follow(self.generation)

    def follow(self, generation: int) -> None:
        self.generation = generation
        for server in self.servers:
            server.follow(generation)

    def ids(self, nodes: Sequence[int]) -> NcclIds:
        return NcclIds(KEY, self.generation, [self.addresses[node] for node in nodes])

    async def tells(self, kind: str) -> str:
        async with asyncio.timeout(LONG_S):
            while True:
                for known, text in self.events:
                    if known == kind:
                        return text
                self.told.clear()
                await self.told.wait()

    async def has_kept(self, *counts: int) -> None:
        """Returns once so many ranks wait at the last nodes."""
        async with asyncio.timeout(LONG_S):
            while [server._roots._kept for server in self.servers[-len(counts) :]] != list(counts):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()


def in_agents(count: int, scenario: Callable[[Agents], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        agents = Agents()
        try:
            await agents.start(count)
            return await scenario(agents)
        finally:
            await agents.close()

    return asyncio.run(main())


class Ranks:
    """Processes of stock NCCL; all are gone when it is left."""

    def __init__(self, version: str) -> None:
        self._version, self._library = version, library(version)
        self._running: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> "Ranks":
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._running:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def start(self, number: int, communicators: Sequence[Communicator]) -> asyncio.subprocess.Process:
        env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        env.update(NCCL_SOCKET_IFNAME="lo", NCCL_DEBUG="WARN", CUDA_VISIBLE_DEVICES="")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("stock_rank.py")),
            str(self._library),
            self._version,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._running.append(process)
        mine = [
            {"rank": ranks.index(number), "ranks": len(ranks), "ids": b"".join(ids).hex()}
            for ranks, ids in communicators
            if number in ranks
        ]
        assert process.stdin is not None
        process.stdin.write(json.dumps(mine).encode())
        process.stdin.write_eof()
        return process

    async def run(self, communicators: Sequence[Communicator], *, late: Sequence[int] = ()) -> None:
        """Every rank of the first one, which is the world."""
        world = communicators[0][0]
        first = [await self.start(number, communicators) for number in world if number not in late]
        if late:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first[0].wait(), 2.0)
        rest = [await self.start(number, communicators) for number in late]
        async with asyncio.timeout(LONG_S):
            outputs = await asyncio.gather(*(process.communicate() for process in (*first, *rest)))
        for output, _ in outputs:
            assert b'{"communicators": ' in output, output.decode(errors="replace")


@pytest.mark.parametrize("version", ALL)
def test_a_check_in_has_the_length_that_it_is_known_by(version: str) -> None:
    nbytes = RECORDED[version]["in"]["sizeof_check_in"]
    first, last = (tuple(map(int, v.split("."))) for v in nccl_wire.LAYOUTS[nbytes].versions.split(" to "))
    assert first <= tuple(map(int, version.split(".")))[:2] <= last
    assert RECORDED[version]["in"]["sizeof_handle"] == 40


@pytest.mark.parametrize("version", ALL)
def test_one_computed_id(version: str) -> None:
    """All that NCCL before 2.23 can do; its root serves ranks of any node."""

    async def scenario(agents: Agents) -> None:
        ids = agents.ids([0, 1, 1, 0])
        async with Ranks(version) as ranks:
            await ranks.run([(range(4), ids.ids(b"world", 0, 1)), (range(4), ids.ids(b"world", 1, 1))])
        assert agents.events == []

    in_agents(2, scenario)


@pytest.mark.parametrize("version", SCALABLE)
def test_world_and_groups_over_uneven_nodes(version: str) -> None:
    """One root for each rank, as torch asks for it: the world, rows and columns, and once more the world."""

    async def scenario(agents: Agents) -> None:
        ids = agents.ids([0, 2, 0, 1])
        async with Ranks(version) as ranks:
            await ranks.run(
                [
                    (range(4), ids.ids(b"world", 0, 4)),
                    ((0, 1), ids.ids(b"row 0", 0, 2)),
                    ((2, 3), ids.ids(b"row 1", 0, 2)),
                    ((0, 2), ids.ids(b"column 0", 0, 2)),
                    ((1, 3), ids.ids(b"column 1", 0, 2)),
                    (range(4), ids.ids(b"world", 1, 4)),
                ]
            )
        assert agents.events == []

    in_agents(3, scenario)


@pytest.mark.parametrize("version", SCALABLE)
def test_uneven_blocks_and_a_late_rank(version: str) -> None:
    """Five ranks with two roots, three and two of them; the last comes when the others wait."""

    async def scenario(agents: Agents) -> None:
        async with Ranks(version) as ranks:
            ids = agents.ids([0, 0, 0, 1, 1]).ids(b"world", 0, 2)
            await ranks.run([(range(5), ids)], late=[4])

    in_agents(2, scenario)


@pytest.mark.parametrize("version", SCALABLE)
def test_interleaved_groups_and_a_late_node(version: str) -> None:
    """The last node's ranks come late, and its agent is the last to hear of their generation."""

    async def scenario(agents: Agents) -> None:
        *early, late = agents.servers
        for server in early:
            server.follow(2)
        agents.generation = 2
        ids = agents.ids([0, 1, 0, 1, 2])
        async with Ranks(version) as ranks:
            communicators: list[Communicator] = [(range(5), ids.ids(b"world", 0, 5))]
            for group, members in ((b"even", (0, 2, 4)), (b"odd", (1, 3))):
                communicators += [(members, ids.ids(group, round_, len(members))) for round_ in range(2)]
            formed = asyncio.create_task(ranks.run(communicators, late=[4]))
            await agents.has_kept(1)
            late.follow(2)
            await formed
        assert agents.events == []

    in_agents(3, scenario)


@pytest.mark.parametrize("version", SCALABLE)
def test_a_new_generation_beside_ranks_of_the_old_one(version: str) -> None:
    async def scenario(agents: Agents) -> None:
        async with Ranks(version) as stale, Ranks(version) as ranks:
            old = agents.ids([0, 1, 1])
            stuck = [await stale.start(rank, [(range(3), old.ids(b"world", 0, 3))]) for rank in (0, 2)]
            # Rank 2 has heard of rank 0; rank 0 and the root before rank 2 wait for rank 1.
            await agents.has_kept(1, 1)
            agents.follow(2)
            stuck.append(await stale.start(1, [(range(3), old.ids(b"world", 0, 3))]))
            await ranks.run([(range(3), agents.ids([0, 1, 1]).ids(b"world", 0, 3))])
            await agents.tells("nccl-stale")
            # Those of the old generation wait, or failed: none was let in.
            for process in stuck:
                if process.returncode is None:
                    process.kill()
                output, _ = await process.communicate()
                assert b'{"communicators": ' not in output, output.decode(errors="replace")

    in_agents(2, scenario)


@pytest.mark.parametrize("version", [NEWEST[-1]])
def test_an_nccl_that_is_not_known_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {nbytes: layout for nbytes, layout in nccl_wire.LAYOUTS.items() if nbytes != 176}
    monkeypatch.setattr(nccl_wire, "LAYOUTS", known)

    async def scenario(agents: Agents) -> None:
        async with Ranks(version) as ranks:
            await ranks.start(0, [(range(2), agents.ids([0, 0]).ids(b"world", 0, 2))])
            assert "a check-in of 176 bytes" in await agents.tells("nccl-unknown")

    in_agents(1, scenario)


async def _asked_for(env: dict[str, str], store: StoreServer, port: int, ranks: int) -> list[list[bytes]]:
    """The world's ids as each rank gets them by torch's requests, with the value that it is given."""
    ranks_per_root = environment.ranks_per_root(env, stock_roots=False)
    roots = -(-ranks // ranks_per_root)
    keys = [b"default_pg/0//cuda//UniqueNCCLID:%d" % root for root in range(roots)]
    of_rank = {block(root, ranks, roots)[0]: root for root in range(roots)}
    found = []
    for rank in range(ranks):
        client = await Client.connect(port)
        if rank in of_rank:
            client.set_soon(keys[of_rank[rank]], b"a root of its own, which nobody uses")
        found.append(await client.multi_get(keys))
        await client.close()
    assert store.refused == 0
    return found


@pytest.mark.parametrize("version", SCALABLE)
@pytest.mark.parametrize(("own", "roots"), [("2", 3), ("4", 2)])
def test_the_jobs_own_number_of_ranks_for_a_root(version: str, own: str, roots: int) -> None:
    """From the job's environment to the ranks' requests, the computed ids, and a world that they form."""
    nodes = [0, 0, 0, 1, 1]
    env = {environment.RANKS_PER_ROOT: own}

    async def scenario() -> list[tuple[str, str]]:
        events: list[tuple[str, str]] = []
        store, infos = StoreServer(), []
        services = [NcclService(lambda *event: events.append(event), lambda: None) for _ in range(2)]
        try:
            for node, service in enumerate(services):
                host = f"127.0.0.{2 + node}"
                service.learn_key(KEY)
                port = await service.start(host, env)
                info = NodeInfo(node=node, name=f"n{node}", address=host, agent_port=1, nccl_port=port)
                infos.append(info)
            assignment = Assignment(
                job="job",
                generation=1,
                term=1,
                leader=0,
                places=tuple(Place(node=node, slot=slot) for slot, node in enumerate(nodes)),
                nodes=tuple(infos),
                restore_step=None,
            )
            computed = [service.follow(assignment) for service in services]
            told = []
            for ids in computed:
                store.cut(ids)
                port = await store.start("127.0.0.1")
                told += await _asked_for(env, store, port, len(nodes))
                await store.close()
            assert all(ids == told[0] for ids in told), "on both nodes"
            assert len(told[0]) == roots
            async with Ranks(version) as ranks:
                await ranks.run([(range(5), told[0])])
        finally:
            await store.close()
            for service in services:
                await service.close()
        return events

    # What it costs is told once by each agent, and no check-in is refused.
    assert [kind for kind, _ in asyncio.run(scenario())] == ["nccl-ranks-per-root"] * 2
