"""Goodput under fire: `python -m tests.bench.fire`; a rank is killed again and again, ours beside the peers'.

What counts is each (rank, step) when it is done first, by second, against the same run's rate in the quiet
before and after: a step that is done again counts for nothing, and one without some rank for less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .crash import (
    AFTER,
    BETWEEN,
    RECOVERY_DEADLINE_S,
    START_DEADLINE_S,
    StuckError,
    lines,
    reaches,
    top,
    wait,
)
from .systems import SYSTEMS, Case, Running, System, running

QUIET_S = 20.0
POLL_S = 0.02
CASE = Case(4, "ddp", "toy")


@dataclass(frozen=True)
class Fire:
    """Seconds between kills, how many there were, the part of the quiet's work that was done."""

    period_s: float
    kills: int
    goodput: float
    quiet_per_s: float
    stuck: str = ""


def done(run: Running) -> list[float]:
    """When each (rank, step) was done first."""
    found: list[float] = []
    for rows in lines(run).values():
        first: dict[int, float] = {}
        for step, _, at in rows:
            first.setdefault(step, at)
        found += first.values()
    return found


def rate(times: list[float], begin: float, end: float) -> float:
    """How many there are in a second of this time."""
    return sum(begin <= at < end for at in times) / (end - begin)


def rest(run: Running, until: float) -> None:
    """Let it train."""
    while time.monotonic() < until:
        run.tend()
        time.sleep(POLL_S)


def measure(system: System, case: Case, period_s: float, for_s: float) -> Fire:
    """Quiet, fire, quiet: of one run."""
    draw = random.Random(round(period_s))
    kills = 0
    with running(system.start, case) as run:
        try:
            wait(run, lambda: reaches(run, 2 * BETWEEN), START_DEADLINE_S)
            quiet = time.monotonic()
            rest(run, quiet + QUIET_S)
            begin = time.monotonic()
            for number in range(round(for_s / period_s)):
                rest(run, begin + (number + draw.random() / 2) * period_s)
                victim = draw.choice([rank for rank in range(case.ranks) if rank not in run.spared])
                # One that has not come back yet is dead already.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.pid(victim), signal.SIGKILL)
                    kills += 1
            rest(run, begin + for_s)
            end = time.monotonic()
            # What the last kill costs is the fire's; the quiet begins when all train again.
            low = top(run) + AFTER
            wait(run, lambda: reaches(run, low), RECOVERY_DEADLINE_S)
            again = time.monotonic()
            rest(run, again + QUIET_S)
        except StuckError as error:
            return Fire(period_s, kills, 0.0, 0.0, str(error))
        times = done(run)
    calm = statistics.mean((rate(times, quiet, quiet + QUIET_S), rate(times, again, again + QUIET_S)))
    return Fire(period_s, kills, rate(times, begin, end) / calm, calm)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ckptless", "torchft-tuned"])
    parser.add_argument("--periods", type=float, nargs="+", default=[15.0, 60.0], help="seconds")
    parser.add_argument("--for", type=float, default=300.0, dest="for_s", help="seconds under fire")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    told = []
    for period_s in args.periods:
        for name in args.systems:
            found = measure(SYSTEMS[name], CASE, period_s, args.for_s)
            load = os.getloadavg()[0]
            told.append({"system": name, "case": asdict(CASE), "load": load, **asdict(found)})
            sys.stderr.write(
                f"{name}: a kill each {period_s:.0f} s, {found.kills} kills: {found.goodput:.1%} of "
                f"{found.quiet_per_s:.1f} ranks' steps a second, load {load:.1f}"
                f"{', STUCK' if found.stuck else ''}\n"
            )
    if args.json:
        args.json.write_text(json.dumps({"cpus": os.cpu_count(), "runs": told}, indent=1))


if __name__ == "__main__":
    main()
