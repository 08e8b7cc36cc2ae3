"""Hugging Face Accelerate: `ckptless.accelerate.keep(run, make)`, where `make()` prepares everything.

The loop is the script's own, as it was. What Accelerate keeps besides model, optimizer and scheduler (where
an accumulation is, a scaler) is committed with the step; the prepared loader's batches come by `run.batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

import ckptless
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters.accelerate_refusals import watch
from ckptless.pytorch_hooks.adapters.accelerate_saves import Saves
from ckptless.pytorch_hooks.adapters.accelerate_trackers import Trackers, name_by_job
from ckptless.pytorch_hooks.adapters.prepared import ACCELERATE, Prepared
from ckptless.pytorch_hooks.adapters.workers import begin_anew
from ckptless.pytorch_hooks.errors import CarriedError

# What is read or set on an Accelerator.
HOOKS = "distributed_type is_fsdp2 scaler step project_configuration save_state"
# What ranks train with that ckptless renews, beside FSDP2.
KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def keep(run: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what `make()` gives: an Accelerator, what that has prepared, and objects with a `state_dict`.

    It is called once in each process. Its first loader is the one of the training, which goes on where the
    step did: `for epoch in range(run.epoch, epochs): for batch in loader: ...`. Others are as they were
    prepared. Commit after an update: `if accelerator.sync_gradients: run.commit()`. To be called once in the
    training function, instead of `run.keep`. Raises as that, and UsageError where it is given something else.
    """

    def build() -> ckptless.State:
        name_by_job()
        made = _Made(make())
        return ckptless.State(made=made, **made.parts)

    joins = bool(run.joins)
    made: _Made = run.keep(build).made
    made.enter(run, joins=joins)
    return made.things


class _Made:
    """Holds what one process has made; an object of its State, for where the loop is."""

    def __init__(self, things: tuple[Any, ...]) -> None:
        if not isinstance(things, tuple) or not things or not isinstance(things[0], Accelerator):
            raise UsageError(
                "the function given to keep must return an Accelerator, then what it has prepared"
            )
        self._accelerator: Any = things[0]
        for name in HOOKS.split():
            if not hasattr(self._accelerator, name):
                raise UsageError(f"accelerate's Accelerator.{name} is gone: {ACCELERATE}")
        if self._accelerator.distributed_type not in KNOWN and not self._accelerator.is_fsdp2:
            raise UsageError(
                f"Accelerate with {self._accelerator.distributed_type.value} is not protected by ckptless, "
                "which knows DDP and FSDP of version 2 there: use one of these"
            )
        self._loader: Prepared | None = None
        self._run: Any = None
        found: list[Any] = []
        for one in things:
            # Whatever it is, and whether it was prepared: it is the one of the training.
            if isinstance(one, torch.utils.data.DataLoader) and self._loader is None:
                self._loader = Prepared(one)
                self._watch(
                    one,
                    "batches are taken past ckptless, which does not know of them where a fault comes: loop "
                    "over the loader that keep returns",
                )
                self._loader.settle()
                found.append(self._loader)
                continue
            if isinstance(one, torch.utils.data.DataLoader):
                begin_anew(one)
            if isinstance(one, DataLoaderShard):
                self._watch(
                    one,
                    "a second loader gives batches to the steps of the training, and ckptless keeps the "
                    "position of the first one alone: put their data into one loader",
                )
            found.append(one)
        watch(self._accelerator, self._loader)
        self._trackers = Trackers(self._accelerator)
        self._saves = Saves(self._accelerator)
        self.things = tuple(found)
        self.parts = self._sorted()

    def _watch(self, loader: Any, told: str) -> None:
        """Refuse batches of a loader that is gone through while steps are committed: nobody has that."""
        base, begin = loader.base_dataloader, loader.base_dataloader.__iter__

        def batches() -> Iterator[Any]:
            step = self._run.step
            for batch in begin():
                if self._run.step != step:
                    raise CarriedError(told)
                yield batch

        # Accelerate asks the object for it, not its class.
        vars(base)["__iter__"] = batches

    def _sorted(self) -> dict[str, Any]:
        """Return the parts of the State."""
        kinds = {
            "model": torch.nn.Module,
            "optimizer": AcceleratedOptimizer,
            "scheduler": AcceleratedScheduler,
        }
        parts: dict[str, Any] = {}
        for name, kind in kinds.items():
            those = [one for one in self.things if isinstance(one, kind)]
            if those:
                parts[name] = those[0] if len(those) == 1 else those
        if "model" not in parts:
            raise UsageError("the function given to keep must return a model that `prepare` has given")
        if self._accelerator.scaler is not None:
            parts["scaler"] = self._accelerator.scaler
        known = (*kinds.values(), Prepared, torch.utils.data.DataLoader)
        for number, one in enumerate(self.things[1:]):
            if isinstance(one, known):
                continue
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise UsageError(
                    f"the function given to keep returned a {type(one).__name__}, which has no state_dict "
                    "and load_state_dict: give it both, or nobody would know what of it changes in training"
                )
            parts[f"other_{number}"] = one
        return parts

    def enter(self, run: Any, *, joins: bool = False) -> None:
        """The training function is entered; `joins`: others have trained before this process."""
        self._run = run
        self._trackers.enter(run, joins=joins)
        if self._loader is not None:
            self._loader.run = run
            self._loader.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is."""
        loader = self._loader
        return {
            "step": self._accelerator.step,
            "loader": None if loader is None else loader.state_dict(),
            "logged": self._trackers.newest,
            "saves": self._saves.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go there."""
        self._accelerator.step = saved["step"]
        self._trackers.newest = saved["logged"]
        self._saves.load_state_dict(saved["saves"])
        if self._loader is not None:
            self._loader.load_state_dict(saved["loader"])
