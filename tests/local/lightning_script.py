"""A small net under Lightning: `lightning_script.py OUT STEPS KILLS`, KILLS as "STEP:RANK,...".

With PLAIN in the environment it is Lightning's own strategy. VARIANT says what is trained how. Each rank
writes its losses and what Lightning logs, with all bits, and at the end a digest of the parameters.
"""

import csv
import hashlib
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import one_gpu  # type: ignore[import-not-found]  # run as a script, beside it
import torch
import torchmetrics
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {tuple(map(int, one.split(":"))) for one in sys.argv[3].split(",") if one}
VARIANT = os.environ.get("VARIANT", "steps")
PLAIN = "PLAIN" in os.environ
# Lightning's own choice, where there is `rich` that one; and the other.
BARS = ("steps", "stops")


def die(step: int) -> None:
    """Kill this process where it is told to, once."""
    where = (step, int(os.environ["RANK"]))
    if where in KILLS:
        try:
            (OUT / f"kill-{where[0]}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def tell(kind: str, line: str) -> None:
    with (OUT / f"{kind}-{os.environ['RANK']}.txt").open("a") as file:
        file.write(line + "\n")


def late(logger: Any) -> Any:
    """Kill the process where a step's line is written, before its commit: at 2000 and the step."""
    write = logger.log_metrics

    def log_metrics(metrics: dict[str, Any], step: int) -> None:
        write(metrics=metrics, step=step)
        if "loss_step" in metrics:
            die(2000 + step)

    logger.log_metrics = log_metrics
    return logger


class Net(pl.LightningModule):
    """With dropout, a BatchNorm, sums over epochs, a metric, and a number of its own that is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        )
        self.right = torchmetrics.classification.MulticlassAccuracy(num_classes=4)
        self.batches = 0

    def configure_model(self) -> None:
        if VARIANT == "fsdp2" and not isinstance(self, FSDPModule):
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        self.batches += 1
        out = self(x)
        loss = nn.functional.cross_entropy(out, y) * (1 + self.batches / 1000)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=VARIANT == "steps")
        self.right(out, y)
        self.log("right", self.right, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self(x), y), sync_dist=True)
        if self.trainer.sanity_checking:
            return
        die(1000 + self.trainer.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        die(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        die(-1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if VARIANT == "epochs":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, mode="max"
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Net):
    """Two optimizers, each for its part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        losses = []
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self(x), y) * (number + 1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            die(self.trainer.global_step + number)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        self.log("loss", losses[0], on_step=True, on_epoch=True)
        return {"loss": sum(losses)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW([*self.net[0].parameters(), *self.net[1].parameters()], lr=1e-2)
        second = torch.optim.SGD(self.net[4].parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 5)]


class Tell(pl.Callback):
    """Writes what there is after each batch and each validation; with an average that no state_dict has."""

    def __init__(self) -> None:
        self.lines = 0
        self.average: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average["bias"] = torch.zeros(())

    def state_dict(self) -> Any:
        # Of the very first commit.
        die(-2)
        return {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lines += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
        self.steps.append(trainer.global_step)
        bias = module.net[0].bias
        bias = bias.to_local() if hasattr(bias, "to_local") else bias
        self.average["bias"] = self.average["bias"] * 0.9 + bias.detach().cpu().sum()
        own = f"{len(self.steps)} {float(self.average['bias']).hex()}"
        tell("loss", f"{trainer.global_step} {batch_idx} {self.lines} {outputs['loss'].item().hex()} {own}")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.told("val", trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.told("epoch", trainer)

    def told(self, kind: str, trainer: Any) -> None:
        found = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
        tell(kind, f"{trainer.global_step} {trainer.current_epoch} {found}")


class Data(pl.LightningDataModule):
    """One process fetches it."""

    def prepare_data(self) -> None:
        tell("prepared", "yes")

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(52, 16, generator=generator)
        self.all = TensorDataset(x, x[:, :4].argmax(1))

    def train_dataloader(self) -> Any:
        return DataLoader(self.all, batch_size=4, shuffle=True, num_workers=int(VARIANT == "stops"))

    def val_dataloader(self) -> Any:
        return DataLoader(self.all, batch_size=16)


def make() -> Any:
    pl.seed_everything(7, verbose=False)
    words: dict[str, Any] = {"max_steps": STEPS, "enable_checkpointing": False}
    called: list[Any] = [Tell()]
    module: Any = Manual() if VARIANT == "manual" else Net()
    if "PRECISION" in os.environ:
        words["precision"] = os.environ["PRECISION"]
    if VARIANT == "steps":
        words |= {"accumulate_grad_batches": 2, "val_check_interval": 3, "gradient_clip_val": 0.5}
    if VARIANT == "epochs":
        saves = pl.callbacks.ModelCheckpoint(
            dirpath=OUT / "saved", monitor="val", save_top_k=2, save_last=True
        )
        # Not in Lightning 2.5.
        averages: Any = getattr(pl.callbacks, "WeightAveraging", None)
        called += [saves] if averages is None else [saves, averages()]
        words |= {"enable_checkpointing": True, "limit_train_batches": 5}
    if VARIANT == "accumulates":
        called += [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]
    if VARIANT == "stops":
        called += [
            pl.callbacks.EarlyStopping("val", patience=1, mode="max"),
            pl.callbacks.TQDMProgressBar(),
        ]
        words |= {"max_steps": -1, "max_epochs": 6}
    loggers: list[Any] = [pl.loggers.CSVLogger(OUT, name="logs")]
    if VARIANT == "steps":
        loggers.append(pl.loggers.TensorBoardLogger(OUT, name="shown", version="once"))
    if os.environ.get("LOGGER") == "wandb":
        loggers.append(late(pl.loggers.WandbLogger(save_dir=OUT, offline=True)))
    if os.environ.get("LOGGER") == "mlflow":
        loggers.append(late(pl.loggers.MLFlowLogger(tracking_uri=f"file:{OUT}/mlruns")))
    kind = "fsdp2" if VARIANT == "fsdp2" else "ddp"
    strategy: Any = f"ckptless_{kind}"
    if PLAIN:
        ranks = int(os.environ["WORLD_SIZE"])
        strategy = kind if kind == "ddp" else pl.strategies.ModelParallelStrategy(ranks, 1)
        if VARIANT == "manual":
            strategy = pl.strategies.DDPStrategy(find_unused_parameters=True)
    elif VARIANT == "manual":
        strategy = ckptless.lightning.DDPStrategy(find_unused_parameters=True)
    elif kind == "fsdp2":
        strategy = ckptless.lightning.ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1)
    return module, pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if one_gpu.ON_GPU else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        callbacks=called,
        logger=loggers,
        enable_progress_bar=VARIANT in BARS,
        enable_model_summary=False,
        log_every_n_steps=1,
        **words,
    )


def finish(module: Any, trainer: Any) -> None:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().cpu().numpy().tobytes())
    if trainer.is_global_zero:
        (log,) = (OUT / "logs").glob("version_*/metrics.csv")
        with log.open(newline="") as file:
            rows = Counter(repr(sorted(i for i in row.items() if i[1])) for row in csv.DictReader(file))
        for row, times in rows.items():
            tell("logged", f"{times} x {row}")
    tell("final", f"{digest.hexdigest()} {trainer.global_step} {trainer.current_epoch} {module.batches}")


if not PLAIN:
    import ckptless.lightning

OUT.mkdir(parents=True, exist_ok=True)
one_gpu.begin()
module, trainer = make()
trainer.fit(module, datamodule=Data())
finish(module, trainer)
(after,) = trainer.validate(module, datamodule=Data(), verbose=False)
tell("final", f"{float(after['val']).hex()}")
if os.environ.get("LOGGER") == "wandb":
    import wandb

    wandb.finish()
if PLAIN:
    torch.distributed.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
