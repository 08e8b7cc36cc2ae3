"""Pure: NCCL's unique ids as every agent of a job computes them, so that nobody has to be asked for one.

Scalable initialization (NCCL 2.23 and torch 2.7 or newer) takes a list of ids, the same on every rank: id i
says where root i listens, and here that is an agent. All ids of a communicator have one magic, by which its
connections know each other. It follows from the job's key, the generation, the group's name and how many
communicators that group has had; and whoever has the key can tell by it of which generation it is.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ckptless.daemon.agent.nccl.blocks import block
from ckptless.daemon.agent.nccl.wire import Address, UniqueId, encode_id
from ckptless.daemon.protocol.errors import ProtocolError

# A magic's lower bytes name the communicator, the upper ones prove it and its generation. Two communicators
# of one name would only disturb each other where they meet: in one agent, with the same number of root.
_NAME_NBYTES, _PROOF_NBYTES = 4, 4
# Lists of ids that are kept, since every rank of a node asks for the same.
MAX_LISTS = 16
# Other nodes may hear of a generation a little earlier than this one; and older ones are known by name.
NEAR = (0, 1, 2, 3, -1, -2, -3)


class StaleError(ProtocolError):
    """The id is of this job, and of a generation that is over."""


def magic_of(key: bytes, generation: int, group: bytes, round_: int) -> int:
    """The magic of a group's `round_`-th communicator of a generation, from 0."""
    text = struct.pack("<qq", generation, round_) + group
    name = _digest(key, b"name", text)[:_NAME_NBYTES]
    return int.from_bytes(name + _proof(key, generation, name), "little")


def generation_of(key: bytes, magic: int, near: Iterable[int]) -> int | None:
    """Return for which generation of these a magic was made, if any: by chance 1 of 4 billion is."""
    data = magic.to_bytes(8, "little")
    name, proof = data[:_NAME_NBYTES], data[_NAME_NBYTES:]
    return next((g for g in near if hmac.compare_digest(_proof(key, g, name), proof)), None)


def admitted(key: bytes, magic: int, current: int) -> int:
    """The generation of a magic: `current`, or one that is to come. Raises StaleError, ProtocolError."""
    generation = generation_of(key, magic, (current + step for step in NEAR))
    if generation is None:
        raise ProtocolError("its magic is none of this job's")
    if generation < current:
        raise StaleError(f"it is of generation {generation}, here it is {current}")
    return generation


def _proof(key: bytes, generation: int, name: bytes) -> bytes:
    return _digest(key, b"proof", struct.pack("<q", generation) + name)[:_PROOF_NBYTES]


def _digest(key: bytes, purpose: bytes, text: bytes) -> bytes:
    return hmac.digest(key, b"ckptless nccl magic\0" + purpose + b"\0" + text, hashlib.sha256)


class NcclIds:
    """The ids of one generation; `homes[rank]` is where the roots of the rank's node listen.

    `ranks_per_root` is what torch has been told: a communicator has so many times fewer roots than ranks.
    """

    def __init__(
        self, key: bytes, generation: int, homes: Sequence[Address], ranks_per_root: int = 1
    ) -> None:
        self.generation = generation
        self._roots_of_all = -(-len(homes) // ranks_per_root)
        self._key, self._homes = key, tuple(homes)
        self._nodes = tuple(dict.fromkeys(homes))
        self.ids = lru_cache(MAX_LISTS)(self._ids)
        """All ids of a communicator: `ids(group, round, count)`, for so many roots."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return len(self._homes)

    def _ids(self, group: bytes, round_: int, count: int) -> list[bytes]:
        magic = magic_of(self._key, self.generation, group, round_)
        return [encode_id(UniqueId(magic, home)) for home in self.roots(group, count)]

    def roots(self, group: bytes, count: int) -> list[Address]:
        """Return the roots' addresses. With as many as ranks, each is on the node of its block's first rank.

        Of a smaller group nobody says who is in it: its roots are dealt out over the nodes that have ranks,
        so that losing one of them ends the generation in any case.
        """
        if count == self._roots_of_all:
            return [self._homes[block(root, self.ranks, count)[0]] for root in range(count)]
        first = int.from_bytes(hashlib.sha256(group).digest()[:4], "little")
        return [self._nodes[(first + root) % len(self._nodes)] for root in range(count)]
