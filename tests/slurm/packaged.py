"""The packages, installed in another Debian: `python -m tests.slurm.packaged SUITE --into FOLDER`.

It makes FOLDER/SUITE-packaged, a copy of what chroot.py makes with the three .deb of this checkout in it, and
prints its path. With CKPTLESS_SLURM_ROOTFS=PATH and CKPTLESS_PACKAGED=1 clusters take its daemon and plugin.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import chroot

ROOT = Path(__file__).resolve().parents[2]
LINE = "/etc/slurm/plugstack.conf.d/ckptless.conf"
YAML = "/etc/ckptless/ckptless.yaml"
DEADLINE_S = 300.0


def copy(root: Path, to: Path) -> Path:
    """A root folder that may be changed."""
    _run(["cp", "-a", "--reflink=auto", str(root), str(to)])
    return to


def build(root: Path, work: Path, sources: Path = ROOT, kind: str = "deb") -> list[Path]:
    """Make the packages of these sources for Slurm and Python of a root folder, in `work`, of one kind."""
    # Only Slurm's headers: the others there are for another compiler.
    (work / "include").mkdir(parents=True)
    (work / "include/slurm").symlink_to(root / "usr/include/slurm")
    (plugins,) = root.glob("usr/lib/*/slurm-wlm")
    # An outer make's flags are not for this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | {
        "SLURM_CPPFLAGS": f"-I{work / 'include'}",
        "PLUGINDIR": f"/{plugins.relative_to(root)}",
        "BUILD": str(work / "build"),
    }
    python = (root / "usr/bin/python3").readlink().name
    program = str(sources / "etc/packages/dist.py")
    _run([sys.executable, program, "--into", str(work / "dist"), "--python", python, "--formats", kind], env)
    return sorted((work / "dist").glob(f"*.{kind}"))


def version(sources: Path, to: Path, number: str) -> Path:
    """A copy of what git has of these sources, as another version."""
    for name in _run(["git", "-C", str(sources), "ls-files", "-z"]).split("\0")[:-1]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(sources / name, to / name, follow_symlinks=False)
    init = to / "src/ckptless/__init__.py"
    lines = [
        f'__version__ = "{number}"' if line.startswith("__version__ = ") else line
        for line in init.read_text().splitlines()
    ]
    init.write_text("\n".join(lines) + "\n")
    return to


def dpkg(root: Path, *words: str | Path, etc: Path | None = None) -> str:
    """Run dpkg in a root folder, in namespaces that end with it; what it printed.

    `etc` is its /etc then: that of a cluster which runs on this root. Files outside are copied in first.
    """
    inside = []
    for word in words:
        if isinstance(word, Path):
            shutil.copy(word, root / "tmp")
        inside.append(f"/tmp/{word.name}" if isinstance(word, Path) else word)
    bind = f'mount --bind "{etc}" "{root}/etc" && ' if etc else ""
    script = f'mount -t proc proc "{root}/proc" && {bind}exec chroot "{root}" dpkg --force-unsafe-io "$@"'
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    # What Debian's tools ask for is said; nothing of this environment is seen.
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    return _run([*spaces, "sh", "-c", script, "sh", *inside], env)


def rpm(root: Path, *words: str | Path) -> str:
    """Run this system's rpm on a root folder, in which scripts run; what it printed."""
    return _run(["rpm", "--root", str(root), "--nodeps", *map(str, words)])


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-4000:]}")
    return done.stdout


def main(argv: Sequence[str]) -> int:
    """Make the root folder anew, and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=sorted(chroot.SUITES))
    parser.add_argument(
        "--into", type=Path, required=True, metavar="FOLDER", help="where root folders are kept"
    )
    options = parser.parse_args(argv)
    into: Path = options.into.resolve()
    clean = chroot.make(chroot.SUITES[options.suite], into)
    packaged, work = into / f"{options.suite}-packaged", into / f"{options.suite}-work"
    for old in (packaged, work):
        shutil.rmtree(old, ignore_errors=True)
    dpkg(copy(clean, packaged), "-i", *build(clean, work))
    print(packaged)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
