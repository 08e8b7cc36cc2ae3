"""The tests that stand on torch, on other torches: `matrix.py VERSION...`, one line of a table for each.

Each version gets a virtual environment in a folder of its own, .torch/VERSION, with this project and what its
tests need (PyPI's wheels, some 7 GB, which also work without a GPU); with --keep it stays and is used again.
Everything that is said there is in .torch/VERSION.log. The end is non-zero where anything has failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SETUP_DEADLINE_S = 1800.0
TESTS_DEADLINE_S = 3600.0

FOLDERS = ("tests/torch", "tests/unit/pytorch_hooks")
# On the simulated device, which is built against each torch; without g++ all of it is skipped.
DEVICES = ("tests/simdev", "tests/gpu", "tests/local/test_devices.py")
# Of what takes long or is a whole job: a kind of recovery each.
CHOSEN = (
    "tests/torch/test_sharded.py::test_left_while_activations_are_recomputed",
    "tests/torch/test_sharded.py::test_compiled_models",
    "tests/local/test_faults.py::test_nodes_before_the_first_commit_and_two_at_once",
    "tests/local/test_sharded.py::test_two_nodes_at_once",
    "tests/local/test_sharded.py::test_processes_and_nodes_at_every_place[hsdp-off]",
    "tests/local/test_saving.py::test_a_job_that_is_killed_wholly_goes_on_from_its_newest_saved_step[hsdp]",
    "tests/local/test_saving.py::test_at_sigterm_the_newest_step_is_saved[fsdp]",
    "tests/local/test_saving.py::test_plain_dcp_reads_it_without_ckptless",
)


@dataclass
class Line:
    """What one version has come to; `wrong` says what kept its tests from running at all."""

    version: str
    seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def good(self) -> bool:
        return not self.wrong and not self.failed and self.passed > 0

    def __str__(self) -> str:
        end = "ok" if self.good else self.wrong or "FAILED"
        numbers = f"{self.passed:>7} {len(self.failed):>7} {self.skipped:>8} {self.seconds:>8.0f}"
        return "\n".join([f"{self.version:<40} {numbers}  {end}", *(f"    {name}" for name in self.failed)])


class Version:
    """One torch, its environment and its log."""

    what = "torch"

    def __init__(self, version: str, home: Path) -> None:
        self.line = Line(version)
        self._venv = home / version
        self._log = home / f"{version}.log"
        self._xml = home / f"{version}.xml"
        self._python = self._venv / "bin" / "python"

    def run(self, *, keep: bool) -> Line:
        began = time.monotonic()
        self._log.write_text("")
        try:
            self._set_up()
            self._test_all()
        except subprocess.SubprocessError as error:
            self.line.wrong = f"{error}; see {self._log}"
        finally:
            if not keep:
                shutil.rmtree(self._venv, ignore_errors=True)
        self.line.seconds = time.monotonic() - began
        return self.line

    def _set_up(self) -> None:
        if not self._python.exists():
            self._call(SETUP_DEADLINE_S, sys.executable, "-m", "venv", self._venv)
        pip = (self._python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--progress-bar", "off")
        torch = f"torch=={self.line.version}"
        self._call(SETUP_DEADLINE_S, *pip, torch)
        # Once more with it: nothing that the project asks for may bring another torch.
        self._call(SETUP_DEADLINE_S, *pip, torch, "-e", f"{ROOT}[daemon,test]")

    def _test_all(self) -> None:
        self._test("-m", "not slow and not soak", *FOLDERS)
        self._test("-m", "not slow and not soak", *DEVICES)
        self._test(*CHOSEN)

    def _test(self, *words: str) -> None:
        """One run of pytest, whose results are added to the line's."""
        self._xml.unlink(missing_ok=True)
        options = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")
        run = (self._python, "-m", "pytest", *options, f"--junit-xml={self._xml}")
        code = self._call(TESTS_DEADLINE_S, *run, *words, check=False)
        if not self._xml.exists():
            raise subprocess.CalledProcessError(code, "pytest")
        cases = list(ElementTree.parse(self._xml).iter("testcase"))
        bad = {
            self._name(case) for case in cases for kind in ("failure", "error") if case.find(kind) is not None
        }
        skipped = sum(case.find("skipped") is not None for case in cases)
        self.line.failed += tuple(sorted(bad))
        self.line.skipped += skipped
        self.line.passed += len({self._name(case) for case in cases}) - len(bad) - skipped
        if code != 0 and not bad:
            raise subprocess.CalledProcessError(code, "pytest")

    @staticmethod
    def _name(case: ElementTree.Element) -> str:
        return f"{case.get('classname')}::{case.get('name')}"

    def _call(self, deadline_s: float, *words: object, check: bool = True) -> int:
        """A command's exit code. What it prints goes to the log, and it imports from nowhere but its venv."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(word) for word in words]
        with self._log.open("ab") as log:
            done = subprocess.run(
                command,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=deadline_s,
                check=check,
            )
        return done.returncode


def main(kind: type[Version] = Version, default: tuple[str, ...] = ()) -> int:
    parser = argparse.ArgumentParser(description=f"Run what stands on a {kind.what} on other releases.")
    parser.add_argument("versions", nargs="*" if default else "+", default=default, metavar="VERSION")
    parser.add_argument("--at-once", type=int, default=1, help="how many versions at a time (default 1)")
    parser.add_argument("--into", type=Path, default=ROOT / ".torch", help="where environments and logs go")
    parser.add_argument("--keep", action="store_true", help="leave the environments for the next time")
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    versions = [kind(version, asked.into.resolve()) for version in asked.versions]
    print(f"{kind.what:<40} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}", flush=True)
    good = True
    with ThreadPoolExecutor(asked.at_once) as pool:
        for line in pool.map(lambda version: version.run(keep=asked.keep), versions):
            print(line, flush=True)
            good = good and line.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
