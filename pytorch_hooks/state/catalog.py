"""The place of a State's tensors in the whole model: where a DTensor's part begins, whose moments are whose.

Goes with every record, so that whoever has record and tensors can write them for others to read.
"""

import zlib
from typing import TYPE_CHECKING

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.pytorch_hooks.torch_private import dcp as torch_dcp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptless.pytorch_hooks.state.layout import Named

_LIMIT = 64 << 20


class Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names and places of tensors, by number of the layout's entry.

    `parts`: (entry, shape of the whole, where this rank's part begins), of DTensors. `optimizers`: of each
    optimizer the parameters' entries, in its order. `wrappers`: parts of names that a state_dict of torch
    leaves out, such as `model:module.` for DDP.
    """

    parts: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    optimizers: dict[str, tuple[int, ...]]
    wrappers: tuple[str, ...]


def make(
    named: "Sequence[Named]",
    optimizers: dict[str, torch.optim.Optimizer],
    modules: "Iterable[tuple[str, torch.nn.Module]]",
) -> bytes:
    """The catalog of a layout of these tensors, packed."""
    parts = []
    for index, item in enumerate(named):
        where = torch_dcp.part_of(item.tensor)
        if where is not None:
            parts.append((index, tuple(item.tensor.shape), where))
    entries = {id(item.tensor): index for index, item in enumerate(named) if item.like is None}
    made = Catalog(
        tuple(parts),
        {
            name: tuple(entries[id(p)] for group in one.param_groups for p in group["params"])
            for name, one in optimizers.items()
        },
        tuple(_wrappers(modules)),
    )
    return zlib.compress(msgspec.msgpack.encode(made), 1)


def read(data: bytes) -> Catalog:
    """Return what `make` packed. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(data, _LIMIT), type=Catalog)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed catalog: {error}") from error


def _wrappers(modules: "Iterable[tuple[str, torch.nn.Module]]") -> list[str]:
    found = []
    for prefix, module in modules:
        if isinstance(module, DistributedDataParallel):
            found.append(f"{prefix}module.")
        inner = torch_dcp.wrapped_under(module)
        if inner is not None:
            found.append(f"{prefix}{inner}.")
    return found
