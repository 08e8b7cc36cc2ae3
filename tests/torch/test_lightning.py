"""What stands between ckptless and Lightning's Trainer: it is there, and what it cannot do is refused."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl  # where there is one
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import TrainerFn

import ckptless.lightning
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters import lightning as adapter
from ckptless.pytorch_hooks.adapters.lightning_checkpoints import Checkpoints
from ckptless.pytorch_hooks.adapters.lightning_loggers import LOGGERS, Loggers, go_on, lines
from ckptless.pytorch_hooks.adapters.lightning_metrics import Metrics

# Of how one runs, and what it runs on.
pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")

Words = dict[str, Any]


def trainer(**more: Any) -> Any:
    words: Words = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    made = pl.Trainer(**{**words, "enable_checkpointing": False, "enable_model_summary": False, **more})
    made.strategy._lightning_module = Module()
    return made


def test_strategies_have_names_and_without_an_agent_are_lightning_s_own() -> None:
    for name, kind in (
        ("ckptless_ddp", ckptless.lightning.DDPStrategy),
        ("ckptless_fsdp2", ckptless.lightning.ModelParallelStrategy),
    ):
        made = trainer(strategy=name).strategy
        assert type(made) is kind
        assert not isinstance(made.launcher, adapter._Inside)
        assert made.fit is None
        assert made.options == {"commit_every": 1, "commit_budget": 0.01, "overlap": "off"}
    made = ckptless.lightning.DDPStrategy(commit_every="auto", static_graph=True)
    assert made.options["commit_every"] == "auto"


def test_validations_begin_with_new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process would draw a seed for them that one that lives has drawn before."""
    strategy = trainer(strategy="ckptless_ddp").strategy
    data: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(4)), num_workers=1, persistent_workers=True
    )
    monkeypatch.setattr("ckptless.pytorch_hooks.env.read", lambda: SimpleNamespace(agent_socket="there"))
    assert strategy.process_dataloader(data).persistent_workers
    strategy.fit = SimpleNamespace(trainer=SimpleNamespace(training=False))
    assert not strategy.process_dataloader(data).persistent_workers


def test_under_an_agent_fit_runs_inside_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.pytorch_hooks.env.read", lambda: SimpleNamespace(agent_socket="there"))
    made = trainer(strategy="ckptless_ddp")
    launcher = made.strategy.launcher
    assert isinstance(launcher, adapter._Inside)
    with pytest.raises(UsageError, match="the first call of a Trainer is to be fit"):
        launcher.launch(print, trainer=made)
    made.strategy.fit = object()
    assert launcher.launch(lambda: 7, trainer=made) == 7
    made.state.fn = TrainerFn.FITTING
    with pytest.raises(UsageError, match=r"Trainer.fit was called twice"):
        launcher.launch(print, trainer=made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"reload_dataloaders_every_n_epochs": 2}, "a Trainer with reload_dataloaders_every_n_epochs is not"),
        ({"barebones": True}, "a Trainer with barebones is not"),
    ],
)
def test_what_cannot_be_protected_is_refused(words: Words, said: str) -> None:
    made = trainer(**words)
    with pytest.raises(UsageError, match=said):
        adapter._refuse(made)


@pytest.mark.parametrize(
    "made",
    [
        pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1),
        pl.callbacks.BackboneFinetuning(),
        pl.callbacks.ModelPruning("l1_unstructured"),
        pl.callbacks.LearningRateFinder(),
        pl.callbacks.BatchSizeFinder(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_callbacks_that_make_something_else_of_the_training_are_refused(made: Any) -> None:
    with pytest.raises(UsageError, match=f"the callback {type(made).__name__} changes what is trained"):
        adapter._refuse(trainer(callbacks=[made]))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in adapter.HOOKS.items() for name in names.split()]
)
def test_a_hook_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    made = trainer()
    # On whichever class has it.
    owner = next(base for base in kind.__mro__ if name in vars(base))
    monkeypatch.delattr(owner, name)
    with pytest.raises(UsageError, match=rf"{kind.__name__}\.{name} is gone: use Lightning 2\.5 to 2\.6"):
        adapter._refuse(made)


class Without:
    """Something as it is, but for an attribute of something in it."""

    def __init__(self, one: Any, path: list[str], name: str) -> None:
        self.one, self.path, self.name = one, path, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.one, name)
        if not self.path and name == self.name:
            raise AttributeError(name)
        return Without(found, self.path[1:], self.name) if self.path and name == self.path[0] else found


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in adapter.ATTRIBUTES.items() for name in names.split()]
)
def test_an_attribute_that_has_moved_is_refused(path: str, name: str) -> None:
    made = trainer()
    adapter._refuse(made)
    with pytest.raises(UsageError, match=rf"\.{name} is gone: use Lightning 2\.5 to 2\.6"):
        adapter._refuse(Without(made, path.split(".") if path else [], name))


class Elsewhere(pl.loggers.logger.Logger):
    """Of a service that nobody asks what it has."""

    name, version = "elsewhere", "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Send it there."""

    def log_hyperparams(self, params: Any, *args: Any, **words: Any) -> None:
        """Send them there."""


def test_a_logger_that_does_not_say_what_it_has_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [pl.loggers.CSVLogger(tmp_path), pl.loggers.TensorBoardLogger(tmp_path)]
    Loggers(trainer(logger=kinds), SimpleNamespace(step=0), joins=False)
    made = trainer(logger=[Elsewhere()])
    assert not [text for text in caplog.messages if "what it has written" in text]
    Loggers(made, SimpleNamespace(step=0), joins=False)
    text = caplog.messages[-1]
    assert text.startswith("Elsewhere does not say what it has written: lines of the step that is cut off")


def test_loggers_have_what_is_read_of_them(tmp_path: Path) -> None:
    for kind, names in LOGGERS.items():
        begins = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
        sets = {name for one in begins if inspect.isfunction(one) for name in one.__code__.co_names}
        for name in names.split():
            assert name in sets or hasattr(kind, name), f"{kind.__name__}.{name}"
    logger = pl.loggers.CSVLogger(tmp_path)
    made = trainer(logger=logger)
    del logger._version
    with pytest.raises(UsageError, match=r"Lightning's CSVLogger\._version is gone"):
        adapter._refuse(made)


def test_batches_that_are_taken_ahead_and_loaders_side_by_side_are_refused() -> None:
    def checked(loaders: list[Any], fetcher: Any) -> None:
        loop = SimpleNamespace(
            _data_fetcher=fetcher, _combined_loader=SimpleNamespace(flattened=loaders), epoch_loop=None
        )
        adapter._Fit.check_loaders(SimpleNamespace(_fit_loop=loop))  # type: ignore[arg-type]

    checked([1], SimpleNamespace(length=3))
    with pytest.raises(UsageError, match="from 2 loaders"):
        checked([1, 2], SimpleNamespace(length=3))
    with pytest.raises(UsageError, match="a loader without a length"):
        checked([1], SimpleNamespace(length=None))
    ahead = _DataLoaderIterDataFetcher()
    ahead.length = 3
    with pytest.raises(UsageError, match="dataloader_iter"):
        checked([1], ahead)


class Bar(pl.callbacks.ProgressBar):
    """A script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.shown = 7, [1, 2]


def test_of_progress_bars_nothing_is_kept() -> None:
    """Their numbers are names of what they have on this screen."""
    made = [Bar(), pl.callbacks.TQDMProgressBar(), pl.callbacks.ModelSummary()]
    if importlib.util.find_spec("rich"):
        made.append(pl.callbacks.RichProgressBar())
    assert [bool(adapter._plain(one)) for one in made[1:3]] == [False, True]
    of_bars = [one for one in made if isinstance(one, pl.callbacks.ProgressBar)]
    assert [adapter._plain(one) for one in of_bars] == [{}] * len(of_bars)


@pytest.mark.parametrize("lives", [False, True])
def test_what_hooks_set_in_a_trainer_is_of_the_step(lives: bool) -> None:
    made = trainer()
    built = adapter._public(made)
    assert {"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"} <= built.keys()
    made.accumulate_grad_batches, made.gradient_clip_val, made.should_stop = 2, 0.5, True
    saved = adapter._changed(built, adapter._public(made))
    assert saved == {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "should_stop": True}
    if lives:
        # It has gone on.
        made.accumulate_grad_batches, made.log_every_n_steps, made.of_mine = 4, 7, "new"
        its = built
    else:
        # A new one, maybe of a script that begins with something else.
        made = trainer(log_every_n_steps=3)
        its = adapter._public(made)
    adapter._set_public(made, {**its, **saved})
    assert adapter._public(made) == {**its, **saved}
    made.gradient_clip_val = held = object()
    adapter._set_public(made, its)
    assert made.gradient_clip_val is held


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("job", ["4711", "4712"])
def test_a_checkpoint_of_a_step_that_was_cut_off_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool, job: str
) -> None:
    """Not what was there before; and of another job's folder nothing."""

    def begun() -> tuple[Any, Any, Checkpoints]:
        one = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
        made = trainer(callbacks=[one], enable_checkpointing=True)
        one.setup(made, made.lightning_module, "validate")
        return made, one, Checkpoints(made)

    def save(made: Any, one: Any, name: str) -> str:
        wanted = [str(tmp_path / f"{name}{more}.ckpt") for more in ("", "-v1", "-v2", "-v3")]
        chosen = next(path for path in wanted if not one.file_exists(path, made))
        Path(chosen).touch()
        return Path(chosen).name

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    (tmp_path / "last.ckpt").touch()
    made, one, checkpoints = begun()
    assert save(made, one, "a") == "a.ckpt"
    checkpoints.removed(tmp_path / "gone.ckpt")
    saved = checkpoints.state_dict()
    assert [save(made, one, name) for name in ("last", "a", "b")] == ["last-v1.ckpt", "a-v1.ckpt", "b.ckpt"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    if joins or job != "4711":
        made, one, checkpoints = begun()
    checkpoints.load_state_dict(saved)
    again = [save(made, one, name) for name in ("last", "a", "b", "b")]
    if job == "4711":
        assert again == ["last-v1.ckpt", "a-v1.ckpt", "b.ckpt", "b-v1.ckpt"]
    else:
        assert again == ["last-v2.ckpt", "a-v2.ckpt", "b-v1.ckpt", "b-v2.ckpt"]


class Module(pl.LightningModule):
    """With a metric of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.mean = torchmetrics.MeanMetric()


def sums() -> tuple[Any, Any, Metrics]:
    """Return a Trainer in training, the results of its loop, and its metrics."""
    made = trainer()
    made.training = True
    return made, made.fit_loop.epoch_loop._results, Metrics(made)


def log(made: Any, results: Any, number: int) -> None:
    words: Words = {"sync_dist_fn": made.strategy.reduce}
    value = torch.tensor(1.5 + number)
    results.batch_size = number + 1
    results.log("training_step", "loss", value, on_step=True, on_epoch=True, prog_bar=True, **words)
    results.log("training_step", "most", value, reduce_fx="max", **words)
    results.log("training_step", "now", value, on_step=True, on_epoch=False, **words)
    mean = made.lightning_module.mean
    mean(value)
    results.log("training_step", "mean", mean, metric_attribute="mean", **words)


@pytest.mark.parametrize("beyond", [0, 2])
def test_sums_go_on_as_they_would_have(beyond: int) -> None:
    made, results, metrics = sums()
    connector = made._logger_connector
    for number in range(3):
        log(made, results, number)
    connector._first_loop_iter, connector._current_fx = False, "training_step"
    connector._callback_metrics["val"] = torch.tensor(0.25)
    saved = metrics.state_dict()
    # Numbers of one type in one tensor, whatever has how many.
    assert sorted(str(one.dtype) for one in saved["tensors"]) == ["torch.float32", "torch.int64"]
    if beyond:
        # The process lives, and has gone on.
        its, others, again = made, results, metrics
        for number in range(beyond):
            log(made, results, 7 + number)
        made.lightning_module.mean.reset()
    else:
        its, others, again = sums()
    again.load_state_dict(saved)
    assert [*others] == [*saved["sums"]]
    assert its._logger_connector._callback_metrics["val"] == 0.25
    assert its._logger_connector._first_loop_iter is False
    # A module's metric is the module's own, and the State has it.
    assert others["training_step.mean"].value is its.lightning_module.mean
    for number in range(3):
        if beyond or its is not made:
            its.lightning_module.mean(torch.tensor(1.5 + number))
    log(its, others, 3)
    found = {name: float(value) for name, value in others.metrics(on_step=False)["log"].items()}
    assert found == {"loss_epoch": (1.5 * 1 + 2.5 * 2 + 3.5 * 3 + 4.5 * 4) / 10, "most": 4.5, "mean": 3.0}
    assert float(others.metrics(on_step=True)["log"]["now"]) == 4.5


def test_metrics_that_cannot_be_made_again_are_refused() -> None:
    made, results, metrics = sums()
    results.log("training_step", "a", made.lightning_module.mean)
    with pytest.raises(UsageError, match="a metric that is no attribute of the module"):
        metrics.state_dict()
    results.clear()
    results.log("training_step", "b", torch.tensor(1.0), sync_dist_group=object())
    with pytest.raises(UsageError, match=r"self\.log\('b', sync_dist_group=\.\.\.\) is not protected"):
        metrics.state_dict()


def test_a_log_in_csv_is_gone_on_with(tmp_path: Path) -> None:
    def begun() -> Any:
        return pl.loggers.CSVLogger(tmp_path, name="logs", version="version_4711")

    first = begun()
    go_on(first)
    for step in range(2):
        first.log_metrics({"loss": step / 2, "b": 1.0}, step)
        first.save()
    (file,) = tmp_path.glob("logs/version_4711/metrics.*")
    # As where a process was killed while it put the file aside.
    file.rename(file.with_suffix(".kept"))
    second = begun()
    with pytest.warns(UserWarning, match="exists and is not empty"):
        go_on(second)
    second.log_metrics({"loss": 1.0, "b": 1.0}, 2)
    second.save()
    (file,) = tmp_path.glob("logs/version_4711/metrics.*")
    assert file.read_text().splitlines() == ["b,loss,step", "1.0,0.0,0", "1.0,0.5,1", "1.0,1.0,2"]


class Logged:
    """A job of one rank that logs two lines a step, and one more in the second."""

    def __init__(self, home: Path, *, joins: bool = False) -> None:
        self.logger = pl.loggers.CSVLogger(home, name="logs", version="version_4711")
        self.run = SimpleNamespace(step=0)
        trainer = SimpleNamespace(loggers=[self.logger], is_global_zero=True)
        self.loggers = Loggers(trainer, self.run, joins=joins)

    def step(self, most: int = 9) -> None:
        """Do a step, or so many lines of it."""
        names = ["loss", "loss", "val"] if self.run.step == 1 else ["loss", "rate"]
        for name in names[:most]:
            self.logger.log_metrics({name: self.run.step / 2, "epoch": 0}, self.run.step)
            self.logger.save()
        if most == 9:
            self.run.step += 1


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:.*is not empty:UserWarning")
def test_each_line_is_written_once(tmp_path: Path, joins: bool, back: int, most: int) -> None:
    plain, job = Logged(tmp_path / "plain"), Logged(tmp_path / "job")
    for _ in range(4):
        plain.step()
    job.step()
    job.step()
    job.step(most)
    if joins:
        job = Logged(tmp_path / "job", joins=True)
    job.run.step = back
    job.loggers.go_back(back, back, joins=joins)
    for _ in range(4 - back):
        job.step()
    assert sorted(map(repr, lines(job.logger, 0))) == sorted(map(repr, lines(plain.logger, 0)))


def test_another_release_is_refused_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones lack what is imported."""
    monkeypatch.delitem(sys.modules, adapter.__name__)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loops.fetchers", None)
    with pytest.raises(UsageError, match=r"not the one that ckptless knows .*: use Lightning 2\.5 to 2\.6"):
        importlib.reload(ckptless.lightning)
    monkeypatch.undo()
    importlib.reload(ckptless.lightning)
