"""A job on hosts that ssh reaches, without Slurm: processes and hosts are lost, and losses stay the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from .localrun import POLL_S, TOY, Job, newest_loss, recovered, same_as_reference, wait_until
from .namespaces import Hosts, hosts
from .test_job_key import open_to_all, spellings

NODES, STEPS = 3, 100
DEADLINE_S = 90.0
# Shorter than sshd's or ssh's own.
NOTHING_LEFT_S = 30.0


def job_on(net: Hosts, home: Path, options: Sequence[object] = (), steps: int = STEPS) -> Job:
    """A toy on all hosts but for the last, which is the spare."""
    words = ["--spares", 1, "--max-stall", 60, "--tee", "0", *options]
    env = {
        # As in the run that it is compared with.
        "OMP_NUM_THREADS": "1",
        "TOY_SLEEP_S": "0.1",
        "TOY_SLEEP_WHILE": str(home / "slow"),
        "PATH": net.path,
    }
    home.mkdir(parents=True, exist_ok=True)
    (home / "slow").touch()
    script = [TOY, steps, home / "out", json.dumps([])]
    return Job(home, words, script, env, way=("--hosts", net.hostfile()))


def trains_past(job: Job, step: int) -> None:
    wait_until(lambda: newest_loss(job.home) >= step, DEADLINE_S, job)


def nothing_left(net: Hosts, but: Sequence[int] = ()) -> None:
    """Fails where a host still has processes of a job."""
    limit = time.monotonic() + NOTHING_LEFT_S
    others = [number for number in range(len(net.names)) if number not in but]
    while (left := {n: pids for n in others if (pids := net.processes(n))}) and time.monotonic() < limit:
        time.sleep(POLL_S)
    assert not left


def cut_ssh(net: Hosts, number: int) -> None:
    """End the launcher's ssh to a host."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(f"{net.folder}/ssh_config") in words and net.names[number].encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)


LOSE = {"killed": Hosts.kill, "dark": Hosts.darken, "no-ssh": cut_ssh}


@pytest.mark.parametrize("how", LOSE)
def test_a_process_and_a_host_are_lost(tmp_path: Path, how: str) -> None:
    with hosts(tmp_path, NODES + 1) as net, job_on(net, tmp_path / "run") as job:
        trains_past(job, 10)
        os.kill(int((job.home / "out/pid-1.txt").read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: len(recovered(job.ledger())) == 1, DEADLINE_S, job)
        trains_past(job, newest_loss(job.home) + 5)
        LOSE[how](net, 2)
        wait_until(lambda: len(recovered(job.ledger())) == 2, DEADLINE_S, job)
        (job.home / "slow").unlink()
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [], STEPS, NODES)
        # One that nothing reaches ends by itself.
        nothing_left(net)
    assert ledger.generations[-1].places[2] == (3, 0)
    assert "node-lost" in {one.kind for one in ledger.faults}, ledger.faults
    if how != "dark":
        assert "h2: its ssh has ended" in job.stderr


def test_the_launcher_is_killed(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as net, job_on(net, tmp_path / "run", steps=100_000) as job:
        trains_past(job, 3)
        assert all(net.processes(number) for number in range(2))
        job.launcher.kill()
        job.ended(-signal.SIGKILL, DEADLINE_S)
        nothing_left(net)


def test_ctrl_c(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as net, job_on(net, tmp_path / "run", steps=100_000) as job:
        trains_past(job, 3)
        # The key is where only its user can read it, and nowhere in a command line or an environment.
        key = (job.state_dir / "node-0/key").read_bytes()
        assert (job.state_dir / "node-0/key").stat().st_mode & 0o777 == 0o600
        assert not open_to_all(spellings(key))
        job.launcher.send_signal(signal.SIGINT)
        job.ended(128 + signal.SIGINT, DEADLINE_S)
        nothing_left(net)
        (row,) = job.ledger().jobs
        assert (row.state, row.exit_code) == ("stopped", 128 + signal.SIGINT)


def test_a_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nprint('it begins')\nsys.exit('no such data set')\n")
    with hosts(tmp_path, 1) as net:
        options = ["--spares", 0, "--tee", "all"]
        env = {"PATH": net.path}
        with Job(tmp_path / "run", options, [script], env, way=("--hosts", net.hostfile())) as job:
            job.ended(1, DEADLINE_S)
            assert "it begins" in job.stdout
            assert "no such data set" in job.stderr
            nothing_left(net)


def test_a_host_that_ssh_does_not_reach(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as net:
        path = net.hostfile()
        path.write_text(path.read_text().replace("h1", "h9"))
        with Job(tmp_path / "run", [], [TOY], {"PATH": net.path}, way=("--hosts", path)) as job:
            job.refused(3, "h9: ssh ended: ", "Could not resolve hostname h9")
            nothing_left(net)
