"""A tiny GPT-2 under transformers' Trainer: `trainer_script.py OUT STEPS KILLS`, KILLS as "STEP:RANK,...".

With PLAIN in the environment it is transformers' own Trainer. ARGUMENTS has more TrainingArguments, as JSON;
with FSDP in it Accelerate shards on the CPU, too. With LORA a GPT-2 is frozen under adapters of peft. With
LATE processes are killed when a step's line is written, before its commit. With LENGTHS samples are of many
lengths, with METRICS an evaluation counts, too.
Each line of log is written with all bits, and at the end a digest of the parameters.
"""

import hashlib
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import one_gpu  # type: ignore[import-not-found]  # run as a script, beside it
import shards_anywhere  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {tuple(map(int, one.split(":"))) for one in sys.argv[3].split(",") if one}


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        length = 3 + index * 7 % 14 if "LENGTHS" in os.environ else 16
        ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put samples of several lengths together."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [one["input_ids"] for one in samples]
    mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
    labels = pad(ids, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "attention_mask": mask, "labels": labels}


def counted(found: Any) -> dict[str, float]:
    """Metrics of an evaluation."""
    right = (found.predictions == found.label_ids).sum()
    return {"loss_of_mine": float(right) + len(found.label_ids) / 100}


class Counting(Trainer):
    """A subclass with a number of its own, which is in the loss, and sums for its log, as TRL's have them."""

    seen = 0.0

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.sums: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}

    def log(self, logs: dict[str, float], *args: Any, **words: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **{name: sum(those) / len(those) for name, those in self.sums["train"].items()}}
            self.sums["train"].clear()
        super().log(logs, *args, **words)

    def compute_loss(self, *args: Any, **words: Any) -> Any:
        self.seen += 1.0
        self.sums["train"]["mean_loss"].append(self.seen + self.state.global_step / 7)
        found = super().compute_loss(*args, **words)
        scale = 1 + self.seen / 1000
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale


class Tell(TrainerCallback):
    """Writes each line of log, and kills its process where it is told to, once.

    With what callbacks have: a file that is opened once, an average in a dict, what an epoch begins anew.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.begun = False
        self.average: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if not self.begun:
            self.begun, self.file = True, (OUT / f"log-{os.environ['RANK']}.txt").open("a")
        self.average = {"weight": torch.zeros(())}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.steps = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)
        weight = next(one for one in more["model"].parameters() if one.requires_grad)
        self.average["weight"] = self.average["weight"] * 0.9 + shards_anywhere.local(weight).cpu().sum()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        self.lines += 1
        told = {
            name: float(value).hex()
            for name, value in (logs or {}).items()
            if "loss" in name or name == "grad_norm"
        }
        average = float(self.average["weight"]).hex()
        self.file.write(f"{state.global_step} {self.lines} {sorted(told.items())} {average} {self.steps}\n")
        self.file.flush()
        if "LATE" in os.environ and "loss" in (logs or {}):
            self.kill(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if "LATE" not in os.environ:
            self.kill(state.global_step)

    def kill(self, step: int) -> None:
        where = (step, int(os.environ["RANK"]))
        if where in KILLS:
            try:
                (OUT / f"kill-{where[0]}").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def make() -> Trainer:
    more = json.loads(os.environ.get("ARGUMENTS", "{}"))
    words: dict[str, Any] = {
        "output_dir": str(OUT / "saved"),
        "use_cpu": not one_gpu.ON_GPU,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "warmup_steps": 2,
        "seed": 3,
    }
    if "FSDP" in os.environ:
        shards_anywhere.begin()
        fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
        words.update(fsdp=True, fsdp_config=fsdp | {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})
    args = TrainingArguments(**{**words, **more})
    torch.manual_seed(5)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    if "LORA" in os.environ:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
        model = get_peft_model(model, lora)
    callbacks: list[Any] = [Tell()]
    if "PATIENCE" in os.environ:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=int(os.environ["PATIENCE"])))
    parts: dict[str, Any] = {"train_dataset": Data(), "eval_dataset": Data(), "callbacks": callbacks}
    if "LENGTHS" in os.environ:
        parts["data_collator"] = padded
    if "METRICS" in os.environ:
        parts |= {"compute_metrics": counted, "preprocess_logits_for_metrics": lambda x, _y: x.argmax(-1)}
    return Counting(model=model, args=args, **parts)


def finish(trainer: Any, output: Any) -> None:
    digest = hashlib.sha256()
    assert shards_anywhere.reshard(trainer.model) == ("FSDP" in os.environ)
    for parameter in trainer.model.parameters():
        digest.update(shards_anywhere.local(parameter).cpu().numpy().tobytes())
    lines = [line["step"] for line in trainer.state.log_history if "loss" in line]
    (OUT / f"final-{os.environ['RANK']}.txt").write_text(
        f"{digest.hexdigest()} {output.global_step} {output.training_loss.hex()} {lines}\n"
    )


def close() -> None:
    """Have wandb write what it has, where it is imported."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()


OUT.mkdir(parents=True, exist_ok=True)
one_gpu.begin()
if "PLAIN" in os.environ:
    trainer = make()
    finish(trainer, trainer.train())
    close()
    torch.distributed.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
else:
    import ckptless.transformers

    kept: list[Trainer] = []

    def made() -> Trainer:
        kept.append(make())
        return kept[0]

    output = ckptless.transformers.train(made)
    finish(kept[0], output)
    close()
