"""Recipes (docs/recipes), tiny: a rehearsal finds the same bits with a killed process and a lost node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl

from .frameworks import TITAN_ENV
from .localrun import HERE, LAUNCHER

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
DEADLINE_S = 240.0


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("config", ["tiny", "tiny-hsdp", "tiny-experts"])
def test_a_recipe_is_rehearsed(config: str, tmp_path: Path) -> None:
    words = ["--nodes", "4"] if config == "tiny-hsdp" else []
    words += [
        "--state-dir",
        str(tmp_path / "state"),
        str(RECIPES / "llama.py"),
        str(RECIPES / f"{config}.yaml"),
    ]
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "--rehearse", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchtitans_recipe_is_rehearsed(tmp_path: Path) -> None:
    """Its tiny one, by the command line of its batch script."""
    pytest.importorskip("torchtitan")
    (line,) = [line for line in (RECIPES / "titan.sbatch").read_text().splitlines() if "ckptless-run" in line]
    words = line.split()
    words = words[words.index("-m") :]
    assert words == ["-m", "ckptless.torchtitan", "--module", "titan_llama", "--config", "llama3_8b"]
    words[3], words[5] = "titan_anywhere", "anywhere"
    words += ["--training.steps", "12", "--dump_folder", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "--rehearse", "--state-dir", str(tmp_path / "state"), *words],
        cwd=HERE,
        env={**os.environ, **TITAN_ENV},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_says_what_the_planner_does() -> None:
    """Memory, traffic and goodput of each row."""
    page = (RECIPES / "index.md").read_text()
    plans = {
        "8 (2 nodes of 4)": "--gpus 8 --gpus-per-node 4 --params 8e9 --step-s 20",
        "256 | 70B": "--gpus 256 --params 70e9 --step-s 15 --spares 1",
        "256 | 20B": "--gpus 256 --params 20e9 --step-s 5 --spares 1",
        "2,304": "--gpus 2304 --params 70e9 --sharding hsdp --shard-size 256 --step-s 5 --spares 4",
    }
    for row, words in plans.items():
        (line,) = re.findall(rf"^\| {re.escape(row)}.*$", page, re.MULTILINE)
        said = CliRunner().invoke(ckptctl, ["plan", *words.split(), "--nic", "400", "--mtbf", "154"]).stdout
        memory, sent = (
            re.search(rf"^{name} +\d+ +(\S+ \S+) ", said, re.MULTILINE)
            for name in ("memory", "sent at a commit")
        )
        assert memory is not None
        assert sent is not None
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4] == memory[1]
        assert cells[5] == sent[1] or (cells[5], sent[1]) == ("nothing", "0 B")
        goodput = re.search(r"goodput ([\d.]+)%", said)
        assert goodput is not None
        assert not cells[6] or cells[6].startswith(f"{goodput[1]} %")


@pytest.mark.parametrize(
    ("config", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("experts-20b", 21.0)]
)
def test_a_model_has_the_parameters_that_its_name_says(config: str, billions: float) -> None:
    c = yaml.safe_load((RECIPES / f"{config}.yaml").read_text())
    head = c["dim"] // c["heads"]
    attention = 2 * c["dim"] ** 2 + 2 * c["dim"] * c["kv_heads"] * head
    experts = c.get("experts", 0)
    gated = 3 * c["dim"] * c["hidden"]
    block = attention + 2 * c["dim"] + (experts * (gated + c["dim"]) if experts else gated)
    total = c["layers"] * block + 2 * c["vocab"] * c["dim"] + c["dim"]
    assert total / 1e9 == pytest.approx(billions, rel=0.02)
    assert head % 2 == 0
    assert c["heads"] % c["kv_heads"] == 0
