"""The command line is torchrun's: what is ours, what is the script's, and what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import ckptless
from ckptless.daemon.launch import main
from ckptless.daemon.launch import options as launch_options
from ckptless.daemon.launch.options import data_of
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.options import DataSettings, run_options


class FakeRun:
    """Takes the checked options, and runs nothing."""

    seen: SharedConfig | None = None
    state_dir: Path | None = None
    log_dir: Path | None = None

    def __init__(
        self, config: SharedConfig, *, state_dir: Path | None, log_dir: Path | None, port: int, verbose: bool
    ) -> None:
        type(self).seen, type(self).state_dir, type(self).log_dir = config, state_dir, log_dir

    async def run(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch_options, "LocalRun", FakeRun)
    monkeypatch.setattr(FakeRun, "seen", None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("other script.py").touch()


def call(words: Sequence[str]) -> Result:
    return CliRunner().invoke(main.command, list(words), prog_name="ckptless-run")


def options(*words: str) -> SharedConfig:
    result = call(["--local", *words])
    assert result.exit_code == 0, result.output
    assert FakeRun.seen is not None
    return FakeRun.seen


def test_defaults(tmp_path: Path) -> None:
    found = options("train.py")
    assert found.argv == (str(tmp_path / "train.py"),)
    spec = found.spec
    assert (spec.nodes, spec.spares, spec.slots_per_node, spec.limits.start_tries) == (1, 0, 1, 0)
    assert not found.module
    assert found.tee == (0,)
    assert FakeRun.state_dir is None
    assert spec.job.startswith("local-")
    assert options("train.py").spec.job != options("train.py").spec.job


def test_what_ranks_print_goes_where_it_is_said(tmp_path: Path) -> None:
    folders = []
    for words in ([], ["--log-dir", "printed", "--job", "mine"]):
        options(*words, "train.py")
        folders.append(FakeRun.log_dir)
    assert folders == [None, tmp_path / "printed" / "ckptless-mine"]
    Path("printed").rename("elsewhere")
    Path("printed").touch()
    result = call(["--local", "--log-dir=printed", "train.py"])
    assert result.exit_code == 2
    assert "choose another --log-dir" in result.stderr


def test_limits_for_batches() -> None:
    assert options("train.py").data == DataSettings()
    found = options("--data-budget", "32MiB", "--data-prefetch", "3", "train.py").data
    assert found == DataSettings(budget_nbytes=32 << 20, prefetch=3)
    for wrong in ("much", "1KiB", "12", "-4MiB"):
        result = call(["--local", f"--data-budget={wrong}", "train.py"])
        assert result.exit_code == 2
        assert f"--data-budget is '{wrong}': it must be a size with its unit from 1MiB" in result.stderr
    assert call(["--local", "--data-prefetch", "257", "train.py"]).exit_code == 2


@pytest.mark.parametrize(
    ("site", "found"),
    [
        (DataSettings(), DataSettings(budget_nbytes=8 << 20, prefetch=4)),
        (DataSettings(budget_nbytes=4 << 20, prefetch=9), DataSettings(budget_nbytes=4 << 20, prefetch=4)),
        (DataSettings(budget_nbytes=9 << 20, prefetch=2), DataSettings(budget_nbytes=8 << 20, prefetch=2)),
    ],
)
def test_the_lower_of_two_limits_for_batches_counts(site: DataSettings, found: DataSettings) -> None:
    assert data_of(run_options({"data_budget_nbytes": "8MiB", "data_prefetch": 4}), site) == found
    assert data_of(run_options({}), site) == site


def test_a_limit_for_copies() -> None:
    assert options("train.py").replication.bandwidth_rate is None
    assert options("--replication-bandwidth", "50MB/s", "train.py").replication.bandwidth_rate == 5e7
    result = call(["--local", "--replication-interface", "lo", "train.py"])
    assert result.exit_code == 2
    assert "--replication-interface is for a Slurm job" in result.stderr


def test_failure_domains() -> None:
    assert options("train.py").spec.domains == ()
    found = options("--nodes", "2", "--spares", "1", "--domains", "a,a,b", "train.py")
    assert found.spec.domains == ("a", "a", "b")


@pytest.mark.parametrize("text", ["a,a", "a,a,b,b", "", "a,,b", "a,b c,d"])
def test_failure_domains_that_cannot_be(text: str) -> None:
    result = call(["--local", "--nodes", "2", "--spares", "1", "--domains", text, "train.py"])
    assert result.exit_code == 2
    assert "error: " in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "2", "--nproc-per-node", "3", "--max-restarts", "1"],
        ["--nnodes=2", "--nproc-per-node=3", "--max-restarts=1"],
        ["--nnodes=2", "--nproc_per_node=3", "--max_restarts=1"],
        ["--nnodes", "2", "--nproc_per_node", "3", "--max_restarts", "1"],
        ["--nodes", "2", "--nproc_per-node", "3", "--max-restarts", "1"],
    ],
)
def test_dashes_or_underscores(words: list[str]) -> None:
    found = options(*words, "train.py")
    spec = found.spec
    assert (spec.nodes, spec.slots_per_node, spec.limits.start_tries) == (2, 3, 1)


@pytest.mark.parametrize(
    "theirs",
    [
        ["--nodes", "7", "--nproc_per_node=9"],
        ["--lr_decay", "0.1", "-m", "--local", "-v", "--help"],
        ["--", "--nnodes", "3"],
        ["train.py", "--tee", "none"],
        ["--unknown_option", "--job=x_y"],
        [""],
    ],
)
@pytest.mark.parametrize("ours", [[], ["--nproc_per_node", "2"], ["--job", "a_b"], ["--job=a_b"], ["-v"]])
def test_what_follows_the_script_is_the_scripts(ours: list[str], theirs: list[str], tmp_path: Path) -> None:
    found = options(*ours, "train.py", *theirs)
    assert found.argv == (str(tmp_path / "train.py"), *theirs)
    assert found.spec.nodes == 1
    if "a_b" in "".join(ours):
        assert found.spec.job == "a_b"


def test_a_module() -> None:
    found = options("--nnodes=2", "-m", "my_package.train_it", "--nodes", "3", "-m")
    assert found.module
    assert found.argv == ("my_package.train_it", "--nodes", "3", "-m")
    assert found.spec.nodes == 2


def test_a_script_with_a_blank_in_its_name(tmp_path: Path) -> None:
    assert options("other script.py", "a b").argv == (str(tmp_path / "other script.py"), "a b")


def test_values_that_look_like_scripts(tmp_path: Path) -> None:
    found = options(
        "--preload", "my_models", "--preload", "numpy", "--state_dir", "some_where", "train.py", "x_y"
    )
    assert found.preload[-2:] == ("my_models", "numpy")
    assert FakeRun.state_dir == Path("some_where")
    assert found.argv == (str(tmp_path / "train.py"), "x_y")


@pytest.mark.parametrize(
    ("text", "ranks"), [("all", None), ("none", ()), ("0,3", (0, 3)), ("3", None), ("0", (0,))]
)
def test_tee(text: str, ranks: tuple[int, ...] | None) -> None:
    assert options("--tee", text, "train.py").tee == ranks


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["--rdzv-backend", "c10d"],
        ["--rdzv_backend=c10d"],
        ["--rdzv_endpoint", "localhost:0"],
        ["--rdzv-id=5"],
        ["--master_addr", "127.0.0.1", "--master_port", "29500"],
        ["--node_rank=0"],
    ],
)
def test_what_torchrun_needs_is_taken_and_said_to_do_nothing(words: list[str], tmp_path: Path) -> None:
    result = call(["--local", *words, "train.py", "x"])
    assert result.exit_code == 0, result.output
    assert "is not needed and has no effect" in result.stderr
    assert FakeRun.seen is not None
    assert FakeRun.seen.argv == (str(tmp_path / "train.py"), "x")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.py"], "add --local"),
        (["--local"], "SCRIPT"),
        (["--local", "nothing.py"], "no script nothing.py"),
        (["--local", "."], "no script ."),
        (["--local", "--nodez", "2", "train.py"], "--nodez"),
        (["--local", "--nodes", "0", "train.py"], "--nnodes 0"),
        (["--local", "--nnodes", "4:1", "train.py"], "4:1"),
        (["--local", "--spares", "1025", "train.py"], "--spares"),
        (["--local", "--replicas", "65", "train.py"], "--replicas"),
        (["--local", "--max-stall", "86401", "train.py"], "--max-stall"),
        (["--local", "--spares", "-1", "train.py"], "--spares"),
        (["--local", "--tee", "0;1", "train.py"], "--tee 0;1"),
        (["--local", "--max-stall", "4", "train.py"], "--max-stall"),
        (["--local", "--replicas", "0", "train.py"], "--replicas"),
        (["--local", "--port", "65536", "train.py"], "--port"),
        (["--local", "--nproc-per-node"], "nproc-per-node"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], says: str) -> None:
    result = call(words)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if "rror:" in line]
    assert len(errors) == 1
    assert says in errors[0]
    assert FakeRun.seen is None


@pytest.mark.parametrize("job", ["", ".", "..", "../escape", "a/b", "/tmp/x", "a\nb", "latest"])
def test_a_jobs_name_is_no_path(job: str) -> None:
    """Without --state-dir it names a folder beside the other runs."""
    result = call(["--local", "--job", job, "train.py"])
    if job == "":  # as if it were not given
        assert result.exit_code == 0
        return
    assert result.exit_code == 2, result.output
    assert "--job" in result.stderr


def test_help_teaches() -> None:
    result = call(["--help"])
    assert result.exit_code == 0
    for word in ("Examples:", "Exit codes:", "--spares", "--nproc-per-node", "130"):
        assert word in result.stdout


def test_without_torch_it_says_one_sentence(tmp_path: Path) -> None:
    """A real process, in an environment that has all but torch."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(click.__file__).parents[1].iterdir():
        if not path.name.startswith(("torch", "functorch")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    words = [sys.executable, "-S", "-m", "ckptless.daemon.launch.main", "--local", "train.py"]
    source = Path(ckptless.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{packages}:{source}"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("ckptless-run: error: torch is not installed for ")
    assert done.stderr.count("\n") == 1
