"""How long training stands still when a rank is killed: `python -m tests.bench.crash`, ours beside the peers.

SIGKILL strikes a rank drawn at random, at a random moment of a step, from outside. A global step is completed
when every rank that takes part has noted it for the first time; a stall is the longest time between two
completed steps around the kill, less the median of such times. What else is told: when the killed rank trains
again, how many steps were done again, how many (rank, step) have another loss than in a run without faults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from ckptless.daemon.ledger.merge import read_all
from ckptless.daemon.protocol.records import PHASES

from .systems import SYSTEMS, Case, Running, System, plain, running

START_DEADLINE_S = 60.0
RECOVERY_DEADLINE_S = 45.0
# Steps between two kills, and after one before it counts as over.
BETWEEN, AFTER = 15, 3
POLL_S = 0.01

Line: TypeAlias = tuple[int, str, float]
"""A step, the loss as hex, and when, by CLOCK_MONOTONIC."""


class StuckError(Exception):
    """No training within the deadline; the message has the ends of the logs."""


@dataclass(frozen=True)
class Kill:
    """Seconds without a step, until the rank itself trains again, and how many steps were done again."""

    stall_s: float
    back_s: float
    redone: int


@dataclass(frozen=True)
class Outcome:
    """A system in a case: its kills, the median time of a step, losses unlike those of plain torch."""

    kills: list[Kill]
    step_s: float
    losses: int
    differ: int
    stuck: str = ""
    # Of ours, by its ledger: the median of each phase of the recoveries, in seconds.
    phases: dict[str, float] = field(default_factory=dict)


def lines(run: Running) -> dict[int, list[Line]]:
    """Everything that ranks have noted; a last line may be half of one."""
    found: dict[int, list[Line]] = {}
    for path in run.out.glob("steps-*"):
        whole, _, _ = path.read_text().rpartition("\n")
        words = [line.split() for line in whole.splitlines()]
        found[int(path.name.split("-")[1])] = [(int(w[0]), w[1], float(w[2])) for w in words]
    return found


def newest(run: Running) -> dict[int, tuple[int, float]]:
    """The highest step that each rank has noted, and when it was that first."""
    found: dict[int, tuple[int, float]] = {}
    for rank, rows in lines(run).items():
        for step, _, at in rows:
            if step > found.get(rank, (0, 0.0))[0]:
                found[rank] = (step, at)
    return found


def completions(found: dict[int, list[Line]]) -> list[float]:
    """When each global step was completed, in order of time."""
    last: dict[int, float] = {}
    for rows in found.values():
        first: dict[int, float] = {}
        for step, _, at in rows:
            first.setdefault(step, at)
        for step, at in first.items():
            last[step] = max(at, last.get(step, 0.0))
    return sorted(last.values())


def wait(run: Running, what: Callable[[], bool], deadline_s: float) -> None:
    """Raises StuckError."""
    limit = time.monotonic() + deadline_s
    while not what():
        run.tend()
        if time.monotonic() > limit:
            raise StuckError(run.logs())
        time.sleep(POLL_S)


def reaches(run: Running, step: int) -> bool:
    """Whether all ranks have noted such a step."""
    at = newest(run)
    return len(at) == run.case.ranks and all(done >= step for done, _ in at.values())


def top(run: Running) -> int:
    """The newest step of anybody."""
    return max((step for step, _ in newest(run).values()), default=0)


def strike(run: Running, draw: random.Random, step_s: float) -> tuple[int, float]:
    """Kill a rank within a step; returns it, and when."""
    victim = draw.choice([rank for rank in range(run.case.ranks) if rank not in run.spared])
    time.sleep(draw.uniform(0, 2 * step_s))
    pid = run.pid(victim)
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return victim, at


def measure(system: System, case: Case, kills: int, seed: int) -> tuple[Outcome, dict[int, list[Line]]]:
    """Kill ranks of one run, one after the other."""
    draw = random.Random(seed)
    struck: list[tuple[int, float]] = []
    stuck = ""
    with running(system.start, case) as run:
        try:
            wait(run, lambda: reaches(run, BETWEEN), START_DEADLINE_S)
            for _ in range(kills):
                before = top(run)
                wait(run, lambda low=before: reaches(run, low + BETWEEN), RECOVERY_DEADLINE_S)  # type: ignore[misc]
                gaps = [b - a for a, b in pairs(completions(lines(run))[-BETWEEN:])]
                hit = strike(run, draw, statistics.median(gaps))
                # Steps that were under way when it died may still come.
                seen = top(run) + AFTER
                wait(run, lambda low=seen: reaches(run, low), RECOVERY_DEADLINE_S)  # type: ignore[misc]
                struck.append(hit)
        except StuckError as error:
            stuck = str(error)
        found = lines(run)
        phases = phases_of(run.out / "state")
    done = completions(found)
    step_s = statistics.median([b - a for a, b in pairs(done)]) if len(done) > 2 else float("nan")
    told = [kill(found, done, victim, at, step_s) for victim, at in struck]
    return Outcome(told, step_s, 0, 0, stuck, phases), found


def phases_of(state_dir: Path) -> dict[str, float]:
    """Return the median of each phase of the recoveries in a ledger, in order; none where there is none."""
    found = [one.phases for one in read_all(state_dir).recoveries] if state_dir.exists() else []
    return {name: statistics.median(one.get(name, 0.0) for one in found) for name in PHASES if found}


def pairs(values: list[float]) -> Iterator[tuple[float, float]]:
    """Neighbours."""
    return itertools.pairwise(values)


def kill(found: dict[int, list[Line]], done: list[float], victim: int, at: float, step_s: float) -> Kill:
    """Return the cost of one kill."""
    before = max((when for when in done if when <= at), default=at)
    low = max((step for step, _, when in found[victim] if when <= at), default=0)
    back = min(when for step, _, when in found[victim] if when > at and step > low)
    window = [when for when in done if before <= when <= back + AFTER * step_s]
    stall = max(b - a for a, b in pairs(window)) - step_s
    redone = 0
    for rows in found.values():
        seen = {step for step, _, when in rows if when <= at}
        redone = max(
            redone, sum(1 for step, _, when in rows if at < when <= back + AFTER * step_s and step in seen)
        )
    return Kill(stall, back - at, redone)


def compared(outcome: Outcome, found: dict[int, list[Line]], reference: dict[int, list[Line]]) -> Outcome:
    """With how many losses are other than without faults, of those that both have."""
    clean = {(rank, step): loss for rank, rows in reference.items() for step, loss, _ in rows}
    losses = [
        (loss, clean[rank, step])
        for rank, rows in found.items()
        for step, loss, _ in rows
        if (rank, step) in clean
    ]
    return replace(outcome, losses=len(losses), differ=sum(1 for a, b in losses if a != b))


def without_faults(case: Case, steps: int) -> dict[int, list[Line]]:
    """Return the notes of ranks under torchrun, where nothing is saved and nobody is killed."""
    with running(plain, case) as run:
        wait(run, lambda: reaches(run, steps), START_DEADLINE_S + steps)
        return lines(run)


# --------------------------------------------------------------------------------------------- main

CASES = [Case(ranks, layout, "toy") for layout in ("ddp", "fsdp") for ranks in (2, 4, 8)]
# Peers without tuning: with --short in one case.
AS_IS, AS_IS_CASE = ("torchrun", "nvrx", "torchft"), Case(4, "ddp", "toy")
LARGE = [Case(4, layout, "20m") for layout in ("ddp", "fsdp")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layouts", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--sizes", nargs="+", choices=("toy", "20m"), default=["toy", "20m"])
    parser.add_argument("--kills", type=int, default=2, help="of a peer in a turn")
    parser.add_argument("--own-kills", type=int, default=10, help="of ckptless in a turn")
    parser.add_argument("--short", action="store_true", help="peers as they are in one case alone")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--logs", action="store_true", help="show the logs of what gets stuck")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    told = []
    for case in [*CASES, *LARGE]:
        if case.ranks not in args.ranks or case.layout not in args.layouts or case.size not in args.sizes:
            continue
        # As far as the longest of the runs is likely to come: some steps are made while one is waited for.
        most = max(args.own_kills if name == "ckptless" else args.kills for name in args.systems)
        reference = without_faults(case, 2 * BETWEEN + (BETWEEN + 3 * AFTER) * most)
        for turn in range(args.turns):
            for name in args.systems:
                system = SYSTEMS[name]
                if case.layout not in system.layouts or (args.short and name in AS_IS and case != AS_IS_CASE):
                    continue
                kills = args.own_kills if name == "ckptless" else args.kills
                outcome, found = measure(system, case, kills, seed=turn + 1)
                outcome = compared(outcome, found, reference)
                load = os.getloadavg()[0]
                told.append({"system": name, "case": asdict(case), "load": load, **asdict(outcome)})
                show(name, case, outcome, load)
                if args.json:
                    args.json.write_text(json.dumps({"cpus": os.cpu_count(), "runs": told}, indent=1))
                if outcome.stuck and args.logs:
                    sys.stderr.write(outcome.stuck + "\n")


def show(name: str, case: Case, outcome: Outcome, load: float) -> None:
    """A line of what was just measured."""
    stalls = [one.stall_s for one in outcome.kills]
    text = (
        f"median {statistics.median(stalls):.3f} s of {len(stalls)}, most {max(stalls):.3f}"
        if stalls
        else "-"
    )
    back = f", back {statistics.median(one.back_s for one in outcome.kills):.3f}" if stalls else ""
    redone = f", redone {max((one.redone for one in outcome.kills), default=0)}"
    stuck = ", STUCK" if outcome.stuck else ""
    phases = "".join(f", {name} {1000 * seconds:.0f}" for name, seconds in outcome.phases.items())
    sys.stderr.write(
        f"{case}: {name}: {text}{back}{redone}, {outcome.differ} of {outcome.losses} losses differ, "
        f"step {outcome.step_s * 1000:.0f} ms, load {load:.1f}{stuck}{phases}\n"
    )


if __name__ == "__main__":
    main()
