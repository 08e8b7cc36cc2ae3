"""Lets the tiny recipe of torchtitan train anywhere: where there is no device it is told that the CPU is one.

`-m ckptless.torchtitan --module titan_anywhere --config anywhere` takes it as a script does.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.attention import ScaledDotProductAttention

sys.path.append(str(Path(__file__).parents[2] / "docs" / "recipes"))
import titan_llama  # type: ignore[import-not-found]  # a recipe, in the folder above

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


def _begin() -> None:
    """Tell torchtitan of it, which has asked for a device as it was imported."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu")
        if name.startswith("torchtitan.") and hasattr(module, "device_module"):
            vars(module).update(device_module=Cpu())


def _add_up(_optimizers: object, parts: list[torch.nn.Module], _dims: object) -> None:
    """Have FSDP add gradients up, as torchtitan would by a factor of 1, which Gloo does not know."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def anywhere() -> Any:
    """Return the recipe's configuration; to be called before a Trainer is built."""
    config = titan_llama.tiny()
    if not hasattr(torch.distributed, "set_timeout"):
        # What torch 2.13 and older have under another name.
        vars(torch.distributed).update(set_timeout=torch.distributed.distributed_c10d._set_pg_timeout)
    # The default is for newer torches, too.
    config.parallelism.spmd_backend = "partial_dtensor"
    if not ON_GPU:
        _begin()
        config.model_spec.post_optimizer_build_fn = _add_up
        for layer in config.model_spec.model.layers:
            # The CPU has no backward pass for the others.
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config
