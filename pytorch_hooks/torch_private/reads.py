"""Reads of tensors by a script: behind them stands a question whether what came is anything.

A collective that is aborted leaves garbage on the device, and whoever waited for it reads that. Nothing of it
may come into a log, a file or a decision of the script's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# What a script gets numbers by, itself or inside torch (`print`, `torch.save`).
_OF_TENSORS = (
    *("item", "tolist", "numpy", "cpu", "to", "copy_"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
)
_OF_STORAGES = ("cpu", "tolist")


@functools.cache
def guard(check: Callable[[], None]) -> None:
    """Have `check()` called after each read, in the thread that reads; it raises where nothing counts."""
    for kind, names in ((torch.Tensor, _OF_TENSORS), (torch.UntypedStorage, _OF_STORAGES)):
        for name in names:
            setattr(kind, name, _checked(getattr(kind, name), check))


def _checked(read: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(read)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        check()
        return found

    return call
