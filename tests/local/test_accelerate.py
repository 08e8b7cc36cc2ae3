"""A script with Accelerate, killed at many steps: losses and parameters are those without ckptless."""

from __future__ import annotations

from pathlib import Path

import pytest

from .localrun import FAULTY_DEADLINE_S, HERE, Job
from .test_torchrun import execute

pytest.importorskip("accelerate")

SCRIPT = HERE / "accelerate_script.py"
RANKS, EPOCHS = 2, 4
# Of 4 updates an epoch, the last of them of one batch: before the first commit, an epoch's last, its first.
FEW = "0:1,3:0,4:1,7:0,12:1"


def told(home: Path) -> dict[str, set[str]]:
    return {path.name: set(path.read_text().splitlines()) for path in home.glob("*.txt")}


def plain(home: Path, epochs: int, env: dict[str, str]) -> dict[str, set[str]]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    execute([*words, SCRIPT, home / "plain", epochs, ""], home, {**env, "PLAIN": "1"})
    return told(home / "plain")


def protected(home: Path, epochs: int, kills: str, env: dict[str, str]) -> dict[str, set[str]]:
    options = ["--nodes", RANKS, "--tee", "none", "--max-stall", 60]
    with Job(home / "job", options, [SCRIPT, home / "ours", epochs, kills], env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        # Survivors may see it first; none of them raises.
        kinds = [one.kind for one in job.ledger().faults if one.kind != "broken"]
        assert kinds == ["died"] * len(kills.split(",")), job.story()
    return told(home / "ours")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_script_that_is_killed_ends_as_without_ckptless(tmp_path: Path, workers: str) -> None:
    env = {"WORKERS": workers}
    expected = plain(tmp_path, EPOCHS, env)
    assert len(expected) == 2 * RANKS
    assert protected(tmp_path, EPOCHS, FEW, env) == expected


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    kills = ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(20))
    assert protected(tmp_path, 11, kills, {}) == plain(tmp_path, 11, {})


def test_a_commit_in_the_middle_of_an_accumulation_is_refused(tmp_path: Path) -> None:
    options = ["--nodes", RANKS, "--tee", "none"]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 1, ""], {"EACH": "1"}) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert "has a gradient that no optimizer has used, and gradients are not saved" in str(row.reason)
