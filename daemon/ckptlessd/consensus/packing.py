"""Pure: a decree as it goes over the wire: what differs from the one before, with a digest of the whole.

Of a large job a decree is long: every rank's slot, and who holds its state; every node's address. Addresses
are left out where the decree before has them. The rest are columns of numbers, each beside the one before it,
or beside the rank's own node: where a job is regular, as they are, compressing leaves almost nothing.
"""

import hashlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.limits import MOST_RANKS, MOST_SLOTS, OF_NODES, OF_RANKS, NodeNumber, Nodes
from ckptless.daemon.protocol.model import Assignment, NodeInfo, Place, Value, numbers
from ckptless.daemon.protocol.peers.agreement import Decree

# Of what a packed decree may become: of the most ranks that a job may have.
MOST_NBYTES = 64 << 20
T = TypeVar("T")
Small: TypeAlias = Annotated[int, msgspec.Meta(ge=-MOST_RANKS, le=MOST_RANKS)]
# Of each rank, or shard, how many nodes; then those nodes.
_MOST_HOLDERS = msgspec.Meta(max_length=16 * MOST_RANKS)


class _Lists(Value, frozen=True, kw_only=True):
    """Lists of nodes: their lengths, and all their nodes, of each the difference from the one before."""

    counts: Annotated[tuple[NodeNumber, ...], OF_RANKS]
    nodes: Annotated[tuple[Small, ...], _MOST_HOLDERS]


class _Packed(Value, frozen=True, kw_only=True):
    """`rest`: the decree without what follows. `gone` and `came`: nodes that only one of the two has so."""

    rest: Decree
    gone: Nodes = ()
    came: Annotated[tuple[NodeInfo, ...], OF_NODES] = ()
    homes: Annotated[tuple[Small, ...], OF_RANKS] = ()
    slots: Annotated[tuple[Small, ...], OF_RANKS] = ()
    shards: Annotated[tuple[Small, ...], OF_RANKS] = ()
    holds: Annotated[tuple[Small, ...], OF_RANKS] = ()
    tensors: _Lists
    records: _Lists


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Packed)


class MissingBaseError(Exception):
    """The decree before is another one here, or this is not the decree that was packed."""


def digest_of(decree: Decree) -> str:
    """Return the digest by which a decree is known to be the one that was meant.

    Of one field of the assignment after the other: all of it encoded at once is 8 MB in a large job.
    """
    digest = hashlib.blake2b(_ENCODER.encode(replace(decree, assignment=None)), digest_size=16)
    for field in Assignment.__struct_fields__ if decree.assignment is not None else ():
        digest.update(_ENCODER.encode(getattr(decree.assignment, field)))
    return digest.hexdigest()


def pack(decree: Decree, base: Decree) -> bytes | None:
    """The decree, for whoever has the one before it; None where it is not as plans are, and goes as it is."""
    new, old = decree.assignment, base.assignment
    if new is None:
        return zlib.compress(_ENCODER.encode(_Packed(rest=decree, tensors=_lists([]), records=_lists([]))))
    if not _is_regular(new):
        return None
    before = {info.node: info for info in old.nodes} if old is not None else {}
    homes = [place.node for place in new.places]
    packed = _Packed(
        rest=replace(decree, assignment=_without(new)),
        gone=tuple(sorted(before.keys() - new.members)),
        came=tuple(info for info in new.nodes if before.get(info.node) != info),
        homes=_steps(homes),
        slots=_steps([place.slot for place in new.places]),
        shards=_steps(new.shards),
        holds=_steps([shard for shard, _ in new.tensor_nodes]),
        tensors=_lists([(homes[shard], nodes) for shard, nodes in new.tensor_nodes]),
        records=_lists(list(zip(homes, new.record_nodes, strict=False))),
    )
    return zlib.compress(_ENCODER.encode(packed))


def unpack(body: bytes, base: Decree, digest: str, nodes: Collection[int]) -> Decree:
    """Return the decree, of these nodes and with that digest. Raises MissingBaseError, ProtocolError."""
    try:
        decree = _whole(_DECODER.decode(_inflate(body)), base)
    except (zlib.error, msgspec.MsgspecError, ValueError, IndexError, RecursionError) as error:
        raise ProtocolError(f"not a decree: {error}") from error
    assignment = decree.assignment
    named = {*decree.voters}
    if assignment is not None:
        named |= assignment.members | assignment.ranks_by_node.keys()
    if stranger := named.difference(nodes):
        raise ProtocolError(f"a decree with node {min(stranger)}, which the job does not have")
    if digest_of(decree) != digest:
        raise MissingBaseError
    return decree


def _is_regular(assignment: Assignment) -> bool:
    """Nodes in their order, each once; and what is held is of ranks that there are."""
    numbers = [info.node for info in assignment.nodes]
    world = len(assignment.places)
    return (
        all(a < b for a, b in pairwise(numbers))
        and all(shard < world for shard, _ in assignment.tensor_nodes)
        and all(shard < world for shard in assignment.shards)
        and len(assignment.record_nodes) <= world
    )


def _inflate(body: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(body, MOST_NBYTES)
    if not unpacker.eof:
        raise ValueError(f"more than {MOST_NBYTES} bytes, or cut short")
    return found


def _whole(packed: _Packed, base: Decree) -> Decree:
    rest = packed.rest
    if rest.assignment is None:
        return rest
    old = base.assignment if base.assignment is not None else _without(rest.assignment)
    infos = {info.node: info for info in old.nodes}
    for node in packed.gone:
        infos.pop(node, None)
    infos |= {info.node: info for info in packed.came}
    same: dict[int, int] = {}
    homes = [same.setdefault(node, node) for node in accumulate(packed.homes)]
    ranks = numbers(len(homes))
    slots = _chosen(range(MOST_SLOTS), packed.slots)
    shards, holds = _chosen(ranks, packed.shards), _chosen(ranks, packed.holds)
    if any(node < 0 for node in same):
        raise ValueError("a node that there is not")
    places = _shared(old.places, (Place(node=n, slot=s) for n, s in zip(homes, slots, strict=True)))
    alike: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors = _unlist(packed.tensors, [homes[shard] for shard in holds], alike)
    assignment = replace(
        rest.assignment,
        places=places,
        nodes=tuple(infos[node] for node in sorted(infos)),
        shards=_shared(old.shards, shards),
        tensor_nodes=_shared(old.tensor_nodes, zip(holds, tensors, strict=True)),
        record_nodes=_shared(
            old.record_nodes, _unlist(packed.records, homes[: len(packed.records.counts)], alike)
        ),
    )
    return replace(rest, assignment=assignment)


def _without(assignment: Assignment) -> Assignment:
    return replace(assignment, places=(), nodes=(), shards=(), tensor_nodes=(), record_nodes=())


def _shared(old: Sequence[T], new: Iterable[T]) -> tuple[T, ...]:
    """Return the new ones; what two decrees have alike is in memory once."""
    return tuple(
        kept if kept == one else one for kept, one in zip(chain(old, repeat(None)), new, strict=False)
    )


def _steps(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return of each number the difference from the one before."""
    return tuple(b - a for a, b in pairwise((0, *numbers)))


def _chosen(of: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Return those of these numbers that are named by the steps between them."""
    found: list[int] = []
    for number in accumulate(steps):
        if not 0 <= number < len(of):
            raise ValueError("a slot that there is not, or a shard of no rank")
        found.append(of[number])
    return found


def _lists(found: Sequence[tuple[int, Sequence[int]]]) -> _Lists:
    """Pack lists of (home, nodes): the first node relative to the home, each other one to the one before."""
    return _Lists(
        counts=tuple(len(nodes) for _, nodes in found),
        nodes=tuple(b - a for home, nodes in found for a, b in pairwise((home, *nodes))),
    )


def _unlist(
    lists: _Lists, homes: Sequence[int], same: dict[tuple[int, ...], tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Give the same back; what is equal is in memory once, by `same`."""
    if sum(lists.counts) != len(lists.nodes):
        raise ValueError("lists that do not add up")
    at = 0
    for home, count in zip(homes, lists.counts, strict=True):
        nodes = tuple(accumulate(lists.nodes[at : at + count], initial=home))[1:]
        yield same.setdefault(nodes, nodes)
        at += count
