"""`python -m tests.mutants`: so many mutants of the pure rooms, each against the tests that reach its line.

First the tests run once as they are, and what each line is reached by is noted (coverage.py's contexts).
Then each mutant gets a process of its own, forked from one that has all libraries loaded and none of ours: it
runs the tests that reach the mutated line, then jobs in the simulator, until something fails. A mutant that
nothing notices survives, and is shown.

What makes no difference (an equivalent mutant) stands in `equivalent.txt` with its reason, and is not tried.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from .mutations import Mutant, mutants
from .reached import Reached, measure
from .trial import Trial, Verdict, preload

ROOT = Path(__file__).parents[2]
ROOMS = ("daemon/control", "daemon/membership")
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


def tried(reached: Reached, item: tuple[str, Mutant]) -> Result:
    """Try one mutant in a process of its own."""
    path, mutant = item
    began = time.monotonic()
    verdict = Verdict(None)
    tests = reached.by(path, mutant.line)
    if tests:
        verdict = Trial(path, mutant.source).run(tests, deadline_s=reached.deadline_s)
    if verdict.found is None:
        verdict = Trial(path, mutant.source).simulate(deadline_s=reached.deadline_s)
    return Result(path, mutant.line, str(mutant), verdict.found, time.monotonic() - began)


def check_tool(reached: Reached) -> None:
    """Raise SystemExit where a module as it is does not pass, or one that cannot be imported does."""
    path = next(iter(sorted(reached.lines)))
    tests = min(filter(None, reached.lines[path].values()), key=len)
    source = (ROOT / path).read_text()
    found = Trial(path, source).run(tests, deadline_s=reached.deadline_s).found
    if found is not None:
        raise SystemExit(f"{path} without any mistake is found by {found}")
    if Trial(path, "raise ValueError").run(tests, deadline_s=reached.deadline_s).found is None:
        raise SystemExit(f"{path} that cannot be imported is not found")


def report(results: list[Result], as_json: Path | None) -> int:
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
    if as_json is not None:
        as_json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
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
    args = parser.parse_args()
    paths = args.files or [
        str(path.relative_to(ROOT)) for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
    ]
    preload()
    began = time.monotonic()
    reached = measure(ROOT, ROOMS)
    print(f"{len(reached.tests)} tests as they are: {time.monotonic() - began:.0f} s", flush=True)
    check_tool(reached)
    results: list[Result] = []
    todo = chosen(paths, args.count, args.seed)
    with ThreadPoolExecutor(args.processes) as pool:
        for result in pool.map(partial(tried, reached), todo):
            results.append(result)
            what = f"{result.path}:{result.mistake}: {result.found or 'SURVIVES'} ({result.took_s:.1f} s)"
            print(f"[{len(results)}/{len(todo)}] {what}", flush=True)
    return report(results, args.json)


if __name__ == "__main__":
    sys.exit(main())
