"""What `ckptless.accelerate.keep` is given: what it knows, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator  # where there is one

import ckptless.accelerate
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters import accelerate as adapter
from ckptless.pytorch_hooks.adapters.prepared import Prepared

DATA = torch.utils.data.TensorDataset(torch.randn(16, 4))


def loader() -> Any:
    return torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)


def kept(make: Callable[[], Any]) -> Any:
    found: list[Any] = []
    ckptless.run(lambda run: found.extend(ckptless.accelerate.keep(run, make)))
    return found


class Best:
    """A number of the loop's own."""

    def __init__(self) -> None:
        self.best = 7.0

    def state_dict(self) -> dict[str, float]:
        """Give it."""
        return {"best": self.best}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Take it."""
        self.best = saved["best"]


def test_what_has_a_state_is_kept_too() -> None:
    best = Best()
    parts = adapter._Made((*prepared(), best)).parts
    assert best in parts.values()


def test_what_was_made_comes_back_and_its_first_loader_is_the_trainings() -> None:
    accelerator = Accelerator(cpu=True)
    things = accelerator.prepare(torch.nn.Linear(4, 1), loader(), loader())
    model, first, second = things
    found = kept(lambda: (accelerator, *things))
    assert found[0] is accelerator
    assert found[1] is model
    assert isinstance(found[2], Prepared)
    assert found[3] is second
    assert len(found[2]) == len(first) == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "must return an Accelerator, then what it has prepared"),
        (lambda: (torch.nn.Linear(1, 1),), "must return an Accelerator, then what it has prepared"),
        (lambda: (Accelerator(cpu=True),), "must return a model"),
        (lambda: (*prepared(), [1.0]), "returned a list, which has no state_dict and load_state_dict"),
        (lambda: prepared(rng_types=["torch", "generator"]), "leave rng_types out"),
        (lambda: prepared(dispatched=True), "or dispatches batches: give it to `prepare`"),
    ],
)
def test_what_is_not_known_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kept(make)


def prepared(*, dispatched: bool = False, rng_types: Any = None) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, rng_types=rng_types, dataloader_config=config)
    # Of one rank accelerate prepares none that dispatches.
    model, one = accelerator.prepare(torch.nn.Linear(4, 1), loader())
    if dispatched:
        return accelerator, model, Prepared(loader())
    return accelerator, model, one
