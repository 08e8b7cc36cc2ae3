"""The tiny recipe as torchtitan 0.2 has it: a JobConfig, and a TrainSpec with texts that are made up."""

import random
from typing import Any

import datasets
import titan_cpu  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

WORDS = 100


class Words(BaseTokenizer):  # type: ignore[misc]
    """Numbers, written out: each is a token."""

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


def _optimizers(parts: list[torch.nn.Module], *rest: Any) -> Any:
    if not titan_cpu.ON_GPU:
        titan_cpu.add_up(parts)
    return build_optimizers(parts, *rest)


def build(config: Any) -> Any:
    return Trainer(config)


def tiny(metrics: type[MetricsProcessor]) -> Any:
    """Return the debug model's configuration with two layers; `metrics` is what is built of its."""
    spec = get_train_spec()
    spec.model_args = {"tiny": TransformerModelArgs(dim=256, n_layers=2, n_heads=16, vocab_size=2048)}
    spec.build_tokenizer_fn = lambda _config: Words()
    spec.build_metrics_processor_fn = lambda config, dims, _args: metrics(config, dims)
    spec.build_optimizers_fn = _optimizers
    register_train_spec("tiny", spec)
    if not titan_cpu.ON_GPU:
        titan_cpu.begin()
    DATASETS["made up"] = DatasetConfig("", _texts, lambda sample: sample["text"])
    config = JobConfig()
    config.model.name, config.model.flavor = "tiny", "tiny"
    config.lr_scheduler.warmup_steps = 2
    for part in (config.training, config.validation):
        part.dataset, part.local_batch_size, part.seq_len = "made up", 2, 64
    config.validation.freq, config.validation.steps = 5, 2
    config.debug.seed = 3
    return config
