"""Hangs ranks of one job, each time in another way: `bench_hangs.py [--hangs 200] [--ranks 4] [--step 0.05]`.

Of each: whether the rank that hangs is the one that is replaced, and how long that took from the hang to the
fault, and to the next generation's first step. Prints a table by kind, and JSON with --json.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from .localrun import HERE, Job

EVERY = 40
# Of hangs_script.py.
KINDS = (
    *("stopped", "interpreter", "interpreter_asleep", "lock", "loader"),
    *("file", "native", "child", "other_collective"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hangs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    hangs = {
        EVERY * (number + 1): (draw.randrange(options.ranks), KINDS[number % len(KINDS)])
        for number in range(options.hangs)
    }
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        out, steps = home / "out", EVERY * (options.hangs + 1)
        named = ",".join(f"{step}:{rank}:{kind}" for step, (rank, kind) in hangs.items())
        script = [HERE / "hangs_script.py", steps, out, named]
        settings = ["--job", "hangs", "--nodes", options.ranks, "--tee", "none"]
        began = time.monotonic()
        with Job(home, settings, script, env={"STEP_S": str(options.step)}) as job:
            job.ended(0, 60.0 + 30.0 * options.hangs)
            ledger = job.ledger()
        took_s = time.monotonic() - began
        at = {step: float((out / f"hang-{step}").read_text()) for step in hangs}
        faults = [one for one in ledger.faults if one.kind not in ("broken", "exit")]
        losses = [
            dict.fromkeys((out / f"loss-{rank}.txt").read_text().splitlines())
            for rank in range(options.ranks)
        ]
    found: dict[str, list[tuple[bool, float]]] = {name: [] for name in KINDS}
    times = sorted(at.values())
    for step, (rank, kind) in hangs.items():
        until = next((time_s for time_s in times if time_s > at[step]), float("inf"))
        of_this = [one for one in faults if at[step] <= one.seen_s < until]
        right = [one.rank for one in of_this] == [rank]
        found[kind].append((right, of_this[0].seen_s - at[step] if of_this else float("inf")))
    load = Path("/proc/loadavg").read_text().split()[0]
    twice = sum(len(lines) - steps for lines in losses)
    if options.json:
        print(json.dumps({"found": found, "took_s": took_s, "load": load, "twice": twice}))
        return
    print(
        f"{options.hangs} hangs in {took_s:.0f} s, {len(faults)} faults; load {load}; losses twice: {twice}"
    )
    print(f"{'kind':20} {'n':>3} {'right':>5} {'median s':>9} {'max s':>7}")
    everything = [one for ones in found.values() for one in ones]
    for name, ones in (*found.items(), ("all", everything)):
        if ones:
            seconds = [one for _, one in ones]
            good = sum(is_right for is_right, _ in ones)
            print(f"{name:20} {len(ones):3} {good:5} {statistics.median(seconds):9.2f} {max(seconds):7.2f}")


if __name__ == "__main__":
    main()
