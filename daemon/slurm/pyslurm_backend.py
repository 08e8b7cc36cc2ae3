"""Slurm through pyslurm, where it is installed and matches the site's Slurm: 1 ms a call, not a process each.

pyslurm runs in a process of its own (`pyslurm_worker` says why), started at the first call and again after it
had to be ended. What pyslurm cannot do goes through Slurm's commands: growing and shrinking a job, and
whatever is done to one task of an array, since pyslurm names jobs by numbers and a number may mean the whole
array.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptless.daemon.slurm.adapter import DEADLINE_S, Job, Node, check_job, check_node, check_text
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import (
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
    from_message,
)
from ckptless.daemon.slurm.process import end, environment
from ckptless.daemon.slurm.pyslurm_messages import MAX_LINE, Answer, Request, decode_answer, encode

# Where this very ckptless is, so that the other process has the same.
_PACKAGES = Path(__file__).absolute().parents[3]


class UnfitError(SlurmUnreachableError):
    """pyslurm cannot be used here; the text says why."""


class Pyslurm:
    """The protocol `adapter.Slurm` on pyslurm. For one event loop; its owner closes it.

    `python` is the interpreter that has pyslurm, the daemon's own by default.
    """

    def __init__(self, commands: Commands, python: str = sys.executable) -> None:
        self._commands = commands
        self._argv = (python, "-P", "-m", "ckptless.daemon.slurm.pyslurm_worker")
        self._env = environment({"PYTHONPATH": str(_PACKAGES)})
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None

    async def aclose(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()
        await self._commands.aclose()

    async def hello(self, *, deadline_s: float = DEADLINE_S) -> str:
        """pyslurm's name and version. UnfitError if it cannot be used."""
        answer = await self._call(Request(method="hello"), Deadline(deadline_s), "start pyslurm")
        return answer.text

    async def ping(self, *, deadline_s: float = DEADLINE_S) -> str:
        """See `adapter.Slurm`."""
        return (await self._call(Request(method="ping"), Deadline(deadline_s), "answer")).text

    async def jobs(self, *, deadline_s: float = DEADLINE_S) -> tuple[Job, ...]:
        """See `adapter.Slurm`."""
        return (await self._call(Request(method="jobs"), Deadline(deadline_s), "list the jobs")).jobs

    async def job(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Job:
        """See `adapter.Slurm`."""
        return await self._job(job_id, Deadline(deadline_s))

    async def ending(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Ending:
        """See `adapter.Slurm`."""
        return await self._commands.ending(job_id, deadline_s=deadline_s)

    async def nodes(self, *, deadline_s: float = DEADLINE_S) -> tuple[Node, ...]:
        """See `adapter.Slurm`."""
        return (await self._call(Request(method="nodes"), Deadline(deadline_s), "list the nodes")).nodes

    async def node(self, name: str, *, deadline_s: float = DEADLINE_S) -> Node:
        """See `adapter.Slurm`."""
        return await self._node(name, Deadline(deadline_s))

    async def drain(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        await self._set_node(name, "DRAIN", check_text(reason), Deadline(deadline_s))

    async def mark_down(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        await self._set_node(name, "DOWN", check_text(reason), Deadline(deadline_s))

    async def undrain(self, name: str, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        deadline = Deadline(deadline_s)
        node = await self._node(name, deadline)
        if node.draining or node.down:
            await self._set_node(name, "RESUME", "", deadline)

    async def requeue(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        deadline = Deadline(deadline_s)
        job = await self._job(job_id, deadline)
        if job.over:
            raise SlurmRefusedError(f"job {job_id} is {job.state}: it is not brought back")
        if job.array:
            await self._commands.requeue(job_id, deadline_s=deadline.left_s)
        else:
            await self._call(Request(method="requeue", job_id=job_id), deadline, f"requeue job {job_id}")

    async def cancel(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        deadline = Deadline(deadline_s)
        job = await self._job(job_id, deadline)
        if job.over:
            return
        if job.array:
            await self._commands.cancel(job_id, deadline_s=deadline.left_s)
            return
        try:
            await self._call(Request(method="cancel", job_id=job_id), deadline, f"cancel job {job_id}")
        except SlurmRefusedError:
            # pyslurm reports an error that an earlier call has left behind, too: what counts is the job.
            if not (now := await self._job(job_id, deadline)).over and now.state != "COMPLETING":
                raise

    async def comment(self, job_id: int, text: str, *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        deadline = Deadline(deadline_s)
        check_text(text, "comment")
        if (await self._job(job_id, deadline)).array:
            await self._commands.comment(job_id, text, deadline_s=deadline.left_s)
            return
        request = Request(method="comment", job_id=job_id, text=text)
        await self._call(request, deadline, f"comment on job {job_id}")

    async def draw_in(
        self, job_id: int, count: int, *, avoid: Sequence[str] = (), deadline_s: float = DEADLINE_S
    ) -> tuple[str, ...]:
        """See `adapter.Slurm`."""
        return await self._commands.draw_in(job_id, count, avoid=avoid, deadline_s=deadline_s)

    async def release(self, job_id: int, names: Sequence[str], *, deadline_s: float = DEADLINE_S) -> None:
        """See `adapter.Slurm`."""
        await self._commands.release(job_id, names, deadline_s=deadline_s)

    async def _job(self, job_id: int, deadline: Deadline) -> Job:
        request = Request(method="job", job_id=check_job(job_id))
        # Of an array Slurm gives all tasks, and pyslurm the first of them; or none, see the worker.
        answer = await self._call(request, deadline, f"show job {job_id}")
        if answer.jobs and answer.jobs[0].job_id == job_id:
            return answer.jobs[0]
        answer = await self._call(Request(method="jobs"), deadline, "list the jobs")
        for job in answer.jobs:
            if job.job_id == job_id:
                return job
        raise SlurmNotFoundError(f"Slurm knows no job {job_id}")

    async def _node(self, name: str, deadline: Deadline) -> Node:
        check_node(name)
        answer = await self._call(Request(method="nodes"), deadline, "list the nodes")
        for node in answer.nodes:
            if node.name == name:
                return node
        raise SlurmNotFoundError(f"Slurm knows no node {name}")

    async def _set_node(self, name: str, state: str, reason: str, deadline: Deadline) -> None:
        request = Request(method="set_node", name=check_node(name), state=state, text=reason)
        await self._call(request, deadline, f"set {name} {state.lower()}")

    async def _call(self, request: Request, deadline: Deadline, doing: str) -> Answer:
        """One request and its answer. A process that is late or gone is ended; the next call starts one."""
        try:
            async with asyncio.timeout(deadline.left_s):
                async with self._turn:
                    answer = await self._exchange(request)
        except TimeoutError:
            raise SlurmUnreachableError(f"Slurm could not {doing} in time") from None
        if answer.unfit:
            raise UnfitError(answer.error)
        if answer.error:
            raise from_message(doing, answer.error)
        return answer

    async def _exchange(self, request: Request) -> Answer:
        try:
            if self._worker is None or self._worker.returncode is not None:
                await self._end()
                await self._start()
            worker = self._worker
            assert worker is not None
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(encode(request))
            # no deadline: that of `_call`, around it
            await worker.stdin.drain()
            line = await worker.stdout.readline()
            if not line.endswith(b"\n"):
                raise UnfitError("the pyslurm process ended without an answer; its last words are in the log")
            return decode_answer(line)
        except (OSError, ValueError) as error:
            # ValueError: a line beyond the limit.
            await self._end()
            raise UnfitError(f"the pyslurm process failed: {error}") from error
        except BaseException:
            # Its answer may still come, and would be taken for that to the next request.
            await asyncio.shield(self._end())
            raise

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._worker = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=pipe,
            stdout=pipe,
            env=self._env,
            cwd="/",
            start_new_session=True,
            limit=MAX_LINE,
        )

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.stdin is not None:
            worker.stdin.close()
        await end(worker)
