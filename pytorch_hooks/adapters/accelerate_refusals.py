"""What a script may do with an Accelerator that is kept, and that no commit can follow: refused there."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from accelerate.data_loader import SkipBatchSampler
from accelerate.local_sgd import LocalSGD

from ckptless.pytorch_hooks.errors import CarriedError

# Of those that `keep` was given: Accelerators, and what makes the batches of the training.
_KEPT: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(accelerator: Any, loader: Any) -> None:
    """Refuse from here on what goes past the commits of an Accelerator and of its loader, if it has one."""
    _lay_over()
    _KEPT.add(accelerator)
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        # A script may give a list, which is known by no other name than its own.
        if sampler is not None and not isinstance(sampler, (list, tuple)):
            _KEPT.add(sampler)


@functools.cache
def _lay_over() -> None:
    """Once in a process, whatever names a script has imported before."""
    for name in ("__enter__", "step"):
        setattr(LocalSGD, name, _in_step(getattr(LocalSGD, name)))
    SkipBatchSampler.__init__ = _whole(SkipBatchSampler.__init__)


def _in_step(method: Any) -> Any:
    """Wrap a method of LocalSGD."""

    @functools.wraps(method)
    def asked(self: Any, *args: Any, **words: Any) -> Any:
        if self.enabled and self.accelerator in _KEPT:
            raise CarriedError(
                "LocalSGD lets ranks have different parameters between its averages, and ckptless gives all "
                "of them those of one: leave LocalSGD out, or train without ckptless"
            )
        return method(self, *args, **words)

    return asked


def _whole(method: Any) -> Any:
    """Wrap what begins to skip batches."""

    @functools.wraps(method)
    def asked(self: Any, batch_sampler: Any, *args: Any, **words: Any) -> Any:
        if batch_sampler in _KEPT:
            raise CarriedError(
                "skip_first_batches gives batches past ckptless, which goes on behind the last step by "
                "itself: leave it out, and loop over the loader that keep returns"
            )
        return method(self, batch_sampler, *args, **words)

    return asked
