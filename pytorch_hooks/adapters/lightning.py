"""Lightning's Trainer: `Trainer(strategy="ckptless_ddp")`, or `ckptless.lightning.DDPStrategy(...)`.

`fit` sets up once in each process: that is what builds the State. Its loop is what comes again after a fault,
in the process that lives with the objects that it has. A step is committed between two batches, when its logs
and its validation are over; of an epoch's last step when the epoch's own are. Without an agent around it
these are Lightning's own strategies.

Stands on what is not public in Lightning (2.5 to 2.6): `HOOKS` has it, and a release in which some of it has
moved is refused before the first step.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import callbacks, strategies
from lightning.pytorch.loops import fit_loop, training_epoch_loop
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn

import ckptless
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters.kept import Kept
from ckptless.pytorch_hooks.adapters.lightning_checkpoints import Checkpoints
from ckptless.pytorch_hooks.adapters.lightning_loggers import LOGGERS, Loggers
from ckptless.pytorch_hooks.adapters.lightning_metrics import Metrics
from ckptless.pytorch_hooks.adapters.workers import begin_anew

# What is called, replaced on an instance, or read.
HOOKS: dict[type, str] = {
    fit_loop._FitLoop: "setup_data on_run_start on_advance_start advance on_advance_end on_iteration_done "
    "on_run_end done",
    training_epoch_loop._TrainingEpochLoop: "reset on_advance_end done global_step _should_accumulate",
    pl.Trainer: "_run_stage",
    callbacks.ModelCheckpoint: "file_exists",
    strategies.Strategy: "_configure_launcher process_dataloader save_checkpoint remove_checkpoint "
    "reduce_boolean_decision",
}
# What is read or set on objects, each by where a Trainer has it.
ATTRIBUTES = {
    "": "fit_loop callbacks loggers should_stop _detect_anomaly _logger_connector",
    "fit_loop": "epoch_loop epoch_progress _combined_loader _data_fetcher _restarting",
    "fit_loop.epoch_loop": "val_loop _batches_that_stepped _results",
    "fit_loop.epoch_loop.val_loop": "run _combined_loader _results _seen_batches_per_dataloader",
    "_logger_connector": "_logged_metrics _callback_metrics _first_loop_iter _current_fx",
    "lightning_module": "_current_fx_name _param_requires_grad_state _metric_attributes",
}
VERSIONS = "use Lightning 2.5 to 2.6"
# No step is done meanwhile, which until then is no hang.
VALIDATION_S = 3600.0
# Callbacks that put another scheduler, other parameters or another loader into a Trainer that trains, or have
# one train before it does.
REMAKE = (
    callbacks.StochasticWeightAveraging,
    callbacks.BaseFinetuning,
    callbacks.ModelPruning,
    callbacks.LearningRateFinder,
    callbacks.BatchSizeFinder,
)
# Of callbacks: a clock of this machine.
NOT_KEPT = frozenset({"_last_time_checked"})
# Of a Trainer: made of others where data is set up.
DERIVED = frozenset({"val_check_batch"})
_NUMBERS = frozenset({int, float, bool})
_PLAIN = frozenset({*_NUMBERS, str, type(None)})


class _Protecting:
    """Is mixed into a strategy of Lightning's; `options` are those of `ckptless.run`."""

    fit: _Fit | None = None
    _launcher: Any

    def __init__(
        self,
        *args: Any,
        commit_every: Any = 1,
        commit_budget: float = 0.01,
        overlap: Any = "off",
        **words: Any,
    ) -> None:
        super().__init__(*args, **words)
        self.options = {"commit_every": commit_every, "commit_budget": commit_budget, "overlap": overlap}

    def _configure_launcher(self) -> None:
        if env.read().agent_socket is None:
            super()._configure_launcher()  # type: ignore[misc]
        else:
            self._launcher = _Inside(self)

    def barrier(self, *args: Any, **words: Any) -> None:
        """As Lightning's, but for what one process does alone."""
        if self.fit is None or not self.fit.alone:
            super().barrier(*args, **words)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As Lightning's; a process that takes a rank in the middle of a job has what the others have."""
        if self.fit is not None and self.fit.alone:
            return obj
        return super().broadcast(obj, src)  # type: ignore[misc]

    def reduce(self, tensor: Any, *args: Any, **words: Any) -> Any:
        """As `broadcast`."""
        if self.fit is not None and self.fit.alone:
            return tensor
        return super().reduce(tensor, *args, **words)  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: Any, filepath: Any, *args: Any, **words: Any) -> None:
        """As Lightning's; what has been written is known."""
        super().save_checkpoint(checkpoint, filepath, *args, **words)  # type: ignore[misc]
        if self.fit is not None and self.fit.checkpoints is not None:
            self.fit.checkpoints.written(filepath)

    def remove_checkpoint(self, filepath: Any) -> None:
        """As `save_checkpoint`."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.fit is not None and self.fit.checkpoints is not None:
            self.fit.checkpoints.removed(filepath)

    def process_dataloader(self, dataloader: object) -> object:
        """Have the training's loader go on where the step did."""
        found: object = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self.fit is None or not self.fit.trainer.training:
            return found if self.fit is None else begin_anew(found)
        return _Batches(self.fit, found)


class DDPStrategy(_Protecting, strategies.DDPStrategy):
    """Lightning's DDPStrategy; `commit_every`, `commit_budget` and `overlap` are those of `ckptless.run`.

    `Trainer(strategy="ckptless_ddp")` has it with their defaults. Without an agent around it, it is
    Lightning's own. `fit` raises UsageError for a Trainer that cannot be protected.
    """


class ModelParallelStrategy(_Protecting, strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2), with options and errors of DDPStrategy here.

    `Trainer(strategy="ckptless_fsdp2")` has it with their defaults.
    """


strategies.StrategyRegistry.register("ckptless_ddp", DDPStrategy, "DDP that outlives its processes")
strategies.StrategyRegistry.register(
    "ckptless_fsdp2", ModelParallelStrategy, "FSDP2 that outlives its processes"
)


class _Inside(_Launcher):
    """Runs `fit` inside of `ckptless.run`, and inside of the handler in which Lightning ends a Trainer."""

    is_interactive_compatible = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **words: Any) -> Any:
        """Call it. Raises UsageError where that cannot be protected."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            if self._strategy.fit is None:
                raise UsageError(
                    "under ckptless the first call of a Trainer is to be fit: there are no groups yet"
                )
            return function(*args, **words)
        if self._strategy.fit is not None:
            raise UsageError("Trainer.fit was called twice: under ckptless a process trains once")
        _refuse(trainer)

        def train(run: Any) -> None:
            self._strategy.fit = _Fit(self._strategy, trainer, run)
            run.building()
            function(*args, **words)

        ckptless.run(train, **self._strategy.options)
        return None

    def kill(self, signum: Any) -> None:
        """Nothing: the agent ends processes."""


class _Batches:
    """A loader whose batches come by `run.batches`; else it is that loader."""

    def __init__(self, fit: _Fit, loader: Any) -> None:
        vars(self).update(_owner=fit, _loader=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._owner.check_loaders()
        self._owner.run.counts_epochs = True
        yield from self._owner.run.batches(self._loader)


class _Fit:
    """One `fit` of a process, over all generations; an object of its State, for where the loops are."""

    def __init__(self, strategy: Any, trainer: Any, run: Any) -> None:
        self.trainer, self.run = trainer, run
        # What it has the state of, for who looks whether all that changes is in the State.
        self.ckptless_covers = (trainer,)
        # While only this process does what it does: the others have done it before.
        self.alone = bool(run.joins)
        self._strategy = strategy
        self._metrics = Metrics(trainer)
        self._kept: Kept | None = None
        self.checkpoints: Checkpoints | None = None
        # What hooks set in the Trainer as it trains, such as accumulate_grad_batches: as it was built.
        self._as_built: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._begun = False
        # What Lightning patches for each call, and a fault may leave so.
        self._forward: Any = None
        # The attributes of the loops, and of what they count in, that are numbers: by path.
        self._counted: list[tuple[str, dict[str, Any], list[str]]] = []
        # Updates that were done when it was committed.
        self._committed = 0
        self._stage = trainer._run_stage
        trainer._run_stage = self._train
        self._watch()
        # Who logs is asked for.
        strategy.set_world_ranks()
        self._loggers = Loggers(trainer, run, joins=self.alone)

    @property
    def _fit_loop(self) -> Any:
        return self.trainer.fit_loop

    @property
    def _epoch_loop(self) -> Any:
        return self.trainer.fit_loop.epoch_loop

    # ------------------------------------------------------------------------------------ the loop

    def _train(self) -> None:
        """Stand where the Trainer would run its loop."""
        self.run.repeat(self._body)
        # It may evaluate from here on.
        del self.trainer._run_stage

    def _body(self) -> None:
        """The loop, from the agreed step on."""
        again, self._begun, joins = self._begun, True, self.run.joins
        if again and not joins:
            self._leave()
        self.run.keep(self._build)
        self.alone = False
        if self._saved is None:
            self._stage()
            return
        if not self.run.step:
            # Again from the begin, where all set their data up together.
            self._fit_loop._combined_loader = self._epoch_loop.val_loop._combined_loader = None
            self._put_back(joins=joins)
            self._stage()
            return
        if not again and not joins:
            # From a disk.
            self._set_up_data()
        self._put_back(joins=joins)
        self._rest()

    def _build(self) -> ckptless.State:
        """Return what `fit` has set up; of a process that joins, all that comes before a batch, too."""
        self._as_built = _public(self.trainer)
        self.checkpoints = Checkpoints(self.trainer)
        if self.alone:
            self._set_up_data()
        self._forward = vars(self.trainer.lightning_module).get("forward")
        self._counted = [*_counted(self._fit_loop, "fit")]
        strategy = self._strategy
        parts: dict[str, Any] = {"model": strategy.model, "optimizer": list(strategy.optimizers)}
        if strategy.lr_scheduler_configs:
            parts["scheduler"] = [one.scheduler for one in strategy.lr_scheduler_configs]
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            parts["scaler"] = self.trainer.precision_plugin.scaler
        module, of_script = self.trainer.lightning_module, {}
        for number, callback in enumerate(self.trainer.callbacks):
            if not isinstance(callback, callbacks.ProgressBar):
                of_script[f"callback_{number}"] = callback
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value is not module:
                    parts[f"callback_{number}_{name}"] = value
        self._kept = Kept("lightning", of_script, module)
        return ckptless.State(**parts, fit=self)

    def ckptless_looks_through(self) -> dict[str, Any]:
        """Return what is looked through at each commit, for who tells where that takes long."""
        assert self._kept is not None
        return self._kept.all()

    def ckptless_leaves_out(self) -> dict[str, Any]:
        """Return what callbacks have beside plain data, for who looks whether all that changes is kept.

        Of those with a `state_dict` of their own nothing: that says what they have.
        """
        assert self._kept is not None
        told = {f"callback_{number}" for number, one in enumerate(self.trainer.callbacks) if _tells(one)}
        left = self._kept.left_out().items()
        return {place: value for place, value in left if place.partition(".")[0] not in told}

    def _set_up_data(self) -> None:
        """Do what comes before the first batch."""
        self._fit_loop.setup_data()
        self._fit_loop.on_run_start()
        self._set_up_validation()

    def check_loaders(self) -> None:
        """Raise UsageError where batches do not come one by one, from one loader that knows their number."""
        fetcher, loaders = self._fit_loop._data_fetcher, self._fit_loop._combined_loader.flattened
        if len(loaders) > 1:
            raise UsageError(
                f"training takes its batches from {len(loaders)} loaders, and ckptless knows one under "
                "Lightning: put them into one"
            )
        if fetcher.length is None or isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise UsageError(
                "training takes batches ahead, of a loader without a length or by `dataloader_iter`, and a "
                "fault would lose them: give the loader a length, and training_step a batch"
            )

    def _set_up_validation(self) -> None:
        """Have the loader for validation: those that have evaluated do."""
        loop = self._epoch_loop.val_loop
        if self.trainer.enable_validation and loop._combined_loader is None:
            self.trainer.validating = True
            loop.setup_data()
            self.trainer.training = True

    def _leave(self) -> None:
        """Undo what a fault has cut off half-way."""
        module = self.trainer.lightning_module
        self.trainer.training = True
        module._current_fx_name = None
        vars(module).pop("forward", None)
        if self._forward is not None:
            vars(module)["forward"] = self._forward
        for parameter, needs in module._param_requires_grad_state.items():
            parameter.requires_grad = needs
        module._param_requires_grad_state = {}
        torch.set_grad_enabled(True)
        for bar in self.trainer.callbacks:
            if isinstance(bar, callbacks.ProgressBar):
                # Or a validation that was cut off would have the next one's bar.
                bar.reset_dataloader_idx_tracker()
        self.alone = True
        self._set_up_validation()

    def _rest(self) -> None:
        """Run the fit loop's rest, as its `run` does; maybe from the middle of an epoch on."""
        fit, progress = self._fit_loop, self._fit_loop.epoch_progress.current
        cut = progress.ready > progress.processed
        iter(fit._data_fetcher)
        with torch.autograd.set_detect_anomaly(self.trainer._detect_anomaly):
            while cut or not fit.done:
                try:
                    if cut:
                        self._rest_of_epoch()
                    else:
                        fit.on_advance_start()
                        fit.advance()
                    fit.on_advance_end()
                except StopIteration:
                    break
                finally:
                    fit.on_iteration_done()
                cut = False
            fit._restarting = False
            fit.on_run_end()

    def _rest_of_epoch(self) -> None:
        for loader in self._fit_loop._combined_loader.flattened:
            _set_sampler_epoch(loader, self._fit_loop.epoch_progress.current.processed)
        # Or it would count from the epoch's begin.
        self._epoch_loop.reset = lambda: None
        try:
            self._fit_loop.advance()
        finally:
            del self._epoch_loop.reset

    # ------------------------------------------------------------------------------------- commit

    def _watch(self) -> None:
        """Commit where the loops are between two batches."""
        fit, epoch = self._fit_loop, self._epoch_loop
        batch_over, epoch_over = epoch.on_advance_end, fit.on_advance_end

        def on_batch_over(fetcher: Any) -> None:
            batch_over(fetcher)
            if not epoch._should_accumulate() and not epoch.done:
                self._commit()

        def on_epoch_over() -> None:
            epoch_over()
            self.run.end_epoch()
            self._commit()

        def validate() -> Any:
            with self.run.phase("validation", VALIDATION_S):
                return validation()

        validation = epoch.val_loop.run
        epoch.on_advance_end, fit.on_advance_end = on_batch_over, on_epoch_over
        epoch.val_loop.run = validate

    def _commit(self) -> None:
        """Commit, if there was an update: of a step without one there is nothing to go back to."""
        if self._epoch_loop.global_step != self._committed:
            self._committed = self._epoch_loop.global_step
            self.run.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loops are, and what metrics and callbacks have."""
        trainer = self.trainer
        assert self._kept is not None
        assert self.checkpoints is not None
        told = {f"callback_{number}": one.state_dict() for number, one in enumerate(trainer.callbacks)}
        return {
            "loops": {
                path: {name: of[name] for name in names if type(of[name]) in _NUMBERS}
                for path, of, names in self._counted
            },
            "seen": dict(self._epoch_loop.val_loop._seen_batches_per_dataloader),
            "trainer": _changed(self._as_built, _public(trainer)),
            "metrics": self._metrics.state_dict(),
            "callbacks": [
                (_plain(one), state) for one, state in zip(trainer.callbacks, told.values(), strict=True)
            ],
            "checkpoints": self.checkpoints.state_dict(),
            "kept": self._kept.state_dict(told),
            "data": None if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it; it is put back once all the rest is."""
        self._saved = saved

    def _put_back(self, *, joins: bool) -> None:
        trainer, saved = self.trainer, self._saved
        assert saved is not None
        for path, of, _names in self._counted:
            of.update(saved["loops"][path])
        self._epoch_loop.val_loop._seen_batches_per_dataloader.update(saved["seen"])
        _set_public(trainer, {**self._as_built, **saved["trainer"]})
        self._metrics.load_state_dict(saved["metrics"])
        assert self._kept is not None
        assert self.checkpoints is not None
        self.checkpoints.load_state_dict(saved["checkpoints"])
        self._kept.load_state_dict(saved["kept"])
        for one, (plain, state) in zip(trainer.callbacks, saved["callbacks"], strict=True):
            vars(one).update(plain)
            # Its clock goes on.
            if state and not isinstance(one, callbacks.Timer):
                one.load_state_dict(state)
        if trainer.datamodule is not None and saved["data"]:
            trainer.datamodule.load_state_dict(saved["data"])
        # By id, of the process that has committed it.
        trainer.lightning_module._metric_attributes = None
        self._committed = self._epoch_loop.global_step
        self._loggers.go_back(self.run.step, self._epoch_loop._batches_that_stepped, joins=joins)


def _counted(loop: Any, path: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Give the attributes of a loop, of the loops in it, and of what they count in; and which are numbers."""
    yield path, vars(loop), [name for name, value in vars(loop).items() if type(value) in _NUMBERS]
    for name, value in vars(loop).items():
        if isinstance(value, (_Loop, _BaseProgress)):
            yield from _counted(value, f"{path}.{name}")


def _plain(one: Any) -> dict[str, Any]:
    """Return a callback's numbers and words; what else it has stays the process's own.

    So does all of a progress bar, which only shows: its numbers are those of what it has on this screen.
    """
    if isinstance(one, callbacks.ProgressBar):
        return {}
    return {
        name: value for name, value in vars(one).items() if type(value) in _PLAIN and name not in NOT_KEPT
    }


def _public(trainer: Any) -> dict[str, Any]:
    """Return a Trainer's numbers and words that hooks may set as it trains, and others read."""
    return {
        name: value
        for name, value in vars(trainer).items()
        if type(value) in _PLAIN and name[0] != "_" and name not in DERIVED
    }


def _changed(built: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return what training has changed: the rest is what the script, maybe changed, says as it begins."""
    return {
        name: value
        for name, value in now.items()
        if name not in built or type(built[name]) is not type(value) or built[name] != value
    }


def _set_public(trainer: Any, values: dict[str, Any]) -> None:
    """Have a Trainer with these numbers and words, and without others that a step cut off has set."""
    for name in _public(trainer).keys() - values.keys():
        del vars(trainer)[name]
    # What is an object by now stays the process's own.
    named = vars(trainer)
    named.update({k: v for k, v in values.items() if k not in named or type(named[k]) in _PLAIN})


def _tells(callback: Any) -> bool:
    """Whether a callback's class has a state_dict of its own."""
    return type(callback).state_dict is not callbacks.Callback.state_dict


def _refuse_release(trainer: Any) -> None:
    """Raise UsageError where Lightning is not the one that this stands on."""
    for kind, names in HOOKS.items():
        for name in names.split():
            if inspect.getattr_static(kind, name, None) is None:
                raise UsageError(f"Lightning's {kind.__name__}.{name} is gone: {VERSIONS}")
    for path, names in ATTRIBUTES.items():
        _need(operator.attrgetter(path)(trainer) if path else trainer, names)
    for one in trainer.loggers:
        for kind in LOGGERS:
            if isinstance(one, kind):
                _need(one, LOGGERS[kind])


def _need(one: Any, names: str) -> None:
    for name in names.split():
        if not hasattr(one, name):
            raise UsageError(f"Lightning's {type(one).__name__}.{name} is gone: {VERSIONS}")


def _refuse(trainer: Any) -> None:
    """Raise UsageError where a Trainer is not one that ckptless knows."""
    _refuse_release(trainer)
    for one in trainer.callbacks:
        if isinstance(one, REMAKE):
            raise UsageError(
                f"the callback {type(one).__name__} changes what is trained, or trains itself, after all is "
                "set up, and is not protected by ckptless: train without it"
            )
    cannot = {
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "barebones": trainer.barebones,
        "a val_check_interval in time": getattr(trainer, "_val_check_time_interval", None) is not None,
        "model averaging": getattr(trainer.strategy, "_model_averaging_period", None) is not None,
    }
    for what, is_so in cannot.items():
        if is_so:
            raise UsageError(f"a Trainer with {what} is not protected by ckptless: train without it")
