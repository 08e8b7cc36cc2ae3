"""Lets torchtitan train anywhere: its debug model made tiny, with texts that are made up.

torchtitan asks for a device as it is imported: where there is none it is told that the CPU is one.
"""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.validate import Validator
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

ON_GPU = os.environ.get("TOY_DEVICE") == "cuda"
WORDS = 100


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
    """To be called before a Trainer is built; on a device there is nothing to do."""
    if not hasattr(torch.distributed, "set_timeout"):
        # What torch 2.13 and older have under another name.
        vars(torch.distributed).update(set_timeout=torch.distributed.distributed_c10d._set_pg_timeout)
    if ON_GPU:
        return
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


def _texts(_path: str) -> datasets.Dataset:
    draw = random.Random(7)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randrange(20, 90))) for _ in range(60)]
    return datasets.Dataset.from_dict({"text": texts})


def tiny(home: Path, steps: int) -> Trainer.Config:
    """Return the debug model's configuration, of two layers, for so many steps; files go into a folder."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS + 2)}, unk_token="w100"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    home.mkdir(parents=True, exist_ok=True)
    words.save(str(home / "tokenizer.json"))
    DATASETS["made up"] = DatasetConfig("", _texts, lambda sample: sample["text"])
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(home), str(home)
    model: Any = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        # The CPU has no backward pass for the others.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.post_optimizer_build_fn = _add_up
    # The default is for torch 2.14 and newer.
    config.parallelism.spmd_backend = "partial_dtensor"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 64, steps
    training.disable_cuda_graphs = True
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="made up")
    config.validator = Validator.Config(
        freq=5, steps=2, dataloader=HuggingFaceTextDataLoader.Config(dataset="made up"), enable=True
    )
    config.debug.seed = 3
    return config
