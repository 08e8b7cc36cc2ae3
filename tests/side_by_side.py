"""All of `make test`, in two lanes side by side: `python tests/side_by_side.py [OPTION...]`.

A lane is runs of pytest one after the other: what computes (unit and property tests, the simulator), then
tests of parts and of the simulated device, beside jobs and clusters, which wait most of the time. What a run
prints goes to build/test-NAME.txt; here one line a minute says how far they are, and at the end comes the
summary of each, with its slowest tests, and all of one that failed. The options are pytest's.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
RUNS = {
    "core": ("unit", "property", "sim", "fuzz", "mutants"),
    "parts": ("integration", "torch", "nccl"),
    # By itself: torch's autograd counts a process's devices once, before its first backward.
    "devices": ("simdev", "gpu"),
    "jobs": ("local",),
    "slurm": ("slurm",),
}
LANES = (("core", "parts", "devices"), ("jobs", "slurm"))
SLOWEST = 15
EVERY_S = 60.0
POLL_S = 0.5


@dataclass
class Run:
    """One run of pytest, and the file that has its output."""

    name: str
    output: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str, options: list[str]) -> Run:
        """Begin it; it ends by itself."""
        output = BUILD / f"test-{name}.txt"
        folders = [f"tests/{folder}" for folder in RUNS[name]]
        command = [sys.executable, "-m", "pytest", "-q", f"--durations={SLOWEST}", *options, *folders]
        with output.open("wb") as out:
            # In sessions of their own: Ctrl-C comes from here, once.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, output, process)

    @property
    def text(self) -> str:
        """Return what it has said so far."""
        return self.output.read_text(errors="replace")

    @property
    def summary(self) -> str:
        """All that it has said where it failed; else its last line, and the slowest tests."""
        if self.process.returncode:
            return self.text.rstrip()
        lines = self.text.rstrip().splitlines()
        return "\n".join([lines[-1], *(line for line in lines if re.match(r"\d+\.\d+s (call|setup) ", line))])

    def status(self) -> str:
        """Return how far it is, or how it ended."""
        code = self.process.poll()
        if code is not None:
            return f"{self.name} {'passed' if code == 0 else f'ended with {code}'}"
        shares = re.findall(r"\[ *(\d+)%\]", self.text)
        failed = len(re.findall(r"^[.sxXEF]*[FE]", self.text, re.MULTILINE))
        return f"{self.name} {shares[-1] if shares else 0} %" + (" (with failures)" if failed else "")


def missing() -> set[str]:
    """Return the folders that have tests and are in no run."""
    there = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    return there - {folder for folders in RUNS.values() for folder in folders}


def run_lanes(options: list[str]) -> list[Run]:
    """Return all runs, ended; at most one of each lane is under way at a time."""
    began = said = time.monotonic()
    waiting = [list(lane) for lane in LANES]
    runs: list[Run] = []
    last: dict[int, Run] = {}
    try:
        while any(waiting) or any(run.process.poll() is None for run in runs):
            for lane, names in enumerate(waiting):
                if names and (lane not in last or last[lane].process.poll() is not None):
                    last[lane] = Run.start(names.pop(0), options)
                    runs.append(last[lane])
            time.sleep(POLL_S)
            if time.monotonic() - said >= EVERY_S:
                said = time.monotonic()
                minutes = (said - began) / 60
                print(f"{minutes:3.0f} min: " + ", ".join(run.status() for run in runs), flush=True)
    finally:
        for run in runs:
            run.process.send_signal(signal.SIGINT)
        for run in runs:
            # no deadline: pytest ends at SIGINT, and what its tests have started before it
            run.process.wait()
    return runs


def main() -> int:
    """Return 0 if all tests passed."""
    if missing():
        print(f"in no run of {Path(__file__).name}: tests/{', tests/'.join(sorted(missing()))}")
        return 1
    BUILD.mkdir(exist_ok=True)
    runs = run_lanes(sys.argv[1:])
    for run in runs:
        print(f"\n{run.name}: {run.summary}")
    return int(any(run.process.returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main())
