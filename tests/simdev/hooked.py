"""The simulated device as the training hooks use one: its collectives are known to them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ckptless.pytorch_hooks.process_groups import device_backends
from tests.simdev import collectives


def make(store: Any, rank: int, size: int, *, timeout: timedelta, name: str) -> Any:
    """Return a backend, as `device_backends.Maker` says."""
    return collectives.create(store, rank, size, timeout)


def install() -> None:
    """Have the device in this process, and groups of `ckptless.run` on it."""
    collectives.install()
    device_backends.teach("simccl", make)
