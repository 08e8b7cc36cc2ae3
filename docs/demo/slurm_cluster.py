"""The cluster of the Slurm demo: real Slurm in namespaces of this machine, and gone again whatever happens.

Run as a program it is the keeper: it waits until the demo's process is gone, and takes down what that left.
"""

import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.slurm.cluster import requirements
from tests.slurm.cluster.api import Cluster
from tests.slurm.cluster.plan import ClusterError
from tests.slurm.training import YAML, make_site

__all__ = ["PACKAGES", "STATE_DIR", "Cluster", "ClusterError", "cluster_up", "missing"]

KEEPER_DEADLINE_S = 90.0
STATE_DIR = "/var/lib/ckptless"
# What Debian 12 has of all this; build tools for the plugin.
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libslurm-dev"),
    *("munge", "libmunge2", "iproute2", "procps", "gcc", "libc6-dev", "make"),
)


def missing() -> list[str]:
    """Return what stands in the way of the cluster and of the plugin, each in a few words."""
    lacks = requirements.missing()
    programs = {"cc": "gcc", "make": "make", "pgrep": "procps"}
    lacks += [f"{name} (package {package})" for name, package in programs.items() if not shutil.which(name)]
    if not Path("/usr/include/slurm/spank.h").exists():
        lacks.append("slurm/spank.h (package libslurm-dev)")
    try:
        ctypes.CDLL("libmunge.so.2")
    except OSError:
        lacks.append("libmunge.so.2 (package libmunge2)")
    return lacks


@contextmanager
def cluster_up(nodes: int, conf: dict[str, str] | None = None, yaml: str = YAML) -> Iterator[Cluster]:
    """A cluster with ckptlessd on every node and the plugin in Slurm, for as long as the block lasts.

    `conf`: lines of slurm.conf to set; `yaml`: ckptless.yaml.
    Raises ClusterError, CalledProcessError (of the plugin's make).
    """
    place = Path(tempfile.mkdtemp(prefix="ckptless-slurm-demo-"))
    with _keeper(place):
        try:
            cluster = make_site(place / "cluster", place / "build", nodes, conf, yaml=yaml)
            cluster.up()
            yield cluster
        finally:
            with _deaf():
                _take_down(place)


@contextmanager
def _keeper(place: Path) -> Iterator[None]:
    """A process that outlives this one if it is killed, and then takes the cluster down."""
    # In a session of its own: Ctrl-C is not for it.
    keeper = subprocess.Popen(
        [sys.executable, __file__, str(place)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        with _deaf():
            keeper.communicate(timeout=KEEPER_DEADLINE_S)


@contextmanager
def _deaf() -> Iterator[None]:
    """No signal stops the taking down, nor what it calls: those who are told to ignore one inherit that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_down(place: Path) -> None:
    """Cut the power of all machines, and delete everything. Raises ClusterError, OSError."""
    Cluster(place / "cluster").down(purge=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(place)


def _keep(place: Path) -> None:
    sys.stdin.buffer.read()  # ends with the demo's process
    _take_down(place)


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
