"""A process that has all tests loaded, and runs some of them in forks of itself."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "-s",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:terminal",
    "-o",
    "addopts=--import-mode=importlib",
    "--hypothesis-seed=0",
    "-m",
    "not slow",
    "--timeout=0",
    # pytest cannot look into the asserts of what is loaded already.
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
# So many cases of each property: what takes a thousand to find is not worth the time of all the others.
CASES = 50
# Exit codes of a fork; BROKEN: the trial itself has failed, and says nothing of the mutant.
PASSED, FOUND, BROKEN = 0, 1, 3
# A mutant that takes more memory never ends; nor does one that computes for so many times as long as what it
# runs takes otherwise, or has so many times that time and does not compute.
MOST_NBYTES = 4 << 30
PATIENCE, LEAST_S = 4.0, 3.0
IDLE = 20

Say = Callable[[str], None]
Work = Callable[[Say], int]


@dataclass(frozen=True)
class Verdict:
    """Who found it; None: nobody."""

    found: str | None


def with_tests(paths: Sequence[str], work: Callable[[list[pytest.Item]], None]) -> None:
    """Load the tests of these files and folders and do `work` with them. SystemExit if one is broken."""
    session = _Session(work)
    code = pytest.main([*OPTIONS, *paths], plugins=[session])
    if session.stopped is not None:
        raise session.stopped
    if not session.done:
        raise SystemExit(f"the tests cannot be loaded: pytest ends with {code}")


@dataclass(eq=False)
class _Session:
    work: Callable[[list[pytest.Item]], None]
    done: bool = False
    # What has ended the work: pytest would only print it.
    stopped: BaseException | None = None

    def pytest_collection(self) -> None:
        # After the conftest's. A mistake that was found need not be found in its simplest form.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", parent=settings(), phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            # What hypothesis' own plugin looks at, too: a second @settings is refused.
            test: Any = getattr(item, "obj", None)
            drawn = getattr(test, "_hypothesis_internal_use_settings", None)
            if isinstance(drawn, settings) and drawn.max_examples > CASES:
                test._hypothesis_internal_use_settings = settings(parent=drawn, max_examples=CASES)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False
        gc.freeze()
        self.done = True
        try:
            self.work(session.items)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # it goes on in `with_tests`
            self.stopped = error
        return True


@dataclass(eq=False)
class _Reports:
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"import of {report.nodeid}")


def passes(item: pytest.Item) -> bool:
    """Run one loaded test, here and now."""
    reports = _Reports()
    item.config.pluginmanager.register(reports)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    finally:
        item.config.pluginmanager.unregister(reports)
    return not reports.failed


def load_and_run(ids: Sequence[str]) -> str | None:
    """Load these tests anew and run them; which one fails first, or cannot be imported."""
    reports = _Reports()
    code = pytest.main(["-x", *OPTIONS, *ids], plugins=[reports])
    if code == pytest.ExitCode.OK:
        return None
    if code == pytest.ExitCode.USAGE_ERROR and not reports.failed:
        return "import of a conftest"
    if not reports.failed:
        raise RuntimeError(f"pytest ends with {code}, and no test has failed")
    return reports.failed[0]


@dataclass(frozen=True)
class Fork:
    """A fork that does some work and says what came of it."""

    pid: int
    reader: int

    @classmethod
    def of(cls, work: Work) -> Fork:
        """Start it. What it does is to say beforehand how long that takes: `allow`."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(work, writer)
        os.close(writer)
        return cls(pid, reader)

    def verdict(self, status: int) -> Verdict:
        """What came of it, by its exit status. Raises RuntimeError where the trial itself has failed."""
        with os.fdopen(self.reader, "rb") as said:
            who = said.readline().decode().strip()
        code = os.waitstatus_to_exitcode(status)
        if code == PASSED:
            return Verdict(None)
        if code == FOUND:
            return Verdict(who)
        if code in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
            return Verdict("timeout")
        raise RuntimeError(f"a trial has broken, exit code {code}: {who}")


def _child(work: Work, writer: int) -> None:
    """Never returns."""
    code, why = BROKEN, ""
    try:
        os.chdir(ROOT)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_NBYTES, MOST_NBYTES))
        code = work(lambda text: _say(writer, text))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent raises it
        why = repr(error)
    finally:
        if code == BROKEN:
            _say(writer, why)
        os._exit(code)


def allow(seconds: float) -> None:
    """End this process where it computes for much longer than that from now on, or does nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + PATIENCE * seconds + LEAST_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    signal.alarm(int(IDLE * (PATIENCE * seconds + LEAST_S)))


def _say(writer: int, text: str) -> None:
    os.write(writer, " ".join(text.split())[:4000].encode() + b"\n")


def waited(fork: Fork) -> Verdict:
    """Wait for one fork."""
    # no deadline: it has one of its own
    return fork.verdict(os.waitpid(fork.pid, 0)[1])
