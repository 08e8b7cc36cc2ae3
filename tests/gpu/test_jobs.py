"""Jobs on a GPU that four ranks share, over stock NCCL: bit for bit as without a fault. `make test-gpu`.

On the simulated device they are in tests/local/test_devices.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.local.localrun import (
    FAULTY_DEADLINE_S,
    RANKS,
    TOY,
    Shape,
    check,
    fault,
    on,
    read_toy,
    reference,
    same_as_reference,
    toy,
)
from tests.local.test_compiled import nothing_is_compiled_again
from tests.local.test_devices import who_hangs_is_named
from tests.local.test_torchrun import execute

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KILLS = 20
FEW = 40


@pytest.mark.parametrize(("parallel", "overlap"), [("ddp", "off"), ("fsdp", "on"), ("hsdp", "off")])
def test_twenty_processes_are_killed(tmp_path: Path, parallel: str, overlap: str) -> None:
    where = ("forward", "backward", "update", "commit", "committed")
    faults = [fault(where[n % 5], "kill", n % RANKS, 2 * n + 2) for n in range(KILLS)]
    shape = Shape(steps=2 * KILLS + 4, parallel=parallel, overlap=overlap, device="cuda")
    assert check(tmp_path, faults, shape=shape)["died"] == KILLS


def test_a_stopped_process_and_one_that_raises(tmp_path: Path) -> None:
    faults = [fault("forward", "stop", 0, 5), fault("backward", "raise", 2, 12)]
    kinds = check(tmp_path, faults, shape=Shape(steps=FEW, device="cuda"))
    assert (kinds["hung"], kinds["raised"]) == (1, 1)


def test_the_bits_are_those_of_stock_groups_under_torchrun(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    execute([*words, TOY, FEW, tmp_path / "out"], tmp_path, on("cuda"))
    found, clean = read_toy(tmp_path / "out"), reference(FEW, device="cuda")
    assert (found.losses, found.finals) == (clean.losses, clean.finals)


def test_who_finds_no_memory_raises_and_goes_on_in_its_process(tmp_path: Path) -> None:
    kinds = check(tmp_path, [fault("backward", "oom", 1, 5)], shape=Shape(steps=FEW, device="cuda"))
    assert kinds == {"raised": 1}


def test_who_hangs_is_named(tmp_path: Path) -> None:
    who_hangs_is_named(tmp_path, "cuda")


def test_compiled_code_is_used_again(tmp_path: Path) -> None:
    nothing_is_compiled_again(tmp_path, "cuda")


def test_an_assert_in_a_kernel_ends_the_process_at_once(tmp_path: Path) -> None:
    faults = [fault("backward", "sticky", 1, 5)]
    with toy(tmp_path, faults, steps=FEW, env=on("cuda")) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, device="cuda")
    assert [one.kind for one in ledger.faults] == ["died"]
    assert [one.rung for one in ledger.recoveries] == ["process"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_commits_wait_for_no_device(tmp_path: Path, parallel: str) -> None:
    env = {**on("cuda"), "TOY_LAZY": "1", "TOY_PARALLEL": parallel}
    with toy(tmp_path, steps=FEW, env=env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        same_as_reference(job, [], FEW, parallel=parallel, device="cuda")


def test_memory_is_back_before_a_new_process_builds(tmp_path: Path) -> None:
    """One rank that nearly fills the device is killed twice."""
    faults = [fault("forward", "kill", 0, 5), fault("update", "kill", 0, 10)]
    _free, total = torch.cuda.mem_get_info()
    env = {**on("cuda"), "TOY_BALLAST": str(total * 3 // 5)}
    with toy(tmp_path, faults, nodes=1, steps=FEW, env=env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, ranks=1, device="cuda")
    kinds = [one.kind for one in ledger.faults]
    assert kinds.count("died") == 2
    assert set(kinds) <= {"died", "no-memory"}


def test_a_spare_is_ready_before_it_is_needed(tmp_path: Path) -> None:
    faults = [fault("forward", "node", 3, 20)]
    with toy(tmp_path, faults, spares=1, steps=FEW, env={**on("cuda"), "TOY_HOOKS": "1"}) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW, device="cuda")
    told = [event.text for event in ledger.events if event.kind == "warm-up"]
    assert len(told) == 1
    assert "a spare was made ready in" in told[0]
