"""Tells torchtitan that the CPU is a device where there is none: `begin()`, before a Trainer is built."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

ON_GPU = os.environ.get("TOY_DEVICE") == "cuda"


class Cpu:
    """torch.cpu, and what torchtitan asks a device besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """As of a device."""
        return 0

    def get_device_name(self, _device: object) -> str:
        """As of a device."""
        return "CPU"

    def get_device_properties(self, _device: object) -> SimpleNamespace:
        """As of a device."""
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, _device: object) -> dict[str, int]:
        """As of a device; nothing is known."""
        return {}

    def reset_peak_memory_stats(self) -> None:
        """As of a device."""

    def empty_cache(self) -> None:
        """As of a device."""


def begin() -> None:
    """Tell those of its modules that are imported, which have asked for a device by then."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu")
        if name.startswith("torchtitan.") and hasattr(module, "device_module"):
            vars(module).update(device_module=Cpu())


def add_up(parts: list[torch.nn.Module]) -> None:
    """Have FSDP add gradients up, as torchtitan would by a factor of 1, which Gloo does not know."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
