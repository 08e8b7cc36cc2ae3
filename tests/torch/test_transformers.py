"""What stands between ckptless and transformers' Trainer: it is there, and what it cannot do is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers  # where there is one
from transformers.integrations.integration_utils import MLflowCallback

import ckptless.transformers
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters import transformers as adapter
from ckptless.pytorch_hooks.adapters import transformers_reports as reports


class Model(torch.nn.Module):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.line(x)
        return {"loss": (found - labels).pow(2).mean(), "logits": found}


DATA: Any = [{"x": torch.full((4,), float(n)), "labels": torch.tensor([float(n)])} for n in range(16)]


class Endless(torch.utils.data.IterableDataset[Any]):
    """Samples without a number."""

    def __iter__(self) -> Any:
        return iter(DATA)


class Unprepared(transformers.Trainer):
    """With a loader of its own, as every rank has it."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(DATA)


def trainer(home: Path, data: Any = DATA, **more: Any) -> Any:
    words = {"output_dir": str(home), "use_cpu": True, "max_steps": 6, "report_to": [], "disable_tqdm": True}
    words |= {"save_strategy": "no", "logging_steps": 2, **more.pop("arguments", {})}
    args = transformers.TrainingArguments(**words)  # type: ignore[arg-type]
    torch.manual_seed(1)
    model = {} if "model_init" in more else {"model": Model()}
    kind = more.pop("kind", transformers.Trainer)
    return kind(args=args, train_dataset=data, **{**model, **more})


def test_without_an_agent_it_is_plain_trainer(tmp_path: Path) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(trainer(tmp_path))
        return made[0]

    ours = ckptless.transformers.train(make)
    theirs = trainer(tmp_path)
    assert theirs.train().training_loss == ours.training_loss
    assert torch.equal(theirs.model.line.weight, made[0].model.line.weight)
    assert len(made[0].state.log_history) == len(theirs.state.log_history)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _home: torch.nn.Linear(1, 1), "must return a Trainer, not a Linear"),
        (lambda home: trainer(home, model_init=Model), "a Trainer with a model_init is not protected"),
        (lambda home: trainer(home, Endless()), "a Trainer with an iterable data set is not"),
        (
            lambda home: trainer(home, arguments={"auto_find_batch_size": True}),
            "a Trainer with auto_find_batch_size is not",
        ),
        (
            lambda home: trainer(home, arguments={"neftune_noise_alpha": 5.0}),
            "a Trainer with NEFTune is not",
        ),
        (
            lambda home: trainer(home, kind=Unprepared),
            "DataLoader is no loader that accelerate has prepared",
        ),
    ],
)
def test_what_cannot_be_protected_is_refused(tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ckptless.transformers.train(lambda: make(tmp_path))


@pytest.mark.parametrize("name", adapter.HOOKS)
def test_a_hook_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    made = trainer(tmp_path)
    monkeypatch.setattr(transformers.Trainer, name, lambda self: None)
    with pytest.raises(UsageError, match=rf"transformers.Trainer.{name} is not what it was"):
        adapter._refuse(made)


@pytest.mark.parametrize(
    ("name", "used"), [(name, used) for name, names in adapter.CALLS.items() for used in names.split()]
)
def test_a_loop_that_goes_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, used: str
) -> None:
    made = trainer(tmp_path)
    adapter._refuse(made)
    method = inspect.unwrap(getattr(transformers.Trainer, name))
    code = method.__code__
    other = code.replace(co_names=tuple(f"{one}_2" if one == used else one for one in code.co_names))
    monkeypatch.setattr(method, "__code__", other)
    with pytest.raises(UsageError, match=rf"Trainer\.{name} does not use {used} any more: use tr"):
        adapter._refuse(made)


@pytest.mark.parametrize("name", adapter.REGISTERED)
def test_what_the_accelerator_has_no_more_is_refused(tmp_path: Path, name: str) -> None:
    made = trainer(tmp_path)
    delattr(made.accelerator, name)
    with pytest.raises(UsageError, match=rf"accelerate\.Accelerator\.{name} is gone"):
        adapter._refuse(made)


def test_evaluations_begin_with_new_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process would draw a seed for them that one that lives has drawn before."""
    words = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    made = adapter._protect(trainer(tmp_path, arguments=words, eval_dataset=DATA))
    # Without an agent they are the Trainer's own.
    assert made.get_test_dataloader(DATA).base_dataloader.persistent_workers
    monkeypatch.setenv(env.AGENT_SOCKET, "an agent's")
    for one in (made.get_eval_dataloader(), made.get_test_dataloader(DATA), made.get_eval_dataloader()):
        assert not one.base_dataloader.persistent_workers


def test_a_reporter_that_does_not_say_what_it_has_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(transformers.TrainerCallback):
        def on_log(self, *_args: Any, **_more: Any) -> None:
            """Report somewhere."""

    monkeypatch.setenv(env.AGENT_SOCKET, "an agent's")
    monkeypatch.setattr(reports, "REPORTERS", (Own, *reports.REPORTERS))
    made = trainer(tmp_path, arguments={"report_to": ["tensorboard"]})
    reports.Reports(made, lambda: 0)
    assert not caplog.messages
    made.add_callback(Own())
    reports.Reports(made, lambda: 0)
    assert [text.partition(":")[0] for text in caplog.messages] == ["Own does not say what it has written"]


def test_without_an_agent_reports_are_the_trainers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun's name for a job that is given none is the same for all."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    made = trainer(tmp_path, arguments={"report_to": ["tensorboard"]})
    reports.Reports(made, lambda: 0)
    (reporter,) = [one for one in made.callback_handler.callbacks if hasattr(one, "tb_writer")]
    assert "on_log" not in vars(reporter)
    assert reporter.logging_dir is None


def test_a_reporter_that_is_another_one_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, arguments={"report_to": ["tensorboard"]})
    adapter._refuse(made)
    (reporter,) = [one for one in made.callback_handler.callbacks if hasattr(one, "tb_writer")]
    del reporter.tb_writer
    with pytest.raises(UsageError, match=r"transformers' TensorBoardCallback\.tb_writer is gone"):
        adapter._refuse(made)
    assert "_async_log" in MLflowCallback.on_log.__code__.co_names
    assert "_ml_flow" in MLflowCallback.__init__.__code__.co_names


def test_numbers_of_callbacks_are_kept_and_their_objects_are_not() -> None:
    callback = transformers.EarlyStoppingCallback(early_stopping_patience=3)
    callback.early_stopping_patience_counter = 2
    callback.other = object()  # type: ignore[attr-defined]
    kept = adapter._plain(callback)
    assert kept["early_stopping_patience_counter"] == 2
    assert "other" not in kept


def test_another_release_is_refused_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones lack what is imported."""
    monkeypatch.delitem(sys.modules, adapter.__name__)
    monkeypatch.setitem(sys.modules, "transformers.trainer_utils", None)
    with pytest.raises(UsageError, match=r"not the one that ckptless knows .*: use transformers 5\.17 to"):
        importlib.reload(ckptless.transformers)
    monkeypatch.undo()
    importlib.reload(ckptless.transformers)


def test_arguments_that_a_callback_changes_are_those_of_the_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, arguments={"lr_scheduler_kwargs": {"a": [1]}})
    loop, args = adapter._protect(made).ckptless, made.args
    loop.run = SimpleNamespace(step=1)
    loop.batches = SimpleNamespace(state_dict=dict, load_state_dict=lambda saved: None)
    built = {**vars(args)}
    assert loop.state_dict()["arguments"] == {}
    args.max_grad_norm, args.of_a_script, args.logging_strategy = 0.5, "x", "epoch"
    args.lr_scheduler_kwargs["a"].append(2)
    saved = copy.deepcopy(loop.state_dict())
    changed = saved["arguments"]
    assert {*changed} == {"max_grad_norm", "of_a_script", "logging_strategy", "lr_scheduler_kwargs"}
    # The step that is cut off; and the process has a rank of its own.
    args.max_grad_norm, args.weight_decay, args.late, args.local_rank = 0.25, 9.0, 1, 7
    args.lr_scheduler_kwargs["a"].append(3)
    loop.load_state_dict(saved)
    loop.resume()
    assert loop.arguments.changed() == changed
    assert (args.max_grad_norm, args.weight_decay, args.local_rank) == (0.5, 0.0, 7)
    assert args.logging_strategy is type(built["logging_strategy"])("epoch")
    assert not hasattr(args, "late")
    # What they begin anew with the training.
    args.max_grad_norm = 1.0
    loop.put_back()
    assert args.max_grad_norm == 0.5
    args.local_rank = built["local_rank"]
    loop.arguments.put_back({})
    assert vars(args) == built | {"lr_scheduler_kwargs": {"a": [1]}}
