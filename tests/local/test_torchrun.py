"""Scripts for torchrun run unchanged under ckptless-run, and ckptless scripts under torchrun and python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .localrun import RANKS, STEPS, TOY, Job, read_toy, reference

DEADLINE_S = 240.0
SCRIPT = Path(__file__).with_name("env_script.py")

# What differs between any two runs, or says where torchrun's own processes talk to each other.
THEIR_OWN = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
OWN = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"),
    # Ours is served by the agent; torchrun's by rank 0 where sharing is off, as it is here.
    *("TORCHELASTIC_USE_AGENT_STORE", *THEIR_OWN),
}


def execute(words: Sequence[object], home: Path, more: Mapping[str, str] | None = None) -> str:
    """Run a command in a session of its own; its output. `more` is added to its environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TOY_", "CKPTLESS_"))}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **(more or {})}
    home.mkdir(parents=True, exist_ok=True)
    with (home / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
            cwd=home,
        )
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -9
    text = (home / "output.txt").read_text(errors="replace")
    assert code == 0, text
    return text


def told(out: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]


def run_script(home: Path, options: Sequence[object], words: Sequence[object]) -> list[Any]:
    out = home / "out"
    out.mkdir(parents=True)
    with Job(home, options, [*words[:1], out, *words[1:]], cwd=SCRIPT.parent) as job:
        job.ended(0)
        if "--fail-once" in words:
            assert "RuntimeError: fails once" in job.stdout
    return told(out)


def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    said = ["x", "--local-rank=${local_rank}", "$local_rank $$HOME $HOME ${x} $"]
    execute(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT, out, *said], tmp_path
    )
    theirs = told(out)
    # Options that torchrun needs and ckptless-run does not are taken, and said to be of no effect.
    options = ["--standalone", "--nproc-per-node", 2, "--rdzv_backend=c10d"]
    ours = run_script(tmp_path / "ours", options, [SCRIPT, *said])
    assert len(theirs) == len(ours) == 2
    for there, here in zip(theirs, ours, strict=True):
        assert set(there["env"]) - set(here["env"]) <= THEIR_OWN
        fixed = {name: value for name, value in there["env"].items() if name not in OWN}
        assert {name: here["env"].get(name) for name in fixed} == fixed
        assert here["env"]["MASTER_ADDR"]
        assert here["env"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert Path(here["env"]["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()
        assert 0 < int(here["env"]["MASTER_PORT"]) < 65536
        assert here["env"]["TORCHELASTIC_RUN_ID"]
        assert (here["sum"], here["ranks"]) == (there["sum"], there["ranks"]) == (3.0, ["0", "1"])
        assert here["argv"][0] == there["argv"][0]
        assert here["argv"][2:] == there["argv"][2:]
        assert here["argv"][2:4] == ["x", f"--local-rank={here['env']['LOCAL_RANK']}"]
        assert here["path"] == there["path"]
    warned = (tmp_path / "ours/stderr.txt").read_text()
    assert "--standalone is not needed" in warned
    assert "--rdzv-backend is not needed" in warned


def test_a_module_on_two_nodes_that_fails_once(tmp_path: Path) -> None:
    options: list[object] = ["--nnodes=2", "--nproc_per_node", "2", "--max_restarts=1", "--tee", "all"]
    options += ["--log_dir", tmp_path / "logs", "-m"]
    found = run_script(tmp_path, options, ["env_script", "--fail-once", "--nproc_per_node"])
    assert len(found) == 4
    # Of all nodes, as in a Slurm job.
    (logs,) = (tmp_path / "logs").iterdir()
    assert logs.name.startswith("ckptless-local-")
    names = sorted(path.name for path in logs.glob("rank-*"))
    assert [name for name in names if name.endswith(".log")] == [f"rank-{rank:05d}.log" for rank in range(4)]
    # Of who is ended while it waits for rank 1 there may be one, too.
    error = json.loads((logs / "rank-00001.error.json").read_text())["message"]
    assert error["message"] == "RuntimeError: fails once"
    assert "in main" in error["extraInfo"]["py_callstack"]
    assert any("fails once" in path.read_text() for path in logs.glob("rank-*.log"))
    for rank, one in enumerate(found):
        want = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "GROUP_RANK": rank // 2,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_WORLD_SIZE": 2,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 4,
            "TORCHELASTIC_RESTART_COUNT": 1,
            "TORCHELASTIC_MAX_RESTARTS": 1,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        }
        assert {name: one["env"][name] for name in want} == {k: str(v) for k, v in want.items()}
        assert one["sum"] == 10.0
        assert Path(one["argv"][0]) == SCRIPT
        # What follows the script is the script's, however it is written.
        assert one["argv"][2:] == ["--fail-once", "--nproc_per_node"]
        assert one["path"] == str(SCRIPT.parent)
        assert one["cwd"] == str(SCRIPT.parent)


def test_every_kind_of_group_over_two_nodes(tmp_path: Path) -> None:
    script = SCRIPT.with_name("groups_script.py")
    assert run_script(tmp_path, ["--nnodes=2", "--nproc-per-node=2"], [script]) == ["1"] * 4


def test_the_toy_alone(tmp_path: Path) -> None:
    execute([TOY, 12, tmp_path / "out"], tmp_path)
    found = read_toy(tmp_path / "out")
    assert set(found.losses) == {(0, step) for step in range(1, 13)}


def test_a_script_that_makes_its_default_group_runs_under_torchrun_too(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    execute([*words, SCRIPT.with_name("asked_script.py"), tmp_path, 99], tmp_path)
    assert len([*tmp_path.glob("final-*.txt")]) == 2


def test_the_toy_under_torchrun_makes_the_same_bits(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    execute([*words, TOY, STEPS, tmp_path / "out"], tmp_path)
    found, clean = read_toy(tmp_path / "out"), reference()
    assert found.losses == clean.losses
    assert found.finals == clean.finals
