"""Jobs on an accelerator, simulated (tests/simdev): collectives are queued, and what is cut off is garbage.

Bit for bit as without a fault, like on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simdev import build, device

from .localrun import (
    FAULTY_DEADLINE_S,
    HERE,
    RANKS,
    Job,
    Shape,
    check,
    fault,
    on,
    same_as_reference,
    toy,
)
from .test_sharded import twenty

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(device.missing() is not None, reason=str(device.missing())),
]

FEW = 40
FULL = 64 << 20
MANY = 300


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the device before any job: a rank that does so comes late."""
    build.build()


@pytest.mark.parametrize(("parallel", "overlap"), [("ddp", "on"), ("fsdp", "on"), ("hsdp", "off")])
def test_processes_and_nodes_at_every_place(tmp_path: Path, parallel: str, overlap: str) -> None:
    faults = [
        fault("forward", "kill", 2, 3),
        fault("backward", "raise", 3, 6),
        fault("update", "kill", 1, 9),
        fault("forward", "stop", 0, 12),
        fault("commit", "node", 3, 15),
        fault("recovered", "kill", 1, after=4),
        fault("committed", "kill", 2, 20),
        # All at once.
        *(fault("commit", "kill", rank, 25) for rank in range(RANKS)),
        fault("restore", "kill", 1, after=7),
        fault("finish", "kill", 1, FEW),
    ]
    shape = Shape(steps=FEW, parallel=parallel, overlap=overlap, device="simdev")
    kinds = check(tmp_path, faults, spares=2, shape=shape)
    assert kinds["node-lost"] == 1
    assert kinds["died"] >= 5


def sticky(home: Path, **env: str) -> None:
    """Have two devices fail for good: the processes are replaced at once."""
    faults = [fault("backward", "sticky", 1, 5), fault("forward", "sticky", 2, 10)]
    with toy(home, faults, steps=FEW, env={**on("simdev"), **env}) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, device="simdev")
    assert [one.kind for one in ledger.faults] == ["died", "died"]
    assert all("71" in one.detail for one in ledger.faults)
    assert [one.rung for one in ledger.recoveries] == ["process", "process"]
    told = [event for event in ledger.events if event.kind == "device-lost"]
    assert [event.node for event in told] == [1, 2]
    assert all("device-side assert triggered" in event.text for event in told)


def full(home: Path, **env: str) -> None:
    """Have processes killed on a device that one of them nearly fills, and that has the memory back late."""
    (home / "memory").mkdir()
    memory = {
        "SIMDEV_MEMORY": str(FULL),
        "SIMDEV_LEDGER": str(home / "memory"),
        "SIMDEV_RECLAIM_S": "1.5",
        "TOY_BALLAST": str(FULL * 3 // 5),
    }
    faults = [fault("forward", "kill", 0, 5), fault("update", "kill", 0, 10)]
    with toy(home / "job", faults, nodes=1, steps=FEW, env={**on("simdev"), **memory, **env}) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, ranks=1, device="simdev")
    kinds = [one.kind for one in ledger.faults]
    assert kinds.count("died") == 2
    assert 2 <= kinds.count("no-memory") <= 4
    assert set(kinds) == {"died", "no-memory"}


def test_a_device_that_fails_for_good_costs_no_try_in_the_process(tmp_path: Path) -> None:
    """The script raises, as with an error of its own; but nothing on that device will work any more."""
    sticky(tmp_path)


def test_memory_that_a_dead_process_still_has_is_waited_for(tmp_path: Path) -> None:
    """A try in vain is nobody's fault."""
    full(tmp_path)


@pytest.mark.parametrize(("plant", "job"), [("join-before-check", sticky), ("begin-before-memory", full)])
def test_a_planted_mistake_is_found(tmp_path: Path, plant: str, job: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        job(tmp_path, TOY_PLANT=plant)


def test_a_spare_is_ready_before_it_is_needed(tmp_path: Path) -> None:
    faults = [fault("forward", "node", 3, 20)]
    with toy(tmp_path, faults, spares=1, steps=FEW, env={**on("simdev"), "TOY_HOOKS": "1"}) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, device="simdev")
    (ready,) = [event for event in ledger.events if event.kind == "warm-up"]
    assert ready.node == RANKS
    assert "a spare was made ready in" in ready.text
    (line,) = (tmp_path / "out/hooks--1.txt").read_text().splitlines()
    assert line.startswith("warmup ")
    assert line.endswith("on the device")
    assert [one.kind for one in ledger.faults if one.kind != "broken"] == ["node-lost"]


def test_a_spare_whose_libraries_hear_of_a_setting_too_late_begins_anew(tmp_path: Path) -> None:
    faults = [fault("forward", "node", 3, 20)]
    env = {**on("simdev"), "TOY_LATE_SETTING": "CUBLAS_WORKSPACE_CONFIG"}
    with toy(tmp_path, faults, spares=1, steps=FEW, env=env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, device="simdev")
    assert [one.kind for one in ledger.faults if one.kind != "broken"] == ["node-lost", "died"]
    (lost,) = [event for event in ledger.events if event.kind == "device-lost"]
    assert lost.node == RANKS
    assert "the training function has set CUBLAS_WORKSPACE_CONFIG in a spare" in lost.text


@pytest.mark.parametrize(("parallel", "every"), [("ddp", "1"), ("fsdp", "1"), ("hsdp", "3")])
def test_commits_wait_for_no_device(tmp_path: Path, parallel: str, every: str) -> None:
    """The loss is on the device, too; what `ckptctl status` shows of it comes later."""
    env = {**on("simdev"), "TOY_LAZY": "1", "TOY_PARALLEL": parallel, "TOY_COMMIT_EVERY": every}
    with toy(tmp_path, steps=FEW, env=env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, [], FEW, parallel=parallel, device="simdev")
    assert not [event for event in ledger.events if event.kind in ("raised", "died")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_twenty_faults(tmp_path: Path, parallel: str, seed: int) -> None:
    # With copies beside the training in every other job.
    overlap = "on" if seed % 2 else "off"
    shape = Shape(steps=MANY, parallel=parallel, overlap=overlap, device="simdev")
    assert check(tmp_path, twenty(seed), spares=3, shape=shape)["node-lost"] == 3


def who_hangs_is_named(home: Path, device: str) -> None:
    """Nobody asks a device what it waits for: the one that hangs has given its own an all-reduce less."""
    options = ["--job", "hangs", "--nodes", RANKS, "--tee", "none"]
    script = [HERE / "hangs_script.py", 130, home / "out", "50:1:stopped,90:2:lock"]
    with Job(home, options, script, env=on(device)) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = job.ledger()
    hung = [one for one in ledger.faults if one.kind == "hung"]
    assert [one.rank for one in hung] == [1, 2], job.story()
    assert all(f"{RANKS - 1} other ranks wait" in one.detail for one in hung)
    assert "it sleeps in lock (hangs_script.py" in hung[1].detail


def test_who_hangs_is_named_by_what_the_others_have_given_their_devices(tmp_path: Path) -> None:
    who_hangs_is_named(tmp_path, "simdev")


def test_who_finds_no_memory_raises_and_goes_on_in_its_process(tmp_path: Path) -> None:
    kinds = check(tmp_path, [fault("backward", "oom", 1, 5)], shape=Shape(steps=FEW, device="simdev"))
    assert kinds == {"raised": 1}
