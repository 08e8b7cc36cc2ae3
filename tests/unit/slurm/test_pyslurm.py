"""The process in which pyslurm lives, when it hangs, dies or talks; with a made-up pyslurm in it."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.errors import SlurmNotFoundError, SlurmRefusedError, SlurmUnreachableError
from ckptless.daemon.slurm.pyslurm_backend import Pyslurm, UnfitError
from ckptless.daemon.slurm.pyslurm_worker import Answer, Request, decode, encode
from ckptless.daemon.slurm.select import select

MADE_UP = '''
import os, sys, time
from types import SimpleNamespace
os.write(1, b"noise on standard output\\n")
__version__ = "1.2.3"
class PyslurmError(Exception): pass
def node(**more):
    fields = dict(name="n1", address="10.0.0.1", state="IDLE+DRAIN", reason="x\\ny", boot_time=5)
    fields |= dict(reason_time=7)
    fields |= dict(slurmd_start_time=None, total_cpus=8, partitions=["a", "b"], slurm_version="26.05.5")
    return SimpleNamespace(**{**fields, **more})
class Strange:
    """A job whose name is not UTF-8."""
    def __init__(self, **fields): self.__dict__.update(fields)
    @property
    def name(self): return b"caf\\xe9".decode()
def job(**more):
    fields = dict(id=7, user_id=1000, state="RUNNING", allocated_nodes="n[1-2]", requeue_count=1)
    fields |= dict(batch_host="n1", is_batch_job=True, partition="a", start_time=100, end_time=200)
    fields |= dict(time_limit=None, state_reason="None", comment=None, array_id=None)
    fields |= dict(array_task_id=None, array_tasks_waiting=None)
    return Strange(**{**fields, **more})
class Nodes:
    @staticmethod
    def load(): return {"n1": node()}
class Jobs:
    @staticmethod
    def load():
        waiting = dict(array_id=9, array_tasks_waiting="1-3", state="PENDING")
        return {7: job(), 8: job(id=8, array_id=8, time_limit=10), 9: job(id=9, **waiting)}
class Job:
    def __init__(self, number): pass
    @staticmethod
    def load(number):
        if number == 7: return job()
        if number == 8: raise KeyError(8)
        if number == 66: os.kill(os.getpid(), 11)
        if number == 77: time.sleep(60)
        if number == 88: os._exit(1)
        raise PyslurmError("Invalid job id specified")
class Node:
    def __init__(self, name=None, **changes): self.changes = changes
    def modify(self, changes): raise PyslurmError("Invalid user id")
'''


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has the made-up pyslurm."""
    (tmp_path / "pyslurm.py").write_text(MADE_UP)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def with_pyslurm(python: str, test: Callable[[Pyslurm], Awaitable[None]]) -> None:
    async def body() -> None:
        slurm = Pyslurm(python=python)
        try:
            async with asyncio.timeout(30.0):
                await test(slurm)
        finally:
            await slurm.aclose()

    asyncio.run(body())


def test_jobs_and_nodes(python: str) -> None:
    async def test(slurm: Pyslurm) -> None:
        assert await slurm.hello() == "pyslurm 1.2.3"
        job = await slurm.job(7)
        assert (job.nodes, job.batch_host, job.restarts, job.name) == (("n1", "n2"), "n1", 1, "caf\ufffd")
        # Without a limit Slurm's end is a year after the start, which is no end.
        assert (job.start_s, job.end_s, job.time_limit_s, job.array) == (100.0, None, None, "")
        task, waiting = (await slurm.jobs())[1:]
        assert (task.array, task.end_s, task.time_limit_s) == ("8_0", 200.0, 600.0)
        assert waiting.array == "9_[1-3]"
        assert await slurm.job(8) == task
        node = await slurm.node("n1")
        assert (node.state, node.flags, node.reason) == ("IDLE", frozenset({"DRAIN"}), "x")
        assert node.reason_s == 7.0
        assert (node.boot_s, node.slurmd_start_s, node.partitions) == (5.0, None, ("a", "b"))

    with_pyslurm(python, test)


def test_refusals(python: str) -> None:
    async def test(slurm: Pyslurm) -> None:
        with pytest.raises(SlurmNotFoundError, match="Invalid job id"):
            await slurm.job(1)
        with pytest.raises(SlurmNotFoundError, match="n2"):
            await slurm.node("n2")
        with pytest.raises(SlurmRefusedError, match="Slurm could not set n1 drain: Invalid user id"):
            await slurm.drain("n1", "x")
        for bad in ("", "n[1-2]", "-n"):
            with pytest.raises(UsageError):
                await slurm.drain(bad, "x")

    with_pyslurm(python, test)


def test_one_that_hangs_is_ended_and_the_next_call_starts_another(python: str) -> None:
    async def test(slurm: Pyslurm) -> None:
        await slurm.hello()
        assert slurm._worker is not None
        pid = slurm._worker.pid
        began = time.monotonic()
        with pytest.raises(SlurmUnreachableError):
            await slurm.job(77, deadline_s=0.3)
        assert time.monotonic() - began < 30.0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert (await slurm.job(7)).job_id == 7

    with_pyslurm(python, test)


@pytest.mark.parametrize("job_id", [66, 88])
def test_one_that_dies_takes_nobody_along(python: str, job_id: int) -> None:
    async def test(slurm: Pyslurm) -> None:
        with pytest.raises(SlurmUnreachableError, match="without an answer"):
            await slurm.job(job_id)
        assert (await slurm.job(7)).job_id == 7
        assert slurm._worker is not None
        os.kill(slurm._worker.pid, signal.SIGKILL)
        await slurm._worker.wait()
        assert (await slurm.job(7)).job_id == 7

    with_pyslurm(python, test)


def test_a_cancelled_call_leaves_no_answer_for_the_next(python: str) -> None:
    async def test(slurm: Pyslurm) -> None:
        await slurm.hello()
        call = asyncio.create_task(slurm.job(77))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await slurm.job(7)).job_id == 7

    with_pyslurm(python, test)


def test_calls_at_once(python: str) -> None:
    async def test(slurm: Pyslurm) -> None:
        found = await asyncio.gather(*(slurm.job(7) for _ in range(50)), slurm.hello(), slurm.hello())
        assert found[-2:] == ["pyslurm 1.2.3"] * 2

    with_pyslurm(python, test)


def test_no_pyslurm() -> None:
    async def test(slurm: Pyslurm) -> None:
        for _ in range(2):
            with pytest.raises(UnfitError, match="pyslurm"):
                await slurm.hello()

    with_pyslurm(sys.executable, test)


def test_select(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        assert type(await select("commands", tmp_path)) is Commands
        assert type(await select("auto", tmp_path)) is Commands
        with pytest.raises(
            UsageError, match=r"pyslurm cannot be used .*pyslurm.*: set the slurm backend to auto"
        ):
            await select("pyslurm", tmp_path)

    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    reasons = [record.getMessage() for record in caplog.records]
    assert reasons[0] == "Slurm is asked through its commands, as configured"
    assert reasons[1].startswith("Slurm is asked through its commands: No module named 'pyslurm'")


def test_messages() -> None:
    request = Request(method="job", job_id=7)
    assert decode(encode(request), Request) == request
    answer = Answer(error="no")
    assert decode(encode(answer), Answer) == answer
