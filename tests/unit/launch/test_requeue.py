"""When a job that cannot go on is put back into the queue, and how."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from ckptless.daemon.launch.main import command, given
from ckptless.daemon.launch.options import local_run
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.messages import Outcome, Why
from ckptless.daemon.slurm.requeue import MENDABLE, requeue, why_requeue
from ckptless.daemon.slurm.run_name import restarts


def failed(why: Why) -> Outcome:
    return Outcome(state="failed", exit_code=4, reason="it is so", why=why)


@pytest.mark.parametrize("why", sorted(MENDABLE))
def test_what_other_nodes_would_mend(why: Why) -> None:
    assert why_requeue(failed(why), 1, {}) == f"{why}: it is so"


@pytest.mark.parametrize(("text", "count"), [(None, 0), ("", 0), ("0", 0), ("3", 3), ("x", 0), ("-1", 0)])
def test_how_often_slurm_has_started_it_again(text: str | None, count: int) -> None:
    assert restarts({} if text is None else {"SLURM_RESTART_COUNT": text}) == count


def test_nobody_could_say_how_it_ended() -> None:
    found = why_requeue(None, 1, {})
    assert found is not None
    assert found.startswith("no-quorum: ")


@pytest.mark.parametrize("why", ["", "script", "no-progress", "after-training"])
def test_what_would_fail_again(why: Why) -> None:
    assert why_requeue(failed(why), 9, {}) is None


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(state="done", exit_code=0, reason="x", why="done"),
        Outcome(state="stopped", exit_code=143, reason="x", why="cancelled"),
    ],
)
def test_what_is_over(outcome: Outcome) -> None:
    assert why_requeue(outcome, 9, {}) is None


@pytest.mark.parametrize(
    ("most", "restarts", "again"),
    [(0, None, False), (1, None, True), (1, "0", True), (1, "1", False), (3, "2", True), (3, "3", False)],
)
def test_only_so_often(most: int, restarts: str | None, again: bool) -> None:
    env = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    assert (why_requeue(failed("no-spare"), most, env) is not None) is again


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, which notes what it is told, and ends as the file `status` says."""
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/told\ncat {tmp_path}/says >&2\nexit $(cat {tmp_path}/status)\n'
    )
    program.chmod(0o755)
    (tmp_path / "says").write_text("")
    (tmp_path / "status").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_slurm_is_told(scontrol: Path) -> None:
    assert asyncio.run(requeue(4711, "no-spare: x"))
    assert (scontrol / "told").read_text().splitlines()[-1] == "requeue 4711"


def test_slurm_refuses(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    (scontrol / "says").write_text("Requested operation is presently disabled for job 4711\n")
    (scontrol / "status").write_text("1")
    assert not asyncio.run(requeue(4711, "no-spare: x"))
    assert "cannot be put back into the queue" in caplog.text


def test_not_with_local() -> None:
    context = command.make_context("ckptless-run", ["--local", "--requeue", "1", sys.executable])
    with pytest.raises(UsageError, match="--requeue is for a Slurm job"):
        local_run(sys.executable, (), given(context.params), {})
