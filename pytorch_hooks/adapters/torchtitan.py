"""torchtitan's Trainer: `ckptless.torchtitan.train(config)`, or `-m ckptless.torchtitan` of its own options.

A configuration builds its Trainer once in each process. After a fault `Trainer.train` is entered again, at
the step that was agreed on, in the process that lives with the objects that it has. Where it would load a
checkpoint it gets the state; where it asks whether there is a step to come, the one before is committed, with
its logs, checkpoint and validation. Without an agent around it, it is torchtitan's own.

Stands on torchtitan 0.3 and 0.2.2: `HOOKS` has what is called or replaced and `CALLS` what `train` is to
call, and a release in which some of it has moved is refused before the first step. A configuration is a
Trainer.Config, which knows its Trainer; in 0.2 a JobConfig, which does not.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import BaseValidator
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

import ckptless
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters.torchtitan_loggers import Loggers, name_by_job
from ckptless.pytorch_hooks.state import codec

try:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.observability import structured_logger
    from torchtitan.trainer import Trainer

    Config: Any = Trainer.Config
    CONFIG = "Trainer.Config"
except ModuleNotFoundError:
    # 0.2
    from torchtitan.components.checkpoint import CheckpointManager as BaseCheckpointManager
    from torchtitan.config import JobConfig
    from torchtitan.train import Trainer

    Config = JobConfig
    structured_logger = None
    CONFIG = "JobConfig"

# What is called, read, or replaced on an instance.
HOOKS: dict[type, str] = {
    Trainer: "train batch_generator should_continue_training state_dict load_state_dict close "
    "dataloader model_parts optimizers lr_schedulers checkpointer validator metrics_processor step",
    BaseCheckpointManager: "load save",
    BaseValidator: "validate",
    MetricsProcessor: "logger ntokens_since_last_log data_loading_times time_last_log",
    ParallelAwareDataloader: "state_dict load_state_dict",
}
# What each round of `train` asks, and from what objects.
CALLS = "checkpointer load batch_generator dataloader should_continue_training set_pg_timeouts"
VERSIONS = "use torchtitan 0.2.2 to 0.3"
# No step is done meanwhile, which until then is no hang.
EXTRA_S = 3600.0
# Its module, where it looks up what shortens the groups' timeouts.
_UTILS: Any = sys.modules["torchtitan.distributed.utils"]


def main() -> None:
    """Train as `python -m torchtitan.train` does, of the same options."""
    init_logger()
    train(ConfigManager().parse_args())
    if env.read().agent_socket is None:
        dist.destroy_process_group()


def train(config: Any, trainer_class: Any = None, **options: Any) -> Any:
    """Train as `config.build().train()` does, and close; after a fault from the step before.

    `config` is a Trainer.Config of torchtitan's; in 0.2 a JobConfig, of which `trainer_class` is built, which
    is its Trainer if it is not given. The Trainer is built once in each process, with process groups, and
    returned. `options` are those of `ckptless.run`. Raises UsageError where it is a Trainer that cannot be
    protected.
    """
    if not isinstance(config, Config):
        raise UsageError(f"train takes a {CONFIG} of torchtitan's, not a {type(config).__name__}")
    known = getattr(config, "_owner", None)
    if known and trainer_class:
        raise UsageError(f"a Trainer.Config builds its own {known.__name__}: give train no trainer_class")
    kind = known or trainer_class or Trainer
    if env.read().agent_socket is None:
        return _train_alone(kind, config)
    _refuse_release()
    try:
        _refuse(kind, config)
    except AttributeError as error:
        raise UsageError(f"torchtitan's configuration is another one ({error}): {VERSIONS}") from error
    built: list[Any] = []

    def once(run: Any) -> None:
        # torchtitan does this where it makes the groups, which are there.
        torch.autograd.set_multithreading_enabled(False)
        _UTILS.set_pg_timeouts = lambda timeout, parallel_dims: None
        name_by_job()
        _begin_traces(config)
        run.building()
        trainer = _built(kind, config)
        _Loop(trainer, run)
        built.append(trainer)
        run.repeat(trainer.train)
        trainer.close()

    ckptless.run(once, **options)
    return built[0]


def _train_alone(kind: Any, config: Any) -> Any:
    """Do what torchtitan's own `main` does, but for the groups: who trains may still want them."""
    _begin_traces(config)
    trainer = _built(kind, config)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def _built(kind: Any, config: Any) -> Any:
    return config.build() if hasattr(config, "build") else kind(config)


def _begin_traces(config: Any) -> None:
    if structured_logger is not None:
        enabled = config.debug.enable_structured_logging
        structured_logger.init_structured_logger("training", output_dir=config.dump_folder, enable=enabled)


class _Loop:
    """Where the loop of one Trainer is, over all generations; an object of its State."""

    def __init__(self, trainer: Any, run: Any) -> None:
        self.trainer, self.run = trainer, run
        # What it has the state of, for who looks whether all that changes is in the State.
        self.ckptless_covers = (trainer,)
        self._loader = _Position(trainer.dataloader)
        self._committed = 0
        self._loggers = Loggers(trainer.metrics_processor, lambda: self._committed)
        # What `train` calls, in this order.
        self._load, trainer.checkpointer.load = trainer.checkpointer.load, self._enter
        self._generate, trainer.batch_generator = trainer.batch_generator, self._batches
        self._continues, trainer.should_continue_training = trainer.should_continue_training, self._commit
        trainer.checkpointer.save = self._slowly("checkpoint", trainer.checkpointer.save)
        validator = getattr(trainer, "validator", None)
        self._unseen = _Unseen(getattr(validator, "validation_dataloader", None))
        if validator is not None:
            self._validate = self._slowly("validation", validator.validate)
            validator.validate = self._validated

    def _slowly(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **words: Any) -> Any:
            with self.run.phase(name, EXTRA_S):
                return function(*args, **words)

        return slow

    def _validated(self, *args: Any, **words: Any) -> Any:
        found = self._validate(*args, **words)
        self._unseen.note()
        return found

    def _enter(self, step: int = -1) -> bool:
        """Stand where `train` loads a checkpoint: it begins here, or goes on at the agreed step."""
        trainer = self.trainer
        for part in trainer.model_parts:
            # A validation may have been cut off.
            part.train()
        joins = bool(self.run.joins)
        self.run.keep(lambda: self._build(step))
        self._committed = trainer.step
        self._loggers.go_back(trainer.step, joins=joins)
        # Of the step that was cut off, or of nothing at all: the next line measures from here on.
        metrics = trainer.metrics_processor
        metrics.ntokens_since_last_log, metrics.time_last_log = 0, time.perf_counter()
        metrics.data_loading_times.clear()
        return bool(self.run.step)

    def _build(self, step: int) -> ckptless.State:
        trainer = self.trainer
        # What is on the disk, for those that begin: who joins gets what the others have.
        if not self.run.joins and self._load(step):
            self._loader.begins_here()
        (model,) = trainer.model_parts
        return ckptless.State(
            model=model, optimizer=trainer.optimizers, scheduler=trainer.lr_schedulers, trainer=self
        )

    def _batches(self, _loader: object) -> Iterator[Any]:
        """Give the batches from the committed position on."""
        self.run.counts_epochs = True
        found: Iterator[Any] = self._generate(self.run.batches(self._loader))
        return found

    def _commit(self) -> bool:
        """Stand where `train` asks whether there is a step to come: all of the one before is over."""
        if self.trainer.step > self._committed:
            self._committed = self.trainer.step
            self.run.commit()
        return bool(self._continues())

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's own, its step and the tokens that this rank has seen, and where data is."""
        trainer = self.trainer.state_dict()
        return {"trainer": trainer, "data": self._loader.first, "unseen": self._unseen.packed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it."""
        self.trainer.load_state_dict(saved["trainer"])
        self._loader.first = saved["data"]
        self._unseen.go_back(saved["unseen"])


class _Position:
    """The training's loader, with its state packed as it was, and nothing pickled; else it is that loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        kind = type(loader)
        # torchtitan's own loaders pickle what torchdata's tells.
        pickles = kind.state_dict is ParallelAwareDataloader.state_dict
        self._kind: Any = StatefulDataLoader if pickles else kind
        # Where a checkpoint on the disk has put it before the first step.
        self.first: bytes | None = None
        self._is_placed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def begins_here(self) -> None:
        """A checkpoint was loaded, and maybe a position in it."""
        loader = self._loader
        # Of torchdata's nothing is asked before it has begun: that would draw random numbers.
        is_known = isinstance(loader, StatefulDataLoader)
        found = loader.next_iter_state if is_known else self._kind.state_dict(loader)
        self.first = None if found is None else codec.pack(found)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_placed and self.first is not None:
            self._kind.load_state_dict(self._loader, codec.unpack(self.first))
        self._is_placed = False
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is; lists in it grow with the next batch, so it is packed at once."""
        return {"packed": codec.pack(self._kind.state_dict(self._loader), name="the loader's state_dict")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go there."""
        self._kind.load_state_dict(self._loader, codec.unpack(saved["packed"]))
        self._is_placed = True


class _Unseen:
    """Where the next validation of 0.2 goes on in its texts; those of 0.3 begin anew, and have no loader.

    Its data set keeps where it is, and tokens for the next batch, in its attributes, over iterations. With
    workers it does not: each of them begins with a new copy.
    """

    def __init__(self, loader: Any) -> None:
        self._values: dict[str, Any] = {} if loader is None else vars(loader.dataset)
        self.packed = b""
        self.note()

    def note(self) -> None:
        """Take its numbers and lists as they are."""
        found = {key: value for key, value in self._values.items() if isinstance(value, (int, list))}
        self.packed = codec.pack(found, name="the validation's data set")

    def go_back(self, packed: bytes) -> None:
        """Put them back."""
        self.packed = packed
        self._values.update(codec.unpack(packed))


def _refuse_release() -> None:
    """Raise UsageError where torchtitan is not the one that this stands on."""
    for kind, names in HOOKS.items():
        for name in names.split():
            if name not in vars(kind) and name not in inspect.get_annotations(kind):
                raise UsageError(f"torchtitan's {kind.__name__}.{name} is gone: {VERSIONS}")
    called = inspect.unwrap(Trainer.train).__code__.co_names
    for name in CALLS.split():
        if name not in called:
            raise UsageError(f"torchtitan's Trainer.train does not use {name} any more: {VERSIONS}")


def _refuse(kind: Any, config: Any) -> None:
    """Raise UsageError where a Trainer of this configuration is not one that ckptless protects."""
    parallel, training = config.parallelism, config.training
    if kind.train is not Trainer.train:
        raise UsageError(
            f"{kind.__name__} has a `train` of its own, which ckptless does not know: use torchtitan's"
        )
    # 0.2 has none of these.
    graphs = not getattr(training, "disable_cuda_graphs", True)
    symmetric = getattr(parallel, "enable_fsdp_symm_mem", False)
    cannot = {
        "pipeline parallelism": parallel.pipeline_parallel_degree > 1,
        "tensor parallelism": parallel.tensor_parallel_degree > 1,
        "context parallelism": parallel.context_parallel_degree > 1,
        "expert parallelism": parallel.expert_parallel_degree > 1,
        "symmetric memory (enable_fsdp_symm_mem)": symmetric,
        "enable_cpu_offload": training.enable_cpu_offload,
        "CUDA graphs (take --training.disable_cuda_graphs)": graphs and torch.cuda.is_available(),
        "checkpoints in the background (checkpoint.async_mode)": config.checkpoint.enable
        and getattr(config.checkpoint, "async_mode", None) != "disabled",
        "create_seed_checkpoint": config.checkpoint.create_seed_checkpoint,
        "early_step_in_backward": getattr(config.optimizer, "early_step_in_backward", False),
        f"comm.mode {config.comm.mode}": config.comm.mode != "default",
    }
    for what, is_so in cannot.items():
        if is_so:
            raise UsageError(f"a Trainer with {what} is not protected by ckptless: train without it")
