"""What Accelerate's trackers write through a fault: each line once, by one process or by several."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from accelerate import Accelerator  # where there is one
from accelerate.tracking import GeneralTracker, MLflowTracker, WandBTracker

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters import accelerate_trackers as adapter


class Own(GeneralTracker):  # type: ignore[misc]
    """A tracker of a script's own."""

    name = "own"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.lines

    def store_init_configuration(self, values: Any) -> None:
        """Nothing."""

    def log(self, values: Any, step: int | None = None) -> None:
        """Keep it."""
        self.lines.append((step, *values))


@pytest.fixture(autouse=True)
def _in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.AGENT_SOCKET, "an agent's")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    # Set by what is tested.
    for kind in (MLflowTracker, WandBTracker):
        monkeypatch.setattr(kind, "start", kind.start)
    monkeypatch.setattr(adapter, "_name_runs", functools.cache(adapter._name_runs.__wrapped__))


class Process:
    """One that logs, of a job that has committed a step, with the largest number of a line until then."""

    def __init__(self, log_with: Any, step: int = 0, words: Any = None) -> None:
        adapter.name_by_job()
        self.accelerator: Any = Accelerator(cpu=True, log_with=log_with)
        self.accelerator.init_trackers("gpt", init_kwargs=words or {})
        self.trackers = adapter.Trackers(self.accelerator)
        self.run = SimpleNamespace(step=step)
        self.trackers.newest = 10 * step or -1
        self.trackers.enter(self.run, joins=step > 0)

    def train(self, steps: int) -> None:
        """Do so many steps, whose lines have numbers of the script's own, and lose the last one."""
        for step in range(self.run.step + 1, self.run.step + steps + 1):
            self.accelerator.log({"loss": step / 2, "rate": 1.0}, step=10 * step)
            self.run.step = step
        self.run.step -= 1
        self.trackers.newest = 10 * self.run.step
        self.trackers.enter(self.run, joins=False)


def test_a_process_that_lives_writes_each_line_once(caplog: pytest.LogCaptureFixture) -> None:
    own = Own()
    process = Process(own)
    for _ in range(3):
        process.train(3)
    assert own.lines == [(10 * step, "loss", "rate") for step in range(1, 8)]
    assert "Own does not say what it has written" in caplog.text


def test_without_an_agent_it_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.AGENT_SOCKET)
    start, own = MLflowTracker.start, Own()
    process = Process(own)
    process.accelerator.init_trackers("another")
    assert "log" not in vars(own)
    assert MLflowTracker.start is start


def test_trackers_that_would_begin_again_are_refused() -> None:
    process = Process(Own())
    with pytest.raises(UsageError, match="init_trackers was called behind keep"):
        process.accelerator.init_trackers("gpt")


@pytest.mark.parametrize(
    ("given", "begun"),
    [
        ({}, {"id": "4711", "resume": "allow"}),
        ({"resume": "must"}, {"id": "4711", "resume": "must"}),
        ({"id": "mine"}, {"id": "mine"}),
    ],
)
def test_wandb_is_given_the_jobs_name(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], begun: dict[str, str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(WandBTracker, "start", lambda tracker: asked.append(tracker.init_kwargs))
    adapter.name_by_job()
    tracker = WandBTracker("gpt", **given)
    tracker.start()
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    WandBTracker("gpt", **given).start()
    assert asked == [begun, given]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in adapter.HOOKS.items() for name in names.split()]
)
def test_a_tracker_that_is_another_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, name: str
) -> None:
    made = kind("gpt", *[tmp_path] * kind.requires_logging_directory)
    adapter._refuse(made)
    monkeypatch.delattr(made if name in vars(made) else kind, name)
    with pytest.raises(UsageError, match=rf"accelerate's {kind.__name__}\.{name} is gone: use accelerate"):
        adapter._refuse(made)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found = pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    yield found
    while found.active_run():
        found.end_run()


def written(mlflow: Any, run_id: str) -> list[int]:
    client = mlflow.MlflowClient()
    (loss, rate) = ([one.step for one in client.get_metric_history(run_id, n)] for n in ("loss", "rate"))
    assert loss == rate
    return loss


def test_another_process_goes_on_with_the_jobs_run(mlflow: Any) -> None:
    first = Process("mlflow")
    first.train(3)
    run_id = mlflow.active_run().info.run_id
    mlflow.end_run()
    second = Process("mlflow", step=1)
    assert mlflow.active_run().info.run_id == run_id
    second.train(4)
    assert written(mlflow, run_id) == [10, 20, 30, 40, 50]
    mlflow.end_run()
    # As where the whole job begins again.
    Process("mlflow").train(6)
    assert written(mlflow, run_id) == [10, 20, 30, 40, 50, 60]
    (experiment,) = mlflow.search_experiments(filter_string="name = 'gpt'")
    assert "ckptless.job" not in experiment.tags


def test_a_run_that_is_given_may_have_the_same_lines_already(mlflow: Any) -> None:
    Process("mlflow").train(2)
    given = mlflow.active_run().info.run_id
    mlflow.end_run()
    process = Process("mlflow", words={"mlflow": {"run_id": given}})
    process.train(2)
    assert written(mlflow, given) == [10, 20, 10, 20]
    mlflow.end_run()
    # Another process of the same job.
    Process("mlflow", step=1, words={"mlflow": {"run_id": given}}).train(2)
    assert written(mlflow, given) == [10, 20, 10, 20, 30]
