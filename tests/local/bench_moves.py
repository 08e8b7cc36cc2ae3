"""Measures how long training stands still when a rank moves to a spare: `bench_moves.py [--turns N]`.

In each turn a job of four ranks (toy.py) has two spares, and two nodes are left, one with `ckptctl evict
--planned` and one without, in turns first. A stall is the time from the last step that all ranks have made in
the old generation to the first in the new one, in steps as long as they were before, less the one that comes
anyway; where that is the same step, since it was made and not committed yet, that one counts as well. Losses
must be those of a job that nobody disturbs, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

from .localrun import Job, same_as_reference, toy
from .test_evict import evict, trains

NODES, BEFORE, BETWEEN = 4, 12, 8
BAR_STEPS = 2.0


class Move(TypedDict):
    """How one move went; times in seconds."""

    kind: str
    parallel: str
    sleep_s: float
    step_s: float
    gap_s: float
    stall_steps: float
    load: float


def turn(home: Path, parallel: str, sleep_s: float, kinds: tuple[str, ...]) -> list[Move]:
    """Have node 2 left, and then node 1, in these ways; return how that went."""
    slow = home / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": str(sleep_s), "TOY_SLEEP_WHILE": str(slow), "TOY_PARALLEL": parallel}
    loads = []
    with toy(home, [], spares=len(kinds), env=env) as job:
        trains(job, 1, BEFORE)
        for generation, kind in enumerate(kinds, 1):
            loads.append(os.getloadavg()[0])
            words = ["--planned"] if kind == "planned" else []
            answer = evict(job, f"node-{3 - generation}", *words)[1]
            assert answer["verdict"] == "accepted", answer
            trains(job, generation + 1, BETWEEN)
        slow.unlink()
        job.ended(0, 150.0)
        same_as_reference(job, [], parallel=parallel)
        made = steps_made(job)
    found: list[Move] = []
    for old, (kind, load) in enumerate(zip(kinds, loads, strict=True), 1):
        times = made[old]
        # The first two of a generation take longer.
        step_s = statistics.median(b - a for a, b in itertools.pairwise(sorted(times.values())[2:]))
        last, first = max(times), min(made[old + 1])
        gap_s = made[old + 1][first] - times[last]
        stall = gap_s / step_s - (first - last)
        found.append(
            Move(
                kind=kind,
                parallel=parallel,
                sleep_s=sleep_s,
                step_s=step_s,
                gap_s=gap_s,
                stall_steps=stall,
                load=load,
            )
        )
    return found


def steps_made(job: Job) -> dict[int, dict[int, float]]:
    """Return of each generation the steps that all ranks have made in it, and when the last rank had."""
    seen: dict[tuple[int, int], list[float]] = {}
    for rank in range(NODES):
        for line in (job.home / "out" / f"loss-{rank}.txt").read_text().splitlines():
            words = line.split()
            seen.setdefault((int(words[-1]), int(words[0])), []).append(float(words[-2]))
    made: dict[int, dict[int, float]] = {}
    for (generation, step), times in seen.items():
        if len(times) == NODES:
            made.setdefault(generation, {})[step] = max(times)
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="runs of each")
    parser.add_argument(
        "--sleep", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="seconds in each step"
    )
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    found: list[Move] = []
    for number, sleep_s, parallel in itertools.product(range(args.turns), args.sleep, ("ddp", "fsdp")):
        kinds = ("planned", "at once") if number % 2 == 0 else ("at once", "planned")
        with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as scratch:
            found += turn(Path(scratch), parallel, sleep_s, kinds)
        for one in found[-2:]:
            sys.stderr.write(
                f"{parallel}, {one['kind']}: {one['stall_steps']:.2f} steps of {one['step_s']:.2f} s\n"
            )
    report(found)
    if args.json:
        args.json.write_text(json.dumps({"moves": found, "cpus": os.cpu_count()}, indent=1))


def report(found: list[Move]) -> None:
    """Print the table, and whether planned moves are as short as they should be."""
    loads = [one["load"] for one in found]
    print(
        f"{NODES} ranks, load {min(loads):.1f} to {max(loads):.1f}; stalls in steps: median (least to most)"
    )
    print("| | a step, s | planned | at once |\n| --- | --- | --- | --- |")
    cases = sorted({(one["parallel"], one["sleep_s"]) for one in found})
    for parallel, sleep_s in cases:
        mine = [one for one in found if (one["parallel"], one["sleep_s"]) == (parallel, sleep_s)]
        cells = [f"{statistics.median(one['step_s'] for one in mine):.2f}"]
        for kind in ("planned", "at once"):
            stalls = [one["stall_steps"] for one in mine if one["kind"] == kind]
            cells.append(f"{statistics.median(stalls):.1f} ({min(stalls):.1f} to {max(stalls):.1f})")
        print(f"| {parallel} | {' | '.join(cells)} |")
    most = max(one["stall_steps"] for one in found if one["kind"] == "planned")
    print(
        f"the longest planned one: {most:.2f} steps; the bar is {'met' if most <= BAR_STEPS else 'not met'}"
    )


if __name__ == "__main__":
    main()
