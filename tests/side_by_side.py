"""All of `make test`, in two lanes side by side: `python tests/side_by_side.py [--gpu] [OPTION...]`.

A lane is runs of pytest one after the other, so that what computes (unit and property tests, the simulator;
parts, the simulated device) is beside jobs and clusters, which wait most of the time. With --gpu
it is what there is for a GPU, in six lanes, for a machine with 16 cores. What a run prints goes to
build/test-NAME.txt; here one line a minute says how far they are, and at the end (or at Ctrl-C) comes the
summary of each, with its slowest tests, and all of one that failed. The options are pytest's.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
Lanes = tuple[dict[str, tuple[str, ...]], ...]
LANES: Lanes = (
    {
        "core": ("tests/unit", "tests/property", "tests/sim", "tests/fuzz", "tests/mutants"),
        "slurm": ("tests/slurm",),
    },
    {
        "jobs": ("tests/local",),
        "parts": ("tests/integration", "tests/torch", "tests/nccl"),
        # By itself: torch's autograd counts a process's devices once, before its first backward.
        "devices": ("tests/simdev", "tests/gpu"),
    },
)
JOBS, FRAMEWORKS = "tests/gpu/test_jobs.py", "tests/gpu/test_frameworks.py"
GPU_LANES: Lanes = (
    {
        "gpu-parts": (
            *("tests/gpu", f"--ignore={JOBS}", f"--ignore={FRAMEWORKS}", "--ignore=tests/gpu/test_groups.py"),
        ),
        "gpu-groups": ("tests/gpu/test_groups.py",),
    },
    {"gpu-frameworks": (FRAMEWORKS,)},
    {"gpu-ddp": (JOBS, "-k", "ddp")},
    {"gpu-fsdp": (JOBS, "-k", "fsdp")},
    {"gpu-hsdp": (JOBS, "-k", "hsdp")},
    {"gpu-others": (JOBS, "-k", "not ddp and not fsdp and not hsdp")},
)
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
    def start(cls, name: str, words: list[str]) -> Run:
        """Begin it; it ends by itself."""
        output = BUILD / f"test-{name}.txt"
        command = [sys.executable, "-m", "pytest", "-q", f"--durations={SLOWEST}", *words]
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
    return there - {
        word.removeprefix("tests/") for lane in LANES for words in lane.values() for word in words
    }


def run_lanes(lanes: Lanes, options: list[str], runs: list[Run]) -> None:
    """Have all runs in `runs`, ended; at most one of each lane is under way at a time."""
    began = said = time.monotonic()
    waiting = [list(lane.items()) for lane in lanes]
    last: dict[int, Run] = {}
    try:
        while any(waiting) or any(run.process.poll() is None for run in runs):
            for lane, left in enumerate(waiting):
                if left and (lane not in last or last[lane].process.poll() is not None):
                    name, words = left.pop(0)
                    last[lane] = Run.start(name, [*options, *words])
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


def main() -> int:
    """Return 0 if all tests passed."""
    if missing():
        print(f"in no run of {Path(__file__).name}: tests/{', tests/'.join(sorted(missing()))}")
        return 1
    BUILD.mkdir(exist_ok=True)
    options = sys.argv[1:]
    on_gpu = "--gpu" in options
    runs: list[Run] = []
    with contextlib.suppress(KeyboardInterrupt):
        run_lanes(GPU_LANES if on_gpu else LANES, [one for one in options if one != "--gpu"], runs)
    for run in runs:
        print(f"\n{run.name}: {run.summary}")
    return int(any(run.process.returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main())
