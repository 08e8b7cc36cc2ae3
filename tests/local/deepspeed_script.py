"""A model that DeepSpeed trains, by Accelerate or by transformers: `deepspeed_script.py BY STAGE`."""

import sys
from typing import Any

import torch

BY, STAGE = sys.argv[1], int(sys.argv[2])


def prepared() -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=STAGE, gradient_accumulation_steps=1)
    plugin.deepspeed_config.update(train_micro_batch_size_per_gpu=2, train_batch_size=4)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Linear(4, 1)
    data: Any = torch.zeros(16, 4)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)


def train(run: Any) -> None:
    accelerator, model, optimizer, loader = ckptless.accelerate.keep(run, prepared)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        run.commit()


def trainer() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    args = TrainingArguments(
        output_dir="out",
        max_steps=4,
        report_to=[],
        use_cpu=True,
        deepspeed={"zero_optimization": {"stage": STAGE}, **auto},
    )
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    ids = torch.arange(8)
    return Trainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 32)


if BY == "accelerate":
    import ckptless.accelerate

    ckptless.run(train)
else:
    import ckptless.transformers

    ckptless.transformers.train(trainer)
