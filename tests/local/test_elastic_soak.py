"""A hundred changes of size and deaths of ranks, drawn by a seed: every sample once, and nothing grows.

CKPTLESS_ELASTIC_SEED takes another seed than the last time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .growth import Numbers, Watch, at_all
from .localrun import Job, recovered
from .resized import elastic, end, lines, pid_of, resize, resized, story, trains

CHANGES = 100
NODES = 4
SEED = int(os.environ.get("CKPTLESS_ELASTIC_SEED", "1"))
SLOW = {"RECUT_SLEEP_S": "0.02", "RECUT_WATCH": "1"}
# Of the generations of one size the first are left out; growth is from the median of so many to the last's.
WARM, PART = 3, 5
# A thread's first use of some buffer may come late.
TOLERANCE_KIB = 6 * 1024
# A Gloo thread that has missed the end of its sockets (some of a hundred do) keeps its group, of up to so
# many threads and files, until the group's own timeout, which is half a minute here and ten of them else.
STUCK, OF_A_GROUP = 2, 5
# A pool of threads fills up late. So do links: an agent has up to three to each other one, and keeps them.
TOLERANCES = {"own": TOLERANCE_KIB, "shared": TOLERANCE_KIB, "threads": 2, "files": 3 * (NODES - 1)}
# A resize takes about so long here; where it takes another time, the death comes at another point of it.
ABOUT_S = 0.6


class Changes:
    """Draws what happens next to a job, and sees that it goes on."""

    def __init__(self, job: Job, sizes: Sequence[int], seed: int) -> None:
        self.job, self.sizes, self.size = job, sizes, max(sizes)
        self._draw = random.Random(seed)
        self.counts: dict[str, int] = {}

    def one(self) -> None:
        before = self.job.ledger().generations[-1].generation
        kind = self._draw.choices(("resize", "kill", "kill in a resize"), (6, 1, 3))[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        # Never rank 0: it lives through all of it.
        victim = pid_of(self.job, self._draw.randrange(1, self.size)) if self.size > 1 else None
        if kind == "kill" and victim is not None:
            self._kill(victim)
        else:
            self.size = self._draw.choice([size for size in self.sizes if size != self.size])
            if kind == "resize" or victim is None:
                resized(self.job, self.size, self.size)
            else:
                assert resize(self.job, self.size)[0] == 0
                # Not to wait for anything: whatever the job does then, it is to go on.
                time.sleep(self._draw.uniform(0.0, ABOUT_S))
                self._kill(victim)
        trains(self.job, self.size, after=before, steps=self._draw.randrange(1, 8))

    @staticmethod
    def _kill(pid: int) -> None:
        # Of a node that was given back, the process may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def watched(job: Job) -> Iterator[Watch]:
    """Look at the job's processes in a thread, for as long as it runs."""
    watch = Watch(job, NODES)
    thread = threading.Thread(target=watch.until_ended)
    thread.start()
    try:
        yield watch
    finally:
        # By then it has ended, or is ended here: the thread would wait for that.
        job.launcher.kill()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "step"), [("ddp", 1), ("fsdp", 1), ("hsdp", 2)])
def test_a_hundred_changes(tmp_path: Path, kind: str, step: int) -> None:
    sizes = list(range(step, NODES + 1, step))
    print(f"{kind}: seed {SEED}")
    options = ["--nodes", NODES, "--min-nodes", step, "--step", step]
    with elastic(tmp_path, kind, options, SLOW) as job:
        with watched(job) as watch:
            trains(job, NODES)
            changes = Changes(job, sizes, SEED)
            for _ in range(CHANGES):
                changes.one()
            ledger = end(job)
        found = story(job, ledger)
    print(f"{kind}: {changes.counts}, {len(found.worlds)} generations, {max(found.steps)} steps")
    assert len(found.worlds) > CHANGES * 0.9
    assert len({pid for (_, node, slot), pid in found.pids.items() if (node, slot) == (0, 0)}) == 1
    world_of = {one.generation: len(one.places) for one in ledger.generations}
    grown = grows("rank 0", rank_0(tmp_path / "out", world_of))
    rows = recovered(ledger)
    for name in watch.names:
        grown += grows(name, by_world([world_of[row.generation] for row in rows], watch, name, rows))
    assert len(watch.names) == 1 + 3 * NODES
    assert not grown, "\n".join(grown)


def rank_0(folder: Path, world_of: dict[int, int]) -> dict[int, list[Numbers]]:
    """The least of each of its generations, by their numbers of ranks."""
    by_generation: dict[int, list[list[int]]] = {}
    for rank, (generation, _pid, *numbers) in lines(folder, "watch"):
        if rank == 0:
            by_generation.setdefault(generation, []).append(numbers)
    found: dict[int, list[Numbers]] = {}
    for generation, rows in sorted(by_generation.items()):
        files, threads, _rss, own = map(min, zip(*rows, strict=True))
        found.setdefault(world_of[generation], []).append({"files": files, "threads": threads, "own": own})
    return found


def by_world(worlds: list[int], watch: Watch, name: str, rows: Sequence[object]) -> dict[int, list[Numbers]]:
    """Return a process' numbers after each recovery, by the number of ranks that there were then."""
    found: dict[int, list[Numbers]] = {}
    for world, numbers in zip(worlds, watch.between(name, rows), strict=True):
        if numbers is not None:
            found.setdefault(world, []).append(numbers)
    return found


def grows(name: str, found: dict[int, list[Numbers]]) -> list[str]:
    """Return what has grown from the first generations of a size to the last ones, in words."""
    grown: list[str] = []
    for world, rows in sorted(found.items()):
        rows = rows[WARM:]
        if len(rows) < 2 * PART:
            print(f"{name}, {world} ranks: seen in {len(rows)} generations only")
            continue
        for key in rows[0]:
            more = at_all([row[key] for row in rows], PART)
            print(f"{name}, {world} ranks: {key} {rows[0][key]} -> {rows[-1][key]}, {more:+.0f} in all")
            stuck = STUCK * OF_A_GROUP if name == "rank 0" and key in ("threads", "files") else 0
            if more > TOLERANCES.get(key, 0) + stuck:
                grown.append(f"{name}: {more:.0f} more {key} with {world} ranks")
    return grown
