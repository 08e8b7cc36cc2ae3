"""Memory over a requeue: a job that ends goes on from memory when it starts again, with nothing on a disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from .localrun import Fault, Job, fault, newest_loss, read_toy, reference, toy, wait_until
from .resized import ENDLESS, SCRIPT, newest, steps_seen, went_on

HERE = Path(__file__).parent
STEPS = 120
RANKS = 2
DEADLINE_S = 120.0
SLOW = {"TOY_SLEEP_S": "0.03"}


def run(
    home: Path,
    env: Mapping[str, str],
    faults: Sequence[Fault] = (),
    *,
    nodes: int = RANKS,
    spares: int = 0,
    options: Sequence[object] = (),
) -> AbstractContextManager[Job]:
    launcher = (str(HERE / "kept_launcher.py"), str(home))
    sizes = {"nodes": nodes, "spares": spares, "steps": STEPS}
    return toy(home, faults, env=env, options=options, launcher=launcher, **sizes)


def ended_once(job: Job, home: Path) -> int:
    """The first start is over; the newest step that it made, and its exit code."""
    wait_until((home / "first").exists, DEADLINE_S, job)
    return int((home / "first").read_text())


def cancelled_after(job: Job, home: Path, step: int) -> None:
    """As Slurm does to a job that is requeued: SIGTERM to the agents."""
    wait_until(lambda: newest_loss(home) >= step, DEADLINE_S, job)
    for node in range(RANKS):
        agent = job.pid_of(node, "agent")
        assert agent is not None
        os.kill(agent, signal.SIGTERM)
    assert ended_once(job, home) == 128 + signal.SIGTERM


def start_of(job: Job, number: int = 1) -> str:
    """Return what a start says that it goes on from."""
    found = [e.text for e in job.ledger().events if e.kind == "start" and e.job.endswith(f".{number}")]
    assert len(found) <= 1, found
    return found[0] if found else ""


def events(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.ledger().events if event.kind == kind]


def every_node_tells(job: Job, kind: str) -> list[str]:
    """Return what each node's daemon tells of its memory; that may come after the end of the first start."""
    wait_until(lambda: len(events(job, kind)) == RANKS, DEADLINE_S, job)
    return events(job, kind)


def same_as_without(home: Path, parallel: str, ranks: int = RANKS) -> None:
    clean, found = reference(STEPS, ranks, parallel), read_toy(home / "out")
    wrong = {where: lines for where, lines in found.losses.items() if lines != clean.losses.get(where)}
    assert not wrong, f"other losses than without a fault: {sorted(wrong.items())[:8]}"
    assert set(found.losses) == set(clean.losses)
    assert found.finals == clean.finals


def made_twice(home: Path) -> list[int]:
    lines = (home / "out" / "loss-0.txt").read_text().splitlines()
    steps = [int(line.split()[0]) for line in lines]
    return [step for step in set(steps) if steps.count(step) > 1]


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_it_goes_on_after_the_last_committed_step(tmp_path: Path, parallel: str) -> None:
    with run(tmp_path, {"TOY_PARALLEL": parallel, **SLOW}) as job:
        cancelled_after(job, tmp_path, 30)
        before = newest_loss(tmp_path)
        every_node_tells(job, "memory-kept")
        (tmp_path / "again").touch()
        job.ended(0, DEADLINE_S)
        start = start_of(job)
        assert start.startswith(f"step {before} from the memory of run") or start.startswith(
            f"step {before - 1} from the memory of run"
        ), job.story()
        assert len(events(job, "memory-given")) == RANKS
    same_as_without(tmp_path, parallel)
    assert len(made_twice(tmp_path)) <= 1


@pytest.mark.slow
def test_from_copies_where_other_nodes_have_come(tmp_path: Path) -> None:
    """One node of the first start is lost, and nothing is kept in its place; its shard is with the spare."""
    env = {"TOY_PARALLEL": "fsdp", "TOY_KEEP_LOST": "0", **SLOW}
    with run(tmp_path, env, spares=1) as job:
        cancelled_after(job, tmp_path, 30)
        (tmp_path / "again").touch()
        job.ended(0, DEADLINE_S)
        assert "from the memory of run" in start_of(job), job.story()
        assert "kept on 2 nodes" in start_of(job)
    same_as_without(tmp_path, "fsdp")


@pytest.mark.slow
def test_no_spare_is_left_and_the_next_start_has_the_nodes_it_takes(tmp_path: Path) -> None:
    """The requeue rung: what the survivors hold is whole, though a node was lost with all it had."""
    faults = [fault("commit", "node", rank=1, step=40)]
    env = {"TOY_PARALLEL": "fsdp", "TOY_KEEP_LOST": "1"}
    with run(tmp_path, env, faults) as job:
        assert ended_once(job, tmp_path) == 4, job.story()
        (tmp_path / "again").touch()
        job.ended(0, DEADLINE_S)
        assert start_of(job).startswith(("step 39 from the memory", "step 40 from the memory")), job.story()
        assert "kept on 1 node" in start_of(job)
    same_as_without(tmp_path, "fsdp")


def test_what_is_not_whole_is_not_used(tmp_path: Path) -> None:
    """Without copies, on other nodes: from the beginning, and every bit is as before."""
    env = {"TOY_PARALLEL": "fsdp", "TOY_KEEP_LOST": "0,1", **SLOW}
    with run(tmp_path, env) as job:
        cancelled_after(job, tmp_path, 10)
        (tmp_path / "again").touch()
        job.ended(0, DEADLINE_S)
        assert start_of(job) == ""
        assert not events(job, "memory-given")
        assert len(events(job, "memory-not-there")) == RANKS
    same_as_without(tmp_path, "fsdp")


@pytest.mark.slow
def test_no_room_and_then_from_the_disk(tmp_path: Path) -> None:
    env = {"TOY_KEEP_NBYTES": "1000", **SLOW}
    with run(tmp_path, env, options=["--save-dir", tmp_path / "save"]) as job:
        cancelled_after(job, tmp_path, 30)
        assert "keep.memory is 1000" in every_node_tells(job, "memory-not-kept")[0]
        (tmp_path / "again").touch()
        job.ended(0, DEADLINE_S)
        assert "from the disk" in start_of(job), job.story()
    same_as_without(tmp_path, "ddp")


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("fsdp", (4, 0), (2, 2)),
        pytest.param("fsdp", (2, 2), (4, 0), marks=pytest.mark.slow),
        pytest.param("ddp", (3, 0), (2, 1), marks=pytest.mark.slow),
        pytest.param("hsdp", (4, 0), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_goes_on(
    tmp_path: Path, kind: str, first: tuple[int, int], then: tuple[int, int]
) -> None:
    """An elastic job that is requeued with fewer nodes, or more: each rank takes its part out of memory."""
    launcher = (str(HERE / "kept_launcher.py"), str(tmp_path))
    out, least = tmp_path / "out", min(first[0], then[0])
    options = ["--nodes", first[0], "--spares", first[1], "--min-nodes", least, "--max-nodes", sum(first)]
    env = {"RECUT_SLEEP_S": "0.03", "RECUT_SLEEP_WHILE": "/proc", "TOY_KEEP_SPARES": str(then[1])}
    if kind == "hsdp":
        options += ["--step", 2]
    script = [SCRIPT, ENDLESS, out, kind]
    with Job(tmp_path, [*options, "--max-stall", 60, "--tee", "none"], script, env, launcher=launcher) as job:
        wait_until(lambda: newest(out) >= 12, DEADLINE_S, job)
        for node in range(sum(first)):
            agent = job.pid_of(node, "agent")
            assert agent is not None
            os.kill(agent, signal.SIGTERM)
        assert ended_once(job, tmp_path) == 128 + signal.SIGTERM
        before = steps_seen(out)
        (tmp_path / "again").touch()
        wait_until(lambda: newest(out) >= max(one.step for one in before) + 8, DEADLINE_S, job)
        (out / "end").touch()
        job.ended(0, DEADLINE_S)
        start = start_of(job)
    assert start.endswith(f"by {first[0]} ranks"), job.story()
    went_on(out, before, (first[0], then[0]), int(start.split()[1]))
