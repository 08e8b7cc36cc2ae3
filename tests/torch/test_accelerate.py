"""What `ckptless.accelerate.keep` is given: what it knows, and what is refused in a sentence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator  # where there is one
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    skip_first_batches,
)
from accelerate.local_sgd import LocalSGD
from accelerate.state import GradientState
from accelerate.utils import ProjectConfiguration

import ckptless.accelerate
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters import accelerate as adapter
from ckptless.pytorch_hooks.adapters.accelerate_refusals import watch
from ckptless.pytorch_hooks.adapters.prepared import HOOKS, LOOP, Prepared
from ckptless.pytorch_hooks.errors import CarriedError

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


def test_a_second_loader_may_be_gone_through_between_steps_and_not_beside_them() -> None:
    run = SimpleNamespace(step=0)
    accelerator, model, _ = prepared()
    made = adapter._Made((accelerator, model, *accelerator.prepare(loader(), loader())))
    made.enter(run)
    held = made.things[3]
    for step in range(2):
        run.step = step
        assert len([*held]) == 4
    beside = iter(held)
    next(beside)
    run.step = 2
    with pytest.raises(CarriedError, match="a second loader gives batches to the steps of the training"):
        list(beside)


def test_a_new_process_says_of_a_loader_what_it_was_given() -> None:
    """Else its State would not be as it was at the step, where the loop goes on, and that would be told."""
    accelerator = Accelerator(cpu=True)
    first, second = (Prepared(accelerator.prepare(loader())) for _ in range(2))
    first.run = SimpleNamespace(batches=iter)
    for one in (first, second):
        # As where there are several ranks.
        one._loader.synchronized_generator = torch.Generator()
    assert first.state_dict()["shuffles"] is not None
    next(iter(first))
    saved = first.state_dict()
    second.load_state_dict(saved)
    assert second.state_dict() == saved


def test_batches_that_are_skipped_past_it_are_refused() -> None:
    accelerator, model, first = prepared()
    second = accelerator.prepare(loader())
    made = adapter._Made((accelerator, model, first, second))
    assert len(accelerator.skip_first_batches(made.things[3], 1)) == 3
    for one in (made.things[2], first):
        for skip in (accelerator.skip_first_batches, skip_first_batches):
            with pytest.raises(
                CarriedError, match="leave it out, and loop over the loader that keep returns"
            ):
                skip(one, 1)


@pytest.mark.parametrize("how", [{"sampler": [3, 1, 2, 0]}, {"batch_sampler": [[3, 1], [2, 0]]}])
def test_a_sampler_that_is_a_list_is_taken(how: dict[str, Any]) -> None:
    """No weak reference can be had of one."""
    watch(Accelerator(cpu=True), torch.utils.data.DataLoader(DATA, **how))


def test_other_loaders_begin_with_new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process would draw a seed for them that one that lives has drawn before."""
    monkeypatch.setenv(env.AGENT_SOCKET, "an agent's")
    accelerator, model, first = prepared()
    plain: Any = torch.utils.data.DataLoader(DATA, num_workers=1, persistent_workers=True)
    second = accelerator.prepare(torch.utils.data.DataLoader(DATA, num_workers=1, persistent_workers=True))
    adapter._Made((accelerator, model, first, second, plain))
    assert not second.base_dataloader.persistent_workers
    assert not plain.persistent_workers


def test_local_sgd_is_refused() -> None:
    accelerator, model, first = prepared()
    found = LocalSGD(accelerator, model, 2)
    with found:
        found.step()
    adapter._Made((accelerator, model, first))
    with found:
        found.step()
    # Of one rank it does nothing.
    found.enabled, found.accelerator, found.model = True, accelerator, model
    for use in (found.__enter__, found.step):
        with pytest.raises(CarriedError, match="leave LocalSGD out, or train without ckptless"):
            use()
    found.accelerator, found.local_sgd_steps = Accelerator(cpu=True), 9
    found.step()


def test_a_save_is_made_again_in_the_place_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    accelerator, made = saving(tmp_path)
    accelerator.save_state()
    saved = made.state_dict()
    for number in (1, 2):
        accelerator.save_state()
        (tmp_path / "checkpoints" / f"checkpoint_{number}" / "late").touch()
    # In the process that lives, and in a new one.
    made.load_state_dict(saved)
    accelerator.save_state()
    assert folders(tmp_path) == {0: False, 1: False, 3: False}
    accelerator, made = saving(tmp_path)
    made.load_state_dict(saved)
    accelerator.save_state()
    accelerator.save_state()
    assert folders(tmp_path) == {0: False, 1: False, 2: False, 3: False}
    # What was there before the job is not.
    made.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()
    assert 3 in folders(tmp_path)


def saving(home: Path) -> tuple[Any, Any]:
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(home), automatic_checkpoint_naming=True)
    )
    model, one = accelerator.prepare(torch.nn.Linear(4, 1), loader())
    return accelerator, adapter._Made((accelerator, model, one))


def folders(home: Path) -> dict[int, bool]:
    """Return which there are, and whether one has what came late."""
    found = (home / "checkpoints").iterdir()
    return {int(one.name.removeprefix("checkpoint_")): (one / "late").exists() for one in found}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("samples", "drop_last", "refused"),
    [(20, False, True), (16, False, False), (20, True, False), (15, True, False)],
)
def test_ranks_with_different_numbers_of_batches_are_refused(
    split: bool, samples: int, drop_last: bool, refused: bool
) -> None:
    """Also where they come to be different later."""
    count = samples + 1 if split and refused else samples
    data = torch.utils.data.TensorDataset(torch.zeros(count, 1))
    whole = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 4, drop_last)
    made = Accelerator(cpu=True).prepare(loader())
    sampler = BatchSamplerShard(whole, 2, 0, split_batches=split)
    shard = DataLoaderShard(data, batch_sampler=sampler)
    shard.rng_types = made.rng_types
    found = Prepared(shard)
    sampler.even_batches = False
    found.run = SimpleNamespace(batches=iter)
    for use in (lambda: Prepared(shard), lambda: list(found)):
        if refused:
            with pytest.raises(
                UsageError, match="even_batches=False gives ranks different numbers of batches"
            ):
                use()
        else:
            use()


@pytest.mark.parametrize("name", HOOKS.split())
def test_a_loader_that_is_another_one_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = Accelerator(cpu=True).prepare(loader())
    Prepared(made)

    def without(ask: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def asked(self: Any, attribute: str) -> Any:
            if attribute == name:
                raise AttributeError(attribute)
            return ask(self, attribute)

        return asked

    kind, _, inner = name.rpartition(".")
    if kind:
        monkeypatch.delattr(GradientState, inner)
    # The second asks what it wraps.
    for ask in ("__getattribute__", "__getattr__"):
        monkeypatch.setattr(DataLoaderShard, ask, without(getattr(DataLoaderShard, ask)))
    with pytest.raises(UsageError, match=rf"accelerate's DataLoaderShard\.{name} is gone: use accelerate 1"):
        Prepared(made)


@pytest.mark.parametrize("name", LOOP.split())
def test_a_loop_over_a_loader_that_goes_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = Accelerator(cpu=True).prepare(loader())
    code = DataLoaderShard.__iter__.__code__
    other = code.replace(co_names=tuple(f"{one}_2" if one == name else one for one in code.co_names))
    monkeypatch.setattr(DataLoaderShard.__iter__, "__code__", other)
    with pytest.raises(UsageError, match=rf"DataLoaderShard\.__iter__ does not use {name} any more: use acc"):
        Prepared(made)


def test_accelerates_loop_over_a_loader_does_nothing_else() -> None:
    """Ours stands in its place: a new name there may be something that ours has to do, too."""
    of_its_own_state = {"_update_state_dict", "skip_batches", "_non_blocking"}
    ours = {*LOOP.split(), "synchronized_generator", "device", "send_to_device"}
    python = {"__iter__", "next", "StopIteration"}
    assert {*DataLoaderShard.__iter__.__code__.co_names} == of_its_own_state | ours | python


@pytest.mark.parametrize("name", adapter.HOOKS.split())
def test_an_accelerator_that_is_another_one_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    things = prepared()
    monkeypatch.delattr(things[0] if name in vars(things[0]) else Accelerator, name)
    with pytest.raises(UsageError, match=rf"accelerate's Accelerator\.{name} is gone: use accelerate 1"):
        adapter._Made(things)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "must return an Accelerator, then what it has prepared"),
        (lambda: (torch.nn.Linear(1, 1),), "must return an Accelerator, then what it has prepared"),
        (lambda: (Accelerator(cpu=True),), "must return a model"),
        (lambda: (*prepared(), [1.0]), "returned a list, which has no state_dict and load_state_dict"),
        (lambda: prepared(rng_types=["torch", "generator"]), "leave rng_types out"),
        (
            lambda: prepared(dispatched=True),
            "DataLoaderDispatcher is no loader that accelerate has prepared, or dispatches",
        ),
        (lambda: (*prepared()[:2], loader()), "DataLoader is no loader that accelerate has prepared"),
    ],
)
def test_what_is_not_known_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kept(make)


def prepared(*, dispatched: bool = False, rng_types: Any = None) -> Any:
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    model, one = accelerator.prepare(torch.nn.Linear(4, 1), loader())
    # Of one rank accelerate prepares none that dispatches.
    return accelerator, model, DataLoaderDispatcher(DATA) if dispatched else one


def test_another_release_is_refused_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones lack what is imported."""
    monkeypatch.setattr("accelerate.__version__", "1.11.1")
    made = Accelerator(cpu=True).prepare(loader())
    with pytest.raises(UsageError, match=r"accelerate 1\.11\.1 is older than any that ckptless knows"):
        Prepared(made)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    monkeypatch.delitem(sys.modules, Prepared.__module__)
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", None)
    with pytest.raises(UsageError, match=r"not the one that ckptless knows .*: use accelerate 1\.12 to"):
        importlib.reload(ckptless.accelerate)
    monkeypatch.undo()
    importlib.reload(ckptless.accelerate)
