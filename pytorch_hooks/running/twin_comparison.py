"""Compares the tensors of ranks that take each other for twins: at first, at commits, when a script asks.

A model that is cut by hand has no DTensors, and its State looks as if every rank had a copy of all others';
a process that takes a rank's place would get another rank's part.
"""

import msgspec
import xxhash

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.state import TensorSet, raw
from ckptless.pytorch_hooks.state.objects import parts_of, watch_of
from ckptless.pytorch_hooks.torch_private import calls as torch_private

# Of so many tensors it is told which differ: the same for all ranks, some 16 KB in the store for each.
TOLD = 2048
_SHOULD = (
    "nothing in the State says that they should: build and train the same on every rank (the same seed, or "
    "DistributedDataParallel), or shard by DTensors (fully_shard, parallelize_module, distribute_tensor); "
    "what each rank has for itself can be buffers, or plain data in the State; a pipeline is not supported"
)


class Digests(msgspec.Struct, frozen=True):
    """The digests of a rank's version.

    `twins`: digest of the ranks that it takes for its twins. `whole`: of all its tensors and of what its
    optimizers have. `parts`: 8 hex digits for each of the first tensors.
    """

    twins: str
    whole: str
    parts: str = ""


def compare(
    groups: ProcessGroups, rank: int, twins: tuple[int, ...], tensors: TensorSet, when: str, which: str
) -> None:
    """Raise UsageError where the twin before this one has something else.

    If all are as the one before, all are alike; and no rank's node is asked by all others. Each of `twins`
    calls it, for another comparison with another `which`. Raises GenerationEnded, CollectiveFailed.
    """
    mine = _digests(twins, tensors)

    def key(of: int) -> str:
        return f"ckptless/{groups.generation or 0}/rank/{of}/same/{which}"

    data = msgspec.json.encode(mine).decode()
    groups.in_store(lambda store: store.set(key(rank), data))
    if len(twins) < 2:
        return
    before = twins[twins.index(rank) - 1]
    found = groups.in_store(lambda store: torch_private.store_get(store, key(before)))
    # Nobody else reads it, and a long run makes many.
    groups.in_store(lambda store: store.delete_key(key(before)))
    theirs = msgspec.json.decode(found, type=Digests)
    if mine.twins == theirs.twins and mine.whole == theirs.whole:
        return
    one, other = sorted((rank, before))
    raise UsageError(
        f"ranks {one} and {other} have different {_where(mine, theirs, tensors)} {when}, and {_SHOULD}"
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
    """Return what differs first, as far as that is known."""
    for index, (name, tensor) in enumerate(tensors.named()):
        span = slice(8 * index, 8 * index + 8)
        if index < TOLD and mine.parts[span] != theirs.parts[span]:
            return f"tensors, first state.{name[2:].replace(':', '.')} {tuple(tensor.shape)}"
    return "states"
