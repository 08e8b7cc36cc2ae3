"""No rank of an old generation, and none of another job, comes together with anybody of the present one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ckptless.daemon.agent.nccl.blocks import (
    block,
)
from ckptless.daemon.agent.nccl.ids import NcclIds, StaleError, admitted
from ckptless.daemon.agent.nccl.root import Answer, Roots
from ckptless.daemon.agent.nccl.wire import (
    Address,
    CheckIn,
)
from ckptless.daemon.protocol.errors import ProtocolError

from .nccl_rank import decode_id, root_of

OURS, THEIRS = b"our job's key", b"another's"
SEEDS = 1000
GENERATIONS = 4
NODES = 3


@dataclass(frozen=True)
class Communicator:
    """One of a job and a generation; the home of root i is node `homes[i]`."""

    key: bytes
    generation: int
    group: bytes
    round_: int
    ranks: int
    magic: int
    homes: tuple[int, ...]

    def says(self, rank: int) -> bytes:
        """By what a rank of it can be told from any other rank."""
        return repr((self.key, self.generation, self.group, self.round_, rank)).encode()

    def check_ins(self) -> Iterator[tuple[int, CheckIn]]:
        """Every one of them, and the node that it goes to."""
        roots = len(self.homes)
        for rank in range(self.ranks):
            mine, before = root_of(rank, self.ranks, roots), (rank - 1) % self.ranks
            yield self.homes[mine], self._check_in(rank, rank, mine)
            if roots > 1 and block(mine, self.ranks, roots)[0] == rank:
                root = root_of(before, self.ranks, roots)
                yield self.homes[root], self._check_in(before + 1, rank, root)

    def _check_in(self, as_rank: int, rank: int, root: int) -> CheckIn:
        listen = Address("10.0.0.1", 1 + rank)
        return CheckIn(as_rank, self.ranks, root, len(self.homes), 0, listen, self.says(rank))


class Node:
    """An agent's roots, with what it lets in."""

    def __init__(self) -> None:
        self.roots, self.generation = Roots(), 0

    def follow(self, generation: int) -> None:
        self.generation = generation
        self.roots.follow(generation)

    def hears(self, magic: int, message: CheckIn) -> list[Answer]:
        generation = admitted(OURS, magic, self.generation)
        return self.roots.check_in(magic, generation, message, 0.0)


def communicator(
    chance: random.Random, key: bytes, generation: int, group: bytes, round_: int
) -> Communicator:
    """The world of a generation, or a group in it; torch knows of one, two or three ranks for a root."""
    per_root = chance.randint(1, 3)
    placed = [chance.randrange(NODES) for _ in range(chance.randint(2, 7))]
    homes = [Address(f"10.0.0.{node}", 1) for node in placed]
    ranks = len(placed) if group == b"world" else chance.randint(2, len(placed))
    ids = NcclIds(key, generation, homes, per_root).ids(group, round_, -(-ranks // per_root))
    unique = [decode_id(data) for data in ids]
    nodes = tuple(int(one.root.host.rpartition(".")[2]) for one in unique)
    return Communicator(key, generation, group, round_, ranks, unique[0].magic, nodes)


def play(seed: int) -> tuple[int, int]:
    """Return how many were answered, and how many refused as stale."""
    chance = random.Random(seed)
    all_of_them = [
        communicator(chance, key, generation, group, round_)
        for key in (OURS, THEIRS)
        for generation in range(1, GENERATIONS + 1)
        for group, round_ in ((b"world", 0), (b"world", 1), (b"row", 0))
    ]
    by_magic = {one.magic: one for one in all_of_them}
    assert len(by_magic) == len(all_of_them)
    nodes = [Node() for _ in range(NODES)]
    for node in nodes:
        node.follow(1)
    events = [(one, *sent) for one in all_of_them for sent in one.check_ins()]
    # Some come twice, and some of old generations never.
    events = [event for event in events if event[0].generation == GENERATIONS or chance.random() < 0.8]
    events += chance.sample(events, len(events) // 8)
    chance.shuffle(events)
    answered: dict[tuple[int, int], bytes] = {}
    stale = 0
    for one, home, message in events:
        for node in nodes:
            if node.generation < GENERATIONS and chance.random() < 0.02:
                node.follow(node.generation + 1)
        at = nodes[home]
        try:
            answers = at.hears(one.magic, message)
        except StaleError:
            assert one.key == OURS
            assert one.generation < at.generation
            stale += 1
            continue
        except ProtocolError:
            continue
        assert one.key == OURS
        for answer in answers:
            of = by_magic[answer.magic]
            assert of == one, "only those of the communicator that has just been heard are told something"
            assert of.generation >= at.generation
            assert answer.connect == of.says((answer.rank + 1) % of.ranks), "the next of the same"
            assert (answer.magic, answer.rank) not in answered
            answered[answer.magic, answer.rank] = answer.connect
    # The newest has come together, whatever came in between, and however late a node heard of it.
    newest = [one for one in all_of_them if (one.key, one.generation) == (OURS, GENERATIONS)]
    assert all((one.magic, rank) in answered for one in newest for rank in range(one.ranks))
    for node in nodes:
        node.follow(GENERATIONS)
        assert node.roots._kept == 0, "nothing is kept of what is over"
    return len(answered), stale


@pytest.mark.parametrize("part", range(4))
def test_check_ins_of_old_present_and_coming_generations_and_of_another_job(part: int) -> None:
    told = [play(seed) for seed in range(part, SEEDS, 4)]
    assert sum(answered for answered, _ in told) > SEEDS
    assert sum(stale for _, stale in told) > SEEDS
