"""The messages about saving a step to a directory: agent and writer; ckptctl, daemon and agent."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from ckptless.daemon.protocol.limits import (
    Clipped,
    Digest,
    FilePath,
    Generation,
    JobName,
    NodeNumber,
    Nodes,
    Number,
    Protocol,
    Rank,
    RankCount,
    RecordBytes,
    Seconds,
    Step,
    Text,
    TryCount,
)
from ckptless.daemon.protocol.messages import Message, TensorsAt

MAX_NAME = 256
MAX_DEADLINE_S = 24 * 3600.0


class SaveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directory that steps are saved in, and how often.

    `every`: steps between two of them, 0 for none but at the end and when asked. `keep`: so many are kept.
    `end_s`: seconds that saving may take at the end. `resume`: the folder of the step to go on from, if any.
    """

    directory: FilePath
    every: Number = 0
    keep: TryCount = 3
    end_s: Seconds = 300.0
    resume: FilePath = ""


# ---------------------------------------------------------------------------------- agent, writer


class WriterHello(Message, frozen=True, kw_only=True):
    """First message of a writer to its agent, which knows it by its pid."""

    protocol: Protocol


class WriteShard(Message, frozen=True, kw_only=True):
    """A version to write; a memfd of exactly its bytes comes with it (SCM_RIGHTS)."""

    shard: Rank
    at: TensorsAt


class WriteRecord(Message, frozen=True, kw_only=True):
    """A record to write."""

    rank: Rank
    shard: Rank
    record: RecordBytes
    digest: Digest


class WritePart(Message, frozen=True, kw_only=True):
    """All has been sent: write it to `folder`, as the part of `node`.

    `parts` are the nodes whose parts make a whole; where this one `finishes` it, it waits for them, at most
    `deadline_s`, puts them together, and keeps the newest `keep` steps.
    """

    job: JobName
    step: Step
    generation: Generation
    world_size: RankCount
    folder: FilePath
    directory: FilePath
    node: NodeNumber
    parts: Nodes
    finishes: bool
    keep: TryCount
    deadline_s: Seconds


class Written(Clipped, Message, frozen=True, kw_only=True):
    """The writer is done; `error` says why not, if so. `path` is the step's folder, if it is whole.

    `left`: what could not be removed of older steps, and why.
    """

    error: Text = ""
    path: FilePath = ""
    left: Text = ""


FromWriter: TypeAlias = WriterHello | Written
ToWriter: TypeAlias = WriteShard | WriteRecord | WritePart

# ---------------------------------------------------------------------------------- ckptctl save

# saved   it is on the disk                      unknown    there is no such job here
# failed  it came to nothing, or not in time     elsewhere  this node is out of the job: ask on another one
# refused not with this job, or not in this state
SaveVerdict = Literal["saved", "failed", "refused", "unknown", "elsewhere"]
DeadlineS: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]


class Save(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: save a job's state now. `job` is a run, or the number of a Slurm job with one."""

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    deadline_s: DeadlineS


class Saved(Clipped, Message, frozen=True, kw_only=True):
    """Answer to Save."""

    verdict: SaveVerdict
    text: Text
    step: Step | None = None
    path: FilePath = ""


class SaveNow(Message, frozen=True, kw_only=True):
    """Daemon to agent: save; `number` comes back in the answer."""

    number: Number
    deadline_s: DeadlineS


class SaveDone(Message, frozen=True, kw_only=True):
    """Agent to daemon: what came of it."""

    number: Number
    answer: Saved
