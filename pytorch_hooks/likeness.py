"""Whether ranks that take each other for twins have the same: before the first step, and when a script asks.

A model that is cut by hand has no DTensors, and its State looks as if every rank had a copy of all others';
a process that takes a rank's place would get another rank's part.
"""

import msgspec
import xxhash

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks import torch_private
from ckptless.pytorch_hooks.comm.fabric import Fabric
from ckptless.pytorch_hooks.state import TensorSet, raw
from ckptless.pytorch_hooks.state.objects import parts_of, watch_of

# Of so many tensors it is told which differ: the same for all ranks, some 16 KB in the store for each.
TOLD = 2048


class Digests(msgspec.Struct, frozen=True):
    """What a rank has.

    `twins`: digest of the ranks that it takes for its twins. `whole`: of all its tensors and of what its
    optimizers have. `parts`: 8 hex digits for each of the first tensors.
    """

    twins: str
    whole: str
    parts: str = ""


def compare(
    fabric: Fabric, rank: int, twins: tuple[int, ...], tensors: TensorSet, when: str, number: int
) -> None:
    """Raise UsageError where the twin before this one has something else; each time has another `number`.

    If all are as the one before, all are alike; and no rank's node is asked by all others. Every rank calls
    it. Raises GenerationEnded, CollectiveFailed.
    """
    mine = _digests(twins, tensors)

    def key(of: int) -> str:
        # A key that is kept on that rank's node: see store_home.py.
        return f"ckptless/{fabric.generation or 0}/rank/{of}/same/{number}"

    data = msgspec.json.encode(mine).decode()
    fabric.in_store(lambda store: store.set(key(rank), data))
    if len(twins) < 2:
        return
    before = twins[twins.index(rank) - 1]
    found = fabric.in_store(lambda store: torch_private.store_get(store, key(before)))
    theirs = msgspec.json.decode(found, type=Digests)
    if mine.twins == theirs.twins and mine.whole == theirs.whole:
        return
    one, other = sorted((rank, before))
    raise UsageError(
        f"ranks {one} and {other} have different {_where(mine, theirs, tensors)} {when}, and nothing in the "
        "State says that they should: build the same on every rank (the same seed, or "
        "DistributedDataParallel), or shard by DTensors (fully_shard, parallelize_module, distribute_tensor)"
    )


def _digests(twins: tuple[int, ...], tensors: TensorSet) -> Digests:
    told = xxhash.xxh3_64_hexdigest(repr(twins).encode())
    if len(twins) < 2:
        return Digests(told, "")
    parts = []
    state = tensors.state
    own = {item.name for item in watch_of(state).changed()}
    for entry, (_name, tensor) in zip(tensors.layout.entries, tensors.named(), strict=True):
        hasher = xxhash.xxh3_64(f"{entry.name} {entry.dtype} {entry.shape}".encode())
        if entry.name not in own:
            flat = raw.flat(tensor)
            hasher.update(raw.window(flat))
        parts.append(hasher.hexdigest())
    groups = {
        name: [len(group["params"]) for group in one.param_groups]
        for name, one in parts_of(state).optimizers.items()
    }
    whole = xxhash.xxh3_64_hexdigest(("".join(parts) + repr(sorted(groups.items()))).encode())
    return Digests(told, whole, "".join(part[:8] for part in parts[:TOLD]))


def _where(mine: Digests, theirs: Digests, tensors: TensorSet) -> str:
    """What differs first, as far as that is known."""
    for index, (name, tensor) in enumerate(tensors.named()):
        span = slice(8 * index, 8 * index + 8)
        if index < TOLD and mine.parts[span] != theirs.parts[span]:
            return f"tensors, first {name} {tuple(tensor.shape)}"
    return "states"
