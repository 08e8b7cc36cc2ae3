"""A hundred recoveries of a sharded model in one run: nothing grows in what lives through them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .growth import Numbers, Watch, at_all, per_recovery
from .localrun import RANKS, Fault, fault, read_toy, recovered, toy

RECOVERIES = 100
# The first are left out; growth is that over so many.
WARM, OVER = 20, 10
APART = 4
STEPS = APART * (RECOVERIES + 2)
PLACES = ("forward", "backward", "update", "commit", "committed")
# Rank 0 is never killed. Its shard is 1.7 MB, of which the parameters alone are 0.4 MB.
ENV = {"TOY_PARALLEL": "fsdp", "TOY_WIDTH": "4096", "TOY_WATCH": "1"}
# KiB that may be more after a recovery: a tenth of what would stay with a gathered layer, or a shard.
TOLERANCE_KIB = 16
# And in all: a thread's first use of some buffer may come late.
TOLERANCE_IN_ALL_KIB = 6 * 1024
# Threads of asyncio's pool for what blocks, which are made one by one, and stay.
POOL = min(32, (os.cpu_count() or 1) + 4)


def faults() -> list[Fault]:
    """Ranks 1 to 3 are killed in turn; each fourth fault is an error instead, of every rank in turn."""
    found: list[Fault] = []
    for n in range(RECOVERIES):
        kind, rank = ("raise", n // 4 % RANKS) if n % 4 == 3 else ("kill", 1 + n % (RANKS - 1))
        found.append(fault(PLACES[n % 5], kind, rank, APART * (n + 1)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_recoveries_leave_nothing(tmp_path: Path) -> None:
    with toy(tmp_path / "clean", steps=STEPS, env=ENV) as job:
        job.ended(0, 600.0)
        clean = read_toy(job.home / "out")
    with toy(tmp_path / "faulty", faults(), steps=STEPS, env={**ENV, "TOY_SLEEP_S": "0.05"}) as job:
        watch = Watch(job)
        watch.until_ended()
        job.ended(0)
        found, ledger = read_toy(job.home / "out"), job.ledger()
    assert found.struck == frozenset(range(RECOVERIES)), job.story()
    assert found.losses == clean.losses, "other losses than without a fault"
    assert found.finals == clean.finals, "other parameters or moments at the end"
    rows = recovered(ledger)
    assert len(rows) == RECOVERIES == len(ledger.recoveries)
    grown = grows("rank 0", rank_0(tmp_path / "faulty/out/watch-0.txt"))
    for name in watch.names:
        grown += grows(name, watch.after_each(name, rows))
    assert len(watch.names) == 1 + 3 * RANKS
    assert not grown, "\n".join(grown)


def rank_0(log: Path) -> list[Numbers]:
    """The least of each of its generations, from the second on."""
    lines = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert len({line[1] for line in lines}) == 1, "rank 0 is not the same process"
    found: list[Numbers] = []
    for generation in range(2, RECOVERIES + 2):
        files, threads, rss, own = map(
            min, zip(*(line[2:] for line in lines if line[0] == generation), strict=True)
        )
        found.append({"files": files, "threads": threads, "rss": rss, "own": own})
    return found


def grows(name: str, rows: Sequence[Numbers]) -> list[str]:
    """Return what has grown from one part of the recoveries to the last, in words."""
    assert len(rows) >= 0.6 * RECOVERIES, f"{name} was seen after {len(rows)} recoveries only"
    found: list[str] = []
    for key in rows[0]:
        values = [row[key] for row in rows[WARM:]]
        rate, in_all = per_recovery(values, OVER), at_all(values, OVER)
        print(f"{name}: {key} {values[0]} -> {values[-1]}, {rate:.2f} per recovery, {in_all:.0f} in all")
        # Of what is counted not even one; what malloc keeps of freed memory ("rss") is no growth. A pool's
        # next thread is made when the first are busy for once, so perhaps late.
        memory = (TOLERANCE_KIB, TOLERANCE_IN_ALL_KIB)
        most = memory if key in ("own", "shared") else (0, POOL) if key == "threads" else (0, 0)
        if key != "rss" and (rate > most[0] or in_all > most[1]):
            found.append(f"{name}: {rate:.2f} more {key} with each recovery, {in_all:.0f} in all")
    return found
