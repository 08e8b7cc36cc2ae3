"""The collectives backend "simccl" of the simulated device, made known to torch."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.simdev import device


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend for the ranks that share this store; it connects at its first collective."""
    return device.load_extension().SimCCL(store, rank, size, timeout)


def install() -> Any:
    """Register simdev and simccl with torch, once for each process, and return the extension module."""
    device.install()
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", create, devices=["simdev"])
    return device.load_extension()
