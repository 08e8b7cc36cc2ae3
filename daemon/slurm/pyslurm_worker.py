"""The process in which pyslurm lives: `python -m ckptless.daemon.slurm.pyslurm_worker`.

Not a thread of the daemon, for what was seen of libslurm: `import pyslurm` ends the whole process where there
is no slurm.conf; a call holds the interpreter's lock until slurmctld answers or its timeouts are over, which
would stop the daemon's event loop; and no such call can be ended but by ending its process.

It ends when its standard input does.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from ckptless.daemon.slurm.adapter import OVER, Job, Node, node_of
from ckptless.daemon.slurm.hostlist import expand
from ckptless.daemon.slurm.pyslurm_messages import Answer, Request, decode_request, encode
from ckptless.daemon.slurm.text import node_state, something


class Methods:
    """The requests, answered with `pyslurm` (the imported module)."""

    def __init__(self, pyslurm: Any) -> None:
        self._api = pyslurm
        self._table: dict[str, Callable[[Request], Answer]] = {
            "hello": lambda _: Answer(text=f"pyslurm {pyslurm.__version__}"),
            "ping": self._ping,
            "jobs": self._jobs,
            "job": self._job,
            "nodes": self._nodes,
            "set_node": self._set_node,
            "requeue": self._requeue,
            "cancel": self._cancel,
            "comment": self._comment,
        }

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Errors are answers."""
        method = self._table.get(request.method)
        if method is None:
            return Answer(error=f"no such method: {request.method}")
        try:
            return method(request)
        except Exception as error:  # noqa: BLE001  (pyslurm raises what it likes, and this process is to live)
            return Answer(error=str(error) or type(error).__name__)

    def _ping(self, _: Request) -> Answer:
        for controller in self._api.slurmctld.ping_all():
            if controller.is_responding:
                return Answer(text=str(controller.hostname))
        return Answer(error="Unable to contact slurm controller")

    def _jobs(self, _: Request) -> Answer:
        return Answer(jobs=tuple(translate_job(job) for job in self._api.Jobs.load().values()))

    def _job(self, request: Request) -> Answer:
        try:
            return Answer(jobs=(translate_job(self._api.Job.load(request.job_id)),))
        except KeyError:
            # pyslurm looks for the job's steps as well, under the number of the array.
            return Answer()

    def _nodes(self, _: Request) -> Answer:
        return Answer(nodes=tuple(translate_node(node) for node in self._api.Nodes.load().values()))

    def _set_node(self, request: Request) -> Answer:
        changes = {"state": request.state} | ({"reason": request.text} if request.text else {})
        self._api.Node(request.name).modify(self._api.Node(**changes))
        return Answer()

    def _requeue(self, request: Request) -> Answer:
        self._api.Job(request.job_id).requeue()
        return Answer()

    def _cancel(self, request: Request) -> Answer:
        # pyslurm looks at errno afterwards, and takes what an earlier call has left there for an error.
        self._api.Job(request.job_id).cancel()
        return Answer()

    def _comment(self, request: Request) -> Answer:
        self._api.Job(request.job_id).modify(self._api.JobSubmitDescription(comment=request.text))
        return Answer()


def translate_job(job: Any) -> Job:
    """pyslurm's job in our words."""
    limit = job.time_limit
    state = str(job.state)
    # Of a job without a time limit Slurm expects the end a year after its start; squeue shows none.
    ends = limit is not None or state in OVER
    return Job(
        job_id=job.id,
        user_id=job.user_id,
        state=state,
        nodes=expand(_text(lambda: job.allocated_nodes)),
        restarts=job.requeue_count or 0,
        batch_host=_text(lambda: job.batch_host) if job.is_batch_job else "",
        partition=_text(lambda: job.partition),
        start_s=_seconds(job.start_time),
        end_s=_seconds(job.end_time) if ends else None,
        time_limit_s=None if limit is None else limit * 60.0,
        reason=_text(lambda: job.state_reason),
        name=_text(lambda: job.name),
        comment=_text(lambda: job.comment),
        array=_array(job),
    )


def _array(job: Any) -> str:
    if not job.array_id:
        return ""
    if waiting := job.array_tasks_waiting:
        return f"{job.array_id}_[{waiting}]"
    # pyslurm takes a 0 for "none", and task 0 is a task.
    return f"{job.array_id}_{job.array_task_id or 0}"


def translate_node(node: Any) -> Node:
    """pyslurm's node in our words."""
    state, flags = node_state(node.state)
    partitions = node.partitions or ()
    return node_of(
        name=node.name,
        address=_text(lambda: node.address) or node.name,
        state=state,
        flags=flags,
        reason=_text(lambda: node.reason).partition("\n")[0],
        boot_s=_seconds(node.boot_time),
        slurmd_start_s=_seconds(node.slurmd_start_time),
        cpus=node.total_cpus or 0,
        partitions=tuple(partitions.split(",") if isinstance(partitions, str) else partitions),
        version=_text(lambda: node.slurm_version),
    )


def _text(read: Callable[[], str | None]) -> str:
    """A text of pyslurm's; people's bytes need not be UTF-8, and pyslurm raises for those."""
    try:
        return something(read() or "")
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def _seconds(time: int | None) -> float | None:
    return float(time) if time else None


def serve(requests: Iterable[bytes], answers: BinaryIO) -> None:
    """Answer one request after another, until there are no more."""
    methods, trouble = None, ""
    try:
        methods = Methods(importlib.import_module("pyslurm"))
    except (ImportError, RuntimeError, OSError) as error:
        trouble = str(error)
    for line in requests:
        request = decode_request(line)
        answers.write(encode(methods.answer(request) if methods else Answer(error=trouble, unfit=True)))
        answers.flush()


def main() -> None:
    """Serve standard input; what libslurm prints goes to standard error, never between the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
