"""A tiny GPT-2 under a trainer of TRL: `trl_script.py OUT STEPS KILLS`, KILLS as "STEP:RANK,...".

With 0 steps it makes the model, at OUT; the others take it from MODEL. With PLAIN it is TRL's alone.
KIND is sft (LoRA by peft, accumulation, evaluations), dpo, or grpo, whose generations serve four steps each.
Each line of log is written with all bits but for times, and at the end a digest of the parameters.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {tuple(map(int, one.split(":"))) for one in sys.argv[3].split(",") if one}
KIND = os.environ["KIND"]
SAMPLES, WORDS = 40, 50
TIMES = ("runtime", "per_second", "step_time")


class Tell(TrainerCallback):
    """Writes each line of log, and kills its process where it is told to, once."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        told = sorted(
            (name, float(value).hex())
            for name, value in (logs or {}).items()
            if not any(time in name for time in TIMES)
        )
        with (OUT / f"log-{args.process_index}.txt").open("a") as file:
            file.write(f"{state.global_step} {told}\n")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if (state.global_step, args.process_index) in KILLS:
            try:
                (OUT / f"kill-{state.global_step}").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def text(seed: int, length: int) -> str:
    """Return so many words."""
    drawn = torch.randint(0, WORDS, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(one)}" for one in drawn)


def tokens() -> Any:
    """Return a tokenizer of whole words."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{one}": one + 3 for one in range(WORDS)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    of_words: Any = PreTrainedTokenizerFast
    return of_words(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def different(completions: list[str], **_more: Any) -> list[float]:
    """Reward words that are different."""
    return [float(len(set(one.split()))) for one in completions]


def save_model() -> None:
    """Draw the model; DPO and GRPO also take from its folder what they compare with."""
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=WORDS + 3, n_positions=64, n_embd=32, n_layer=2, n_head=2, pad_token_id=0, eos_token_id=1
    )
    GPT2LMHeadModel(config).save_pretrained(str(OUT))


def make() -> Any:
    words: dict[str, Any] = {
        "output_dir": str(OUT / "saved"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    parts: dict[str, Any] = {
        "model": GPT2LMHeadModel.from_pretrained(os.environ["MODEL"]),
        "processing_class": tokens(),
        "callbacks": [Tell()],
    }
    if KIND == "sft":
        data = Dataset.from_list([{"text": text(one, 5 + one % 20)} for one in range(SAMPLES)])
        words |= {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 5}
        parts["peft_config"] = LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1
        )
        args = SFTConfig(**words, max_length=32)
        return SFTTrainer(args=args, train_dataset=data, eval_dataset=data.select(range(8)), **parts)
    if KIND == "dpo":
        rows = [
            {
                "prompt": text(one, 4),
                "chosen": f" {text(one + 1000, 6)}",
                "rejected": f" {text(one + 2000, 6)}",
            }
            for one in range(SAMPLES)
        ]
        return DPOTrainer(
            args=DPOConfig(**words, max_length=32), train_dataset=Dataset.from_list(rows), **parts
        )
    words |= {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.04,
    }
    prompts = Dataset.from_list([{"prompt": text(one, 4)} for one in range(SAMPLES)])
    args = GRPOConfig(**words, num_iterations=2, steps_per_generation=2)
    return GRPOTrainer(args=args, reward_funcs=different, train_dataset=prompts, **parts)


def finish(trainer: Any, output: Any) -> None:
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    lines = [line["step"] for line in trainer.state.log_history if "loss" in line]
    (OUT / f"final-{os.environ['RANK']}.txt").write_text(
        f"{digest.hexdigest()} {output.global_step} {output.training_loss.hex()} {lines}\n"
    )


OUT.mkdir(parents=True, exist_ok=True)
if not STEPS:
    save_model()
elif "PLAIN" in os.environ:
    trainer = make()
    finish(trainer, trainer.train())
    torch.distributed.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
else:
    import ckptless.transformers

    kept: list[Any] = []

    def made() -> Any:
        kept.append(make())
        return kept[0]

    output = ckptless.transformers.train(made)
    finish(kept[0], output)
