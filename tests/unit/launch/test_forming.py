"""What a job's output says while its nodes are not all there, and what is tried again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import pytest

from ckptless.daemon.launch import slurm
from ckptless.daemon.launch.slurm import Forming, SlurmRun, waiting_text
from ckptless.daemon.protocol.errors import StartError
from ckptless.daemon.protocol.forming import has_begun, mark_begun, mark_up, nodes_up
from ckptless.daemon.protocol.messages import JobSpec, Limits
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.options import DEFAULT_SHUTDOWN_S

NAMES = ("n01", "n02", "n03", "n04")


def spec(spares: int = 1, names: tuple[str, ...] = NAMES) -> JobSpec:
    nodes, limits = len(names) - spares, Limits.from_max_stall(60)
    return JobSpec(
        job="4711", command=("t",), nodes=nodes, spares=spares, slots_per_node=1, limits=limits, names=names
    )


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (
            {"n03": "its agent starts up"},
            "waiting for n03 (its agent starts up); 3 of 4 nodes are up after 7 s. "
            "After 120 s, or when Slurm has them down, the job begins without, as its 1 spare allows",
        ),
        (
            {"n02": "its step has not begun", "n04": "x", "n03": "its step has not begun"},
            "waiting for n[02-03] (its step has not begun); n04 (x); 1 of 4 nodes are up after 7 s. "
            "After 120 s, or when Slurm has them down, the job ends (never-formed)",
        ),
    ],
)
def test_whom_it_waits_for_and_what_ends_it(missing: dict[str, str], text: str) -> None:
    assert waiting_text(spec(), missing, 7.2) == text


def test_it_says_so_after_five_seconds_and_then_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forming = Forming(spec(), tmp_path, lambda name: f"{name} sleeps", 100.0)
    mark_up(tmp_path, "n01")
    said = []
    for now_s in range(101, 240):
        if now_s == 230:
            mark_begun(tmp_path)
        with caplog.at_level(logging.INFO):
            forming.look(float(now_s))
        said += [(now_s - 100, record.message) for record in caplog.records]
        caplog.clear()
    assert [at for at, _ in said] == [5, 15, 35, 75, 130]
    assert "n02 (n02 sleeps); n03 (n03 sleeps); n04 (n04 sleeps)" in said[0][1]
    assert said[-1][1] == "training begins without n[02-04]"
    # Nothing of it stays in the user's folder.
    assert forming.over
    assert list(tmp_path.iterdir()) == []


def test_where_all_are_there_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forming = Forming(spec(), tmp_path, str, 0.0)
    for name in NAMES:
        mark_up(tmp_path, name)
    assert nodes_up(tmp_path) == set(NAMES)
    forming.look(60.0)
    mark_begun(tmp_path)
    assert has_begun(tmp_path)
    forming.look(61.0)
    assert forming.over
    assert caplog.messages == []


# ------------------------------------------------------------------------- steps that Slurm cannot launch

SRUN = """#!/bin/sh
for word; do
    case $word in --nodelist=*) node=${word#*=};; --error=*) log=${word#*=};; esac
done
echo $node >> TRIED
if [ $(grep -c $node TRIED) -le $FAIL ]; then
    echo "srun: error: Task launch failed on $node: Socket timed out on send/recv operation" >> $log
    exit 1
fi
touch FOLDER/.up-$node
echo '{"job":"4711","state":"done","exit_code":0,"reason":"x","why":"done"}' > FOLDER/outcome.json
"""


# That of n02 is about to launch a step on a node that has died.
SRUN_OF_A_DEAD_NODE = """#!/bin/sh
echo $* >> TRIED
case "$*" in *--nodelist=n02*) trap '' TERM; while :; do sleep 1; done;; esac
touch FOLDER/.up-n01 FOLDER/.begun
while [ -e FOLDER/.begun ]; do sleep 0.1; done
echo '{"job":"4711","state":"done","exit_code":0,"reason":"x","why":"done"}' > FOLDER/outcome.json
"""


def launched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: int,
    srun: str = SRUN,
    names: tuple[str, ...] = ("n01",),
) -> tuple[int, list[str]]:
    """Run a job whose first `fail` steps fail; (exit code, the nodes as they were tried)."""
    program = folder / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(srun.replace("FOLDER", str(folder)).replace("TRIED", str(folder / "tried")))
    program.chmod(0o755)

    async def config_of_slurm() -> dict[str, str]:
        return {"TaskPlugin": "task/none"}

    monkeypatch.setattr(slurm, "slurm_config", config_of_slurm)
    monkeypatch.setattr(slurm, "STEP_PAUSE_S", 0.05)
    config = SharedConfig(
        spec=spec(len(names) - 1, names),
        argv=("t",),
        module=False,
        cwd="/",
        daemon_socket="/s",
        log_dir=str(folder),
        preload=(),
    )
    path = f"{program.parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    run = SlurmRun(config, {"FAIL": str(fail), "PATH": path}, domains={})
    try:
        return asyncio.run(run.run()), (folder / "tried").read_text().split()
    except StartError:
        return StartError.exit_code, (folder / "tried").read_text().split()


@pytest.mark.parametrize(("fail", "tried", "code"), [(0, 1, 0), (2, 3, 0), (3, 3, StartError.exit_code)])
def test_a_step_that_slurm_could_not_launch_is_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fail: int,
    tried: int,
    code: int,
) -> None:
    assert launched(tmp_path, monkeypatch, fail) == (code, ["n01"] * tried)
    told = [message for message in caplog.messages if message.endswith("it is started again")]
    assert len(told) == min(fail, 2)
    assert all("n01: its step has ended with 1: srun: error: Task launch failed" in text for text in told)


def test_the_end_does_not_wait_for_a_node_that_training_began_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "LEAVE_GRACE_S", 0.5)
    began_s = time.monotonic()
    code, _ = launched(tmp_path, monkeypatch, 0, SRUN_OF_A_DEAD_NODE, ("n01", "n02"))
    assert code == 0
    assert "training begins without n02" in caplog.messages
    assert not [text for text in caplog.messages if "do not end" in text]
    assert time.monotonic() - began_s < DEFAULT_SHUTDOWN_S


def test_nodes_whose_agents_do_the_same_are_told_of_together(tmp_path: Path) -> None:
    states = {}
    for name, at in (("n01", "06:08:15.972"), ("n02", "06:08:16.074")):
        log = tmp_path / f"agent-{name}.log"
        log.write_text(f"{at} agent[{name}] INFO reading\n{at} agent[{name}] INFO importing torch: 2\n")
        states[name] = slurm.NodeStep(name, tmp_path / "console", log).state
    text = waiting_text(spec(), states, 5.0)
    assert text.startswith("waiting for n[01-02] (its agent starts up: importing torch: 2); 2 of 4 nodes")
