"""A tiny Llama 3 under torchtitan's Trainer: `titan_script.py OUT STEPS KILLS`, KILLS as "STEP:RANK,...".

With PLAIN in the environment it is torchtitan's own. With DDP parameters are replicated, else sharded. With
MORE two batches make an update, and there are checkpoints and TensorBoard. A process is killed before the
step's update, at 1000 and the step in its validation, at 2000 and the step after its update.
Each line of metrics is written with all bits, and at the end a digest of the parameters.
"""

import contextlib
import hashlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import one_gpu  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import init_logger

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {tuple(map(int, one.split(":"))) for one in sys.argv[3].split(",") if one}


def kill(step: int) -> None:
    if (step, int(os.environ["RANK"])) in KILLS:
        with contextlib.suppress(FileExistsError):
            (OUT / f"kill-{step}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


# The step that is being done.
AT = [0]
register_optimizer_step_pre_hook(lambda *_: kill(AT[0]))


class Told(MetricsProcessor):  # type: ignore[misc]
    """Writes what is logged on every rank, and kills its process where it is told to, once."""

    def should_log(self, step: int) -> bool:
        """As torchtitan's; where a step begins."""
        AT[0] = step
        return bool(super().should_log(step))

    def log(self, step: int, *values: Any, **more: Any) -> None:
        """As torchtitan's; where an update is done."""
        kill(2000 + step)
        self._tell(step, values, more["extra_metrics"])
        super().log(step, *values, **more)

    def log_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        """As torchtitan's; where modules are still in evaluation."""
        kill(1000 + step)
        self._tell(step, (loss,), {})
        super().log_validation(loss, step, extra_metrics)

    def _tell(self, step: int, values: tuple[float, ...], extra: dict[str, float]) -> None:
        numbers = [float(value).hex() for value in (*values, *extra.values())]
        with (OUT / f"log-{os.environ['RANK']}.txt").open("a") as file:
            file.write(f"{step} {numbers}\n")


def configured() -> Any:
    """Return it as the release that is installed has it: 0.3's own, or a JobConfig."""
    if hasattr(MetricsProcessor, "Config"):
        import titan_anywhere  # type: ignore[import-not-found]  # run as a script, beside it

        class Metrics(Told):
            @dataclass(kw_only=True, slots=True)
            class Config(MetricsProcessor.Config):  # type: ignore[misc]
                """As of torchtitan's."""

        config = titan_anywhere.anywhere()
        config.metrics, config.dump_folder = Metrics.Config(), str(OUT)
        validation, loader = config.validator, config.dataloader
    else:
        import titan_02  # type: ignore[import-not-found]  # run as a script, beside it

        config = titan_02.tiny(Told)
        config.job.dump_folder = str(OUT)
        validation, loader = config.validation, config.training.dataloader
    config.metrics.log_freq = 1
    config.training.steps, validation.enable = STEPS, True
    if "DDP" in os.environ:
        config.parallelism.data_parallel_replicate_degree = int(os.environ["WORLD_SIZE"])
        config.parallelism.data_parallel_shard_degree = 1
    if "MORE" in os.environ:
        config.training.global_batch_size = 8
        config.metrics.enable_tensorboard = True
        config.checkpoint.enable, config.checkpoint.interval = True, 4
        loader.num_workers = int(os.environ["MORE"])
    return config


def built(config: Any) -> Any:
    if hasattr(config, "build"):
        return config.build()
    import titan_02  # run as a script, beside it

    return titan_02.build(config)


def finish(trainer: Any) -> None:
    for module in trainer.model_parts[0].modules():
        # A validation behind the last step leaves parameters whole, as 0.2 has it.
        if isinstance(module, FSDPModule):
            module.reshard()
    digest = hashlib.sha256()
    for parameter in trainer.model_parts[0].parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().cpu().numpy().tobytes())
    text = f"{digest.hexdigest()} {trainer.step} {trainer.ntokens_seen}\n"
    (OUT / f"final-{os.environ['RANK']}.txt").write_text(text)


OUT.mkdir(parents=True, exist_ok=True)
one_gpu.begin()
init_logger()
if "PLAIN" in os.environ:
    trainer = built(configured())
    trainer.train()
    trainer.close()
    finish(trainer)
    torch.distributed.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
else:
    import ckptless.torchtitan

    finish(ckptless.torchtitan.train(configured()))
