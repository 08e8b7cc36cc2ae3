"""All that is installed, in a folder as it lies below /: `make install`, and the daemon's own environment."""

import gzip
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from table import COMMANDS, HOME, PACKAGES, Package

ROOT = Path(__file__).parents[2]
# Of RPM systems; `make dist PLUGINDIR=DIR` says another, for .deb as well.
RPM_PLUGINDIR = "/usr/lib64/slurm"


def install(tree: Path, *, rpm: bool = False) -> None:
    """`make install` and `make install-job-submit`, as packages have it: manual pages are compressed."""
    words = [f"PLUGINDIR={RPM_PLUGINDIR}"] if rpm and "PLUGINDIR" not in os.environ else []
    run("make", "-s", "-C", ROOT, "install", "install-job-submit", f"DESTDIR={tree}", *words)
    for page in tree.glob("usr/share/man/*/*"):
        page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()


def install_python(tree: Path, wheel: Path, python: str, *, dependencies: bool) -> None:
    """The daemon, ckptctl and what they import, for an interpreter such as python3.11, whichever runs this.

    It is a virtual environment without copies of the interpreter: found by pyvenv.cfg beside bin/python3.
    """
    home = tree / HOME[1:]
    site = home / "lib" / python / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    target = ["--target", str(site), "--python-version", python.removeprefix("python"), "--only-binary=:all:"]
    more = [] if dependencies else ["--no-deps"]
    run(*pip, *target, *more, f"ckptless[daemon,gpu] @ {wheel.resolve().as_uri()}")
    # Of the wheels' own commands and pages none are wanted here.
    for name in ("bin", "share", "example.py"):
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # Where this was made is nobody's business, and which files there are is the package manager's.
    for record in (*site.glob("*.dist-info/direct_url.json"), *site.glob("*.dist-info/RECORD")):
        record.unlink()
    # What else the system's Python has, such as pyslurm, comes last.
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = true\n")
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to(f"../../../bin/{python}")
    (tree / "usr/bin").mkdir(parents=True, exist_ok=True)
    (own,) = importlib.metadata.distributions(name="ckptless", path=[str(site)])
    for name in COMMANDS:
        (point,) = own.entry_points.select(name=name)
        command = home / "bin" / name
        # -I: a user's PYTHONPATH is for training.
        call = f"from {point.module} import {point.attr}\n\nraise SystemExit({point.attr}())\n"
        command.write_text(f"#!{HOME}/bin/python3 -I\n{call}")
        command.chmod(0o755)
        (tree / "usr/bin" / name).symlink_to(f"../{HOME.removeprefix('/usr/')}/bin/{name}")


def strip(tree: Path) -> None:
    """Strip all that is compiled."""
    run("strip", "--strip-unneeded", *binaries(tree))


def binaries(tree: Path) -> list[Path]:
    """All that is compiled."""

    def is_elf(path: Path) -> bool:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"

    return sorted(path for path in tree.rglob("*") if is_elf(path))


def take(package: Package, tree: Path, into: Path) -> None:
    """Copy what is the package's."""
    for name in split(tree)[package.name]:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, target, follow_symlinks=False)


def split(tree: Path) -> dict[str, list[str]]:
    """The files of each package, by its name; each file is of one package, or this is an error."""
    found: dict[str, list[str]] = {package.name: [] for package in PACKAGES}
    for path in sorted(tree.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = str(path.relative_to(tree))
        owners = [package.name for package in PACKAGES if package.has(name)]
        if len(owners) != 1:
            raise SystemExit(f"{name} is in {owners or 'no package'}: see etc/packages/table.py")
        found[owners[0]].append(name)
    return found


def run(*argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command; what it printed. Its errors go where ours go; SystemExit where it fails."""
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{argv[0]} is not installed; see docs/packages.md") from None
    if done.returncode:
        raise SystemExit(f"{argv[0]} ended with {done.returncode}\n{done.stdout}")
    return done.stdout
