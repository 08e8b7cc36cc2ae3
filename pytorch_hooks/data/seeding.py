"""Random numbers that belong to a sample, not to the process that happens to make it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckptless.pytorch_hooks.data.order import mixed
from ckptless.pytorch_hooks.state import rng


def seed_all(*numbers: int) -> None:
    """Seed Python's, torch's CPU and numpy's global generator: what a transform draws depends on these
    only.
    """
    seed = mixed(*numbers)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def untouched() -> Iterator[None]:
    """Put this process's generators back afterwards."""
    before = rng.capture()
    try:
        yield
    finally:
        rng.restore(before)
