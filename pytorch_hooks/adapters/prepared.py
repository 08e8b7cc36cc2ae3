"""A loader that accelerate has prepared, with its batches from the committed position on.

Accelerate gives all ranks one state of the generator that shuffles, at the beginning of each epoch. Here that
is done once, where the State is built: from there on each draws what the others draw, and `run.batches`
restores what it had drawn from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    SeedableRandomSampler,
    synchronize_rng_states,
)
from accelerate.utils import send_to_device
from packaging.version import Version

from ckptless.daemon.protocol.errors import UsageError

# What is called, read or set on a prepared loader, and on what it tells of loops over it.
HOOKS = (
    "base_dataloader begin end set_epoch iteration device rng_types synchronized_generator batch_sampler "
    "end_of_dataloader gradient_state gradient_state.dataloader_references"
)
# What its own loop over a loader uses, in the place of which is the one here.
LOOP = "rng_types synchronize_rng_states begin set_epoch iteration base_dataloader end_of_dataloader end"
OLDEST = "1.12"
ACCELERATE = "use accelerate 1.12 to 1.15"


class Prepared:
    """Gives what the prepared loader would: the same order, on the same device, the end told as there.

    It takes batches by `run.batches`, none ahead. `run` is set at each entry into the training function.
    Raises UsageError for another loader.
    """

    def __init__(self, loader: Any) -> None:
        if Version(accelerate.__version__) < Version(OLDEST):
            raise UsageError(
                f"accelerate {accelerate.__version__} is older than any that ckptless knows: {ACCELERATE}"
            )
        if not isinstance(loader, DataLoaderShard):
            raise UsageError(
                f"{type(loader).__name__} is no loader that accelerate has prepared, or dispatches batches: "
                "give it to `prepare`, without dispatch_batches"
            )
        for name in HOOKS.split():
            try:
                operator.attrgetter(name)(loader)
            except AttributeError as error:
                raise UsageError(
                    f"accelerate's {type(loader).__name__}.{name} is gone: {ACCELERATE}"
                ) from error
        for name in LOOP.split():
            if name not in DataLoaderShard.__iter__.__code__.co_names:
                raise UsageError(
                    f"accelerate's DataLoaderShard.__iter__ does not use {name} any more: {ACCELERATE}"
                )
        if {*(loader.rng_types or ())} - {"generator"}:
            raise UsageError(
                f"rng_types={loader.rng_types}: other random numbers than those of a loader's generator are "
                "each rank's own under ckptless: leave rng_types out"
            )
        _refuse_uneven(loader.batch_sampler)
        self.run: Any = None
        # Batches of the epoch that is under way.
        self.done = 0
        # Whether an epoch has begun, in this process or before what it was given.
        self._begun = False
        self._loader = loader
        self._rest: Iterator[Any] = iter(())
        sampler = loader.batch_sampler
        while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if sampler is not None and sampler.generator is None:
            # It would make the same where it begins; and a new process's loader would have none to restore.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(sampler.initial_seed)

    def settle(self) -> None:
        """Have all ranks shuffle alike; where the State is built."""
        loader = self._loader
        if loader.rng_types and loader.synchronized_generator is not None:
            synchronize_rng_states(loader.rng_types, loader.synchronized_generator)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, and before the first epoch what that shuffles with."""
        generator = None if self._begun else self._loader.synchronized_generator
        shuffles = None if generator is None else generator.get_state()
        return {"done": self.done, "iteration": self._loader.iteration, "shuffles": shuffles}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go there. A process that lives has drawn its order, and `run.batches` has it."""
        self.done = saved["done"]
        self._loader.set_epoch(saved["iteration"])
        if saved["shuffles"] is None:
            self._begun = True
        elif not self._begun:
            self._loader.synchronized_generator.set_state(saved["shuffles"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        # `join_uneven_inputs` may have set it since.
        _refuse_uneven(loader.batch_sampler)
        self._begun = True
        loader.begin()
        loader.set_epoch(loader.iteration)
        self._rest = self.run.batches(loader.base_dataloader)
        for batch in self._rest:
            self.done += 1
            # What accelerate sums up until, whatever is left over, and what it cuts off what it gathers.
            loader.end_of_dataloader = self.done == len(loader)
            yield batch if loader.device is None else send_to_device(batch, loader.device, non_blocking=True)
        self.over()

    def finish(self) -> None:
        """Go to the end of the epoch: a loop that counts its steps does not ask for more than there are."""
        if self.done:
            for _ in self._rest:
                pass
            self.over()

    def over(self) -> None:
        """An epoch is over."""
        self.done = 0
        self._loader.iteration += 1
        self._loader.end()

    def leave(self) -> None:
        """Tell accelerate that no epoch is under way, nor an evaluation: a fault may have cut them off."""
        self._loader.gradient_state.dataloader_references = [None]


def _refuse_uneven(sampler: Any) -> None:
    """Raise UsageError where ranks have different numbers of batches: a step is committed by all of them."""
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.drop_last:
        return
    whole = sampler.batch_sampler
    if sampler.split_batches:
        data = getattr(getattr(whole, "sampler", None), "data_source", None)
        uneven = data is None or len(data) % sampler.batch_size != 0
    else:
        uneven = len(whole) % sampler.num_processes != 0
    if uneven:
        raise UsageError(
            "even_batches=False gives ranks different numbers of batches here, and each commits all steps: "
            "leave it out (and join_uneven_inputs with it), or take drop_last=True"
        )
