"""What every backend of the Slurm adapter must do, on a real cluster: one contract, run for each of them.

The checks run inside the cluster's controller, where this file is a script: `test_adapter.py BACKEND CHECK`.
CKPTLESS_SLURM_ROOTFS names the root of another Slurm (see chroot.py); pyslurm's turn comes where it is
installed.
"""

import asyncio
import contextlib
import json
import logging
import os
import pwd
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.clock import Clock
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.slurm.adapter import Job
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import (
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from ckptless.daemon.slurm.pyslurm_backend import Pyslurm
from ckptless.daemon.slurm.select import select

from .cluster import requirements
from .cluster.api import Cluster
from .cluster.plan import Plan, Share

ROOTFS = os.environ.get("CKPTLESS_SLURM_ROOTFS", "")
REPOSITORY = Path(__file__).resolve().parents[2]
BACKENDS = ("commands", "pyslurm")
WAIT_S = 30.0
NODES = ("node01", "node02", "node03", "node04")
WHOLE = ("--exclusive", "--ntasks-per-node=1", "--no-kill")
HOSTILE = "one\ntwo UserId=root(0) JobState=COMPLETED NodeList=node09 "

Check = Callable[[Commands], Awaitable[object]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# --------------------------------------------------------------------------- inside the cluster


def run_as(user: str, *argv: bytes | str) -> str:
    account = pwd.getpwnam(user)
    done = subprocess.run(
        argv,
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def submit(*options: str, user: str = "tester", name: bytes | str = "job") -> int:
    named = (b"--job-name=" + os.fsencode(name), "--wrap=exec sleep 300")
    return int(run_as(user, "sbatch", "--parsable", "--output=/dev/null", *options, *named))


async def until(slurm: Commands, job_id: int, wanted: Callable[[Job], bool]) -> Job:
    deadline = Deadline(WAIT_S)
    while not wanted(job := await slurm.job(job_id)):
        assert deadline.left_s > 0, job
        await asyncio.sleep(0.05)
    return job


async def running(slurm: Commands, *options: str, name: bytes | str = "job") -> Job:
    return await until(slurm, submit(*options, name=name), lambda job: job.running)


@contextlib.contextmanager
def stopped_slurmctld() -> Iterator[None]:
    """It takes connections and says nothing: worse than one that is gone."""
    pids = [int(pid) for pid in subprocess.check_output(["pidof", "slurmctld"]).split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@check
async def answers(slurm: Commands) -> None:
    assert len(await slurm.nodes()) == len(NODES)


@check
async def nodes(slurm: Commands) -> None:
    found = {node.name: node for node in await slurm.nodes()}
    assert tuple(sorted(found)) == NODES
    for name, node in found.items():
        assert (node.address, node.cpus, node.partitions, node.reason) == (name, 8, ("main",), "")
        assert node.idle
        assert node.responding
        assert not node.down
        assert node.boot_s is not None
        assert abs(time.time() - node.boot_s) < 3600
        assert await slurm.node(name) == node
    with pytest.raises(SlurmNotFoundError, match="nowhere"):
        await slurm.node("nowhere")
    for bad in ("", "node[01-02]", "-h", "node01,node02", "node01 state=down", "ALL"):
        with pytest.raises((UsageError, SlurmNotFoundError)):
            await slurm.node(bad)


@check
async def a_job(slurm: Commands) -> None:
    two = ("-w", "node[01-02]", *WHOLE)
    job = await running(slurm, *two, "--time=1-00:30:00", f"--comment=\n{HOSTILE}", name=HOSTILE)
    assert job.user_id == pwd.getpwnam("tester").pw_uid
    assert (job.nodes, job.batch_host, job.partition) == (("node01", "node02"), "node01", "main")
    assert (job.name, job.comment.strip(), job.array) == (HOSTILE, HOSTILE.strip(), "")
    assert job.time_limit_s == 86400 + 30 * 60
    assert job.start_s is not None
    assert abs(time.time() - job.start_s) < 60
    assert job.end_s == job.start_s + job.time_limit_s
    assert job.restarts == 0
    assert job.holds_nodes
    assert job in await slurm.jobs()
    with pytest.raises(SlurmNotFoundError):
        await slurm.job(4000)
    for bad in (0, -1, 2**32):
        with pytest.raises(UsageError):
            await slurm.job(bad)


@check
async def a_name_that_is_not_utf8(slurm: Commands) -> None:
    job = await running(slurm, "-N1", name=b"caf\xe9 \xff")
    assert job.name.startswith("caf")
    assert job in await slurm.jobs()


@check
async def same_as_the_commands(slurm: Commands) -> None:
    """Both backends say the same of everything there is."""
    plain = await running(slurm, "-N2", *WHOLE)
    await running(slurm, "-N1", "--time=10", "--comment=x", name="é")
    submit("--array=1-9%2", "-N1", f"--dependency=afterok:{plain.job_id}")
    await until(slurm, submit("--array=0-1", "-N1"), lambda job: job.running)
    over = await running(slurm, "-N1")
    await slurm.cancel(over.job_id)
    await slurm.drain("node04", "ckptless: same")
    await until(slurm, over.job_id, lambda job: job.over)
    theirs = Commands()
    for mine, their in zip(by_number(await slurm.jobs()), by_number(await theirs.jobs()), strict=True):
        assert mine == their, (mine, their)
    blind = {"boot_s": None, "slurmd_start_s": None}
    nodes = [replace(node, **blind) for node in await slurm.nodes()]  # type: ignore[arg-type]
    assert nodes == [replace(node, **blind) for node in await theirs.nodes()]  # type: ignore[arg-type]


def by_number(jobs: tuple[Job, ...]) -> list[Job]:
    return sorted(jobs, key=lambda job: job.job_id)


@check
async def drain_and_undrain(slurm: Commands) -> None:
    job = await running(slurm, "-N1", "-w", "node03", "--exclusive")
    reason = "ckptless: rank 3 is gone, a=b State=IDLE (gpu 5)"
    await slurm.drain("node03", reason)
    node = await slurm.node("node03")
    assert node.reason == reason
    assert node.draining
    assert not node.down
    assert not node.idle
    assert (await slurm.job(job.job_id)).running
    await slurm.undrain("node03")
    await slurm.undrain("node03")
    node = await slurm.node("node03")
    assert not node.draining
    assert node.reason == "", node
    with pytest.raises(SlurmNotFoundError):
        await slurm.drain("nowhere", "x")
    for bad in ("", "  ", "a\nb", "x" * 201, "'quoted'", '"', "a\\b", "\x1b[31m"):
        with pytest.raises(UsageError):
            await slurm.drain("node03", bad)
    assert not (await slurm.node("node03")).draining


@check
async def mark_down(slurm: Commands) -> None:
    job = await running(slurm, "-w", "node[01-03]", *WHOLE)
    await slurm.mark_down("node03", "ckptless: dark")
    node = await slurm.node("node03")
    assert node.down
    assert node.reason == "ckptless: dark"
    job = await slurm.job(job.job_id)
    assert (job.state, job.nodes) == ("RUNNING", ("node01", "node02")), job
    # What a recovery does next.
    assert await slurm.draw_in(job.job_id, 1) == ("node04",)
    if node.version.startswith("22.05"):
        with pytest.raises(SlurmRefusedError, match="DB index"):
            await slurm.comment(job.job_id, "lost node03")
    else:
        await slurm.comment(job.job_id, "lost node03")
    assert set((await slurm.job(job.job_id)).nodes) == {"node01", "node02", "node04"}
    await slurm.undrain("node03")
    assert not (await slurm.node("node03")).down


@check
async def cancel(slurm: Commands) -> None:
    job = await running(slurm, "-N1")
    await slurm.cancel(job.job_id)
    job = await until(slurm, job.job_id, lambda job: job.over)
    assert job.state == "CANCELLED"
    await slurm.cancel(job.job_id)
    with pytest.raises(SlurmNotFoundError):
        await slurm.cancel(4000)


@check
async def one_task_of_an_array(slurm: Commands) -> None:
    """The number of one of the tasks is the number of the whole array."""
    base = submit("--array=0-2", "-N1")
    deadline = Deadline(WAIT_S)
    while len(tasks := [job for job in await slurm.jobs() if job.array and job.running]) < 3:
        assert deadline.left_s > 0, tasks
        await asyncio.sleep(0.1)
    assert {job.array for job in tasks} == {f"{base}_{task}" for task in range(3)}
    own = await slurm.job(base)
    await slurm.comment(base, "only this one")
    await slurm.cancel(base)
    await until(slurm, base, lambda job: job.over)
    for job in tasks:
        if job.job_id != base:
            now = await slurm.job(job.job_id)
            assert (now.running, now.comment) == (True, "")
    assert own in tasks
    for job in tasks:
        await slurm.cancel(job.job_id)
        await until(slurm, job.job_id, lambda job: job.over)
    waiting = submit("--array=1-2", "-N1", "--begin=now+1hour")
    with pytest.raises(SlurmRefusedError, match="waiting"):
        await slurm.cancel(waiting)
    assert (await slurm.job(waiting)).state == "PENDING"


@check
async def comment(slurm: Commands) -> None:
    job = await running(slurm, "-N2", *WHOLE)
    text = "ckptless: generation 3, step 41, a=b"
    await slurm.comment(job.job_id, text)
    assert (await slurm.job(job.job_id)).comment == text
    with pytest.raises(SlurmNotFoundError):
        await slurm.comment(4000, "x")


@check
async def draw_in(slurm: Commands) -> None:
    job = await running(slurm, "-w", "node01", *WHOLE, "--time=600")
    with pytest.raises(SlurmRefusedError, match="no 9 idle"):
        await slurm.draw_in(job.job_id, 9, deadline_s=4.0)
    # Nor what a job that comes first waits for, though that cannot start yet.
    run_as("tester", "scontrol", "update", f"jobid={job.job_id}", "nice=100")
    first = submit("-N4", *WHOLE)
    await until(slurm, first, lambda job: job.reason in ("Resources", "Priority"))
    with pytest.raises(SlurmRefusedError, match=f"while job {first}, which comes first, waits for nodes"):
        await slurm.draw_in(job.job_id, 1)
    await slurm.cancel(first)
    new = await slurm.draw_in(job.job_id, 2, avoid=("node02",))
    assert new == ("node03", "node04")
    job = await slurm.job(job.job_id)
    assert (job.state, set(job.nodes)) == ("RUNNING", {"node01", *new})
    step = ["srun", f"--jobid={job.job_id}", "--overlap", "-N1", "-n1", "-w", "node04", "hostname"]
    assert await asyncio.to_thread(run_as, "tester", *step) == "node04"
    with pytest.raises(SlurmRefusedError, match="no 1 idle"):
        await slurm.draw_in(job.job_id, 1, avoid=("node02",), deadline_s=4.0)
    left = [other for other in await slurm.jobs() if other.job_id != job.job_id and not other.over]
    assert left == []
    with pytest.raises(SlurmNotFoundError):
        await slurm.draw_in(4000, 1)
    await slurm.cancel(job.job_id)
    await until(slurm, job.job_id, lambda job: job.over)
    with pytest.raises(SlurmRefusedError, match="CANCELLED"):
        await slurm.draw_in(job.job_id, 1)


@check
async def release(slurm: Commands) -> None:
    job = await running(slurm, "-w", "node[01-03]", *WHOLE)
    for bad, why in ((["node01"], "batch script"), (["node04"], "not in job"), (list(NODES[:3]), "batch")):
        with pytest.raises(UsageError, match=why):
            await slurm.release(job.job_id, bad)
    await slurm.release(job.job_id, ["node02"])
    assert (await slurm.job(job.job_id)).nodes == ("node01", "node03")
    waiting = submit("-N1", "--begin=now+1hour")
    # scontrol would take it, and change which nodes the job waits for.
    with pytest.raises(SlurmRefusedError, match="PENDING"):
        await slurm.release(waiting, ["node02"])


def left_running() -> list[bytes]:
    return subprocess.run(["pgrep", "-x", "scontrol|squeue"], capture_output=True, check=False).stdout.split()


@check
async def a_controller_that_hangs(slurm: Commands) -> None:
    clock = Clock()
    cached = CachedSlurm(slurm, clock, query_s=1.0)
    before = await cached.nodes()
    assert before.fresh
    assert before.value is not None
    with stopped_slurmctld():
        calls: list[Awaitable[object]] = [
            slurm.jobs(deadline_s=1.0),
            slurm.nodes(deadline_s=1.0),
            slurm.drain("node01", "x", deadline_s=1.0),
        ]
        for call in calls:
            began = clock.now()
            with pytest.raises(SlurmUnreachableError):
                await call
            assert clock.now() - began < 2.0
        after = await cached.nodes(max_age_s=0.5, wait_s=0.5)
        assert after.value == before.value
        assert not after.fresh
        assert after.age_s > 3.0
        assert after.trouble
    again = await cached.nodes(max_age_s=0.0, wait_s=10.0)
    assert again.value is not None
    await answers(slurm)
    assert not left_running()


@check
async def timing(slurm: Commands) -> dict[str, float]:
    """Median milliseconds of each call, here and now."""
    job = await running(slurm, "-N2", *WHOLE)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "jobs": slurm.jobs,
        "job": lambda: slurm.job(job.job_id),
        "nodes": slurm.nodes,
        "node": lambda: slurm.node("node04"),
        "drain": lambda: slurm.drain("node04", "timing"),
        "undrain": lambda: slurm.undrain("node04"),
        "mark_down": lambda: slurm.mark_down("node04", "timing"),
        "comment": lambda: slurm.comment(job.job_id, "timing"),
    }
    found: dict[str, float] = {}
    for name, call in calls.items():
        times = []
        for _ in range(15):
            began = time.perf_counter()
            await call()
            times.append(time.perf_counter() - began)
        found[name] = round(statistics.median(times) * 1000, 2)
        assert found[name] < 500, name
    await slurm.undrain("node04")
    return found


@check
async def a_user_without_rights(slurm: Commands) -> None:
    """As the user tester: everything can be seen, little can be done."""
    own, foreign = submit("-N1"), submit("-N1", user="other")
    account = pwd.getpwnam("tester")
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    await until(slurm, foreign, lambda job: job.running)
    orders: list[Awaitable[object]] = [
        slurm.drain("node01", "x"),
        slurm.mark_down("node01", "x"),
        slurm.cancel(foreign),
        slurm.draw_in(foreign, 1),
    ]
    for order in orders:
        with pytest.raises(SlurmRefusedError):
            await order
    assert not (await slurm.node("node01")).draining
    await slurm.cancel(own)


def main(backend: str, name: str) -> None:
    """Run one check; a dictionary that it returns is printed as JSON."""
    logging.basicConfig(level=logging.INFO)

    async def run() -> object:
        if backend == "auto":
            slurm = await select("auto")
            print(type(slurm).__name__)
        else:
            slurm = Commands() if backend == "commands" else Pyslurm()
        try:
            return await CHECKS[name](slurm)
        finally:
            await slurm.aclose()

    print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit()

# ---------------------------------------------------------------------------------- outside of it


class Inside:
    """Runs checks on a cluster's controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._python = "python3" if ROOTFS else sys.executable

    def run(self, backend: str, name: str) -> str:
        env = {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
        words = (self._python, "-m", __name__, backend, name)
        return self.cluster.run("ctl", *words, env=env, timeout_s=90).stdout

    def has_pyslurm(self) -> bool:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pyslurm') is None)"
        return self.cluster.run("ctl", self._python, "-c", find, check=False).returncode == 0


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    lacks = requirements.missing(ROOTFS)
    if lacks and os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(f"no Slurm cluster here, it takes {', '.join(lacks)}")
    if lacks:
        pytest.skip(f"no Slurm cluster here, it takes {', '.join(lacks)}")
    conf = {
        "SchedulerParameters": "permit_job_expansion,batch_sched_delay=0,sched_interval=1,bf_interval=1",
        "ReturnToService": "1",
        "PrologFlags": "",
    }
    shares = (Share(path=str(REPOSITORY)),) if ROOTFS else ()
    plan = Plan(nodes=len(NODES), conf=conf, rootfs=ROOTFS, shares=shares)
    with Cluster(tmp_path_factory.mktemp("adapter") / "cluster", plan, ckptless=not ROOTFS) as cluster:
        yield Inside(cluster)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, inside: Inside) -> str:
    if request.param == "pyslurm" and not inside.has_pyslurm():
        pytest.skip("pyslurm is not installed with this Slurm")
    inside.cluster.restore()
    return str(request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_contract(inside: Inside, backend: str, name: str) -> None:
    print(inside.run(backend, name))


def test_auto_takes_pyslurm_where_it_fits(inside: Inside) -> None:
    inside.cluster.restore()
    chosen = inside.run("auto", "answers").splitlines()[0]
    assert chosen == ("Pyslurm" if inside.has_pyslurm() else "Commands")


def test_a_controller_that_is_gone(inside: Inside, backend: str) -> None:
    inside.cluster.stop_slurmctld()
    try:
        with pytest.raises(Exception, match=r"SlurmUnreachableError|UnfitError"):
            inside.run(backend, "nodes")
    finally:
        inside.cluster.start_slurmctld()
    inside.run(backend, "answers")
