"""Slurm through pyslurm, where it is installed and matches the site's Slurm: 1 ms a call, not a process each.

pyslurm runs in a process of its own (`pyslurm_worker` says why), started at the first call and again after it
had to be ended. What pyslurm cannot do goes through Slurm's commands: why a job ends, growing and shrinking
one, and whatever is done to one task of an array, since pyslurm names jobs by numbers and a number may mean
the whole array.
"""

import asyncio
import sys
from pathlib import Path

from ckptless.daemon.slurm.adapter import DEADLINE_S, Job, Node, check_job, check_node
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import (
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
    from_message,
)
from ckptless.daemon.slurm.process import end, environment
from ckptless.daemon.slurm.pyslurm_worker import MAX_LINE, Answer, Request, decode, encode

# Where this very ckptless is, so that the other process has the same.
_PACKAGES = Path(__file__).absolute().parents[3]


class UnfitError(SlurmUnreachableError):
    """pyslurm cannot be used here; the text says why."""


class Pyslurm(Commands):
    """The same as `Commands`, where possible by the pyslurm of interpreter `python`. Its owner closes it."""

    def __init__(self, folder: Path | None = None, python: str = sys.executable) -> None:
        super().__init__(folder)
        self._argv = (python, "-P", "-m", "ckptless.daemon.slurm.pyslurm_worker")
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None

    async def aclose(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def hello(self, *, deadline_s: float = DEADLINE_S) -> str:
        """pyslurm's name and version. UnfitError if it cannot be used."""
        return (await self._call(Request(method="hello"), Deadline(deadline_s), "start pyslurm")).text

    async def jobs(self, *, deadline_s: float = DEADLINE_S) -> tuple[Job, ...]:
        """See `Commands`."""
        return (await self._call(Request(method="jobs"), Deadline(deadline_s), "list the jobs")).jobs

    async def job(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Job:
        """See `Commands`."""
        deadline = Deadline(deadline_s)
        request = Request(method="job", job_id=check_job(job_id))
        # Of an array Slurm gives all tasks, and pyslurm the first of them; or none, see the worker.
        answer = await self._call(request, deadline, f"show job {job_id}")
        if answer.jobs and answer.jobs[0].job_id == job_id:
            return answer.jobs[0]
        for job in await self.jobs(deadline_s=deadline.left_s):
            if job.job_id == job_id:
                return job
        raise SlurmNotFoundError(f"Slurm knows no job {job_id}")

    async def nodes(self, *, deadline_s: float = DEADLINE_S) -> tuple[Node, ...]:
        """See `Commands`."""
        return (await self._call(Request(method="nodes"), Deadline(deadline_s), "list the nodes")).nodes

    async def node(self, name: str, *, deadline_s: float = DEADLINE_S) -> Node:
        """See `Commands`."""
        check_node(name)
        for node in await self.nodes(deadline_s=deadline_s):
            if node.name == name:
                return node
        raise SlurmNotFoundError(f"Slurm knows no node {name}")

    async def _set_node(self, name: str, state: str, reason: str, deadline: Deadline) -> None:
        request = Request(method="set_node", name=name, state=state.upper(), text=reason)
        await self._call(request, deadline, f"set {name} {state}")

    async def _cancel(self, job: Job, deadline: Deadline) -> None:
        if job.array:
            await super()._cancel(job, deadline)
            return
        try:
            request = Request(method="cancel", job_id=job.job_id)
            await self._call(request, deadline, f"cancel job {job.job_id}")
        except SlurmRefusedError:
            # pyslurm reports an error that an earlier call has left behind, too: what counts is the job.
            now = await self.job(job.job_id, deadline_s=deadline.left_s)
            if not now.over and now.state != "COMPLETING":
                raise

    async def _comment(self, job: Job, text: str, deadline: Deadline) -> None:
        if job.array:
            await super()._comment(job, text, deadline)
            return
        request = Request(method="comment", job_id=job.job_id, text=text)
        await self._call(request, deadline, f"comment on job {job.job_id}")

    # ------------------------------------------------------------------------------ the process

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
            return decode(line, Answer)
        except (OSError, ValueError) as error:
            # ValueError: a line beyond the limit.
            await self._end()
            raise UnfitError(f"the pyslurm process failed: {error}") from error
        except BaseException:
            # Its answer may still come, and would be taken for that to the next request.
            await asyncio.shield(self._end())
            raise

    async def _start(self) -> None:
        self._worker = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment({"PYTHONPATH": str(_PACKAGES)}),
            cwd="/",
            start_new_session=True,
            limit=MAX_LINE,
        )

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if worker.stdin is not None:
                worker.stdin.close()
            await end(worker)
