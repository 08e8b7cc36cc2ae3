"""What the ledger keeps: one frozen struct per kind of row, written by the daemon and read by ckptctl.

Every record carries the identity that makes writing it twice harmless (`key`), so that daemons may tell
each other what they saw and ckptctl may merge several nodes' ledgers. Times are seconds since the Unix
epoch by the clock of the daemon that led; phases are durations in seconds.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from ckptless.daemon.api.model import RingState

JobState: TypeAlias = Literal["starting", "running", "recovering", "done", "failed", "stopped"]
NodeState: TypeAlias = Literal["up", "daemon-away", "lost"]
Level: TypeAlias = Literal["info", "warning", "error"]

# Who says that something is broken. Of a rank: "process", which its agent watches (pidfd, and what it says).
# Of a node: "agent", its connection to its daemon is gone; "membership", the other daemons cannot reach it;
# "slurm", Slurm has it down; "health", a check's verdict; "operator", a person's word; "lease", it ends its
# ranks itself, as it hears too few others. Of either: "leader", who waited for it in vain. Of several ranks:
# "twins", whose tensors should be the same.
FaultSource: TypeAlias = Literal[
    "process", "agent", "membership", "slurm", "health", "operator", "lease", "leader", "twins"
]

# The phases of a recovery, in order. They do not overlap; their sum is the recovery.
PHASES = ("detect", "stop", "leave", "agree", "join", "restore", "first step")


# A job's `reason` begins so where Slurm alone has said that it is over.
BY_SLURM = "over by Slurm's word"


class JobRecord(Struct, frozen=True, kw_only=True, tag="job", forbid_unknown_fields=True):
    """A job. Key: job."""

    job: str
    command: tuple[str, ...]
    world_size: int
    nodes: int
    spares: int
    state: JobState
    started_s: float
    ended_s: float | None = None
    exit_code: int | None = None
    reason: str | None = None


class NodeRecord(Struct, frozen=True, kw_only=True, tag="node", forbid_unknown_fields=True):
    """A node of a job's allocation. Key: job, node. A later `updated_s` replaces."""

    job: str
    node: int
    name: str
    address: str
    state: NodeState
    daemon_pid: int | None
    agent_pid: int | None
    updated_s: float


class SlotRecord(Struct, frozen=True, kw_only=True, tag="slot", forbid_unknown_fields=True):
    """A slot and the process in it. Key: job, node, slot. A later `updated_s` replaces.

    `rank` is None for a spare; `phase` is the agent's word (see `messages.Phase`). Each `every`-th step is
    committed, which takes `share` of its rank's time; None where that is not known.
    """

    job: str
    node: int
    slot: int
    rank: int | None
    generation: int
    pid: int | None
    phase: str
    step: int | None
    loss: float | None
    updated_s: float
    every: int | None = None
    share: float | None = None


class HoldingRecord(Struct, frozen=True, kw_only=True, tag="holding", forbid_unknown_fields=True):
    """What a node's agent holds. Key: job, node. A later `seq`, the agent's own count, replaces.

    `tensors` are (shard, steps, bytes), `records` are (rank, shard, steps, bytes), where bytes are those of
    all these steps; `nbytes` is the memory taken for them. `updated_s`: when the agent told it.
    `rings`: what it has of training data, for which there is other memory.
    """

    job: str
    node: int
    tensors: tuple[tuple[int, tuple[int, ...], int], ...]
    records: tuple[tuple[int, int, tuple[int, ...], int], ...]
    nbytes: int
    seq: int
    updated_s: float
    rings: tuple[RingState, ...] = ()


class GenerationRecord(Struct, frozen=True, kw_only=True, tag="generation", forbid_unknown_fields=True):
    """One agreed assignment of ranks to slots. Key: job, generation.

    `places[rank]` is (node, slot). `restore_step` is None where every rank builds anew. `faults` are the
    ids of the faults that this generation answers.
    """

    job: str
    generation: int
    places: tuple[tuple[int, int], ...]
    restore_step: int | None
    rung: str
    faults: tuple[str, ...]
    leader: int
    agreed_s: float


class FaultRecord(Struct, frozen=True, kw_only=True, tag="fault", forbid_unknown_fields=True):
    """Something observed. Key: fault (its id). `source` is None in ledgers older than that field."""

    fault: str
    job: str
    kind: str
    node: int
    slot: int | None
    rank: int | None
    generation: int
    detail: str
    seen_s: float
    source: FaultSource | None = None


class RecoveryRecord(Struct, frozen=True, kw_only=True, tag="recovery", forbid_unknown_fields=True):
    """From the first sign of a fault to the first new step. Key: job, generation (the new one).

    `phases` maps names of PHASES to seconds, as far as the recovery came. `outcome`: "recovered",
    "superseded" (another fault came first; the next generation's recovery goes on), "failed", or None
    while it runs.
    """

    job: str
    generation: int
    rung: str
    faults: tuple[str, ...]
    restore_step: int | None
    started_s: float
    phases: dict[str, float]
    outcome: str | None


# Kinds of events that tell of something refused: it came from an older generation, or an older leader.
REFUSALS = frozenset(("order-refused", "stale-message", "stale-record"))


# Kinds of events that tell that a node's daemon cannot vote, and that it can again.
VOTE_LOST, VOTE_AGAIN = "vote-lost", "vote-again"


class Subject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of whom an event tells: a node, and of it a slot, its rank and process; and what became of that.

    `error` is one line: what a rank raised, or why a node is out.
    """

    node: int
    name: str = ""
    slot: int | None = None
    rank: int | None = None
    pid: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    error: str | None = None


class EventRecord(Struct, frozen=True, kw_only=True, tag="event", forbid_unknown_fields=True):
    """A line of the story. Key: event (its id, unique over all daemons of the job).

    `node` is the one whose daemon tells it; `about` is of whom, where that can be said.
    """

    event: str
    job: str
    node: int
    at_s: float
    level: Level
    kind: str
    generation: int | None
    text: str
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
