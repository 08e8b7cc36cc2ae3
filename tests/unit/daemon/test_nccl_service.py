"""What an agent does for NCCL: ids where every agent has roots and the key is known, and how that ends."""

import asyncio
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from ckptless.daemon.agent.nccl.service import NcclService
from ckptless.daemon.agent.nccl.wire import Address
from ckptless.daemon.agent.ranks.environment import GLOO, RANKS_PER_ROOT, ranks_per_root, user_env
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import UsageError

INFOS = tuple(
    m.NodeInfo(
        node=node,
        name=f"n{node}",
        address=f"10.0.0.{node}",
        agent_port=1,
        nccl_port=100 + node,
    )
    for node in range(3)
)
ASSIGNMENT = m.Assignment(
    job="j",
    generation=4,
    term=1,
    leader=0,
    # The spare has taken the place of node 1.
    places=(m.Place(node=0, slot=0), m.Place(node=2, slot=0)),
    nodes=INFOS,
    restore_step=None,
)


class Told:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.changes = 0
        self.service = NcclService(lambda kind, _: self.events.append(kind), self._changed)

    def _changed(self) -> None:
        self.changes += 1


async def _started(env: Mapping[str, str]) -> list[str]:
    told = Told()
    assert await told.service.start("127.0.0.1", env) > 0
    for generation in (4, 5):
        told.service.follow(replace(ASSIGNMENT, generation=generation))
    await told.service.close()
    return told.events


async def _followed(assignment: m.Assignment, key: bytes | None = b"k") -> tuple[list[Address] | None, Told]:
    told = Told()
    if key is not None:
        told.service.learn_key(key)
    ids = told.service.follow(assignment)
    return None if ids is None else ids.roots(b"world", 2), told


def test_ids_point_at_the_agents_of_the_ranks() -> None:
    homes, told = asyncio.run(_followed(ASSIGNMENT))
    assert homes == [Address("10.0.0.0", 100), Address("10.0.0.2", 102)]
    assert told.events == []


def test_no_ids_are_computed_without_a_key_or_without_roots() -> None:
    assert asyncio.run(_followed(ASSIGNMENT, key=None))[0] is None
    nodes = (*INFOS[:2], replace(INFOS[2], nccl_port=0))
    assert asyncio.run(_followed(replace(ASSIGNMENT, nodes=nodes)))[0] is None


def test_with_stock_roots_no_ids_are_computed_and_that_is_told_once() -> None:
    async def scenario() -> list[str]:
        told = (await _followed(replace(ASSIGNMENT, stock_roots=True)))[1]
        assert told.service.follow(replace(ASSIGNMENT, stock_roots=True, generation=5)) is None
        return told.events

    assert asyncio.run(scenario()) == ["nccl-stock-roots"]


def test_an_unknown_nccl_is_told_to_the_daemon_once() -> None:
    told = Told()
    told.service._is_unknown("a check-in of 192 bytes")
    told.service._is_unknown("a check-in of 200 bytes")
    assert (told.service.unknown, told.changes) == ("a check-in of 192 bytes", 1)


def test_nccl_comm_id_does_not_reach_the_ranks() -> None:
    env = {"NCCL_COMM_ID": "10.0.0.1:1234", "NCCL_DEBUG": "WARN"}
    assert user_env(env) == {**GLOO, "NCCL_DEBUG": "WARN"}
    assert user_env({"TORCH_GLOO_LAZY_INIT": "0"})["TORCH_GLOO_LAZY_INIT"] == "0"
    assert asyncio.run(_started(env)) == ["nccl-comm-id"]
    assert asyncio.run(_started({})) == []


def test_ranks_ask_the_store_for_every_id_unless_nccl_has_roots_of_its_own() -> None:
    assert ranks_per_root({}, stock_roots=False) == 1
    assert ranks_per_root({}, stock_roots=True) == 128


@pytest.mark.parametrize("stock_roots", [False, True])
def test_the_jobs_own_ranks_per_root_is_kept(stock_roots: bool) -> None:
    assert ranks_per_root({RANKS_PER_ROOT: "8"}, stock_roots=stock_roots) == 8


def test_what_it_costs_is_told_once() -> None:
    assert asyncio.run(_started({RANKS_PER_ROOT: "8"})) == ["nccl-ranks-per-root"]
    assert asyncio.run(_started({RANKS_PER_ROOT: "1"})) == []


@pytest.mark.parametrize("text", ["0", "-1", "", "many", "8 ", "1.5", "\u0661", "2147483648", "9" * 5000])
def test_a_value_that_torch_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"{RANKS_PER_ROOT} must be a whole number from 1 on"):
        asyncio.run(_started({RANKS_PER_ROOT: text}))


def test_ids_follow_the_jobs_own_ranks_per_root() -> None:
    async def scenario() -> list[Address]:
        told = Told()
        told.service.learn_key(b"k")
        await told.service.start("127.0.0.1", {RANKS_PER_ROOT: "2"})
        ids = told.service.follow(replace(ASSIGNMENT, places=ASSIGNMENT.places[::-1] * 2))
        await told.service.close()
        assert ids is not None
        return ids.roots(b"world", 2)

    assert asyncio.run(scenario()) == [Address("10.0.0.2", 102)] * 2
