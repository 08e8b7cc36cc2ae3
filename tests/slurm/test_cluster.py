"""The cluster that the tests here rely on: what it runs, how it breaks and heals, what it leaves."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .cluster.api import Cluster
from .cluster.plan import ClusterError, Plan, Service, Share
from .cluster.supervise import RESTART_PAUSE_S

if TYPE_CHECKING:
    from .conftest import MakeCluster

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "tests.slurm.cluster"]
DEADLINE_S = 20.0
SILENCE_S = 1.5

# Counts aloud to whoever connects, ten times a second.
COUNTER = """
import socket, time
server = socket.create_server(("", 7000))
print("listening", flush=True)
peer, _ = server.accept()
number = 0
while True:
    peer.sendall(b"%d\\n" % number)
    number += 1
    time.sleep(0.1)
"""
# Repeats what it hears; says how the connection ends.
LISTENER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), timeout=10)
peer.settimeout(None)
try:
    for line in peer.makefile():
        print(line, end="", flush=True)
    print("closed", flush=True)
except OSError as error:
    print("error", error, flush=True)
"""


def eventually(what: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    limit = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < limit, f"not within {deadline_s:.0f} s"
        time.sleep(0.02)


# --- running jobs


def test_job_of_three_nodes_runs_as_the_user(cluster: Cluster) -> None:
    script = "srun bash -c 'echo $(hostname) $(id -un) $SLURM_PROCID > /shared/job-$SLURM_PROCID'"
    job = cluster.run("ctl", "sbatch", "--parsable", "-N3", "--wrap", script, user="tester").stdout.strip()
    over = "JobState=COMPLETED "
    eventually(lambda: over in cluster.run("ctl", "scontrol", "-o", "show", "job", job).stdout)
    lines = [(cluster.shared / f"job-{rank}").read_text().split() for rank in range(3)]
    assert lines == [[f"node0{rank + 1}", "tester", str(rank)] for rank in range(3)]
    assert (cluster.shared / "job-0").stat().st_uid == 5001


def test_step_starts_within_a_second(cluster: Cluster) -> None:
    """Nothing in it waits for a name server or a timeout; a busy machine may need more than one try."""

    def step_s() -> float:
        begin = time.monotonic()
        done = cluster.run("node01", "srun", "-N2", "hostname", user="other")
        assert sorted(done.stdout.split()) == ["node01", "node02"]
        return time.monotonic() - begin

    eventually(lambda: step_s() < 1)


def test_defaults_are_those_of_a_site(cluster: Cluster) -> None:
    shown = cluster.run("ctl", "scontrol", "show", "config").stdout
    settings = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in shown.splitlines())
    }
    assert settings["SlurmdTimeout"] == "300 sec"
    assert settings["ReturnToService"] == "1"
    assert cluster.run("ctl", "sinfo", "-h", "-o", "%c").stdout.split() == ["8"]


def test_ckptless_is_there_for_every_user_and_cannot_be_changed(cluster: Cluster) -> None:
    names = "os.getuid(), sys.prefix, ckptless.__file__"
    ask_python = f"import ckptless.daemon.settings.config, os, sys; print({names})"
    done = cluster.run("ctl", "srun", "-N2", "python", "-c", ask_python, user="tester")
    here = subprocess.run([sys.executable, "-c", ask_python], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [here.stdout.strip().replace("0 ", "5001 ", 1)] * 2
    assert cluster.run("node01", "ckptless-run", "--help", user="tester").stdout.startswith("Usage")
    refused = cluster.run("node01", "touch", str(Path(__file__)), check=False)
    assert "Read-only file system" in refused.stderr


def test_machines_share_a_directory_and_nothing_else(cluster: Cluster) -> None:
    # The home of this machine's root, and whatever lies in /var, /run, /tmp, stay out.
    write = "echo here | tee /shared/of ~/of /tmp/of /dev/shm/of"
    cluster.run("node01", "sh", "-c", write, user="tester")
    cluster.run("node02", "sh", "-c", "cat /shared/of ~/of; ! ls /tmp/of && ! ls /dev/shm/of", user="tester")
    assert (cluster.shared / "of").read_text() == "here\n"
    assert not Path("/tmp/of").exists()
    names = cluster.run("node02", "ps", "-e", "-o", "comm=").stdout.split()
    assert sorted({"munged", "slurmd", "slurmctld", "pytest"} & set(names)) == ["munged", "slurmd"]
    assert cluster.run("node02", "ls", "/sys/class/net").stdout.split() == ["eth0", "lo"]
    assert "unreachable" in cluster.run("node02", "ip", "route", "get", "192.0.2.1", check=False).stderr


def test_command_that_overruns_is_killed_with_its_children(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="has not ended within 1 s: begun"):
        cluster.run("node01", "sh", "-c", "echo begun; sleep 7777; true", timeout_s=1)
    eventually(lambda: not cluster.run("node01", "pgrep", "-f", "sleep 7777", check=False).stdout)
    with pytest.raises(ClusterError, match="node01: false ended with 1"):
        cluster.run("node01", "false")


# --- power and cables


@dataclass
class Connection:
    """A TCP connection from node01 to node02, and what arrives on it."""

    counter: subprocess.Popen[str]
    listener: subprocess.Popen[str]
    _heard: str = ""

    def next(self) -> str:
        """The next line that arrives."""
        limit = time.monotonic() + DEADLINE_S
        while "\n" not in self._heard:
            assert self._more(limit - time.monotonic()), "nothing arrives"
        line, self._heard = self._heard.split("\n", 1)
        return line

    def silent_for(self, pause_s: float) -> bool:
        """Whether nothing arrives, no word and no end, once what was under way is in."""
        while self._more(0.3) and not self._heard.endswith("closed\n"):
            pass
        return not self._more(pause_s) and "closed" not in self._heard and self.listener.poll() is None

    def _more(self, pause_s: float) -> bool:
        assert self.listener.stdout is not None
        descriptor = self.listener.stdout.fileno()
        if not select.select([descriptor], [], [], max(0.0, pause_s))[0]:
            return False
        text = os.read(descriptor, 65536).decode()
        self._heard += text
        return bool(text)


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[Connection]:
    counter = cluster.popen("node02", "python", "-c", COUNTER)
    assert counter.stdout is not None
    assert counter.stdout.readline() == "listening\n"
    listener = cluster.popen("node01", "python", "-c", LISTENER, "node02")
    made = Connection(counter, listener)
    try:
        assert [made.next() for _ in range(3)] == ["0", "1", "2"]
        yield made
    finally:
        cluster.kill_group(listener)
        cluster.kill_group(counter)


def test_a_killed_process_is_heard_of_at_once(cluster: Cluster, connection: Connection) -> None:
    """What a power failure must not look like; it proves that `silent_for` can tell."""
    cluster.run("node02", "pkill", "-KILL", "-f", "create_server")
    assert not connection.silent_for(SILENCE_S)


def test_a_power_failure_is_silent(cluster: Cluster, connection: Connection) -> None:
    cluster.power_off("node02")
    assert connection.silent_for(SILENCE_S)
    sockets = cluster.run("node01", "cat", "/proc/net/tcp").stdout
    assert any(line.split()[2:4] == ["0C00630A:1B58", "01"] for line in sockets.splitlines()), "established"
    # Slurm knows nothing of it for 300 s.
    assert cluster.node_states()["node02"] == "idle"
    assert next(one for one in cluster.status() if one.machine == "node02").pid is None
    with pytest.raises(ClusterError, match="node02 is off"):
        cluster.run("node02", "true")


def test_a_pulled_cable_loses_nothing_when_it_is_back(cluster: Cluster, connection: Connection) -> None:
    cluster.unplug("node02")
    assert connection.silent_for(SILENCE_S)
    assert {one.machine: one.link for one in cluster.status()}["node02"] == "down"
    assert cluster.run("node02", "true").returncode == 0, "it runs on"
    cluster.plug("node02")
    first = int(connection.next())
    assert [int(connection.next()) for _ in range(20)] == list(range(first + 1, first + 21))


def test_a_node_that_is_back_in_no_time_resets_its_old_connections(cluster: Cluster) -> None:
    """Its new kernel knows nothing of them: why a multi-node srun gives up after a quick power cycle."""
    counter = cluster.popen(
        "node02", "python", "-c", COUNTER.replace("peer.sendall", "peer.recv(1) or peer.sendall")
    )
    talker = (
        'exec 3<>/dev/tcp/node02/7000; echo connected; while echo 1 >&3; do sleep 0.1; done; echo "lost $?"'
    )
    try:
        assert counter.stdout is not None
        assert counter.stdout.readline() == "listening\n"
        with cluster.popen("node01", "bash", "-c", f"trap '' PIPE; {talker}") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            cluster.cycle("node02")
            output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        cluster.kill_group(counter)
    assert output.startswith("lost"), errors
    assert "Broken pipe" in errors or "reset" in errors


def test_a_booted_node_is_fresh_and_registers(cluster: Cluster) -> None:
    for path in ("/tmp", "/run", "/dev/shm", "/var/lib/ckptless"):
        cluster.run("node03", "touch", f"{path}/left")
    cluster.power_off("node03")
    time.sleep(1.1)  # Slurm counts whole seconds: in the same one it takes a boot for none
    cluster.boot("node03")
    cluster.wait_state("node03", "down")  # ReturnToService=1: not used again before somebody says so
    reason = cluster.run("ctl", "sinfo", "-h", "-R", "-o", "%E").stdout
    assert reason.strip() == "Node unexpectedly rebooted"
    cluster.resume("node03")
    cluster.wait_idle("node03")
    assert cluster.run("ctl", "srun", "-w", "node03", "hostname", user="tester").stdout == "node03\n"
    left = cluster.run(
        "node03", "sh", "-c", "ls /tmp/left /run/left /dev/shm/left /var/lib/ckptless/left", check=False
    )
    assert left.stdout == "/var/lib/ckptless/left\n"


def test_restore_mends_whatever_was_broken(cluster: Cluster) -> None:
    job = cluster.run("ctl", "sbatch", "--parsable", "-N4", "--wrap", "srun sleep 600", user="tester").stdout
    cluster.unplug("node01")
    cluster.power_off("node02")
    cluster.cycle("node03")
    cluster.stop_slurmd("node04", signal.SIGKILL)
    cluster.run("ctl", "scontrol", "update", "nodename=node05", "state=drain", "reason=test")
    cluster.restore()
    assert set(cluster.node_states().values()) == {"idle"}
    assert job.strip() not in cluster.run("ctl", "squeue", "-h", "-o", "%A").stdout
    assert cluster.run("ctl", "srun", "-N5", "hostname", user="tester").stdout.count("node") == 5


# --- Slurm's own daemons


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_outlive_slurmctld(cluster: Cluster, number: signal.Signals) -> None:
    job = cluster.run(
        "ctl", "sbatch", "--parsable", "-N1", "--wrap", "sleep 600", user="tester"
    ).stdout.strip()
    eventually(lambda: cluster.run("ctl", "squeue", "-h", "-o", "%t").stdout == "R\n")
    if number == signal.SIGKILL:
        # After a crash Slurm knows what it had saved: let it save something that it was told just now.
        cluster.run("ctl", "scontrol", "update", f"jobid={job}", "comment=saved-by-now")
        saved = cluster.var("ctl") / "spool/slurmctld/job_state"
        eventually(lambda: saved.exists() and b"saved-by-now" in saved.read_bytes())
    cluster.stop_slurmctld(number)
    assert cluster.node_states() == {}
    assert "DOWN" in cluster.run("node01", "scontrol", "ping", check=False).stdout
    assert cluster.service("ctl", "slurmctld").last_exit == (0 if number == signal.SIGTERM else -number)
    cluster.start_slurmctld()
    cluster.wait_registered()
    assert cluster.run("ctl", "squeue", "-h", "-o", "%t").stdout == "R\n"


def test_a_jobs_processes_outlive_slurmd(cluster: Cluster) -> None:
    cluster.run("ctl", "sbatch", "-w", "node04", "--wrap", "sleep 600", user="tester")
    eventually(lambda: cluster.run("node04", "pgrep", "-x", "sleep", check=False).stdout)
    before = cluster.run("node04", "pgrep", "-x", "sleep").stdout
    cluster.stop_slurmd("node04", signal.SIGKILL)
    assert cluster.service_pid("node04", "slurmd") is None
    cluster.start_slurmd("node04")
    cluster.wait_registered()
    assert cluster.run("node04", "pgrep", "-x", "sleep").stdout == before
    assert cluster.node_states()["node04"] in ("mixed", "allocated"), "not taken for a reboot"


# --- services and files of one's own

SERVICE = Service(
    name="echo-d",
    argv=("bash", "-c", "echo $(id -un) {node} $WORD $$; exec sleep 600"),
    user="tester",
    env={"WORD": "on-{node}"},
)
PROLOG = """\
#!/bin/sh
echo "$SLURM_JOB_ID $SLURM_JOB_USER $(cat /etc/ckptless/ckptless.yaml)" > /shared/prolog-$SLURMD_NODENAME
"""


def test_a_service_is_kept_running_unless_it_was_stopped(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(Plan(nodes=1, services=(SERVICE,)))

    def lines() -> list[str]:
        return cluster.log("node01", "echo-d").splitlines()

    eventually(lines)
    first = cluster.service_pid("node01", "echo-d")
    assert lines() == [f"tester node01 on-node01 {first}"]
    begin = time.monotonic()
    cluster.service_kill("node01", "echo-d")
    eventually(lambda: len(lines()) == 2)
    assert time.monotonic() - begin >= RESTART_PAUSE_S
    assert cluster.service_pid("node01", "echo-d") not in (None, first)
    cluster.service_stop("node01", "echo-d")
    assert cluster.service("node01", "echo-d").last_exit == -signal.SIGTERM
    time.sleep(3 * RESTART_PAUSE_S)
    assert cluster.service_pid("node01", "echo-d") is None
    with pytest.raises(ClusterError, match="echo-d is not running on node01"):
        cluster.service_kill("node01", "echo-d")
    cluster.service_start("node01", "echo-d")
    eventually(lambda: len(lines()) == 3)
    cluster.cycle("node01")
    eventually(lambda: len(lines()) == 4)
    eventually(lambda: cluster.service("node01", "echo-d").starts == 1)
    with pytest.raises(ClusterError, match="no service 'nothing'"):
        cluster.service_pid("node01", "nothing")
    with pytest.raises(ClusterError, match="no service 'echo-d'"):
        cluster.service_pid("ctl", "echo-d")


def test_a_service_that_cannot_start_is_tried_again_and_says_why(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(Plan(nodes=1, services=(Service(name="none", argv=("no-such-command",)),)))
    eventually(lambda: cluster.service("node01", "none").starts > 2)
    eventually(lambda: "cannot start no-such-command" in cluster.log("node01", "none"))
    eventually(lambda: cluster.service("node01", "none").last_exit == 127)


def test_settings_prolog_files_and_shares(make_cluster: MakeCluster, tmp_path: Path) -> None:
    (tmp_path / "read").write_text("shared")
    cluster = make_cluster(
        Plan(
            nodes=2,
            conf={"PrologFlags": "Alloc", "Prolog": "/etc/ckptless/prolog", "slurmdtimeout": "60"},
            lines=("PartitionName=second Nodes=node02",),
            shares=(Share(path=str(tmp_path), at="/mnt/one"), Share(path=str(tmp_path), writable=True)),
        ),
        files={"/etc/ckptless/prolog": PROLOG, "/etc/ckptless/ckptless.yaml": "first"},
    )
    assert cluster.run("ctl", "srun", "-p", "second", "hostname", user="tester").stdout == "node02\n"
    written = (cluster.shared / "prolog-node02").read_text().split()
    assert written[1:] == ["tester", "first"]
    assert "SlurmdTimeout           = 60 sec" in cluster.run("ctl", "scontrol", "show", "config").stdout
    cluster.write("/etc/ckptless/ckptless.yaml", "second")
    assert cluster.run("node01", "cat", "/etc/ckptless/ckptless.yaml", user="other").stdout == "second"
    assert cluster.run("node01", "cat", "/mnt/one/read").stdout == "shared"
    assert cluster.run("node01", "touch", "/mnt/one/read", check=False).returncode == 1
    cluster.run("node01", "touch", f"{tmp_path}/written")
    assert (tmp_path / "written").exists()
    with pytest.raises(ClusterError, match="lie in /etc"):
        cluster.write("/usr/bin/true", "")


# --- several


def test_two_clusters_know_nothing_of_each_other(make_cluster: MakeCluster, tmp_path: Path) -> None:
    both = [make_cluster(Plan(nodes=number)) for number in (1, 2)]
    for number, one in enumerate(both, start=1):
        one.run("node01", "touch", "/shared/mine", f"/var/lib/{number}")
        hosts = one.run("ctl", "srun", f"-N{number}", "hostname", user="tester").stdout
        assert len(hosts.split()) == number
    both[0].down()
    assert both[1].run("ctl", "srun", "-N2", "hostname", user="tester").stdout.count("node") == 2
    both[1].wait_idle()
    assert both[1].node_states() == {"node01": "idle", "node02": "idle"}


def test_one_directory_one_cluster(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(Plan(nodes=1))
    other = Cluster(cluster.shared.parent, Plan(nodes=2))
    with pytest.raises(ClusterError, match="take it down first"):
        other.up()
    (tmp_path / "precious").touch()
    foreign = Cluster(tmp_path, Plan(nodes=1))
    with pytest.raises(ClusterError, match="no cluster's"):
        foreign.up()
    foreign.down(purge=True)
    assert (tmp_path / "precious").exists()


# --- the command


def test_command(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(Plan(nodes=2))
    base = cluster.shared.parent

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, "--dir", str(base), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            cwd=ROOT,
        )

    machines = json.loads(command("status", "--json").stdout)
    assert [(one["machine"], one["link"], one["slurm"]) for one in machines] == [
        ("ctl", "up", None),
        ("node01", "up", "idle"),
        ("node02", "up", "idle"),
    ]
    done = command("exec", "-u", "tester", "node01", "bash", "-c", "hostname; pwd; exit 7")
    assert (done.stdout, done.returncode) == ("node01\n/home/tester\n", 7)
    assert command("power-off", "node02").returncode == 0
    assert "node02   10.99.0.12   off" in command("status").stdout
    assert command("boot", "node02").returncode == 0
    assert command("service", "node01", "slurmd", "crash").returncode == 0
    eventually(lambda: "slurm=idle no-slurmd" in command("status").stdout)
    refused = command("unplug", "node09")
    assert (refused.returncode, refused.stderr) == (
        1,
        "Error: no machine 'node09': there are ctl, node01, node02\n",
    )
    assert command("down", "--purge").returncode == 0
    assert command("status").stderr == f"Error: no cluster in {base}: bring one up first\n"
    assert "want KEY=VALUE" in command("up", "--set", "SlurmdTimeout").stderr


def test_shell_runs_on_a_terminal(cluster: Cluster) -> None:
    base = cluster.shared.parent
    inner = " ".join([*CLI, "--dir", str(base), "shell"])
    typed = "hostname; id -un; sinfo -h -o %t; exit\n"
    done = subprocess.run(
        ["script", "-qec", inner, "/dev/null"],
        input=typed,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=ROOT,
    )
    assert "You are tester on ctl" in done.stdout
    assert {"ctl", "tester", "idle"} <= set(done.stdout.splitlines())
    assert "job control" not in done.stdout
