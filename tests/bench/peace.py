"""What protection costs while nothing fails: `python -m tests.bench.peace`.

Two ranks of FSDP2 and 21 million parameters, with 1, 8 and 32 times the samples of a step: the same state,
and more to compute for it. Each way to protect it is a run of its own, in turns with runs that save nothing.
What is told: the median time of a step, and its CPU time, of a rank and of all processes of the job.
Ranks and what protects them share the machine's cores here; where training has all of them, what is moved
costs it its time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .crash import START_DEADLINE_S, StuckError, reaches, wait
from .systems import Case, Running, ckptless, dcp, marked, nvrx_local, plain, running

CASE = Case(2, "fsdp", "20m")
# Steps before it counts: slots are made, and allocators have settled.
WARM = 6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def with_options(run: Running, **options: object) -> None:
    """ckptless.run with these."""
    ckptless(run, BENCH_OPTIONS=json.dumps(options))


# What is run, and what its steps are compared with.
WAYS: dict[str, tuple[Callable[[Running], None], str]] = {
    "torchrun": (plain, "torchrun"),
    "dcp.async_save each step": (functools.partial(dcp, BENCH_ASYNC="1"), "torchrun"),
    "dcp.save each step": (dcp, "torchrun"),
    "NVRx local checkpoint each step": (nvrx_local, "torchrun"),
    "no commit": (functools.partial(with_options, commit_every=1_000_000), "torchrun"),
    "commit each step, in order": (functools.partial(with_options, overlap="off"), "no commit"),
    "commit each step, beside": (functools.partial(with_options, overlap="on"), "no commit"),
    'commit_every="auto"': (functools.partial(with_options, commit_every="auto"), "no commit"),
}


@dataclass(frozen=True)
class Peace:
    """A run: the median time of a step, CPU time of a step of one rank and of the whole job; seconds."""

    step_s: float
    rank_cpu_s: float
    job_cpu_s: float
    steps: int


def cpu_s(run: Running) -> float:
    """The CPU time of every living process of a run."""
    found = 0.0
    for pid in marked(run.mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += (int(words[11]) + int(words[12])) / TICKS_PER_S
    return found


def measure(start: Callable[[Running], None], times: int, for_s: float) -> Peace:
    """Let a run train for so long."""
    os.environ["BENCH_TIMES"] = str(times)
    with running(start, CASE) as run:
        wait(run, lambda: reaches(run, WARM), START_DEADLINE_S + for_s)
        begin, before = time.monotonic(), cpu_s(run)
        time.sleep(for_s)
        spent, end = cpu_s(run) - before, time.monotonic()
        rows = [line.split() for line in (run.out / "steps-0").read_text().splitlines()[:-1]]
    seen = [(float(row[2]), float(row[3])) for row in rows if begin <= float(row[2]) < end]
    if len(seen) < 3:
        raise StuckError(f"{len(seen)} steps in {for_s} s")
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(seen)]
    steps = len(gaps)
    return Peace(statistics.median(gaps), (seen[-1][1] - seen[0][1]) / steps, spent / (len(seen)), steps)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--times", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--for", type=float, default=15.0, dest="for_s", help="seconds of a run")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    told = []
    for times in args.times:
        for turn in range(args.turns):
            for way in args.ways:
                found = measure(WAYS[way][0], times, args.for_s)
                load = os.getloadavg()[0]
                told.append(
                    {
                        "way": way,
                        "of": WAYS[way][1],
                        "times": times,
                        "turn": turn,
                        "load": load,
                        **asdict(found),
                    }
                )
                sys.stderr.write(
                    f"{times} times, {way}: a step {found.step_s * 1000:.0f} ms ({found.steps}), CPU of a "
                    f"rank {found.rank_cpu_s * 1000:.0f}, of all {found.job_cpu_s * 1000:.0f} ms, "
                    f"load {load:.1f}\n"
                )
    if args.json:
        args.json.write_text(json.dumps({"cpus": os.cpu_count(), "runs": told}, indent=1))


if __name__ == "__main__":
    main()
