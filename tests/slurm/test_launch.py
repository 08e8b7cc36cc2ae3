"""Starting and ending on real Slurm, without any fault: ways to launch, exit codes, what users are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .cluster.api import Cluster
from .miniconf import puts_in_front
from .training import USER, Training

NODES = 3


@pytest.fixture(autouse=True)
def whole(site: Cluster) -> None:
    site.restore()


def submit(site: Cluster, folder: str, script: str, *options: str) -> tuple[int, Path]:
    """Submit a script of its own; (job id, its folder)."""
    site.run("ctl", "mkdir", "-p", f"/shared/{folder}", user=USER)
    home = site.shared / folder
    (home / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
    words = ["sbatch", "--parsable", *options, "job.sh"]
    done = site.run("ctl", *words, user=USER, cwd=f"/shared/{folder}", env={"OMP_NUM_THREADS": "1"})
    return int(done.stdout), home


def ended(site: Cluster, job: int, state: str) -> str:
    """Wait for a job's end; its record."""
    for _ in range(900):
        text = site.run("ctl", "scontrol", "-o", "show", "job", str(job)).stdout
        if f"JobState={state} " in text:
            return text
        words = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        assert any(f"JobState={word} " in text for word in words), text
        site.run("ctl", "sleep", "0.1")
    raise AssertionError(text)


def wait_for_epilog(site: Cluster, node: str, job: int) -> str:
    """The daemon's log, once the node's epilog can have run."""
    site.wait_idle(node)
    for _ in range(50):
        text = site.log(node, "ckptlessd")
        if f"job {job} ends here" in text:
            return text
        site.run("ctl", "sleep", "0.1")
    return site.log(node, "ckptlessd")


def test_the_prolog_and_epilog_tell_the_daemon(site: Cluster) -> None:
    job = Training(site, nodes=3, spares=1, steps=6)
    # A daemon that is not there yet is told nothing, and asks Slurm instead.
    listens = ("test", "-S", "/run/ckptless/ckptlessd.sock")
    nodes = site.plan.node_names
    there = lambda: all(site.run(node, *listens, check=False).returncode == 0 for node in nodes)  # noqa: E731
    job.wait(there, "every daemon listens")
    job.submit()
    job.hurry()
    job.wait(lambda: job.outcome() is not None, "an outcome")
    job.nothing_left()
    for node in site.plan.node_names:
        begun = f"job {job.job_id} of uid 5001 begins here: spares=1"
        assert begun in site.log(node, "ckptlessd"), job.story()
        assert f"job {job.job_id} ends here" in wait_for_epilog(site, node, job.job_id)
    found = job.outcome()
    assert found is not None
    assert found.pop("launch")
    assert found == {
        "job": str(job.job_id), "state": "done", "exit_code": 0, "reason": "every rank ended by itself",
        "why": "done", "rank": None, "node": None,
    }  # fmt: skip
    # What rank 0 prints is in the batch job's own output, what all print in files.
    assert (job.log_dir / "rank-00001.log").exists()


def test_a_step_of_many_tasks_is_agents_at_once(site: Cluster) -> None:
    toy = Path(__file__).parent.parent / "local/env_script.py"
    script = f"mkdir out; srun ckptless-run {toy} out"
    job, home = submit(site, "step", script, "--nodes=2", "--ntasks-per-node=2", "--ckptless")
    ended(site, job, "COMPLETED")
    assert len(list((home / "out").glob("rank-*.json"))) == 4
    text = (home / f"slurm-{job}.out").read_text()
    assert text.count("in a step of 2 nodes") == 1


def test_tier_1_under_srun_is_torch_alone(site: Cluster) -> None:
    toy = Path(__file__).parent.parent / "local/tier1_script.py"
    script = f"mkdir out; CKPTLESS_ROOTLESS=1 srun ckptless-run {toy} out exit"
    job, home = submit(site, "rootless", script, "--nodes=2", "--ntasks-per-node=2")
    assert "ExitCode=7:0" in ended(site, job, "FAILED")
    found = [json.loads(path.read_text()) for path in sorted((home / "out").glob("rank-*.json"))]
    assert [one["sum"] for one in found] == [10.0] * 4
    assert all("CKPTLESS_AGENT_SOCKET" not in one["env"] for one in found)


@pytest.mark.skipif(not puts_in_front(), reason="Slurm before 23.11 cannot put a program in front of a task")
def test_a_plain_srun_of_python_gets_the_launcher(site: Cluster) -> None:
    toy = Path(__file__).parent.parent / "local/env_script.py"
    script = f"mkdir out; srun --ckptless --nodes=2 --ntasks-per-node=2 python {toy} out"
    job, home = submit(site, "plain", script, "--nodes=2", "--ntasks-per-node=2")
    ended(site, job, "COMPLETED")
    assert len(list((home / "out").glob("rank-*.json"))) == 4
    assert (home / f"slurm-{job}.out").read_text().count("in a step of 2 nodes") == 1


def test_the_scripts_exit_code_is_the_jobs(site: Cluster) -> None:
    job, home = submit(
        site, "fails", "echo 'raise SystemExit(7)' > t.py; ckptless-run t.py", "--nodes=1", "--ckptless"
    )
    text = ended(site, job, "FAILED")
    assert "ExitCode=7:0" in text
    assert "exit code 7" in (home / f"slurm-{job}.out").read_text()


def test_a_heterogeneous_job_is_refused(site: Cluster) -> None:
    """Without --ckptless nobody sees it before the launcher does."""
    script = "echo > t.py; ckptless-run t.py"
    job, home = submit(site, "het", script, "--nodes=1", ":", "--nodes=1")
    assert "ExitCode=2:0" in ended(site, job, "FAILED")
    out = (home / f"slurm-{job}.out").read_text()
    assert out.count("a heterogeneous job (with : or hetjob) cannot train with ckptless") == 1
    words = ("salloc", "--nodes=1", ":", "--nodes=1", "ckptless-run", "job.sh")
    done = site.run("ctl", *words, user=USER, cwd="/shared/het", check=False)
    assert "a heterogeneous job (with : or hetjob) cannot train with ckptless" in done.stderr
    assert done.returncode == 2


def test_two_runs_in_one_job_have_their_own_folders(site: Cluster) -> None:
    script = "echo 'print(\"hello\")' > t.py; ckptless-run t.py && ckptless-run t.py"
    job, home = submit(site, "twice", script, "--nodes=2", "--ckptless")
    ended(site, job, "COMPLETED")
    assert sorted(path.name for path in home.glob("ckptless-*")) == [f"ckptless-{job}", f"ckptless-{job}.1"]
    assert (home / f"slurm-{job}.out").read_text().count("[rank 0] hello") == 2


def test_a_node_without_our_daemon_is_named(site: Cluster) -> None:
    site.service_stop("node02", "ckptlessd")
    job, home = submit(
        site, "nodaemon", "echo > t.py; ckptless-run t.py", "--nodes=2", "--nodelist=node01,node02"
    )
    text = ended(site, job, "FAILED")
    assert "ExitCode=3:0" in text
    out = (home / f"slurm-{job}.out").read_text()
    assert "no ckptlessd answers on node02" in out
    # That its daemon is not there is nothing that Slurm should hold against a node.
    assert site.run("ctl", "sinfo", "-h", "-R").stdout == ""
    # Jobs without --ckptless never notice.
    assert site.run("ctl", "srun", "-N3", "hostname", user=USER).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spares", "3"], "a job of 2 nodes has none left to train on"),
        (["--nodes", "3"], "are more than the 2 of the allocation"),
        (["--job", "x"], "--job is for --local"),
        (["--draw-in", "2"], "permit_job_expansion is not among SchedulerParameters; leave out draw-in"),
    ],
)
def test_wrong_options(site: Cluster, options: list[str], words: str) -> None:
    script = f"echo > t.py; ckptless-run {' '.join(options)} t.py"
    job, home = submit(site, "wrong", script, "--nodes=2")
    assert "ExitCode=2:0" in ended(site, job, "FAILED")
    assert words in (home / f"slurm-{job}.out").read_text()


USR1 = """\
import os, signal, sys, time
from pathlib import Path

rank, count = os.environ["RANK"], 0

def told(*_):
    global count
    count += 1
    Path(f"told-{rank}").write_text(str(count))

signal.signal(signal.SIGUSR1, told)
Path(f"ready-{rank}").touch()
while not Path("over").exists():
    time.sleep(0.05)
"""


def test_sigusr1_reaches_every_rank_and_ends_nothing(site: Cluster) -> None:
    """`scancel --signal`, which is what `#SBATCH --signal` does as well, and a signal to the batch script."""
    script = f"cat > usr1.py <<'END'\n{USR1}END\nexec ckptless-run usr1.py"
    job, home = submit(site, "usr1", script, "--nodes=2", "--ntasks-per-node=2", "--ckptless")

    # An agent that has just begun, long before it can say what it ignores.
    agent = "^[^ ]*python[^ ]* -m ckptless.daemon.agent.main"
    first = f"until pid=$(pgrep -u {USER} -f '{agent}'); do :; done; kill -USR1 $pid"
    for node in ("node01", "node02"):
        site.run(node, "timeout", "60", "sh", "-c", first)

    def wait(names: str, count: int) -> None:
        for _ in range(600):
            found = list(home.glob(names))
            if len(found) == 4 and (not count or all(path.read_text() == str(count) for path in found)):
                return
            site.run("ctl", "sleep", "0.1")
        raise AssertionError([(path.name, path.read_text()) for path in home.iterdir() if path.is_file()])

    wait("ready-*", 0)
    site.run("ctl", "scancel", "--signal=USR1", str(job), user=USER)
    wait("told-*", 1)
    site.run("ctl", "scancel", "--batch", "--signal=USR1", str(job), user=USER)
    wait("told-*", 2)
    (home / "over").touch()
    ended(site, job, "COMPLETED")
    assert {path.read_text() for path in home.glob("told-*")} == {"2"}
    assert "started again" not in (home / f"slurm-{job}.out").read_text()
