"""Measures recoveries of the toy job: `bench.py equal` (bits), `bench.py stall` (seconds)."""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ckptless.daemon.ledger.merge import read_all

TOY = Path(__file__).with_name("toy.py")
PLACES = ("forward", "backward", "update", "commit", "committed")
RANKS = 4
DEADLINE_S = 600


def run_toy(out: Path, steps: int, faults: list[dict[str, Any]], spares: int) -> None:
    """One local run; raises where it fails."""
    command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--local"]
    command += ["--nodes", str(RANKS), "--spares", str(spares), "--max-stall", "60"]
    command += ["--state-dir", str(out / "state"), str(TOY), str(steps), str(out / "out"), json.dumps(faults)]
    out.mkdir(parents=True)
    with (out / "console.txt").open("wb") as console:
        done = subprocess.run(command, stdout=console, stderr=console, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{(out / 'console.txt').read_text()}")


def lines(out: Path) -> list[tuple[int, int, str, float, int]]:
    """(rank, step, loss as hex, wall time, generation) of every completed step, redone ones included."""
    rows: list[tuple[int, int, str, float, int]] = []
    for path in sorted((out / "out").glob("loss-*.txt")):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 5:
                rows.append((rank, int(parts[0]), parts[1], float(parts[3]), int(parts[4])))
    return rows


def random_faults(seed: int, steps: int) -> list[dict[str, Any]]:
    """7 processes, 2 nodes, and 1 rank that dies in the recovery of another."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(3, steps - 5, 4), 9))
    kinds = ["kill"] * 7 + ["node"] * 2
    draw.shuffle(kinds)
    faults = [
        {"rank": draw.randrange(RANKS), "step": step, "where": draw.choice(PLACES), "kind": kind}
        for step, kind in zip(at, kinds, strict=True)
    ]
    # Strikes in whatever recovery comes after the middle of the run, on another rank than the first fault's.
    middle = faults[4]
    other = (int(str(middle["rank"])) + 1) % RANKS
    faults.append({"rank": other, "where": "recovered", "kind": "kill", "from": middle["step"]})
    return faults


def equal(args: argparse.Namespace) -> None:
    """Bar: every loss equal to the fault-free run's."""
    with tempfile.TemporaryDirectory() as scratch:
        clean = Path(scratch) / "clean"
        run_toy(clean, args.steps, [], 2)
        reference = {(rank, step): loss for rank, step, loss, _, _ in lines(clean)}
        for seed in args.seeds:
            out = Path(scratch) / f"seed-{seed}"
            run_toy(out, args.steps, random_faults(seed, args.steps), 2)
            rows = lines(out)
            wrong = [row for row in rows if reference.get(row[:2]) != row[2]]
            missing = set(reference) - {row[:2] for row in rows}
            struck = len(list((out / "out").glob("fault-*")))
            final = (out / "out/final.txt").read_text() == (clean / "out/final.txt").read_text()
            print(
                f"seed {seed}: {struck} faults, {max(row[4] for row in rows) - 1} recoveries, "
                f"{len(reference) - len(missing)} of {len(reference)} losses there, {len(wrong)} differ, "
                f"{len(rows) - len(reference) + len(missing)} redone, final parameters equal: {final}"
            )
            if wrong or missing or not final or struck != 10:
                raise SystemExit("the bar is not met")


def stall(args: argparse.Namespace) -> None:
    """Bar: SIGKILL of a rank to the first new step that every rank has completed."""
    draw = random.Random(args.seed)
    faults = [
        {"rank": draw.randrange(RANKS), "step": 5 * (n + 1), "where": draw.choice(PLACES), "kind": "kill"}
        for n in range(args.faults)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        run_toy(out, 5 * (args.faults + 1), faults, 1)
        rows = lines(out)
        stalls: list[float] = []
        for number in range(len(faults)):
            at = float((out / f"out/fault-{number}").read_text())
            generation = min(row[4] for row in rows if row[3] > at and row[4] >= number + 2)
            first = min(row[1] for row in rows if row[4] == generation)
            stalls.append(max(row[3] for row in rows if row[4] == generation and row[1] == first) - at)
        agreed = sorted(row.phases["agree"] for row in read_all(out / "state").recoveries)
    stalls.sort()
    p99 = stalls[min(len(stalls) - 1, round(0.99 * (len(stalls) - 1)))]
    print(
        f"{len(stalls)} SIGKILLs, {RANKS} ranks, to the first step completed by all: "
        f"median {statistics.median(stalls):.3f} s, p99 {p99:.3f} s, max {stalls[-1]:.3f} s "
        f"(load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores)"
    )
    print(
        f"of which until {RANKS + 1} daemons had agreed: median {statistics.median(agreed) * 1000:.1f} ms, "
        f"most {agreed[-1] * 1000:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    same = commands.add_parser("equal")
    same.add_argument("--steps", type=int, default=200)
    same.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    same.set_defaults(run=equal)
    time_it = commands.add_parser("stall")
    time_it.add_argument("--faults", type=int, default=100)
    time_it.add_argument("--seed", type=int, default=1)
    time_it.set_defaults(run=stall)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
