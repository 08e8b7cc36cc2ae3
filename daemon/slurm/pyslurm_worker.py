"""The process in which pyslurm lives: `python -m ckptless.daemon.slurm.pyslurm_worker`.

Not a thread of the daemon, for what was seen of libslurm: `import pyslurm` ends the whole process where there
is no slurm.conf; a call holds the interpreter's lock until slurmctld answers or its timeouts are over, which
would stop the daemon's event loop; and no such call can be ended but by ending its process.

It ends when its standard input does. Requests and answers are lines of JSON, one answer to one request.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.adapter import OVER, Job, Node, node_of
from ckptless.daemon.slurm.hostlist import expand
from ckptless.daemon.slurm.text import node_state, something

MAX_LINE = 128 * 1024 * 1024


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call. Which fields are used depends on the method."""

    method: Literal["hello", "jobs", "job", "nodes", "set_node", "cancel", "comment"]
    job_id: int = 0
    name: str = ""
    state: str = ""
    text: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`error` "" is success; else it is what Slurm said, or why pyslurm cannot be used (`unfit`)."""

    error: str = ""
    unfit: bool = False
    text: str = ""
    jobs: tuple[Job, ...] = ()
    nodes: tuple[Node, ...] = ()


M = TypeVar("M", Request, Answer)


def encode(message: Request | Answer) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes, kind: type[M]) -> M:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no {kind.__name__} of the pyslurm process: {error}") from error


def answer(api: Any, request: Request) -> Answer:
    """Do what is asked with `api`, the imported pyslurm. It raises what it likes."""
    match request.method:
        case "hello":
            return Answer(text=f"pyslurm {api.__version__}")
        case "jobs":
            return Answer(jobs=tuple(map(translate_job, api.Jobs.load().values())))
        case "job":
            return Answer(jobs=_one_job(api, request.job_id))
        case "nodes":
            return Answer(nodes=tuple(map(translate_node, api.Nodes.load().values())))
        case "set_node":
            changes = {"state": request.state} | ({"reason": request.text} if request.text else {})
            api.Node(request.name).modify(api.Node(**changes))
        case "cancel":
            # pyslurm looks at errno afterwards, and takes what an earlier call has left there for an error.
            api.Job(request.job_id).cancel()
        case "comment":
            api.Job(request.job_id).modify(api.JobSubmitDescription(comment=request.text))
    return Answer()


def _one_job(api: Any, job_id: int) -> tuple[Job, ...]:
    try:
        return (translate_job(api.Job.load(job_id)),)
    except KeyError:
        # pyslurm looks for the job's steps as well, under the number of the array.
        return ()


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
        reason_s=_seconds(node.reason_time),
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
    api, trouble = None, ""
    try:
        api = importlib.import_module("pyslurm")
    except (ImportError, RuntimeError, OSError) as error:
        trouble = str(error)
    for line in requests:
        request = decode(line, Request)
        try:
            said = Answer(error=trouble, unfit=True) if api is None else answer(api, request)
        except Exception as error:  # noqa: BLE001  (pyslurm raises what it likes, and this process is to live)
            said = Answer(error=str(error) or type(error).__name__)
        answers.write(encode(said))
        answers.flush()


def main() -> None:
    """Serve standard input; what libslurm prints goes to standard error, never between the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
