"""Slurm through its own commands: scontrol, squeue, scancel, and salloc to grow a job. The default.

They are there wherever Slurm is, and what is read of them is the same on 22.05, 24.11 and 26.05.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptless.daemon.slurm import resize
from ckptless.daemon.slurm.adapter import DEADLINE_S, Job, Node, check_job, check_node, check_text
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import (
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
    from_message,
)
from ckptless.daemon.slurm.giving_way import Queued
from ckptless.daemon.slurm.process import Account, Done, find, run
from ckptless.daemon.slurm.text import JobFormat, read_nodes

# slurmctld answers one caller after another anyway, and each of ours is a process.
AT_ONCE = 4


class Commands:
    """Slurm, asked and told. Its commands are found in `folder`, or else on the daemon's PATH.

    For one event loop. `deadline_s` is in seconds from the call; afterwards nothing of it goes on here.

    Every method raises SlurmUnreachableError (no answer in time), SlurmRefusedError or SlurmNotFoundError,
    each with Slurm's own words; UsageError for an argument that cannot be right; ProtocolError for an answer
    that nobody can read. After SlurmUnreachableError a change may have been made or not: ask.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def aclose(self) -> None:
        """End what is kept between calls. Its owner calls it once, last."""

    # -------------------------------------------------------------------------------- questions

    async def jobs(self, *, deadline_s: float = DEADLINE_S) -> tuple[Job, ...]:
        """All jobs that Slurm still knows, those that ended lately included."""
        return await self.squeue(Deadline(deadline_s))

    async def job(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Job:
        """One job, by its own number."""
        # For the number of an array squeue gives all of its tasks, one of which has that number.
        for job in await self.squeue(Deadline(deadline_s), f"--jobs={check_job(job_id)}"):
            if job.job_id == job_id:
                return job
        raise SlurmNotFoundError(f"Slurm knows no job {job_id}")

    async def ending(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> Ending:
        """Return what tells why a job is signalled."""
        form = JobFormat.of_ending(f"s{secrets.token_hex(8)}")
        found = form.read_endings(await self._ask(form, Deadline(deadline_s), f"--jobs={check_job(job_id)}"))
        if job_id not in found:
            raise SlurmNotFoundError(f"Slurm knows no job {job_id}")
        return found[job_id]

    async def queue(self, *, deadline_s: float = DEADLINE_S) -> tuple[Queued, ...]:
        """All jobs as they stand in the queue, with their priorities."""
        form = JobFormat.of_queue(f"s{secrets.token_hex(8)}")
        return form.read_queue(await self._ask(form, Deadline(deadline_s)))

    async def nodes(self, *, deadline_s: float = DEADLINE_S) -> tuple[Node, ...]:
        """All nodes."""
        done = await self.tell(Deadline(deadline_s), "list the nodes", "-o", "show", "node")
        return read_nodes(done.out)

    async def node(self, name: str, *, deadline_s: float = DEADLINE_S) -> Node:
        """One node."""
        query = (f"show node {check_node(name)}", "-o", "show", "node", name)
        for node in read_nodes((await self.tell(Deadline(deadline_s), *query)).out):
            if node.name == name:
                return node
        raise SlurmNotFoundError(f"Slurm knows no node {name}")

    # ----------------------------------------------------------------------------------- orders

    async def drain(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Have no new job start on this node; running ones go on. The reason replaces an older one."""
        await self._set_node(check_node(name), "drain", check_text(reason), Deadline(deadline_s))

    async def mark_down(self, name: str, reason: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Slurm ends what runs there, at once, and takes the node out of jobs that are no-kill.

        A living node stays down only with ReturnToService 0 or 1; with 2 it is back at its next answer.
        """
        await self._set_node(check_node(name), "down", check_text(reason), Deadline(deadline_s))

    async def undrain(self, name: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Give the node back, drained or down; a node that is neither stays as it is.

        Slurm then takes it for not responding until it has answered, which is a second or two later.
        """
        deadline = Deadline(deadline_s)
        node = await self.node(name, deadline_s=deadline.left_s)
        # Slurm refuses to resume a node that is neither.
        if node.draining or node.down:
            await self._set_node(name, "resume", "", deadline)

    async def cancel(self, job_id: int, *, deadline_s: float = DEADLINE_S) -> None:
        """End a job, of an array only this task; nothing happens to one that is over."""
        deadline = Deadline(deadline_s)
        job = await self.job(job_id, deadline_s=deadline.left_s)
        if not job.over:
            await self._cancel(job, deadline)

    async def comment(self, job_id: int, text: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Set the job's comment, which its user sees in squeue and scontrol.

        22.05 without slurmdbd refuses it, for good, once the job has lost, gained or given up a node.
        """
        deadline = Deadline(deadline_s)
        check_text(text, "comment")
        job = await self.job(job_id, deadline_s=deadline.left_s)
        await self._comment(job, text, deadline)

    async def draw_in(
        self, job_id: int, count: int, *, avoid: Sequence[str] = (), deadline_s: float = DEADLINE_S
    ) -> tuple[str, ...]:
        """Grow a running job by `count` idle nodes, none of `avoid`; returns their names.

        All or none, and now or never: what is not idle is not waited for. Takes `permit_job_expansion` in
        SchedulerParameters, and root or the job's own user. On 24.11 and later the site must not have
        PrologFlags=Alloc, or steps on the new nodes fail.
        """
        return await resize.grow(self, job_id, count, avoid, Deadline(deadline_s))

    async def release(self, job_id: int, names: Sequence[str], *, deadline_s: float = DEADLINE_S) -> None:
        """Shrink a running job by these nodes; what runs on them is ended. Never its batch host.

        22.05 without slurmdbd refuses it for a job that has been resized before.
        """
        await resize.shrink(self, job_id, names, Deadline(deadline_s))

    # ------------------------------------------------- what pyslurm does in its own way, see there

    async def _set_node(self, name: str, state: str, reason: str, deadline: Deadline) -> None:
        why = (f"reason={reason}",) if reason else ()
        await self.tell(deadline, f"set {name} {state}", "update", f"nodename={name}", f"state={state}", *why)

    async def _cancel(self, job: Job, deadline: Deadline) -> None:
        await self.scancel(name_of(job), deadline)

    async def _comment(self, job: Job, text: str, deadline: Deadline) -> None:
        update = ("update", f"jobid={name_of(job)}", f"comment={text}")
        await self.tell(deadline, f"comment on job {job.job_id}", *update)

    # ---------------------------------------------------------------------------- the commands

    async def squeue(self, deadline: Deadline, *select: str) -> tuple[Job, ...]:
        """The jobs that squeue gives for the options `select`, those of all users and partitions."""
        form = JobFormat(f"s{secrets.token_hex(8)}")
        return form.read(await self._ask(form, deadline, *select))

    async def _ask(self, form: JobFormat, deadline: Deadline, *select: str) -> str:
        query = ("--noheader", "--all", "--states=all", *select)
        done = await self.command(deadline, "squeue", *query, env={"SQUEUE_FORMAT2": form.text})
        if done.status != 0:
            raise from_message("list the jobs", done.err)
        return done.out

    async def scancel(self, name: str, deadline: Deadline) -> None:
        """Cancel the job or array task that Slurm calls `name`."""
        done = await self.command(deadline, "scancel", name)
        if done.status != 0:
            raise from_message(f"cancel job {name}", done.err)

    async def tell(self, deadline: Deadline, doing: str, *arguments: str) -> Done:
        """Run scontrol, which must succeed; `doing` completes "Slurm could not"."""
        done = await self.command(deadline, "scontrol", *arguments)
        if done.status != 0:
            raise from_message(doing, done.err or done.out)
        return done

    async def command(
        self,
        deadline: Deadline,
        command: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        account: Account | None = None,
    ) -> Done:
        """Run one of Slurm's commands, a few at a time."""
        argv = (find(command, self._folder), *arguments)
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._slots.acquire()
        except TimeoutError:
            raise SlurmUnreachableError(f"{command} did not get its turn in time: Slurm is slow") from None
        try:
            # salloc takes its request back when it is told to end; the others have nothing to tidy up.
            grace_s = 2.0 if command == "salloc" else 0.0
            return await run(argv, deadline_s=deadline.left_s, env=env, account=account, grace_s=grace_s)
        finally:
            self._slots.release()


def name_of(job: Job) -> str:
    """Return what Slurm's commands are to call this job, and only this one.

    The number of one of an array's tasks is that of the whole array: `scancel 7` would end them all. So a
    task is `7_3`. Tasks that wait together are not touched: nothing of ours is in them.
    """
    if "[" in job.array:
        raise SlurmRefusedError(f"job {job.job_id} is the waiting part {job.array} of an array")
    return job.array or str(job.job_id)
