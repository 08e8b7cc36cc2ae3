"""Process groups of `ckptless.run` on a device; mistakes planted in them must be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptless.pytorch_hooks.torch_private import calls as torch_private
from tests.gpu import kind
from tests.simdev import build

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
DEADLINE_S = 100.0
# Of a scenario that is expected to hang.
PLANTED_S = 25.0
SIMULATED = pytest.mark.skipif(kind.name() != "simdev", reason="what NCCL aborts writes nothing by chance")
STOCK = pytest.mark.skipif(not torch_private.takes_backends(), reason="torch hands out works as they are")
EXPECTED: dict[str, list[dict[str, Any]]] = {
    "ordered": [{"done at once": True, "blocked": False, "waited": 0, "then": 4.0, "after": 6.0}] * 2,
    "left": [
        {
            "read": "GenerationEnded",
            "in time": True,
            **dict.fromkeys(("all_reduce", "check", "item", "print", "save"), "GenerationEnded"),
        },
        {},
    ],
    "idle": [{"written": [7.0]}, {}],
    "sealed": [{"sent": [1]}, {"sent": [1]}],
    "copied": [{"early": False, "same": True}] * 2,
    "ring": [{"got": [2.0]}, {"got": [1.0]}],
    "graph": [{"found": [2.0, 2.0], "over": "GenerationEnded", "old": "UsageError"}] * 2,
    "answers": [
        {
            way: [late or [False, False, None], [True, True, None], 3.0 * 2**number, [1 << 16]]
            for number, way in enumerate(("synchronize", "block_current_stream"), 1)
        }
        for late in (False, True)
    ],
    "forwarded": [
        {
            "backends": [True] * 3,
            "config": True,
            "sums": [2.0] * 2,
            "objects": [[True, 0.0], [True, 1.0], [True, 5.0]],
            "coalesced": [[first, second]] * 4,
            "batches": [[other, True]] * 2,
        }
        for first, second, other in ((6.0, 10.0, 2.0), (6.0, 10.0, 1.0))
    ],
    "refused": [
        {
            "init": "UsageError: init_process_group asks for mpi, and groups",
            "again": "UsageError: ckptless.run makes the process groups: leave",
            "split": "RuntimeError",
            "ucc": "UsageError: new_group asks for ucc, and groups",
            "store": "UsageError: this asks for the store of",
            **dict.fromkeys(
                ("enable", "empty", "rendezvous"), "UsageError: symmetric memory cannot be renewed after"
            ),
            "after": 2.0,
        }
    ]
    * 2,
    "cut": [{"raised": ["GenerationEnded", "ok", "GenerationEnded", "DeviceLost"], "after": 2.0}] * 2,
    "shared": [
        {"said": ["GenerationEnded: generation 1 is over", "UsageError: ranks 0 and 1 work on"]},
    ]
    * 2,
    "hammered": [{"queued": True, "ends": [2.0]}] * 2,
    "ended": [{"ended": True}] * 2,
    "renewed": [{"found": [[4.0, 2.0, ["rank 0", "rank 1"]]] * 3, "backend": True, "fds": True}] * 2,
}


def play(scenario: str, plant: str = "-", deadline_s: float = DEADLINE_S) -> list[dict[str, Any]] | None:
    """Return what both ranks of a scenario have found, or None where one did not end, or by a signal."""
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.group_scenarios", scenario, plant],
            cwd=ROOT,
            # On a GPU that all share NCCL takes them only where each seems to be a machine of its own.
            env={**environment, "RANK": str(rank), "MASTER_PORT": str(store.port), "NCCL_HOSTID": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [rank.communicate(timeout=deadline_s)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if any(rank.returncode for rank in ranks):
        return None
    lines = [text.strip().splitlines() for text in said]
    return [json.loads(line[-1]) for line in lines] if all(lines) else None


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the simulated device, where it is that one, before anybody is timed."""
    if kind.name() == "simdev":
        build.build()


@pytest.mark.parametrize("scenario", EXPECTED)
def test_what_ranks_do_on_a_device(scenario: str) -> None:
    assert play(scenario) == EXPECTED[scenario]


@pytest.mark.parametrize(
    ("plant", "scenario"),
    [
        ("wait-does-not-order", "ordered"),
        pytest.param("streams-not-waited-for", "idle", marks=SIMULATED),
        ("freed-before-over", "left"),
        ("reads-not-guarded", "left"),
        ("sealed-early", "sealed"),
        ("freed-before-over", "sealed"),
        ("commit-before-copy", "copied"),
        ("messages-one-by-one", "ring"),
        ("graphs-not-guarded", "graph"),
        ("graphs-not-released", "graph"),
        ("open-batches-not-seen", "cut"),
        ("batches-stay", "cut"),
        ("devices-not-compared", "shared"),
        ("threads-not-waited-for", "ended"),
        pytest.param("works-not-found", "answers", marks=STOCK),
    ],
)
def test_a_planted_mistake_is_found(plant: str, scenario: str) -> None:
    assert play(scenario, plant, PLANTED_S) != EXPECTED[scenario]
