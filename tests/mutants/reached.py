"""Which tests and simulated jobs reach which line of the pure rooms, and how long each takes."""

from __future__ import annotations

import ast
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import coverage
import pytest

from .transplant import is_in_function
from .warm import PASSED, ROOT, Fork, Say, allow, passes, waited

# What decides and nothing else: no process, socket or disk in them.
SUITES = (
    "tests/unit/agent",
    "tests/unit/control",
    "tests/unit/membership",
    "tests/unit/daemon/test_faults.py",
    "tests/unit/daemon/test_placement.py",
    "tests/unit/daemon/test_plan.py",
    "tests/unit/daemon/test_timeline.py",
    "tests/property/test_peering.py",
    "tests/property/test_protection.py",
    "tests/property/test_keeping.py",
    "tests/sim/test_agreement.py",
)
# Jobs in the simulator, elections, and quarrels about decrees, that a mutant has to come through in the end.
SEEDS = 40
# The quickest of them, so many seconds for each mutant; and no test takes longer than the second.
SIMULATED_S, EACH_S = 5.0, 60.0
# Of a constant: the quickest tests.
ANEW_S = 10.0

Check = Callable[[], bool]


def simulated() -> dict[str, Check]:
    """The jobs by name; each says whether it went well."""
    from tests.sim.agreeing import quarrel
    from tests.sim.electing import election
    from tests.sim.world import simulate

    def check(job: Callable[[int], object], seed: int) -> Check:
        def run() -> bool:
            try:
                job(seed)
            except Exception:  # noqa: BLE001  # a violation, or a daemon that falls over
                return False
            return True

        return run

    jobs: Mapping[str, Callable[[int], object]] = {
        "election": election,
        "quarrel": quarrel,
        "simulate": simulate,
    }
    return {f"{name} {seed}": check(job, seed) for name, job in jobs.items() for seed in range(SEEDS)}


def checks_of(items: Sequence[pytest.Item]) -> dict[str, Check]:
    """All tests and simulated jobs, by their ids."""
    return {**{item.nodeid: partial(passes, item) for item in items}, **simulated()}


@dataclass(frozen=True)
class Reached:
    """`lines`: for each file, from the root, and line, the ids of what reaches it. `seconds`: of each id."""

    lines: Mapping[str, Mapping[int, Sequence[str]]]
    seconds: Mapping[str, float]

    def by(self, path: str, line: int) -> list[str]:
        """What may notice a mistake in that line, the quickest first, and tests before simulated jobs."""
        source = (ROOT / path).read_text()
        if is_in_function(source, line):
            found = set(self.lines.get(path, {}).get(line, ()))
        else:
            found = self._by_name(source, line) or {
                one for ids in self.lines.get(path, {}).values() for one in ids
            }
        tests = [one for one in found if "::" in one]
        jobs = self._quickest(found.difference(tests), SIMULATED_S)
        return self._quickest(tests, EACH_S if is_in_function(source, line) else ANEW_S) + jobs

    def _quickest(self, names: Iterable[str], seconds: float) -> list[str]:
        ordered = sorted(names, key=lambda one: self.seconds[one])
        spent = accumulate(self.seconds[one] for one in ordered)
        return [one for one, by_then in zip(ordered, spent, strict=True) if by_then <= seconds]

    def _by_name(self, source: str, line: int) -> set[str]:
        """Return what reaches a line that names a constant, or the class of a default, and tests that do."""
        there = [node for node in ast.parse(source).body if node.lineno <= line <= (node.end_lineno or 0)]
        names = {
            target.id
            for node in there
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        names |= {node.name for node in there if isinstance(node, ast.ClassDef)}
        found: set[str] = set()
        for path, lines in self.lines.items() if names else ():
            text = (ROOT / path).read_text().splitlines()
            for number, ids in lines.items():
                if names.intersection(re.findall(r"\w+", text[number - 1])):
                    found.update(ids)
        files = {one.partition("::")[0] for one in self.seconds if names and "::" in one}
        naming = {file for file in files if names.intersection(re.findall(r"\w+", (ROOT / file).read_text()))}
        return found | {one for one in self.seconds if one.partition("::")[0] in naming}


def measure(checks: Mapping[str, Check], rooms: Sequence[str]) -> Reached:
    """Run everything once, as it is. Raises SystemExit where something fails already."""
    with tempfile.TemporaryDirectory(prefix="ckptless-mutants-") as folder:
        told = Path(folder) / "reached.json"
        verdict = waited(Fork.of(lambda say: _measure(checks, rooms, told, say)))
        if verdict.found is not None:
            raise SystemExit(f"{verdict.found} fails without any mutant")
        lines, seconds = json.loads(told.read_text())
    ids = list(seconds)
    named = {
        path: {int(line): [ids[one] for one in found] for line, found in by_line.items()}
        for path, by_line in lines.items()
    }
    return Reached(named, seconds)


def _measure(checks: Mapping[str, Check], rooms: Sequence[str], told: Path, say: Say) -> int:
    run = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT / room}/*" for room in rooms])
    seconds: dict[str, float] = {}
    run.start()
    for number, (name, check) in enumerate(checks.items()):
        began = time.process_time()
        run.switch_context(str(number))
        allow(EACH_S)
        if not check():
            say(name)
            return 1
        seconds[name] = time.process_time() - began
    run.stop()
    data = run.get_data()
    lines = {
        str(Path(name).resolve().relative_to(ROOT.resolve())): {
            line: [int(one) for one in found if one] for line, found in data.contexts_by_lineno(name).items()
        }
        for name in data.measured_files()
    }
    told.write_text(json.dumps((lines, seconds)))
    return PASSED
