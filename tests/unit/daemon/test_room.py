"""Whether a node has the memory for what it is to hold: one sentence where it has not, and no false one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from ckptless.daemon.agent.free_memory import FreeMemory
from ckptless.daemon.agent.versions.room import Room
from ckptless.daemon.agent.versions.store import SLOTS, VersionStore
from ckptless.daemon.protocol import messages as m

MIB = 1 << 20
SLOT = MIB
# Two ranks on each of four nodes; with two copies a node holds the shards of two others.
PER_NODE, NODES, COPIES = 2, 4, 2
RANKS = PER_NODE * NODES
WHOLE = SLOTS * SLOT * PER_NODE * (1 + COPIES)
ME = 1


class Here:
    """Node 1, and what it has left."""

    def __init__(self) -> None:
        self.store = VersionStore()
        self.free: FreeMemory | None = FreeMemory(WHOLE, "the node's memory")
        self.room = Room((ME, "node02"), self.store, COPIES, free=lambda: self.free)

    def begin(self, generation: int = 1) -> None:
        self.room.follow(
            m.Assignment(
                job="7",
                generation=generation,
                term=1,
                leader=0,
                places=tuple(m.Place(node=r // PER_NODE, slot=r % PER_NODE) for r in range(RANKS)),
                nodes=tuple(m.NodeInfo(node=n, name="", address="a", agent_port=1) for n in range(NODES)),
                restore_step=None,
            )
        )

    def share(self, rank: int, twins: Sequence[int] = ()) -> int:
        ranks = twins or (rank,)
        self.room.share(min(ranks), ranks)
        return min(ranks)

    def refusal(self, shard: int, slot_nbytes: int = SLOT) -> str | None:
        return self.room.refusal(shard, SLOTS * slot_nbytes)

    def touch(self, shard: int, slots: int = SLOTS, slot_nbytes: int = SLOT) -> None:
        region = self.store.allocate(shard, slot_nbytes, SLOTS)
        os.pwrite(region.fd, b"x" * slot_nbytes * slots, 0)


@pytest.fixture
def here() -> Iterator[Here]:
    found = Here()
    found.begin()
    yield found
    found.store.close()


def leave(here: Here, nbytes: int) -> None:
    here.free = FreeMemory(nbytes, "the node's memory")


def test_what_fits_to_the_last_byte(here: Here) -> None:
    for rank in (2, 3):
        assert here.refusal(here.share(rank)) is None
        here.store.allocate(rank, SLOT, SLOTS)
    leave(here, WHOLE - 1)
    assert here.refusal(here.share(3)) == (
        "node02 has too little memory for the state: versions of its own ranks take 6.3 MB and 12.6 MB for "
        "replicas of others, 0 B of it are there, and the node's memory has 18.9 MB left: take fewer "
        "replicas (--replicas, now 2), shard the state over more nodes, or give the job more memory"
    )


def test_what_was_touched_is_paid_for(here: Here) -> None:
    """Own versions and replicas alike: of what is there already nothing more is needed."""
    here.share(2)
    here.touch(2)
    here.touch(0, slots=1)
    here.share(3)
    left = WHOLE - 4 * SLOT
    leave(here, left)
    assert here.refusal(3) is None
    leave(here, left - 1)
    assert "4.2 MB of it are there" in (here.refusal(3) or "")


def test_a_state_that_grows_is_counted_by_its_new_size(here: Here) -> None:
    """As in the first step, when an optimizer makes its moments."""
    here.share(2)
    here.touch(2, slots=1)
    grown = (1 + COPIES * PER_NODE) * 3 * SLOTS * SLOT - SLOT
    leave(here, grown)
    assert here.refusal(2, 3 * SLOT) is None
    leave(here, grown - 1)
    assert here.refusal(2, 3 * SLOT) is not None


def test_ranks_that_all_have_the_same_send_nothing(here: Here) -> None:
    shard = here.share(2, range(RANKS))
    leave(here, SLOTS * SLOT)
    assert here.refusal(shard) is None
    leave(here, SLOTS * SLOT - 1)
    refusal = here.refusal(shard) or ""
    assert "replicas" not in refusal
    assert "shard the state over more nodes" in refusal


def test_twins_of_no_mesh_have_their_own_counted_alone(here: Here) -> None:
    shard = here.share(2, (0, 2, 3))
    leave(here, SLOTS * SLOT)
    assert here.refusal(shard) is None


def test_another_generation_may_hold_other_shards(here: Here) -> None:
    here.refusal(here.share(2))
    here.begin(2)
    shard = here.share(2, range(RANKS))
    leave(here, SLOTS * SLOT)
    assert here.refusal(shard) is None


def test_where_nothing_tells_what_is_left(here: Here) -> None:
    here.free = None
    assert here.refusal(here.share(2), 1 << 40) is None
