"""What is packaged: the version, and for which Slurm and Python."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stage import ROOT, run
from table import Package

# Whoever makes packages is their packager: DEBFULLNAME and DEBEMAIL, as Debian's tools have it.
NOBODY = ("The ckptless authors", "nobody@ckptless.invalid")


@dataclass(frozen=True, slots=True)
class Release:
    """One run of `make dist`. `slurm` is a release, such as 24.11, `python` a command, such as python3.11."""

    version: str
    slurm: str
    python: str
    packager: str
    at_s: int

    def of(self, package: Package) -> str:
        """The package's version: 1.0rc1 is older than 1.0, and one for another Slurm is another."""
        version = re.sub(r"\.?(a|b|rc|dev)(?=\d)", r"~\1", self.version)
        return f"{version}+slurm{self.slurm}" if package.slurm else version


def release_of(wheel: Path, python: str) -> Release:
    """Read the version off the wheel, and which Slurm the headers are of."""
    environ = os.environ
    packager = f"{environ.get('DEBFULLNAME', NOBODY[0])} <{environ.get('DEBEMAIL', NOBODY[1])}>"
    return Release(wheel.name.split("-")[1], _slurm(), python, packager, int(environ["SOURCE_DATE_EPOCH"]))


def set_date() -> None:
    """All files are of the last change's day, so that the same sources make the same packages."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        git = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
        told = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        os.environ["SOURCE_DATE_EPOCH"] = told or str(int((ROOT / "CHANGELOG.md").stat().st_mtime))


def system_python() -> str:
    """The command of the system's own Python, with its version, such as python3.11."""
    return run("/usr/bin/python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()


def _slurm() -> str:
    told = run("make", "-s", "-C", ROOT / "slurm_ext/spank", "slurm-version").strip()
    if not told.startswith("0x"):
        raise SystemExit("slurm/slurm.h is not there (Debian: libslurm-dev): make dist SLURM_CPPFLAGS=-IDIR")
    return f"{int(told, 16) >> 16}.{int(told, 16) >> 8 & 0xFF:02}"
