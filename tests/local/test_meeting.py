"""A job whose nodes somebody else has started, as Kubernetes or mpirun does: they meet, and one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from .localrun import LAUNCHER, TOY, Job, fault, newest_loss, recovered, same_as_reference, wait_until
from .namespaces import Hosts, hosts

NODES, STEPS = 2, 100
DEADLINE_S = 90.0
PORT = 29512
# In the place of ssh: hosts are addresses, and mpirun tells them apart by their names.
REMOTE = """#!/bin/sh
host=$1; shift
exec ip netns exec {spaces}-$((${{host##*.}} - 1)) unshare --uts sh -c "hostname m$host; $*"
"""
BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


class Pods:
    """`ckptless-run` on each host of a net, and what it needs in its environment."""

    def __init__(
        self, net: Hosts, home: Path, stack: contextlib.ExitStack, options: Sequence[object] = ()
    ) -> None:
        """What is started ends with `stack`."""
        self.net, self.home, self.jobs = net, home, list[Job]()
        self._options, self._stack = options, stack
        self.key = home / "key"
        home.mkdir(parents=True, exist_ok=True)
        self.key.touch(mode=0o400)
        self.key.chmod(0o600)
        self.key.write_bytes(os.urandom(32))
        (home / "slow").touch()

    def refused(self, number: int, code: int, *words: str, **env: str) -> None:
        """Start one more on a host, which ends at once with these words."""
        self.start(number, STEPS, env, self.home / f"refused-{len(self.jobs)}").refused(code, *words)

    def start(
        self,
        number: int,
        steps: int = STEPS,
        env: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> Job:
        """Start a host's, by the variables that a PyTorchJob has."""
        said = {
            "PET_MASTER_ADDR": self.net.address(0),
            "PET_MASTER_PORT": str(PORT),
            "PET_NNODES": str(len(self.net.names)),
            "PET_NODE_RANK": str(number),
            "CKPTLESS_JOB_KEY_FILE": str(self.key),
            "OMP_NUM_THREADS": "1",
            "TOY_SLEEP_S": "0.1",
            "TOY_SLEEP_WHILE": str(self.home / "slow"),
            **(env or {}),
        }
        inside = ("-m", "tests.local.inside", self.net.space(number), *LAUNCHER)
        words = ["--spares", 1, "--max-stall", 60, "--tee", "0", *self._options]
        script = [TOY, steps, self.home / "out", json.dumps([])]
        folder, state = self.home / f"pod-{number}-{len(self.jobs)}", state_dir or self.home / "state"
        job = Job(folder, words, script, said, state_dir=state, launcher=inside, way=())
        job.home = self.home
        self.jobs.append(job)
        return self._stack.enter_context(job)


@contextlib.contextmanager
def pods(folder: Path, count: int, options: Sequence[object] = ()) -> Iterator[Pods]:
    with hosts(folder, count, sshd=False) as net, contextlib.ExitStack() as stack:
        yield Pods(net, folder / "run", stack, options)


def test_a_node_is_lost_and_comes_back_in_vain(tmp_path: Path) -> None:
    with pods(tmp_path, NODES + 1) as run:
        # Node 0 comes last: the others wait for it.
        jobs = [run.start(number) for number in (1, 2, 0)]
        wait_until(lambda: newest_loss(run.home) >= 10, DEADLINE_S, jobs[2])
        run.net.kill(1)
        wait_until(lambda: len(recovered(jobs[2].ledger())) == 1, DEADLINE_S, jobs[2])
        run.refused(1, 3, "node 0 refuses node 1: the job has begun")
        (run.home / "slow").unlink()
        jobs[1].ended(0, DEADLINE_S)
        jobs[2].ended(0, DEADLINE_S)
        ledger = same_as_reference(jobs[2], [], STEPS, NODES)
        assert [one.kind for one in ledger.faults].count("node-lost") == 1
        assert ledger.generations[-1].places[1] == (2, 0)
        assert not any(run.net.processes(number) for number in range(NODES + 1))


def test_who_does_not_belong_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_bytes(os.urandom(32))
    with pods(tmp_path, 2) as run:
        first = run.start(0)
        run.refused(1, 3, "does not hold the key", CKPTLESS_JOB_KEY_FILE=str(other))
        run.refused(1, 3, "slots_per_node is 2, and 1 on node 0", PET_NPROC_PER_NODE="2")
        run.refused(1, 3, "nodes is 4, and 1 on node 0", PET_NNODES="5")
        assert first.launcher.poll() is None
        assert "refused" in first.stderr
        last = run.start(1)
        (run.home / "slow").unlink()
        for job in (first, last):
            job.ended(0, DEADLINE_S)


def test_a_pod_is_told_to_end(tmp_path: Path) -> None:
    """As Kubernetes does where it drains a machine: for the job that is a lost node."""
    with pods(tmp_path, NODES + 1) as run:
        jobs = [run.start(number) for number in range(NODES + 1)]
        wait_until(lambda: newest_loss(run.home) >= 5, DEADLINE_S, jobs[0])
        jobs[1].launcher.terminate()
        wait_until(lambda: len(recovered(jobs[0].ledger())) == 1, DEADLINE_S, jobs[0])
        assert jobs[1].wait(DEADLINE_S) == 128 + 15
        (run.home / "slow").unlink()
        jobs[0].ended(0, DEADLINE_S)
        same_as_reference(jobs[0], [], STEPS, NODES)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI (Debian: openmpi-bin)")
def test_mpirun_starts_it_and_a_node_is_lost(tmp_path: Path) -> None:
    with pods(tmp_path, NODES + 1) as run:
        remote = run.home / "remote"
        remote.write_text(REMOTE.format(spaces=run.net.space(0).rpartition("-")[0]))
        remote.chmod(0o755)
        addresses = [run.net.address(number) for number in range(NODES + 1)]
        here = f"{addresses[0].rpartition('.')[0]}.0/24"
        begin = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(remote)]
        begin += ["--mca", "oob_tcp_if_include", here, "--host", ",".join(addresses)]
        begin += ["--map-by", "ppr:1:node", "--enable-recovery", "-x", "CKPTLESS_JOB_KEY_FILE"]
        env = {"CKPTLESS_JOB_KEY_FILE": str(run.key), "OMP_NUM_THREADS": "1"}
        env |= {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(run.home / "slow")}
        faults = [fault("forward", "kill", 0, 5)]
        words = ["--spares", 1, "--max-stall", 60, "--tee", "0", "--master-addr", addresses[0]]
        script = [TOY, STEPS, run.home / "out", json.dumps(faults)]
        launcher = ("-c", BECOME, *begin, sys.executable, *LAUNCHER)
        state = run.home / "state"
        with Job(tmp_path / "job", words, script, env, state_dir=state, launcher=launcher, way=()) as job:
            job.home = run.home
            wait_until(lambda: newest_loss(run.home) >= 10, DEADLINE_S, job)
            for pid in run.net.processes(1):
                # What mpirun itself has there stays: where that ends, mpirun ends all.
                if b"orted" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(recovered(job.ledger())) == 2, DEADLINE_S, job)
            (run.home / "slow").unlink()
            job.ended(0, DEADLINE_S)
            ledger = same_as_reference(job, faults, STEPS, NODES)
            kinds = [one.kind for one in ledger.faults if one.kind != "broken"]
            assert kinds == ["died", "node-lost"], job.story()
