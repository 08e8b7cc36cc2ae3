"""torchtitan's Trainer, killed at many steps: losses, metrics and parameters are torchtitan's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from .frameworks import RANKS, TITAN_ENV, plain, protected, scalars, told
from .localrun import FAULTY_DEADLINE_S, HERE, Job, lose_node, wait_until

# It needs triton, which the Makefile keeps apart; a torch that comes with one goes first.
sys.path.append(f"{sys.prefix}/triton")
pytest.importorskip("torchtitan")

SCRIPT = HERE / "titan_script.py"
# Two processes import torchtitan twice, on a machine that others use, too.
pytestmark = pytest.mark.timeout(600)

WAYS = {
    "fsdp2": {},
    "ddp": {"DDP": "1"},
    # Two batches an update, checkpoints, TensorBoard; the last with a worker of the loader.
    "more": {"MORE": "0"},
    "worker": {"MORE": "1", "DDP": "1"},
}
SLOW = ("ddp", "more", "worker")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS]
)
def test_a_trainer_that_is_killed_ends_as_torchtitan_does(tmp_path: Path, way: str) -> None:
    """Before the first commit, in a validation, between an update and its commit."""
    env = {**TITAN_ENV, **WAYS[way]}
    kills = "1:1,3:0,1005:1,2007:0,9:1" if "MORE" in env else "1:1,1005:0,2007:1"
    assert protected(SCRIPT, tmp_path, 10, kills, env) == plain(SCRIPT, tmp_path, 10, env)
    if "MORE" in env:
        assert scalars(tmp_path / "ours") == scalars(tmp_path / "plain")
        assert len(scalars(tmp_path / "ours")["grad_norm"]) == 10


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
def test_twenty_kills(tmp_path: Path, way: str) -> None:
    kills = ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(20))
    env = {**TITAN_ENV, **WAYS[way]}
    assert protected(SCRIPT, tmp_path, 44, kills, env) == plain(SCRIPT, tmp_path, 44, env)


@pytest.mark.slow
def test_a_spare_takes_a_lost_nodes_rank(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    options = ["--nodes", RANKS, "--spares", 1, "--tee", "none", "--max-stall", 60]
    with Job(tmp_path / "job", options, [SCRIPT, ours, 40, ""], TITAN_ENV) as job:
        wait_until(lambda: len(_lines(ours)) > 20, 100, job)
        lose_node(job, 0)
        job.ended(0, FAULTY_DEADLINE_S)
    assert told(ours) == plain(SCRIPT, tmp_path, 40, TITAN_ENV)


def _lines(home: Path) -> list[str]:
    path = home / "log-0.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_job_that_begins_from_torchtitans_checkpoint(tmp_path: Path) -> None:
    """A process that takes a rank before the first commit has the position in the data, too."""
    env = {**TITAN_ENV, "MORE": "0"}
    plain(SCRIPT, tmp_path, 10, env)
    saved = (tmp_path / "plain").rename(tmp_path / "first") / "checkpoint" / "step-4"
    for name in ("plain", "ours"):
        shutil.copytree(saved, tmp_path / name / "checkpoint" / "step-4")
    assert protected(SCRIPT, tmp_path, 10, "5:1,6:0,9:1", env) == plain(SCRIPT, tmp_path, 10, env)
