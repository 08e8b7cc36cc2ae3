"""The private parts of torch.distributed.checkpoint's format and of DTensor, each behind one function."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any, BinaryIO

import torch

from ckptless.pytorch_hooks.torch_private.names import Name, refuse_moved

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_DTENSOR = "torch.distributed.tensor._utils"
_NEEDED_DCP = (
    Name(f"{_FILESYSTEM}:_StorageInfo.__init__", "where an item lies", "relative_path offset length"),
)
_NEEDED_DTENSOR = (
    Name(
        f"{_DTENSOR}:compute_local_shape_and_global_offset",
        "where a part lies in the whole",
        "global_shape mesh placements",
    ),
)
# What wraps a module and is left out of the names of a state_dict: torch.compile, activation checkpointing.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def part_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return where this rank's part of a DTensor begins in the whole; None for a plain tensor."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not isinstance(tensor, kind):
        return None
    # As DTensor.__create_chunk_list__ does it, which would load all of torch.distributed.checkpoint.
    refuse_moved(_NEEDED_DTENSOR)
    where = importlib.import_module(_DTENSOR).compute_local_shape_and_global_offset
    shape, start = where(tensor.shape, tensor.device_mesh, tensor.placements)
    # An empty part may be said to begin nowhere.
    return tuple(start) if all(shape) else tuple(0 for _ in tensor.shape)


def wrapped_under(module: torch.nn.Module) -> str | None:
    """The name under which a wrapper has its module, which a state_dict does not show; else None."""
    for where, name, inner in _WRAPPERS:
        kind: Any = getattr(sys.modules.get(where), name, None)
        if kind is not None and isinstance(module, kind):
            return inner
    return None


def check() -> None:
    """Raise `TorchMismatch` where this torch's checkpoints are not those that saving writes."""
    refuse_moved((*_NEEDED_DTENSOR, *_NEEDED_DCP))


def storage(file: str, offset: int, nbytes: int) -> object:
    """Return where an item of a checkpoint lies."""
    refuse_moved(_NEEDED_DCP)
    made: object = importlib.import_module(_FILESYSTEM)._StorageInfo(file, offset, nbytes)
    return made


def write_metadata(metadata: object, file: BinaryIO) -> None:
    """The file `.metadata`: DCP's own format is a pickle of its own classes."""
    pickle.dump(metadata, file)
