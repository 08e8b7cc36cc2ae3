"""`python -m tests.mutants`: so many mutants of the pure rooms, each against what reaches its line.

First all tests, and some jobs in the simulator, run once as they are, and what each line is reached by is
noted. Then each mutant gets a fork of a process that has all of it loaded: its mistake is put into the living
functions, and what reaches the line runs, the quickest first, tests before the simulator, until something
fails. A mutant that nothing notices survives, and is shown.

What makes no difference (an equivalent mutant) stands in `equivalent.txt` with its reason, and is not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from .mutations import Mutant, mutants
from .reached import SUITES, Check, Reached, checks_of, measure
from .trial import Trial
from .warm import ROOT, Fork, with_tests

ROOMS = (
    "daemon/agent/core",
    "daemon/replication",
    *(f"daemon/ckptlessd/{room}" for room in ("consensus", "planning", "recovery", "membership")),
)
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
# Of those that are not equivalent, so many must be found.
WANTED = 0.95


@dataclass(frozen=True)
class Result:
    """What became of one mutant: `found` by which test, or "timeout"; None: it survived."""

    path: str
    line: int
    mistake: str
    found: str | None
    took_s: float


def chosen(paths: list[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return `count` mutants (0: all) of these files, drawn by `seed`."""
    every = [(path, mutant) for path in paths for mutant in mutants((ROOT / path).read_text())]
    known = equivalents()
    every = [(path, m) for path, m in every if (path, *m.words) not in known]
    if not count or count >= len(every):
        return every
    return sorted(random.Random(seed).sample(every, count), key=lambda item: (item[0], item[1].line))


def equivalents() -> set[tuple[str, str, str]]:
    """Return (path, before, after) of each equivalent mutant: a line each, the reason in a comment."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    if len(lines) % 3:
        raise SystemExit(f"{EQUIVALENT.name}: path, before and after, a line each")
    return set(zip(lines[0::3], lines[1::3], lines[2::3], strict=True))


@dataclass
class Trials:
    """So many at a time. What has found many mutants of a file is tried first there."""

    checks: Mapping[str, Check]
    reached: Reached
    finders: Counter[tuple[str, str]] = field(default_factory=Counter)

    def results(self, todo: Sequence[tuple[str, Mutant]], processes: int) -> Iterator[Result]:
        running: dict[int, tuple[Fork, str, Mutant, float]] = {}
        waiting = list(todo)
        while waiting or running:
            while waiting and len(running) < processes:
                path, mutant = waiting.pop(0)
                names = self._in_order(path, mutant.line)
                seconds = {name: self.reached.seconds[name] for name in names}
                fork = Trial(path, mutant.line, mutant.source).start(self.checks, seconds)
                running[fork.pid] = fork, path, mutant, time.monotonic()
            # no deadline: each has one of its own
            pid, status = os.wait()
            fork, path, mutant, began = running.pop(pid)
            found = fork.verdict(status).found
            if found is not None:
                self.finders[path, found] += 1
            yield Result(path, mutant.line, str(mutant), found, time.monotonic() - began)

    def _in_order(self, path: str, line: int) -> list[str]:
        found = self.reached.by(path, line)
        return sorted(found, key=lambda name: ("::" not in name, -self.finders[path, name]))


def check_tool(trials: Trials) -> None:
    """Raise SystemExit where a module as it is does not pass, or one that cannot be imported does."""
    path = "daemon/ckptlessd/consensus/lease.py"
    source = (ROOT / path).read_text()
    line = source[: source.index("if is_quorum(")].count("\n") + 1
    as_it_is, broken = Mutant(line, "", "", source), Mutant(1, "", "", "raise ValueError")
    (passed,) = trials.results([(path, as_it_is)], 1)
    if passed.found is not None:
        raise SystemExit(f"{path} without any mistake is found by {passed.found}")
    (passed,) = trials.results([(path, Mutant(1, "", "", source))], 1)
    if passed.found is not None:
        raise SystemExit(f"{path} loaded anew without any mistake is found by {passed.found}")
    (found,) = trials.results([(path, broken)], 1)
    if found.found is None or not found.found.startswith("import of"):
        raise SystemExit(f"{path} that cannot be imported is found by {found.found}")


def report(results: list[Result]) -> int:
    """Print who survived and the share that was found; the exit code."""
    survivors = [result for result in results if result.found is None]
    for result in survivors:
        print(f"survives  {result.path}:{result.mistake}")
    share = 1 - len(survivors) / max(1, len(results))
    print(
        f"{len(results) - len(survivors)} of {len(results)} mutants found: {share:.1%}, wanted {WANTED:.0%}"
    )
    by_file = Counter(result.path for result in survivors)
    for path, count in by_file.most_common():
        print(f"  {path}: {count} survive of {sum(result.path == path for result in results)}")
    return int(share < WANTED)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", help="modules, from the root of the repository; none: all pure rooms"
    )
    parser.add_argument("--count", type=int, default=300, help="how many mutants, 0: all")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="every result, into this file")
    parser.add_argument(
        "--again", action="store_true", help="only what survives by that file, or is not in it"
    )
    args = parser.parse_args()
    paths = args.files or [
        str(path.relative_to(ROOT)) for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
    ]
    code = 0

    def work(items: list[pytest.Item]) -> None:
        nonlocal code
        todo, kept = chosen(paths, args.count, args.seed), list[Result]()
        if args.again:
            todo, kept = left_by(args.json, todo, chosen(paths, 0, 0))
        code = run(items, todo, args.processes, kept, args.json)

    with_tests(SUITES, work)
    return code


def left_by(
    told: Path, drawn: list[tuple[str, Mutant]], every: list[tuple[str, Mutant]]
) -> tuple[list[tuple[str, Mutant]], list[Result]]:
    """Return what survived in an earlier run, wherever it stands now, and what that did not come to.

    And the results that stay.
    """
    before = [Result(**result) for result in json.loads(told.read_text())]
    tried = {(one.path, one.mistake) for one in before}
    survived = {(one.path, one.mistake.partition(": ")[2]) for one in before if one.found is None}
    todo = [(path, m) for path, m in every if (path, str(m).partition(": ")[2]) in survived]
    todo += [(path, m) for path, m in drawn if (path, str(m)) not in tried]
    return todo, [one for one in before if one.found is not None]


def run(
    items: list[pytest.Item],
    todo: list[tuple[str, Mutant]],
    processes: int,
    kept: list[Result],
    as_json: Path | None,
) -> int:
    """Try them all; the exit code. `kept`: results of before."""
    began = time.monotonic()
    checks = checks_of(items)
    reached = measure(checks, ROOMS)
    took_s = sum(reached.seconds.values())
    print(f"{len(checks)} tests and simulated jobs: {time.monotonic() - began:.0f} s, CPU {took_s:.0f} s")
    trials = Trials(checks, reached)
    check_tool(trials)
    results: list[Result] = []
    began = time.monotonic()
    for result in trials.results(todo, processes):
        results.append(result)
        if as_json is not None:
            as_json.write_text(json.dumps([asdict(one) for one in (*kept, *results)], indent=1) + "\n")
        what = f"{result.path}:{result.mistake}: {result.found or 'SURVIVES'} ({result.took_s:.1f} s)"
        print(f"[{len(results)}/{len(todo)}] {what}", flush=True)
    print(f"{(time.monotonic() - began) / max(1, len(results)):.2f} s each")
    return report([*kept, *results])


if __name__ == "__main__":
    sys.exit(main())
