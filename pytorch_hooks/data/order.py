"""The order of samples: a pure function of their number, the seed, the epoch and the replicas.

    global order of an epoch   a keyed permutation of 0 .. n-1, or 0 .. n-1 itself
    global batch b             its places  b * B .. (b + 1) * B - 1, in the last one maybe fewer
    slice of replica r of R    of m places in a batch those from  m * r // R  to  m * (r + 1) // R

The replicas cut up the same global batch, so that another number of them changes nobody's place in the order.
Where there are virtual replicas, these cut it up, and each replica has a block of them.

The permutation is a Feistel network over the smallest power of two that holds n, walked along its cycles
until it comes out below n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). It
takes no memory, whatever n is, and any place of any epoch is computed at once: going on in the middle costs
nothing. Of few samples, where such a network is not quite even, the order is that of their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.elastic.batches import part_of
from ckptless.pytorch_hooks.elastic.tree import block

Indices = npt.NDArray[np.int64]

ROUNDS = 6
FEW = 1 << 12
LIMIT = 1 << 62
"""Samples that an order can have at most."""

BATCHES_LIMIT = 1 << 40
"""Batches that an epoch can have at most."""

_MULTIPLY = np.uint64(0xFF51AFD7ED558CCD)
_AGAIN = np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(33)


class Permutation:
    """A bijection of 0 .. count-1 that looks random, and is the same for the same key."""

    def __init__(self, count: int, *key: int) -> None:
        if not 0 <= count < LIMIT:
            raise UsageError(f"an order has 0 to 2^62 samples, not {count}")
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._keys = [np.uint64(mixed(*key, turn)) for turn in range(ROUNDS)]
        self._table: Indices | None = None
        if count <= FEW:
            every = np.arange(count, dtype=np.uint64)
            self._table = _by_hash(every, self._keys)

    def at(self, places: Indices) -> Indices:
        """Return what stands at these places, each in 0 .. count-1; any shape."""
        if self._table is not None:
            return self._table[places]
        found = self._once(places.astype(np.uint64))
        outside = found >= self.count
        while outside.any():
            found[outside] = self._once(found[outside])
            outside = found >= self.count
        return found.astype(np.int64)

    def _once(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        low_bits, high_bits = self._low_bits, self._high_bits
        low, high = places & _mask(low_bits), places >> np.uint64(low_bits)
        for key in self._keys:
            # The halves change places, and so do their widths where the bits are odd in number.
            low, high = high ^ (_mix(low, key) & _mask(high_bits)), low
            low_bits, high_bits = high_bits, low_bits
        return (high << np.uint64(low_bits)) | low


@lru_cache(maxsize=16)
def permutation(count: int, *key: int) -> Permutation:
    """The same as `Permutation`, made once."""
    return Permutation(count, *key)


def mixed(*numbers: int) -> int:
    """64 bits of these numbers, each in the range of a signed 128-bit one."""
    return xxhash.xxh3_64_intdigest(
        b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    )


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mix(value: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    value = (value + key) * _MULTIPLY
    value ^= value >> _HALF
    value *= _AGAIN
    return value ^ (value >> _HALF)


def _by_hash(value: npt.NDArray[np.uint64], keys: list[np.uint64]) -> Indices:
    for key in keys[:3]:
        value = _mix(value ^ key, key)
    return np.argsort(value, kind="stable")


@dataclass(frozen=True)
class DataReplica:
    """One of so many data-parallel replicas.

    `virtual`: so many virtual ones share each batch, and this one has the parts of a block of them; 0: none.
    """

    replica: int = 0
    replicas: int = 1
    virtual: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise UsageError(f"replica {self.replica} of {self.replicas}: it must be in 0 .. replicas-1")
        if 0 < self.virtual < self.replicas:
            raise UsageError(f"{self.replicas} replicas cannot share {self.virtual} virtual ones")

    @property
    def most(self) -> int:
        """The number of parts that a batch is cut into."""
        return self.virtual or self.replicas

    @property
    def parts(self) -> tuple[DataReplica, ...]:
        """The virtual replicas that this one has, as replicas."""
        return tuple(
            DataReplica(number, self.virtual) for number in block(self.replica, self.replicas, self.virtual)
        )

    def slice(self, count: int) -> tuple[int, int]:
        """Return this replica's of `count` places in a global batch: first, and one after the last."""
        return part_of(count, self.replica, self.replicas)


@dataclass(frozen=True)
class PlainOrder:
    """`count` samples, one by one, in their own order or shuffled anew in each epoch."""

    count: int
    seed: int = 0
    shuffle: bool = False

    def at(self, epoch: int, places: Indices) -> Indices:
        """The samples at these places."""
        return permutation(self.count, self.seed, epoch).at(places) if self.shuffle else places


@dataclass(frozen=True)
class Batches:
    """An epoch's places, cut into global batches of `size`."""

    count: int
    size: int
    drop_last: bool = False

    @property
    def number(self) -> int:
        """The number of batches of an epoch."""
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def places(self, batch: int, layout: DataReplica) -> Indices:
        """A replica's places in a global batch."""
        begin = batch * self.size
        first, last = layout.slice(min(self.size, self.count - begin))
        return np.arange(begin + first, begin + last, dtype=np.int64)

    def check(self, layout: DataReplica) -> None:
        """Raises UsageError where a batch would leave a replica with nothing, or an epoch has no batch."""
        if not self.number:
            raise UsageError(
                f"{self.count} samples make no batch of {self.size}: take a smaller batch_size, or more data"
            )
        if self.size < layout.most:
            raise UsageError(
                f"batch_size is that of all replicas together: {self.size} samples are not enough "
                f"for {layout.most} of them"
            )
        rest = self.count % self.size
        if not self.drop_last and 0 < rest < layout.most:
            raise UsageError(
                f"the last batch of an epoch has {rest} samples for {layout.most} replicas: "
                "set drop_last=True, or another batch_size"
            )


class DataPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`batch` global batches of `epoch` are done; of its part of them this replica has skipped `skipped`
    records.

    `stream` is the source's own state there, if it has one.
    """

    epoch: int = 0
    batch: int = 0
    skipped: int = 0
    stream: object = None


def position_of(saved: object) -> DataPosition:
    """Read a position strictly. Raises ProtocolError."""
    try:
        found = msgspec.convert(saved, DataPosition)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a position in the data: {error}") from error
    if min(found.epoch, found.batch, found.skipped) < 0 or found.batch >= BATCHES_LIMIT:
        raise ProtocolError(f"a position in the data is out of range: {found}")
    return found
