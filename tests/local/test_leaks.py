"""Thirty recoveries in one run leave the processes that live through them as they were."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from .growth import children
from .localrun import POLL_S, RANKS, STEPS, Job, recovered, same_as_reference, toy

RECOVERIES = 30
EARLY = 3
APART = 5
KINDS = ("kill", "kill", "raise")
VICTIM = 1
Numbers = tuple[int, int, int, int]


def numbers(pid: int) -> Numbers:
    """(open files, threads, resident KiB, children) of a process."""
    home = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (home / "status").read_text().splitlines())
    return (
        len(list((home / "fd").iterdir())),
        int(status["Threads"]),
        int(status["VmRSS"].split()[0]),
        len(children(pid)),
    )


def sample(job: Job, pids: dict[str, int]) -> list[tuple[float, str, Numbers]]:
    found: list[tuple[float, str, Numbers]] = []
    for name, pid in pids.items():
        with contextlib.suppress(OSError, KeyError):  # a zombie has no memory
            found.append((time.time(), name, numbers(pid)))
    return found


def quietest(samples: list[tuple[float, str, Numbers]], name: str, start: float, end: float) -> Numbers:
    """The least of each number between two times: what is there when nothing is going on."""
    inside = [found for at, who, found in samples if who == name and start <= at <= end]
    assert inside, f"no sample of {name}"
    return tuple(min(column) for column in zip(*inside, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_recoveries_leak_nothing(tmp_path: Path) -> None:
    places = ("forward", "backward", "update", "commit", "committed")
    faults = [
        {"rank": VICTIM, "where": places[n % 5], "kind": KINDS[n % 3], "step": APART * (n + 1)}
        for n in range(RECOVERIES)
    ]
    samples: list[tuple[float, str, Numbers]] = []
    with toy(tmp_path, faults, env={"TOY_SLEEP_S": "0.05", "TOY_WATCH": "1"}) as job:
        pids: dict[str, int] = {}
        while job.launcher.poll() is None:
            if len(pids) < 2 * RANKS + 1:
                named = {
                    f"{what}-{n}": job.pid_of(n, what) for n in range(RANKS) for what in ("daemon", "agent")
                }
                pids = {"launcher": job.launcher.pid, **{name: pid for name, pid in named.items() if pid}}
            samples += sample(job, pids)
            time.sleep(POLL_S)
        job.ended(0, 300.0)
        ledger = same_as_reference(job, faults)
    rows = recovered(ledger)
    assert len(rows) == RECOVERIES == len(ledger.recoveries)
    ends = [row.started_s + sum(row.phases.values()) for row in rows]
    early = (ends[EARLY - 1], rows[EARLY].started_s)
    late = (ends[-1], ends[-1] + (STEPS - APART * RECOVERIES) * 0.05)
    wrong: list[str] = []
    for name in pids:
        before, after = quietest(samples, name, *early), quietest(samples, name, *late)
        print(f"{name}: files, threads, KiB, children {before} -> {after}")
        wrong += _grown(name, before, after)
    for rank in range(RANKS):
        if rank == VICTIM:
            continue
        lines = [
            tuple(map(int, line.split()))
            for line in (tmp_path / f"out/watch-{rank}.txt").read_text().splitlines()
        ]
        assert len({line[1] for line in lines}) == 1, f"rank {rank} is not the same process"
        first = [line[2:5] for line in lines if line[0] == EARLY + 1]
        last = [line[2:5] for line in lines if line[0] == RECOVERIES + 1]
        before, after = ((*map(min, zip(*part, strict=True)), 0) for part in (first, last))
        print(f"rank {rank}: files, threads, KiB {before[:3]} -> {after[:3]}")
        wrong += _grown(f"rank {rank}", before, after)
    assert not wrong, "\n".join(wrong)


def _grown(name: str, before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    files, threads, kib, children = (late - early for early, late in zip(before, after, strict=True))
    wrong = {
        "open files": files > 3,
        "threads": threads > 1,
        "KiB": kib > 6 * 1024,
        "children": children > 0,
    }
    return [f"{name}: more {what}: {before} -> {after}" for what, grew in wrong.items() if grew]
