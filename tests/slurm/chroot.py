"""A root folder with another Debian's Slurm in it: `chroot.py SUITE --into FOLDER` prints its path.

    bookworm Slurm 22.05: for packages on a clean system
    trixie   Slurm 24.11
    sid      Slurm 26.05 and pyslurm, built from PyPI's sources against Debian's headers

Made once (a few minutes, about 1 GB each) and found again afterwards; made anew when the recipe in this file
has changed. Needs root and debootstrap. Everything runs in namespaces of its own, so an interrupted run
leaves no mount and no process behind, only FOLDER/SUITE.new, which the next run deletes.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
PYSLURM = "25.11.2"
DEADLINE_S = 1800.0

SLURM_PACKAGES = (
    "slurmd",
    "slurmctld",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "iproute2",
    "nftables",
    # to build the SPANK plugin, and to run the tests inside
    "libslurm-dev",
    "gcc",
    "libc6-dev",
    "make",
    "python3",
    "python3-msgspec",
    "python3-pytest",
)
PYSLURM_PACKAGES = (
    "cython3",
    "python3-dev",
    "python3-pip",
    "python3-setuptools",
    "python3-wheel",
    "python3-packaging",
)


@dataclass(frozen=True, slots=True)
class Suite:
    """One Debian suite: its Slurm (major.minor), whether pyslurm is built in it, which packages it lacks."""

    name: str
    slurm: str
    pyslurm: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Return what apt installs."""
        wanted = SLURM_PACKAGES + (PYSLURM_PACKAGES if self.pyslurm else ())
        return tuple(name for name in wanted if name not in self.lacks)

    @property
    def recipe(self) -> str:
        """Changes when what goes into the root folder does."""
        return repr((self, self.packages, (SHIM, BUILD_PYSLURM) if self.pyslurm else ()))


SUITES = {
    suite.name: suite
    for suite in (
        Suite("bookworm", "22.05", lacks=("python3-msgspec",)),
        Suite("trixie", "24.11"),
        Suite("sid", "26.05", pyslurm=True),
    )
}

# pyslurm refuses every Slurm but its own. 26.05 keeps the older calls behind a switch of its own header, and
# what has been renamed beyond that is two names.
SHIM = """\
set -e
mkdir -p /opt/shim
cp -r /usr/include/slurm /opt/shim/
cd /opt/shim/slurm
sed -i 's/^#define SLURM_VERSION_NUMBER .*/#define SLURM_VERSION_NUMBER 0x190b02/' slurm_version.h
last=$(grep -n '^#endif' slurm.h | tail -1 | cut -d: -f1)
head -n $((last - 1)) slurm.h > slurm.h.new
cat >> slurm.h.new <<'END'
#define slurm_free_ctl_conf slurm_free_conf
#define ESLURM_ERROR_ON_DESC_TO_RECORD_COPY 2053
END
tail -n +$last slurm.h >> slurm.h.new
{ echo '#define SLURM_BACKWARD_COMPAT 1'; cat slurm.h.new; } > slurm.h
rm slurm.h.new
"""

BUILD_PYSLURM = f"""\
set -e
export SLURM_INCLUDE_DIR=/opt/shim SLURM_LIB_DIR=/usr/lib/$(gcc -print-multiarch)
export CFLAGS='-O1 -g0 -Wno-incompatible-pointer-types'
pip install --quiet --no-index --no-deps --no-build-isolation \\
    --break-system-packages --root-user-action=ignore /opt/pyslurm/pyslurm-{PYSLURM}.tar.gz
rm -rf /opt/pyslurm
"""


def make(suite: Suite, into: Path, mirror: str = MIRROR) -> Path:
    """Return the root folder of `suite` under `into`, made first if it is not there or outdated.

    One maker at a time per folder; others wait for it. Raises subprocess.CalledProcessError or
    TimeoutExpired.
    """
    into.mkdir(parents=True, exist_ok=True)
    root, stamp = into / suite.name, into / suite.name / ".ckptless-recipe"
    with (into / f"{suite.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == suite.recipe:
            return root
        new = into / f"{suite.name}.new"
        for old in (root, new):
            if old.exists():
                shutil.rmtree(old)
        _bootstrap(suite, new, mirror)
        if suite.pyslurm:
            _build_pyslurm(new)
        (new / ".ckptless-recipe").write_text(suite.recipe)
        new.rename(root)
    return root


def _bootstrap(suite: Suite, root: Path, mirror: str) -> None:
    _run("unshare", "--mount", "debootstrap", "--variant=minbase", suite.name, str(root), mirror)
    # No service is to start in here; its rc script would find the host's network.
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    # A moving suite's Release is valid for a week by its own clock, which a machine's need not be.
    (root / "etc/apt/apt.conf.d/90ckptless").write_text('Acquire::Check-Valid-Until "false";\n')
    install = (
        f"apt-get update -qq && apt-get install -qq -y --no-install-recommends {' '.join(suite.packages)}"
    )
    _inside(root, f"export DEBIAN_FRONTEND=noninteractive; {install} && apt-get clean")
    found = _inside(root, "slurmctld -V")
    if not found.startswith(f"slurm-wlm {suite.slurm}") and not found.startswith(f"slurm {suite.slurm}"):
        raise SystemExit(
            f"{suite.name} has {found.strip()}, not Slurm {suite.slurm}: change SUITES in {__file__}"
        )


def _build_pyslurm(root: Path) -> None:
    """Fetch the sources with our own pip, which knows its index and certificates; build them inside."""
    where = root / "opt/pyslurm"
    where.mkdir(parents=True)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "--no-binary", ":all:", "--dest", str(where), f"pyslurm=={PYSLURM}")
    _inside(root, SHIM)
    _inside(root, BUILD_PYSLURM)


def _inside(root: Path, script: str) -> str:
    """Run a shell script in `root`, in a mount and PID namespace that end with it; return what it printed."""
    spaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", f"--root={root}", "--mount-proc")
    return _run(*spaces, "/bin/sh", "-c", script)


def _run(*argv: str) -> str:
    env = {
        name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or "PIP" in name
    }
    env |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
    done = subprocess.run(
        ("nice", "-n", "10", *argv),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-8000:])
        raise subprocess.CalledProcessError(done.returncode, argv[0], done.stdout)
    return done.stdout


def main(argv: Sequence[str]) -> int:
    """Make the root folder and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument(
        "--into", type=Path, required=True, metavar="FOLDER", help="where root folders are kept"
    )
    parser.add_argument("--mirror", default=MIRROR, help="Debian mirror (default: %(default)s)")
    options = parser.parse_args(argv)
    if os.geteuid() != 0 or shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        sys.stderr.write("chroot.py needs root and debootstrap (apt-get install debootstrap)\n")
        return 2
    print(make(SUITES[options.suite], options.into.resolve(), options.mirror))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
