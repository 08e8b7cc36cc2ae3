"""Loops of one's own that log, killed around a commit: each step is there once, as without faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reading import Reading

from .frameworks import RANKS, Lines, mlflow_lines, scalars, wandb_files
from .localrun import FAULTY_DEADLINE_S, Job

STEPS = 16
# "STEP:RANK:WHERE". 0: before the step is logged; 1: logged; 2: committed, with every third step's commit.
KILLS = "3:0:2,5:0:1,7:1:1,9:1:2,11:0:0,12:0:1"
BEFORE = """
import contextlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ckptless

loader = DataLoader(torch.randn(64, 4, generator=torch.Generator().manual_seed(3)), batch_size=4)

def build():
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), lines=[])

def update(state, batch):
    loss = state.model(batch).square().mean()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss.detach()

def kill(run, step, where):
    name = f"{step}:{run.rank}:{where}"
    if name in sys.argv[1].split(","):
        with contextlib.suppress(FileExistsError):
            Path(f"killed-{step}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

"""
AFTER = "\nckptless.run(train, commit_every=3)\n"
EXPECTED = [*range(1, STEPS + 1)]


def once(rows: Lines) -> dict[int, float]:
    """Return the values by step; fails where one is missing, twice, or in another place."""
    assert [step for step, _ in rows] == EXPECTED
    return dict(rows)


def train(home: Path, text: str, kills: str) -> Path:
    """Run a block of the page, in a folder of its own."""
    home.mkdir()
    (home / "train.py").write_text(BEFORE + text + AFTER)
    env = {
        "MLFLOW_TRACKING_URI": f"file:{home}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_CONSOLE": "off",
    }
    with Job(home, ["--nodes", RANKS, "--tee", "none"], ["train.py", kills], env, cwd=home) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        died = [one.kind for one in job.ledger().faults if one.kind != "broken"]
        assert len(died) == len(kills.split(",")) * bool(kills), job.story()
    return home


def both(home: Path, block: str, read: Callable[[Path], Lines]) -> tuple[Lines, dict[int, float]]:
    """Return what a run with kills has left, and what one without has."""
    clean = once(read(train(home / "clean", block, "")))
    return read(train(home / "ours", block, KILLS)), clean


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    with Reading("docs/loggers.md") as page:
        rows, clean = both(tmp_path, page.block(1), lambda home: mlflow_lines(home)["loss"])
    assert once(rows) == clean


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    with Reading("docs/loggers.md") as page:
        rows, clean = both(tmp_path, page.block(2), lambda home: scalars(home)["loss"])
    assert once(rows) == clean


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    """A file for each process that was rank 0; offline nobody puts them together, so they overlap."""
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    with Reading("docs/loggers.md") as page:
        text = page.block(3)
    clean = once(wandb_files(train(tmp_path / "clean", text, ""))[0]["loss"])
    files = [file["loss"] for file in wandb_files(train(tmp_path / "ours", text, KILLS)) if "loss" in file]
    for rows in files:
        steps = [step for step, _ in rows]
        assert steps == [*range(steps[0], steps[-1] + 1)], "twice, or out of order, in one file"
        assert all(clean[step] == value for step, value in rows)
    # All of the job: the last one has what those that were killed may not have written.
    assert once(files[-1]) == clean
