"""Which tests reach which line of the pure rooms, and how long all take, by one run under coverage.py."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage

# What decides and nothing else: no process, socket or disk in them.
SUITES = (
    "tests/unit/control",
    "tests/unit/membership",
    "tests/property/test_peering.py",
    "tests/property/test_protection.py",
    "tests/property/test_keeping.py",
    "tests/property/test_idle_replicas.py",
)
# A mutant that runs for so many times as long as everything does has stuck.
PATIENCE = 4.0
LEAST_S = 60.0


@dataclass(frozen=True)
class Reached:
    """`lines` has for each file, from the root, and line the tests (ids, whatever parameters)."""

    lines: dict[str, dict[int, tuple[str, ...]]]
    took_s: float

    @property
    def tests(self) -> set[str]:
        return {test for lines in self.lines.values() for tests in lines.values() for test in tests}

    @property
    def deadline_s(self) -> float:
        return max(LEAST_S, PATIENCE * self.took_s)

    def by(self, path: str, line: int) -> tuple[str, ...]:
        """Return the tests that reach a line."""
        return self.lines.get(path, {}).get(line, ())


def measure(root: Path, rooms: Sequence[str]) -> Reached:
    """Run the suites as they are. Raises SystemExit where one fails already."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptless-mutants-") as folder:
        data, rc = Path(folder) / "data", Path(folder) / "rc"
        rc.write_text(f"[run]\ndata_file = {data}\ndynamic_context = test_function\n")
        include = ",".join(f"{root / room}/*" for room in rooms)
        pytest = (
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "--timeout=0",
            "--hypothesis-seed=0",
            *SUITES,
        )
        run = [sys.executable, "-m", "coverage", "run", f"--rcfile={rc}", f"--include={include}", *pytest]
        done = subprocess.run(run, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the tests fail without any mutant:\n{done.stdout[-4000:]}")
        found = coverage.CoverageData(str(data))
        found.read()
        lines = {_path(root, name): _tests(root, found, name) for name in found.measured_files()}
    return Reached(lines, time.monotonic() - began)


def _path(root: Path, name: str) -> str:
    return str(Path(name).resolve().relative_to(root.resolve()))


def _tests(root: Path, data: coverage.CoverageData, name: str) -> dict[int, tuple[str, ...]]:
    contexts = data.contexts_by_lineno(name)
    return {
        line: tuple(sorted(filter(None, (_id(root, c) for c in found)))) for line, found in contexts.items()
    }


def _id(root: Path, context: str) -> str | None:
    """`tests.unit.control.test_plan.test_x` as pytest's id; None for what no test has run (imports)."""
    module, _, function = context.rpartition(".")
    path = Path(*module.split(".")).with_suffix(".py") if module else None
    return f"{path}::{function}" if path is not None and (root / path).is_file() else None
