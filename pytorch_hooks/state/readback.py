"""Whether a version, as it was written, is what the objects of a State are: asked once in a process."""

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import private, raw, record
from ckptless.pytorch_hooks.state.objects import State
from ckptless.pytorch_hooks.state.tensors import TensorSet
from ckptless.pytorch_hooks.state.walk import shown


def check_written(state: State, data: bytes, payload: torch.Tensor) -> None:
    """Hold what a recovery would read against a fresh look at the objects. Raises UsageError, ProtocolError.

    `data` is the record of the step, `payload` the packed tensors (uint8, on the CPU).
    """
    view = record.read(data)
    fresh = TensorSet(state)
    living = fresh.living
    for entry in view.layout.entries:
        tensor = living.pop(entry.name, None)
        if tensor is None:
            raise UsageError(f"{shown(entry.name)} is in the version of this step, and not in the State")
        part = private.local(tensor)
        saved = payload[entry.offset : entry.offset + entry.nbytes]
        if tuple(part.shape) != entry.shape or not _equal(raw.flat(part), saved):
            raise UsageError(f"{shown(entry.name)} {_MOVED}")
    if living:
        raise UsageError(f"{shown(next(iter(living)))} is in the State, and not in the version of this step")
    again = record.draft(state, view.step, view.cursor, view.ddp_layouts, fresh, view.exact).finish()
    if (part_of := record.differing(data, again)) is not None:
        raise UsageError(f"the state's {part_of} {_MOVED}")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes are the same; as large integers, of which torch compares as many as bytes in a time."""
    fits = not any(n % 8 for n in (len(one), one.storage_offset(), other.storage_offset()))
    return torch.equal(one.view(torch.int64), other.view(torch.int64)) if fits else torch.equal(one, other)


_MOVED = (
    "is not what the version of this step has: something writes to it while run.commit runs, such as another "
    "thread, or its memory is not its own"
)
