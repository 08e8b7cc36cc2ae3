"""Llama 3 by torchtitan: `-m ckptless.torchtitan --module titan_llama --config NAME`, one function a NAME.

`llama3_8b` is torchtitan's own, with what ckptless asks for. `tiny` is its debug model with two layers, on
texts that are made up; tests rehearse it.
"""

import random
from dataclasses import dataclass
from typing import Any

import datasets
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

WORDS = 100


def llama3_8b() -> Trainer.Config:
    """Return torchtitan's, on C4; --hf_assets_path takes the tokenizer's folder."""
    config = llama3.llama3_8b()
    # They hold communicators, of which a fault leaves none.
    config.training.disable_cuda_graphs = True
    # A fault goes back to memory; these are for what comes after the training.
    config.checkpoint.enable, config.checkpoint.interval = True, 5000
    return config


def tiny() -> Trainer.Config:
    """Return the debug model with two layers, on texts that are made up."""
    DATASETS["made up"] = DatasetConfig("", _texts, lambda sample: sample["text"])
    config = llama3.llama3_debugmodel()
    config.tokenizer = Words.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="made up")
    config.validator.dataloader = HuggingFaceTextDataLoader.Config(dataset="made up")
    config.validator.steps = 2
    model: Any = config.model_spec.model
    model.layers = model.layers[:2]
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.disable_cuda_graphs = True
    config.debug.seed = 3
    return config


class Words(BaseTokenizer):  # type: ignore[misc]
    """Numbers, written out: each is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing is to be set."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = WORDS

    def encode(self, text: str, **_more: bool) -> list[int]:
        """Return the numbers, and the end."""
        return [*map(int, text.split()), WORDS]

    def decode(self, ids: list[int]) -> str:
        """Write them out."""
        return " ".join(map(str, ids))

    def get_vocab_size(self) -> int:
        """Return how many there are."""
        return WORDS + 1


def _texts(_path: str) -> datasets.Dataset:
    draw = random.Random(7)
    sizes = [draw.randrange(20, 90) for _ in range(60)]
    texts = [" ".join(str(draw.randrange(WORDS)) for _ in range(size)) for size in sizes]
    return datasets.Dataset.from_dict({"text": texts})
