"""Parts of `make bench` with real sockets, processes and memory, small: they measure the right things."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench import hangs, replication
from tests.bench.scripts import batches
from tests.bench.vaults import MIB

DEADLINE_S = 120.0
RANKS = 4


def test_a_node_gets_a_version_from_several_holders_at_their_rates() -> None:
    try:
        one, two = replication.restores(2, 64, 1)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
            raise
        pytest.skip(f"no network namespaces with limited interfaces here: {error}")
    assert (one["k"], two["k"]) == (1, 2)
    for run in (one, two):
        # But for what a limited interface may send at once.
        least_s = 60 * MIB * 8 / (run["k"] * replication.HOLDER_MBIT * 1e6)
        assert run["s"] > least_s
        assert run["plain_s"] > least_s
        assert run["cpu_s"] > 0


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file as `batches.py write` makes it."""
    with (tmp_path / "rows.bin").open("wb") as file:
        for number in range(batches.ROWS):
            file.write(np.full(batches.ROW_NBYTES // 8, number).tobytes())
    return tmp_path


def told(kind: str, rows: Path, *, shared: bool) -> dict[str, float]:
    """Return the script's figures of a few batches; it checks that they are the right ones."""
    command = [sys.executable, batches.__file__, kind, str(rows), str(RANKS), "10", str(int(shared))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_a_node_has_what_all_its_ranks_want_once(rows: Path, shared: bool) -> None:
    ours = told("ckptless", rows, shared=shared)
    # Those made ahead, the last two, and those that a rank has taken and not told the agent of yet, which are
    # less than half a window; each in a file of its own, with a page before its rows.
    most = batches.PREFETCH + 2 + batches.PREFETCH // 2 - 1
    assert ours["batches_nbytes"] >= batches.PREFETCH * batches.ROW_NBYTES
    assert ours["batches_nbytes"] <= most * (batches.ROW_NBYTES + mmap.PAGESIZE) * (1 if shared else RANKS)
    assert ours["batches_per_s"] > 0


def test_every_dataloader_has_batches_of_its_own(rows: Path) -> None:
    theirs = told("DataLoader", rows, shared=True)
    assert theirs["batches_nbytes"] >= RANKS * batches.PREFETCH * batches.ROW_NBYTES


def test_hangs_are_made_and_seen_as_what_they_are(tmp_path: Path) -> None:
    """Those kinds that tests/local/test_stuck.py does not have."""
    kinds = ("lock@optimizer", "half", "lock@commit")
    found, others = hangs.measure(hangs.plan(kinds, len(kinds), random.Random(3)), tmp_path, 0.05)
    assert [(one.kind, one.right) for one in found] == [(kind, True) for kind in kinds], found
    assert others == 0, "a process was replaced that did not hang"
    for one in found:
        # Not before anybody could have said so, and long before the longest stall.
        assert 2.0 < one.found_s < one.back_s < 60.0
