"""One mutant against tests, in a forked process that imports our code first, mistake included."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Jobs in the simulator, and quarrels about decrees, that a mutant has to come through.
SEEDS = 60
# What tests import that is not ours: loaded once, before the fork.
LIBRARIES = (
    "msgspec",
    "hypothesis",
    "sqlalchemy",
    "click",
    "yaml",
    "xxhash",
    "asyncio",
    "multiprocessing.pool",
)
POLL_S = 0.02
# Exit codes of a child; BROKEN: the trial itself has failed, and says nothing of the mutant.
PASSED, FOUND, BROKEN = 0, 1, 3


@dataclass(frozen=True)
class Verdict:
    """Who found it; None: nobody."""

    found: str | None


def preload() -> None:
    """Import the libraries. Raises RuntimeError where our own code is loaded already."""
    for library in LIBRARIES:
        importlib.import_module(library)
    ours = [name for name in sys.modules if name.split(".")[0] == "ckptless"]
    if ours:
        raise RuntimeError(f"{ours[0]} is loaded before the mutants are")


@dataclass(frozen=True)
class Trial:
    """The module at `path` (from the root of the repository) with another source."""

    path: str
    source: str

    def run(self, tests: Sequence[str], deadline_s: float) -> Verdict:
        """Run these tests until one fails."""
        return self._forked(lambda say: self._pytest(tests, say), deadline_s)

    def simulate(self, deadline_s: float) -> Verdict:
        """Run jobs in the simulator until a check of it fails."""
        return self._forked(_simulate, deadline_s)

    def _pytest(self, tests: Sequence[str], say: Callable[[str], None]) -> int:
        class Failed:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    say(report.nodeid)

            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed:
                    say(f"import of {report.nodeid}")

        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            # pytest cannot look into the asserts of what is loaded before the fork.
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-m",
            "not slow",
            "--timeout=0",
        ]
        code = pytest.main([*options, *tests], plugins=[Failed()])
        # Interrupted: by a test's file that cannot be imported.
        found = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
        return PASSED if code == pytest.ExitCode.OK else FOUND if code in found else BROKEN

    def _forked(self, work: Callable[[Callable[[str], None]], int], deadline_s: float) -> Verdict:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(work, writer)
        os.close(writer)
        code = _waited(child, deadline_s)
        with os.fdopen(reader, "rb") as said:
            who = said.readline().decode().strip()
        if code not in (PASSED, FOUND, None):
            raise RuntimeError(f"a trial of {self.path} has broken, exit code {code}")
        if code == PASSED:
            return Verdict(None)
        return Verdict(who or "timeout")

    def _child(self, work: Callable[[Callable[[str], None]], int], writer: int) -> None:
        """Never returns."""
        code = BROKEN
        try:
            os.setsid()
            os.chdir(ROOT)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            logging.disable(logging.CRITICAL)
            name = ".".join(("ckptless", *Path(self.path).with_suffix("").parts))
            sys.meta_path.insert(0, _Finder(name, self.source))
            code = work(partial(_say, writer))
        finally:
            os._exit(code)


def _say(writer: int, text: str) -> None:
    os.write(writer, text.encode() + b"\n")


def _waited(child: int, deadline_s: float) -> int | None:
    """Return the exit code; None where it had to be killed."""
    limit = time.monotonic() + deadline_s
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _simulate(say: Callable[[str], None]) -> int:
    from tests.sim.agreeing import quarrel
    from tests.sim.story import Violation
    from tests.sim.world import simulate

    for seed in range(SEEDS):
        for what, job in (("simulate", simulate), ("quarrel", quarrel)):
            try:
                job(seed)
            except Violation:
                say(f"{what} {seed}")
                return FOUND
    return PASSED


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Gives out one module with another source."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f"mutant of {fullname}")

    def get_source(self, fullname: str) -> str:
        return self._source
