"""transformers' Trainer, or any subclass: `ckptless.transformers.train(make)`, where `make()` returns one.

The Trainer's own loop runs. After a fault it is entered again, at the step that was agreed on, in the process
that lives with the objects that it has. What the loop has besides model, optimizer and scheduler (its state,
sums of losses, where it is in the epoch, callbacks' numbers) is committed with the step, and put back. The
batches come from the Trainer's loader by `run.batches`, which begins where the step did.

Stands on methods of Trainer that are not public (transformers 5.17 to 5.24): `HOOKS` has them, each with its
parameters, and one that has moved is refused before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import random
import sys
from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

import ckptless
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters.kept import Kept
from ckptless.pytorch_hooks.adapters.prepared import ACCELERATE, Prepared
from ckptless.pytorch_hooks.adapters.transformers_arguments import Arguments
from ckptless.pytorch_hooks.adapters.transformers_reports import REPORTERS, Reports, refuse_reporters
from ckptless.pytorch_hooks.adapters.workers import begin_anew

# What is overridden or called, and parameters that must be there.
HOOKS = {
    "_init_training_state": "max_steps resume_from_checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_run_epoch": "train_dataloader resume_from_checkpoint steps_trained_in_current_epoch",
    "_load_rng_state": "checkpoint",
    "_maybe_log_save_evaluate": "tr_loss",
    "get_batch_samples": "epoch_iterator",
}
# What methods of Trainer's use.
CALLS = {
    "_inner_training_loop": "get_train_dataloader _init_training_state _prepare_for_training _run_epoch "
    "on_train_begin on_epoch_begin _tr_loss",
    "_run_epoch": "_load_rng_state get_batch_samples _maybe_log_save_evaluate skip_first_batches on_step_end "
    "on_epoch_end _tr_loss",
}
VERSIONS = "use transformers 5.17 to 5.24"
# Of the accelerator: emptied where the loop begins, filled by what prepares the model.
REGISTERED = ("_models", "_optimizers", "_schedulers")
# Of TrainerState: grows with every line, and is the same on all ranks; is made anew.
NOT_KEPT = ("log_history", "stateful_callbacks")
MARK = "a step in memory"
# No step is done meanwhile, which until then is no hang.
EVALUATION_S = 3600.0
# Its module, where it looks up what skips batches.
_TRAINER: Any = sys.modules[Trainer.__module__]
_PLAIN = (int, float, str, bool, type(None))


def train(make: Callable[[], Trainer], **options: Any) -> TrainOutput:
    """Train what `make()` returns, to its end; after a fault from the step before. Returns as Trainer.train.

    `train(lambda: Trainer(model=..., args=TrainingArguments(...), ...))`: `make` is called once in each
    process, with process groups. `options` are those of `ckptless.run`. Raises UsageError where the Trainer
    is one that cannot be protected.
    """
    outputs: list[TrainOutput] = []

    def once(run: Any) -> None:
        owner = _protect(make())
        owner.ckptless.run = run

        def body() -> None:
            # A fault may have cut off a step that has changed them.
            owner.ckptless.arguments.put_back({})
            outputs[:] = [owner.train()]

        run.repeat(body)

    ckptless.run(once, **options)
    return outputs[0]


class _Loop:
    """Where the loop of one Trainer is, beyond what it keeps in objects; an object of its State."""

    def __init__(self, owner: Any) -> None:
        self.run: Any = None
        self.model: Any = None
        self.batches: Prepared | None = None
        self.registered: dict[str, list[Any]] = {}
        self.saved: dict[str, Any] | None = None
        # Names of what the Trainer has where its loop begins.
        self.fresh: frozenset[str] | None = None
        self.random: tuple[Any, ...] | None = None
        self.eval_on_start = bool(owner.args.eval_on_start)
        self.arguments = Arguments(owner.args)
        # Whole epochs, steps in the one that is under way, and whether its loop is through.
        self.epochs = self.steps = self.per_epoch = 0
        self.epoch_over = False
        self.reports = Reports(owner, lambda: int(self.run.step))
        self.kept: Kept | None = None
        self._owner = owner
        self._kind = type(owner)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it. The sum of losses stays where it is: nobody waits for a device."""
        owner = self._owner
        state = {field.name: getattr(owner.state, field.name) for field in dataclasses.fields(owner.state)}
        return {
            "state": {name: value for name, value in state.items() if name not in NOT_KEPT},
            "control": dataclasses.asdict(owner.control),
            "arguments": self.arguments.changed(),
            "numbers": _numbers(owner),
            "tr_loss": getattr(owner, "_tr_loss", torch.zeros(())).detach().clone(),
            "at": [self.epochs, self.steps],
            "loader": self.loader.state_dict(),
            # Who reports has begun in this process, or not.
            "callbacks": [
                {} if isinstance(one, REPORTERS) else _numbers(one)
                for one in owner.callback_handler.callbacks
            ],
            "kept": None if self.kept is None else self.kept.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it; the loop puts it back where it begins."""
        self.saved = saved
        self.loader.load_state_dict(saved["loader"])

    def keep(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Know what the script's own classes have here beside a model; return the modules among it."""
        callbacks = self._owner.callback_handler.callbacks
        of_script: dict[str, Any] = {f"callback_{n}": one for n, one in enumerate(callbacks)}
        if not self._kind.__module__.startswith("transformers."):
            of_script["subclass"] = self._owner
        self.kept = Kept("transformers", of_script, model)
        return self.kept.modules(model)

    @property
    def ckptless_covers(self) -> tuple[Any, ...]:
        """Return the objects that it has the state of, for who looks whether all that changes is saved."""
        owner = self._owner
        return owner, owner.args, owner.state, owner.control, owner.callback_handler, owner.accelerator

    def ckptless_looks_through(self) -> dict[str, Any]:
        """Return what is looked through at each commit, for who tells where that takes long."""
        return {} if self.kept is None else self.kept.all()

    def ckptless_leaves_out(self) -> dict[str, Any]:
        """Return what the script's classes have beside plain data, for the same."""
        return {} if self.kept is None else self.kept.left_out()

    @property
    def loader(self) -> Prepared:
        """The loader of this entry into the loop."""
        assert self.batches is not None
        return self.batches

    def resume(self) -> tuple[int, int]:
        """Have what was restored be the state; return whole epochs, and batches of the one under way."""
        owner, saved = self._owner, self.saved
        assert saved is not None
        for name, value in saved["state"].items():
            setattr(owner.state, name, value)
        self.arguments.put_back(saved["arguments"])
        self.epochs, self.steps = saved["at"]
        if self.run.step:
            self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        return self.epochs, self.steps * owner.args.gradient_accumulation_steps

    def forget(self) -> None:
        """Let go of what was restored in another generation."""
        self.saved = None

    def begin(self, control: Any) -> None:
        """Have sums of the loop, its control and callbacks be as at the step that is restored, if any."""
        owner, saved = self._owner, self.saved
        if self.fresh is None:
            self.fresh = frozenset(_plain(owner))
        if saved is None:
            return
        _put_numbers(owner, saved["numbers"], self.fresh)
        owner._tr_loss += saved["tr_loss"].to(owner._tr_loss.device)
        for name, value in saved["control"].items():
            setattr(control, name, value)
        if not self.run.step:
            # As they were built: they are about to begin.
            self.put_back()

    def put_back(self) -> None:
        """Have the script's callbacks be as at the step that is restored, whatever they have begun anew."""
        saved = self.saved
        if saved is None:
            return
        self.arguments.put_back(saved["arguments"])
        callbacks = self._owner.callback_handler.callbacks
        for callback, numbers in zip(callbacks, saved["callbacks"], strict=True):
            if numbers:
                _put_numbers(callback, numbers)
        if self.kept is not None and saved["kept"] is not None:
            self.kept.load_state_dict(saved["kept"])

    def restore_random(self) -> None:
        """Draw from now on as after the commit, whatever was drawn since; once."""
        if self.random is not None:
            python, numbers, of_torch = self.random
            self.random = None
            random.setstate(python)
            np.random.set_state(numbers)
            torch.set_rng_state(of_torch)


def _plain(one: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(one).items() if isinstance(value, _PLAIN)}


def _numbers(one: Any) -> dict[str, Any]:
    """Return an object's numbers and words, as sums of a Trainer's loop, or the counter of EarlyStopping.

    What else it has stays the process's own; of that the names.
    """
    plain = _plain(one)
    return {"numbers": plain, "others": [name for name in vars(one) if name not in plain]}


def _put_numbers(one: Any, kept: dict[str, Any], but: Container[str] = ()) -> None:
    """Put back what `_numbers` gave; what has come since goes, `but` for what the loop has set just now."""
    known = {*kept["numbers"], *kept["others"]}
    for name in _plain(one).keys() - known:
        if name not in but:
            delattr(one, name)
    vars(one).update(kept["numbers"])


class _First(TrainerCallback):
    """Comes before all callbacks: sees where the loop is, and puts its sums back."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """The loop has set its sums to zero."""
        self.loop.begin(control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """An epoch begins, or the rest of one."""
        self.loop.epoch_over = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """An update is done."""
        self.loop.steps += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """Its last logs and evaluation come after this."""
        self.loop.epochs, self.loop.steps, self.loop.epoch_over = self.loop.epochs + 1, 0, True


class _Last(TrainerCallback):
    """Comes after all callbacks: what these begin with the training, or an epoch, goes on where it was."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop
        self._goes_on = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """They have begun, maybe once more."""
        if self.loop.run.step:
            self.loop.put_back()
        self._goes_on = self.loop.steps > 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """They have begun an epoch, or the rest of one."""
        if self._goes_on:
            self.loop.put_back()
        self._goes_on = False


class _Protected:
    """Is laid over the class of a Trainer. `ckptless` is its loop."""

    ckptless: _Loop

    def get_train_dataloader(self) -> Any:
        loop = self.ckptless
        if loop.batches is not None:
            loop.batches.leave()
        loop.batches = Prepared(super().get_train_dataloader())  # type: ignore[misc]
        loop.batches.run = loop.run
        loop.run.counts_epochs = True
        return loop.batches

    def get_eval_dataloader(self, *args: Any, **words: Any) -> Any:
        return begin_anew(super().get_eval_dataloader(*args, **words))  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **words: Any) -> Any:
        return begin_anew(super().get_test_dataloader(*args, **words))  # type: ignore[misc]

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        owner: Any = self
        loop = self.ckptless
        if resume_from_checkpoint is not None:
            raise UsageError("Trainer.train cannot resume from a folder here: use ckptless-run --save-dir")
        history = owner.state.log_history
        super()._init_training_state(max_steps, per_epoch, epochs, None, trial)  # type: ignore[misc]
        prepare = super()._prepare_for_training  # type: ignore[misc]

        def build() -> ckptless.State:
            _write_config(owner.model)
            loop.loader.settle()
            loop.model, _ = prepare(max_steps, None, None)
            loop.registered = {name: [*getattr(owner.accelerator, name)] for name in REGISTERED}
            scaler = getattr(owner.accelerator, "scaler", None)
            parts: dict[str, Any] = {} if scaler is None else {"scaler": scaler}
            return ckptless.State(
                model=loop.model,
                optimizer=owner.optimizer,
                scheduler=owner.lr_scheduler,
                trainer=loop,
                **parts,
                **loop.keep(loop.model),
            )

        loop.forget()
        joins = bool(loop.run.joins)
        loop.run.keep(build)
        loop.reports.go_back(loop.run.step, joins=joins)
        for name, those in loop.registered.items():
            getattr(owner.accelerator, name)[:] = those
        loop.epochs, loop.steps, loop.per_epoch = 0, 0, per_epoch
        # Of the first step, if it is that which is done again.
        owner.args.eval_on_start = loop.eval_on_start and not loop.run.step
        if loop.saved is None:
            return 0, 0
        found = loop.resume()
        # An evaluation before the first step is about to be done again, and to be logged.
        owner.state.log_history = _newest(history, loop.run.step) if loop.run.step else []
        return found

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        owner: Any = self
        owner.callback_handler.train_dataloader = train_dataloader
        self.ckptless.model.train()
        return self.ckptless.model, train_dataloader

    def _run_epoch(self, **words: Any) -> None:
        if self.ckptless.run.step:
            words["resume_from_checkpoint"] = MARK
        super()._run_epoch(**words)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.ckptless.restore_random()

    def get_batch_samples(self, epoch_iterator: Any, *more: Any, **words: Any) -> Any:
        # Here, and not behind it, where the Trainer does: what puts samples together may draw, too.
        self.ckptless.restore_random()
        return super().get_batch_samples(epoch_iterator, *more, **words)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **words: Any) -> None:
        owner: Any = self
        loop, control = self.ckptless, owner.control
        takes_long = control.should_evaluate or control.should_save
        with loop.run.phase("evaluation", EVALUATION_S) if takes_long else nullcontext():
            super()._maybe_log_save_evaluate(*args, **words)  # type: ignore[misc]
        last = loop.steps == loop.per_epoch or control.should_epoch_stop or control.should_training_stop
        if loop.epoch_over:
            loop.loader.finish()
        # Of an epoch's last step when the epoch's own logs and evaluation are over, too: they draw.
        if owner.state.global_step > loop.run.step and (loop.epoch_over or not last):
            loop.run.commit()


def _write_config(model: Any) -> None:
    """Write into a model's configuration what its first save_pretrained would: it is not to change later."""
    config = getattr(model, "config", None)
    if config is not None:
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]


def _newest(own: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the lines of log up to a step, of the rank that has most: a new process has none.

    To be called by all ranks.
    """
    own = [line for line in own if line.get("step", 0) <= step]
    if not dist.is_initialized():
        return own
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(own)))
    best = max(range(len(counts)), key=lambda rank: int(counts[rank]))
    text = torch.tensor([*json.dumps(own).encode()] if dist.get_rank() == best else [], dtype=torch.uint8)
    size = torch.tensor(len(text))
    dist.broadcast(size, best)
    data = text if dist.get_rank() == best else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(data, best)
    lines: list[dict[str, Any]] = json.loads(bytes(data.tolist()))
    return lines


def _protect(owner: Any) -> Any:
    """Lay the adapter over a Trainer. Raises UsageError where it is one that cannot be protected."""
    if not isinstance(owner, Trainer):
        raise UsageError(f"the function given to train must return a Trainer, not a {type(owner).__name__}")
    _refuse(owner)
    loop = _Loop(owner)
    owner.__class__ = type(f"Protected{type(owner).__name__}", (_Protected, type(owner)), {"ckptless": loop})
    owner.callback_handler.callbacks.insert(0, _First(loop))
    owner.callback_handler.callbacks.append(_Last(loop))
    return owner


def _refuse(owner: Trainer) -> None:
    """Raise UsageError where a Trainer is not one that ckptless knows."""
    for name, parameters in HOOKS.items():
        method = getattr(type(owner), name, None)
        there = {} if method is None else inspect.signature(method).parameters
        if method is None or not {*parameters.split()} <= {*there}:
            raise UsageError(f"transformers.Trainer.{name} is not what it was: {VERSIONS}")
    for name, used in CALLS.items():
        uses = inspect.unwrap(getattr(Trainer, name, _skip_ours)).__code__.co_names
        for one in used.split():
            if one not in uses:
                raise UsageError(f"transformers.Trainer.{name} does not use {one} any more: {VERSIONS}")
    for name in REGISTERED:
        if not hasattr(owner.accelerator, name):
            raise UsageError(f"accelerate.Accelerator.{name} is gone: {ACCELERATE}")
    refuse_reporters(owner.callback_handler.callbacks)
    cannot = {
        "DeepSpeed": owner.is_deepspeed_enabled,
        "FSDP of version 1": owner.is_fsdp_enabled and not owner.accelerator.is_fsdp2,
        "a model_init": owner.model_init is not None,
        "dispatch_batches": bool(owner.accelerator.dispatch_batches),
        "an iterable data set": isinstance(owner.train_dataset, torch.utils.data.IterableDataset),
        "auto_find_batch_size": owner.args.auto_find_batch_size,
        "ignore_data_skip": owner.args.ignore_data_skip,
        # Laid over the model again each time that the loop is entered.
        "NEFTune": owner.neftune_noise_alpha is not None,
        "Liger kernels": owner.args.use_liger_kernel,
    }
    for what, is_so in cannot.items():
        if is_so:
            raise UsageError(f"a Trainer with {what} is not protected by ckptless: train without it")
    _skip_ours()


@functools.cache
def _skip_ours() -> None:
    """Have the Trainer not skip what `run.batches` has passed over already."""
    stock = _TRAINER.skip_first_batches

    def skip(loader: Any, count: int = 0) -> Any:
        return loader if isinstance(loader, Prepared) else stock(loader, count)

    _TRAINER.skip_first_batches = skip
