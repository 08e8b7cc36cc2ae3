"""Steps saved to a directory: a job that is killed wholly goes on from there, and no bit is another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.protocol import saved

from .localrun import Job, newest_loss, read_toy, reference, toy, wait_until

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
STEPS = 120
EVERY = 10
RANKS = 2
DEADLINE_S = 120.0
# Long enough to do something to a job in the middle of its steps, also where a save takes seconds.
SLOW = {"TOY_SLEEP_S": "0.1"}


def options(home: Path, every: int = EVERY) -> list[object]:
    return ["--save-dir", home / "save", "--save-every", every]


def run(home: Path, parallel: str, every: int = EVERY, env: Mapping[str, str] | None = None) -> Any:
    mine = {"TOY_PARALLEL": parallel, **(env or {})}
    return toy(home, nodes=RANKS, steps=STEPS, options=options(home, every), env=mine)


def steps(home: Path, damaged: Path | None = None) -> list[int]:
    """The saved steps, oldest first; each is whole, but for one."""
    found = [(step, folder) for step, folder in saved.steps_in(home / "save") if folder != damaged]
    for step, folder in found:
        assert saved.read_manifest(folder).step == step
    return sorted(step for step, _ in found)


def killed_after(job: Job, home: Path, step: int) -> None:
    """All of it, at once, a while after `step` was saved, or where it was passed over a later one."""
    wait_until(lambda: any(s >= step for s, _ in saved.steps_in(home / "save")), DEADLINE_S, job)
    reached = newest_loss(home)
    wait_until(lambda: newest_loss(home) > reached + 3, DEADLINE_S, job)
    job.launcher.kill()
    job.launcher.wait(DEADLINE_S)
    job.nothing_left()


def as_if_nothing_had_been(home: Path, parallel: str) -> None:
    clean, found = reference(STEPS, RANKS, parallel), read_toy(home / "out")
    wrong = {where: lines for where, lines in found.losses.items() if lines != clean.losses.get(where)}
    assert not wrong, f"other losses than without a fault: {sorted(wrong.items())[:8]}"
    assert set(found.losses) == set(clean.losses)
    assert found.finals == clean.finals


# With DDP the step before is gone on from in `test_a_damaged_step_...`, too.
@pytest.mark.parametrize(
    "parallel",
    [pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow), "hsdp"],
)
def test_a_job_that_is_killed_wholly_goes_on_from_its_newest_saved_step(
    tmp_path: Path, parallel: str
) -> None:
    with run(tmp_path, parallel, env=SLOW) as job:
        killed_after(job, tmp_path, 2 * EVERY)
    before = newest_loss(tmp_path)
    resumed = steps(tmp_path)[-1]
    assert 2 * EVERY <= resumed < before < STEPS
    with run(tmp_path, parallel) as job:
        job.ended(0, DEADLINE_S)
        assert f"going on from {tmp_path / 'save' / saved.step_name(resumed)}" in job.stderr
    as_if_nothing_had_been(tmp_path, parallel)
    # It did not begin again: the steps before were made once.
    lines = (tmp_path / "out" / "loss-0.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines].count(resumed) == 1
    assert steps(tmp_path)[-1] == STEPS
    assert len(steps(tmp_path)) <= 3
    left = [path.name for path in (tmp_path / "save").iterdir() if path.name.startswith(".")]
    assert left == []


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_at_sigterm_the_newest_step_is_saved(tmp_path: Path, parallel: str) -> None:
    with run(tmp_path, parallel, every=0, env=SLOW) as job:
        wait_until(lambda: newest_loss(tmp_path) > 30, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGTERM)
        job.ended(128 + signal.SIGTERM, DEADLINE_S)
        story = job.story()
    before = newest_loss(tmp_path)
    assert len(steps(tmp_path)) == 1, story
    (resumed,) = steps(tmp_path)
    assert before - 2 <= resumed <= before, "more than what was under way is lost"
    with run(tmp_path, parallel, every=0) as job:
        job.ended(0, DEADLINE_S)
    as_if_nothing_had_been(tmp_path, parallel)


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), 41])
def test_no_spare_is_left_and_the_lost_nodes_shard_is_saved_from_its_copies(
    tmp_path: Path, every: int
) -> None:
    """Also where a save is under way that waits for the part of the node that is lost."""
    fault = {"where": "commit", "kind": "node", "rank": 1, "step": 40}
    env = {"TOY_PARALLEL": "fsdp"}
    with toy(tmp_path, [fault], nodes=RANKS, steps=STEPS, options=options(tmp_path, every), env=env) as job:
        job.ended(4, DEADLINE_S)
        story = job.story()
    (resumed,) = steps(tmp_path)
    assert resumed >= 39, story
    with toy(tmp_path, [fault], nodes=RANKS, steps=STEPS, options=options(tmp_path, 0), env=env) as job:
        job.ended(0, DEADLINE_S)
    as_if_nothing_had_been(tmp_path, "fsdp")


def writers(job: Job) -> list[int]:
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "ckptless-save":
                found.append(pid)
    return found


def test_a_writer_that_is_killed_leaves_the_older_step(tmp_path: Path) -> None:
    """From the second save on every writer that is seen is killed; no step is ever half there."""
    with run(tmp_path, "fsdp", env={"TOY_WIDTH": "4000", **SLOW}) as job:
        wait_until(lambda: steps(tmp_path), DEADLINE_S, job)
        killed = 0

        def kill() -> bool:
            nonlocal killed
            for pid in writers(job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            return newest_loss(tmp_path) > 4 * EVERY + 5

        wait_until(kill, DEADLINE_S, job)
        job.launcher.kill()
        job.launcher.wait(DEADLINE_S)
        job.nothing_left()
        failed = [event.text for event in job.ledger().events if event.kind == "save-failed"]
    assert killed
    assert any("its writer has ended with -9" in text or "did not come up" in text for text in failed), failed
    resumed = steps(tmp_path)[-1]
    with run(tmp_path, "fsdp", env={"TOY_WIDTH": "4000"}) as job:
        job.ended(0, DEADLINE_S)
        assert saved.step_name(resumed) in job.stderr
    found = read_toy(tmp_path / "out")
    assert all(len(lines) == 1 for lines in found.losses.values()), "a step was another when it was redone"
    assert steps(tmp_path)[-1] == STEPS


def test_a_damaged_step_is_passed_over_and_a_loader_that_is_not_cut_anew_is_refused(tmp_path: Path) -> None:
    with run(tmp_path, "ddp", env=SLOW) as job:
        killed_after(job, tmp_path, 3 * EVERY)
    known = steps(tmp_path)
    newest = tmp_path / "save" / saved.step_name(known[-1])
    with (newest / saved.tensors_name(0)).open("r+b") as file:
        file.truncate(1000)
    script = [HERE / "toy.py", STEPS, tmp_path / "other", "[]"]
    with Job(tmp_path / "refused", ["--nodes", 3, *options(tmp_path)], script) as job:
        assert job.wait(DEADLINE_S) != 0
        assert f"{saved.step_name(known[-2])}, which 2 ranks have saved, with 3" in job.stderr
        assert "a DataLoader stands in the middle of an epoch of another number of ranks" in job.story()
        job.nothing_left()
    with run(tmp_path, "ddp") as job:
        job.ended(0, DEADLINE_S)
        assert f"{newest} is not used" in job.stderr
    # Where few steps were saved since then it is one of the newest still.
    assert steps(tmp_path, damaged=newest)[-1] == STEPS
    as_if_nothing_had_been(tmp_path, "ddp")


PLAIN = """
import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder, step, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(
    nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 48), nn.Linear(48, 32)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
weights, moments = get_state_dict(model, optimizer)
found = {"model": weights, "optimizer": moments}
dcp.load(found, checkpoint_id=folder)
set_state_dict(
    model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
)
assert not [name for name in sys.modules if name.startswith("ckptless")]
assert optimizer.state[model[0].weight]["step"].item() == step
assert optimizer.param_groups[0]["lr"] != 1.0
tensors = [*model.state_dict().values()]
tensors += [v for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
for rank in range(ranks):
    digest = hashlib.sha256()
    for tensor in tensors:
        part = tensor.chunk(ranks)[rank] if tensor.dim() else tensor
        digest.update(part.contiguous().numpy().tobytes())
    print(digest.hexdigest())
"""


def test_plain_dcp_reads_it_without_ckptless(tmp_path: Path) -> None:
    """By one process, which has no ranks: what two had is put together."""
    with run(tmp_path, "fsdp") as job:
        job.ended(0, DEADLINE_S)
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [sys.executable, "-c", PLAIN, str(tmp_path / "save" / "latest"), str(STEPS), str(RANKS)]
    done = subprocess.run(
        words, env=inherited, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    finals = read_toy(tmp_path / "out").finals
    assert done.stdout.split() == [finals[rank].split()[0] for rank in range(RANKS)]


def asked_to_save(job: Job, *words: object) -> tuple[int, Any]:
    """`ckptctl save`: its exit code, and the answer."""
    (row,) = job.ledger().jobs
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), "--json"]
    command += ["save", *map(str, words), row.job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["saved"]


@pytest.mark.parametrize(
    "pause_s",
    ["0", pytest.param("0.05", marks=pytest.mark.slow), pytest.param("0.8", marks=pytest.mark.slow)],
)
def test_it_is_saved_when_somebody_asks_for_it(tmp_path: Path, pause_s: str) -> None:
    """Of fast steps one that is to come, of slow ones what there is; and from there it goes on."""
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": pause_s, "TOY_SLEEP_WHILE": str(slow), "TOY_PARALLEL": "fsdp"}
    many = 100_000
    words: Any = {"nodes": RANKS, "spares": 1, "steps": many, "options": options(tmp_path, 0), "env": env}
    with toy(tmp_path, **words) as job:
        wait_until(lambda: newest_loss(tmp_path) > 3, DEADLINE_S, job)
        code, answer = asked_to_save(job, "--deadline", 60)
        assert (code, answer["verdict"]) == (0, "saved"), f"{answer}\n{job.story()}"
        folder = tmp_path / "save" / saved.step_name(answer["step"])
        assert answer["path"] == str(folder)
        assert saved.read_manifest(folder).step == answer["step"]
        assert newest_loss(tmp_path) >= answer["step"] > 0


def test_without_a_place_it_is_refused_and_late_is_told(tmp_path: Path) -> None:
    slow = {"TOY_SLEEP_S": "0.1", "TOY_PARALLEL": "ddp"}
    with toy(tmp_path, nodes=1, steps=STEPS, env=slow) as job:
        wait_until(lambda: newest_loss(tmp_path) > 1, DEADLINE_S, job)
        code, answer = asked_to_save(job)
        assert (code, answer["verdict"]) == (1, "refused")
        assert "without --save-dir" in answer["text"]
    home = tmp_path / "stopped"
    # An agent that does not answer is killed after a while, which has to be longer than `ckptctl` takes.
    patient = [*options(home, 0), "--max-stall", 1200]
    with toy(home, nodes=1, steps=STEPS, options=patient, env=slow) as job:
        wait_until(lambda: newest_loss(home) > 1, DEADLINE_S, job)
        agent = job.pid_of(0, "agent")
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        code, answer = asked_to_save(job, "--deadline", 1)
        assert (code, answer["verdict"]) == (1, "failed")
        assert "has said nothing in 1 s" in answer["text"]
