"""The rows of the ledger: one frozen struct per kind of row, written by the daemon and read by ckptctl.

Every record carries the identity that makes writing it twice harmless (`key`), so that daemons may tell
each other what they saw and ckptctl may merge several nodes' ledgers. Times are seconds since the Unix
epoch by the clock of the daemon that led; phases are durations in seconds.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from ckptless.daemon.protocol.limits import (
    OF_RANKS,
    Age,
    Clipped,
    Command,
    ExitCode,
    Generation,
    JobName,
    Name,
    Nbytes,
    NodeCount,
    NodeNumber,
    NodeOrNone,
    Number,
    Pid,
    Rank,
    RankCount,
    Share,
    SlotNumber,
    Step,
    Steps,
    Text,
    Word,
    one_line,
)
from ckptless.daemon.protocol.model import Pace, RingState, Spent

JobState: TypeAlias = Literal["forming", "running", "recovering", "done", "failed", "stopped"]
NodeState: TypeAlias = Literal["up", "daemon-away", "lost"]
Level: TypeAlias = Literal["info", "warning", "error"]

# Who says that something is broken. Of a rank: "process", which its agent watches (pidfd, and what it says).
# Of a node: "agent", its connection to its daemon is gone; "membership", the other daemons cannot reach it;
# "slurm", Slurm has it down; "health", a check's verdict; "operator", a person's word; "lease", it ends its
# ranks itself, as it hears too few others. Of either: "leader", who waited for it in vain. Of several ranks:
# "twins", whose tensors should be the same. "drill": somebody wanted it, and nothing is wrong.
FaultSource: TypeAlias = Literal[
    "process", "agent", "membership", "slurm", "health", "operator", "lease", "leader", "twins", "drill"
]

# The phases of a recovery, in order. They do not overlap; their sum is the recovery.
PHASES = ("detect", "stop", "leave", "agree", "join", "restore", "first step")


# A job's `reason` begins so where Slurm alone has said that it is over.
BY_SLURM = "over by Slurm's word"


class JobRecord(Clipped, Struct, frozen=True, kw_only=True, tag="job", forbid_unknown_fields=True):
    """A job. Key: job."""

    job: JobName
    command: Command
    world_size: RankCount
    nodes: NodeCount
    spares: NodeCount
    state: JobState
    started_s: Age
    ended_s: Age | None = None
    exit_code: ExitCode | None = None
    reason: Text | None = None


class NodeRecord(Struct, frozen=True, kw_only=True, tag="node", forbid_unknown_fields=True):
    """A node of a job's allocation. Key: job, node. A later `updated_s` replaces.

    `domain`: its failure domain, see JobSpec; "" where nobody knows.
    """

    job: JobName
    node: NodeNumber
    name: Name
    address: Name
    state: NodeState
    daemon_pid: Pid | None
    agent_pid: Pid | None
    updated_s: Age
    domain: Name = ""


class SlotRecord(Struct, frozen=True, kw_only=True, tag="slot", forbid_unknown_fields=True):
    """A slot and the process in it. Key: job, node, slot. A later `updated_s` replaces.

    `rank` is None for a spare; `phase` is the agent's word (see `messages.Phase`). Each `every`-th step is
    committed, which takes `share` of its rank's time; None where that is not known. `pace`: of its rank's
    last steps, `spent`: on all of them.
    """

    job: JobName
    node: NodeNumber
    slot: SlotNumber
    rank: Rank | None
    generation: Generation
    pid: Pid | None
    phase: Word
    step: Step | None
    loss: float | None
    updated_s: Age
    every: Number | None = None
    share: Share | None = None
    pace: Pace | None = None
    spent: Spent | None = None


class HoldingRecord(Struct, frozen=True, kw_only=True, tag="holding", forbid_unknown_fields=True):
    """The holdings of a node's agent. Key: job, node. A later `seq`, the agent's own count, replaces.

    `tensors` are (shard, steps, bytes), `records` are (rank, shard, steps, bytes), where bytes are those of
    all these steps; `nbytes` is the memory taken for them. `updated_s`: when the agent told it.
    `rings`: what it has of training data, for which there is other memory.
    """

    job: JobName
    node: NodeNumber
    tensors: Annotated[tuple[tuple[Rank, Steps, Nbytes], ...], OF_RANKS]
    records: Annotated[tuple[tuple[Rank, Rank, Steps, Nbytes], ...], OF_RANKS]
    nbytes: Nbytes
    seq: Number
    updated_s: Age
    rings: Annotated[tuple[RingState, ...], OF_RANKS] = ()


class GenerationRecord(Struct, frozen=True, kw_only=True, tag="generation", forbid_unknown_fields=True):
    """One agreed assignment of ranks to slots. Key: job, generation.

    `places[rank]` is (node, slot). `restore_step` is None where every rank builds anew. `faults` are the
    ids of the faults that this generation answers.
    """

    job: JobName
    generation: Generation
    places: Annotated[tuple[tuple[NodeNumber, SlotNumber], ...], OF_RANKS]
    restore_step: Step | None
    rung: Word
    faults: Annotated[tuple[Name, ...], OF_RANKS]
    leader: NodeOrNone
    agreed_s: Age


class FaultRecord(Clipped, Struct, frozen=True, kw_only=True, tag="fault", forbid_unknown_fields=True):
    """Something observed. Key: fault (its id). `source` is None in ledgers older than that field."""

    fault: Name
    job: JobName
    kind: Word
    node: NodeNumber
    slot: SlotNumber | None
    rank: Rank | None
    generation: Generation
    detail: Text
    seen_s: Age
    source: FaultSource | None = None


class RecoveryRecord(Struct, frozen=True, kw_only=True, tag="recovery", forbid_unknown_fields=True):
    """A recovery, from the first sign of a fault to the first new step. Key: job, generation (the new one).

    `phases` maps names of PHASES to seconds, as far as the recovery came. `outcome`: "recovered",
    "superseded" (another fault came first; the next generation's recovery goes on), "failed", "unwatched"
    (the job is done, and its script told of no steps), or None while it runs.
    """

    job: JobName
    generation: Generation
    rung: Word
    faults: Annotated[tuple[Name, ...], OF_RANKS]
    restore_step: Step | None
    started_s: Age
    phases: Annotated[dict[Word, Age], Meta(max_length=64)]
    outcome: Word | None


# Kinds of events that tell of something refused: it came from an older generation, or an older leader.
REFUSALS = frozenset(("order-refused", "stale-message", "stale-record"))


# The kind of events that tell of a drill: that it is asked for, done, over, or not done.
DRILL = "drill"


# Why a node is out of the job which Slurm is to have again: the reason begins so, and all daemons know it.
GIVEN_BACK = "given back to Slurm"


# The kind of the event that tells when every rank has made its first step, where no recovery led to it.
TRAINS = "trains"


# Kinds of events that tell that a node's daemon cannot vote, and that it can again.
VOTE_LOST, VOTE_AGAIN = "vote-lost", "vote-again"


class Subject(Clipped, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The subject of an event: a node, and of it a slot, its rank and process; and what became of that.

    `error` is one line: what a rank raised, or why a node is out.
    """

    node: NodeNumber
    name: Name = ""
    slot: SlotNumber | None = None
    rank: Rank | None = None
    pid: Pid | None = None
    signal: Word | None = None
    exit_code: ExitCode | None = None
    error: Text | None = None


class EventRecord(Clipped, Struct, frozen=True, kw_only=True, tag="event", forbid_unknown_fields=True):
    """Something that happened. Key: event (its id, unique over all daemons of the job).

    `node` is the one whose daemon tells it; `about` is of whom, where that can be said.
    """

    event: Name
    job: JobName
    node: NodeNumber
    at_s: Age
    level: Level
    kind: Word
    generation: Generation | None
    text: Text
    about: Subject | None = None


Record: TypeAlias = (
    JobRecord
    | NodeRecord
    | SlotRecord
    | HoldingRecord
    | GenerationRecord
    | FaultRecord
    | RecoveryRecord
    | EventRecord
)


def printable(record: Record) -> Record:
    """The row with its texts in one line each, as logs and terminals can show them."""
    match record:
        case EventRecord():
            about = record.about
            if about is not None:
                error = None if about.error is None else one_line(about.error)
                about = replace(about, name=one_line(about.name), error=error)
            return replace(record, kind=one_line(record.kind), text=one_line(record.text), about=about)
        case FaultRecord():
            return replace(record, kind=one_line(record.kind), detail=one_line(record.detail))
        case JobRecord():
            reason = None if record.reason is None else one_line(record.reason)
            return replace(record, reason=reason, command=tuple(map(one_line, record.command)))
        case NodeRecord():
            return replace(record, name=one_line(record.name), address=one_line(record.address))
        case _:
            return record
