"""NCCL's ids through torch's own store clients, in the order in which ProcessGroupNCCL uses their keys."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.agent.nccl.wire import (
    Address,
)
from tests.unit.daemon.nccl_rank import decode_id

HOMES = [Address("10.0.0.1", 7), Address("10.0.0.1", 7), Address("10.0.0.2", 8)]
IDS = NcclIds(b"key", 5, HOMES)
LONG = timedelta(seconds=30)


@pytest.fixture
def port() -> Iterator[int]:
    """A store of our own in a thread of its own, in a generation with computed ids."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = StoreServer()

    async def start() -> int:
        server.cut(IDS)
        return await server.start("127.0.0.1")

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
    assert server.refused == 0


def connect(port: int, group: str) -> Any:
    store: Any = TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)
    for prefix in ("default_pg", f"0//{group}", "cuda/"):
        store = PrefixStore(prefix, store)
    return store


def communicator(store: Any, root: int, roots: int) -> list[bytes]:
    """As `allgatherUniqueNCCLIDs` does it."""
    keys = [f"UniqueNCCLID:{i}" for i in range(roots)]
    store.set(keys[root], bytes([root + 1]) * 128)
    return [bytes(data) for data in store.multi_get(keys)]


def test_every_rank_of_the_world_gets_the_same_computed_ids_round_by_round(port: int) -> None:
    stores = [connect(port, "") for _ in HOMES]
    seen = set()
    for _ in range(3):
        with ThreadPoolExecutor(3) as ranks:
            lists = list(ranks.map(communicator, stores, range(3), [3] * 3))
        assert lists[0] == lists[1] == lists[2]
        ids = [decode_id(data) for data in lists[0]]
        assert [unique.root for unique in ids] == HOMES
        seen.add(ids[0].magic)
    assert len(seen) == 3, "each communicator has a magic of its own"


def test_a_rank_alone_does_not_wait_for_anybody(port: int) -> None:
    store = connect(port, "7//")
    assert len(communicator(store, 1, 2)) == 2
    assert store.check(["UniqueNCCLID:0", "UniqueNCCLID:1"])
    store.set("0:1", b"an id that is not computed")
    assert store.get("0:1") == b"an id that is not computed"
