"""Lets the tiny recipe of torchtitan train anywhere: where there is no device it is told that the CPU is one.

`-m ckptless.torchtitan --module titan_anywhere --config anywhere` takes it as a script does.
"""

import sys
from pathlib import Path
from typing import Any

import titan_cpu  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from torchtitan.models.common.attention import ScaledDotProductAttention

sys.path.append(str(Path(__file__).parents[2] / "docs" / "recipes"))
import titan_llama  # type: ignore[import-not-found]  # a recipe, in the folder above


def anywhere() -> Any:
    """Return the recipe's configuration; to be called before a Trainer is built."""
    config = titan_llama.tiny()
    if not hasattr(torch.distributed, "set_timeout"):
        # What torch 2.13 and older have under another name.
        vars(torch.distributed).update(set_timeout=torch.distributed.distributed_c10d._set_pg_timeout)
    # The default is for newer torches, too.
    config.parallelism.spmd_backend = "partial_dtensor"
    if not titan_cpu.ON_GPU:
        titan_cpu.begin()
        config.model_spec.post_optimizer_build_fn = lambda _optimizers, parts, _dims: titan_cpu.add_up(parts)
        for layer in config.model_spec.model.layers:
            # The CPU has no backward pass for the others.
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config
