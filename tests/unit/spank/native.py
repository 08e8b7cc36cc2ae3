"""Builds what is written in C, once for all tests of this folder, and talks to the parsers' test program."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SPANK = REPOSITORY / "slurm_ext/spank"
HOOKS = REPOSITORY / "slurm_ext/hooks"
JOB_SUBMIT = REPOSITORY / "slurm_ext/job_submit"
MAKE_DEADLINE_S = 100


def lacking() -> str:
    """Return what stands in the way of a build here; empty: nothing."""
    for program in ("make", "cc"):
        if not shutil.which(program):
            return f"{program} is not installed"
    probe = subprocess.run(
        ["cc", "-E", "-x", "c", "-"], input="#include <slurm/spank.h>\n", capture_output=True, text=True
    )
    return "" if probe.returncode == 0 else "slurm/spank.h is not there (package libslurm-dev)"


def make(folder: Path, build: Path, *arguments: str) -> str:
    """Run make with its products in `build`; what it printed. Raises AssertionError with it on failure."""
    # an outer make's flags are not for this one
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    result = subprocess.run(
        ["make", "-C", str(folder), f"BUILD={build}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAKE_DEADLINE_S,
        env=env,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


class Parsers:
    """The C parsers: to each question an answer."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def ask(self, *fields: str) -> list[str]:
        """The fields of the answer."""
        (answer,) = self.ask_all([fields])
        return answer

    def ask_all(self, questions: Sequence[Sequence[str]]) -> list[list[str]]:
        """The fields of each answer."""
        lines = ["\t".join(fields) for fields in questions]
        assert "\n" not in "".join(lines)
        text = "".join(f"{line}\n" for line in lines)
        result = subprocess.run(
            [self._program], input=text, capture_output=True, text=True, timeout=20, check=True
        )
        return [line.split("\t") for line in result.stdout.removesuffix("\n").split("\n")]
