"""What a cluster leaves behind when it is taken down, or when bringing it up was cut short: nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import boot, kernel
from .api import Cluster
from .machine import Machine
from .plan import SWITCH, ClusterError, Layout, Plan, Service

if TYPE_CHECKING:
    from tests.slurm.conftest import MakeCluster

ROOT = Path(__file__).resolve().parents[3]
CLI = [sys.executable, "-m", "tests.slurm.cluster"]
DEADLINE_S = 20.0


def eventually(what: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    limit = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < limit, f"not within {deadline_s:.0f} s"
        time.sleep(0.02)


def _processes_of(base: Path) -> list[int]:
    """The processes with the cluster's directory in their command line: every PID 1, and who boots it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(base) in words:
            found.append(int(process.name))
    return found


def _inside(namespaces: set[str], before: int) -> list[int]:
    """The processes in one of the namespaces, but for later ones: their numbers are given out again."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        start = kernel.start_time(int(process.name))
        try:
            own = {link.readlink().name for link in (process / "ns").iterdir()}
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # PID 1 may be closed even to root
            continue
        if own & namespaces and start is not None and start <= before:
            found.append(int(process.name))
    return found


def _nothing_left(base: Path) -> None:
    assert _processes_of(base) == []
    assert str(base) not in Path("/proc/self/mountinfo").read_text()
    for lock in base.glob("machines/*/lock"):
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _interfaces() -> list[str]:
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def test_nothing_is_left(make_cluster: MakeCluster) -> None:
    interfaces = _interfaces()
    cluster = make_cluster(Plan(nodes=2))
    base = cluster.shared.parent
    # One that does not want to go, one in a session of its own.
    cluster.run("ctl", "sbatch", "-N2", "--wrap", "srun bash -c 'trap : TERM; setsid sleep 600 & sleep 600'")
    eventually(lambda: cluster.run("node02", "pgrep", "-x", "sleep", check=False).stdout.count("\n") >= 2)
    pids = [boot.living(Layout(base), SWITCH), *(one.pid for one in cluster.status())]
    outside = {link.readlink().name for link in Path("/proc/self/ns").iterdir()}
    namespaces = {
        link.readlink().name for pid in pids for link in Path(f"/proc/{pid}/ns").iterdir()
    } - outside
    assert len(namespaces) >= 1 + 5 * 3
    with subprocess.Popen(["sleep", "600"]) as clock:  # dates the present, in the kernel's ticks
        now = kernel.start_time(clock.pid)
        clock.kill()
    assert now is not None
    assert len(_inside(namespaces, now)) > 10
    assert len(_processes_of(base)) == 4
    cluster.down()
    assert _inside(namespaces, now) == []
    _nothing_left(base)
    assert _interfaces() == interfaces
    cluster.down(purge=True)
    assert not base.exists()
    cluster.down(purge=True)


@pytest.mark.parametrize("after_s", [0.2, 0.3, 0.4, 0.5, 0.6])
def test_up_that_is_killed_midway_can_be_repeated(
    make_cluster: MakeCluster, tmp_path: Path, after_s: float
) -> None:
    base = tmp_path / "cluster"
    command = [*CLI, "--dir", str(base), "up", "--nodes", "3"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    time.sleep(after_s)  # the moment is what the test is about; any will do
    process.kill()
    process.wait()
    cluster = Cluster(base, Plan(nodes=3))
    try:
        cluster.up()
        assert cluster.node_states() == dict.fromkeys(["node01", "node02", "node03"], "idle")
        begun = [(one.machine, one.pid) for one in cluster.status()]
        cluster.up()
        assert [(one.machine, one.pid) for one in cluster.status()] == begun, "up already: nothing to do"
        assert len(_processes_of(base)) == 5, "no machine twice"
    finally:
        cluster.down()
    _nothing_left(base)


def test_up_that_is_killed_midway_can_be_taken_down(make_cluster: MakeCluster, tmp_path: Path) -> None:
    base = tmp_path / "cluster"
    process = subprocess.Popen(
        [*CLI, "--dir", str(base), "up"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    eventually(lambda: boot.living(Layout(base), "ctl"))
    process.kill()
    process.wait()
    Cluster(base).down(purge=True)
    assert not base.exists()
    assert _processes_of(base) == []


def test_down_goes_on_where_one_machine_fails(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(Plan(nodes=2))
    base = cluster.shared.parent
    cut = Machine.power_off

    def stubborn(machine: Machine) -> None:
        if machine.name == "node01":
            raise ClusterError("node01 will not go")
        cut(machine)

    with monkeypatch.context() as patch:
        patch.setattr(Machine, "power_off", stubborn)
        with pytest.raises(ClusterError, match="node01 will not go"):
            cluster.down(purge=True)
    assert len(_processes_of(base)) == 1
    cluster.down(purge=True)
    assert _processes_of(base) == []


def test_nothing_is_left_of_a_machine_that_cannot_boot(make_cluster: MakeCluster, tmp_path: Path) -> None:
    bad = Service(name="d", argv=("d",), user="nobody-here", where="ctl")
    base = tmp_path / "cluster"
    with (
        pytest.raises(ClusterError, match=r"ctl did not start: it ended.*no user 'nobody-here'"),
        Cluster(base, Plan(nodes=1, services=(bad,))),
    ):
        pass
    assert _processes_of(base) == []
    assert not base.exists()
