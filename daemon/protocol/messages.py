"""Every message between a rank, its agent and its daemon, and what they are made of.

All are frozen, tagged structs, parsed strictly (an unknown field or tag is a ProtocolError). State is told,
not changes of state: an agent sends its whole `AgentState` whenever it changes, so a message that is lost,
late or doubled does no harm, and a daemon that has just started knows all after one message.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from ckptless.daemon.protocol.codec import PROTOCOL as PROTOCOL
from ckptless.daemon.protocol.limits import (
    OF_RANKS,
    Clipped,
    Digest,
    ExitCode,
    Generation,
    JobId,
    JobName,
    Key,
    Name,
    Names,
    Nbytes,
    NodeCount,
    NodeNumber,
    Nodes,
    Number,
    Pid,
    Port,
    Protocol,
    Rank,
    RankCount,
    Ranks,
    RecordBytes,
    Seconds,
    Share,
    SlotCount,
    SlotNumber,
    Spans,
    Step,
    Text,
    TryCount,
    Uid,
    Word,
)
from ckptless.daemon.protocol.model import WARM as WARM
from ckptless.daemon.protocol.model import Assignment as Assignment
from ckptless.daemon.protocol.model import Brought as Brought
from ckptless.daemon.protocol.model import Call as Call
from ckptless.daemon.protocol.model import Cause as Cause
from ckptless.daemon.protocol.model import Copies as Copies
from ckptless.daemon.protocol.model import Doubt as Doubt
from ckptless.daemon.protocol.model import Drill as Drill
from ckptless.daemon.protocol.model import Former as Former
from ckptless.daemon.protocol.model import Holdings as Holdings
from ckptless.daemon.protocol.model import JobSpec as JobSpec
from ckptless.daemon.protocol.model import Limits as Limits
from ckptless.daemon.protocol.model import NodeInfo as NodeInfo
from ckptless.daemon.protocol.model import Outcome as Outcome
from ckptless.daemon.protocol.model import Pace as Pace
from ckptless.daemon.protocol.model import Phase as Phase
from ckptless.daemon.protocol.model import Place as Place
from ckptless.daemon.protocol.model import Replaced as Replaced
from ckptless.daemon.protocol.model import Reuse as Reuse
from ckptless.daemon.protocol.model import SlotState as SlotState
from ckptless.daemon.protocol.model import Spent as Spent
from ckptless.daemon.protocol.model import Still as Still
from ckptless.daemon.protocol.model import Stillness as Stillness
from ckptless.daemon.protocol.model import Tries as Tries
from ckptless.daemon.protocol.model import Value as Value
from ckptless.daemon.protocol.model import Why as Why
from ckptless.daemon.protocol.model import Wish as Wish

MAX_ANNOUNCED = 4096


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Root of every message; the tag is the class's name."""


# ------------------------------------------------------------------------------- agent and daemon


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of an agent to its daemon; `identity` is what an earlier Admitted said.

    `brought` is what a daemon had kept for it.
    """

    protocol: Protocol
    spec: JobSpec
    info: NodeInfo
    pid: Pid
    identity: Name = ""
    brought: Brought | None = None


class Introduction(Message, frozen=True, kw_only=True):
    """An agent's hello as daemons tell it each other. What the job is, each knows from its own agent."""

    info: NodeInfo
    pid: Pid
    brought: Brought | None = None


class AgentState(Clipped, Message, frozen=True, kw_only=True):
    """All that an agent knows of its slots; sent on every change.

    `assigned` is the generation of the newest assignment that it has accepted. `frozen` is the generation it
    has stopped (no commit of it is taken any more), and `holdings` what it holds then. `copies` is what it
    holds at any time, for people: nothing is decided by it. `daemon_pid` is the daemon it talks to. `doubts`
    are of the generation `assigned`. `former` is what it holds, once frozen, of an earlier number of ranks.
    `nccl_unknown` is what it has heard of an NCCL that it does not know, ""
    for nothing.
    """

    seq: Number
    slots: Annotated[tuple[SlotState, ...], OF_RANKS]
    assigned: Generation | None = None
    frozen: Generation | None = None
    holdings: Holdings | None = None
    copies: Copies | None = None
    daemon_pid: Pid | None = None
    doubts: Annotated[tuple[Doubt, ...], OF_RANKS] = ()
    nccl_unknown: Text = ""
    former: Holdings | None = None


class AgentEvent(Clipped, Message, frozen=True, kw_only=True):
    """Something worth a line in the ledger."""

    level: Literal["info", "warning", "error"]
    kind: Word
    text: Text
    generation: Generation | None = None


class Cancel(Clipped, Message, frozen=True, kw_only=True):
    """The user wants the job to end, or Slurm does.

    `restarts`: how often Slurm had started the job again, where it is Slurm that knows the cause of a signal;
    None: `reason` is all that there is to say.
    """

    exit_code: ExitCode
    reason: Text
    restarts: TryCount | None = None


class Resize(Message, frozen=True, kw_only=True):
    """The job is to train on another number of nodes from now on."""

    wish: Wish


class Admitted(Message, frozen=True, kw_only=True):
    """Daemon to agent: the answer to its hello, and again whenever the daemon has promised something.

    `identity` names what the daemon has on its disk of the job; the agent's next hello has the newest one.
    """

    identity: Name


class Denied(Clipped, Message, frozen=True, kw_only=True):
    """Daemon to agent: this agent may not speak for that job here. The daemon hangs up after it."""

    reason: Text


class Renewed(Message, frozen=True, kw_only=True):
    """Daemon to agent: this node hears enough of the job's voters. Said again and again, while it is so."""


class JobKey(Message, frozen=True, kw_only=True):
    """Daemon to agent: what the job's agents prove to each other that they hold."""

    key: Key


class Stop(Clipped, Message, frozen=True, kw_only=True):
    """Leave `generation`: freeze, tell the ranks. `kill` are slots whose process must end now.

    `faults`: the ids of those that are known, for logs.
    """

    generation: Generation
    reason: Text
    kill: Annotated[tuple[Place, ...], OF_RANKS] = ()
    faults: Annotated[tuple[Name, ...], OF_RANKS] = ()


class Assign(Message, frozen=True, kw_only=True):
    """The next generation."""

    assignment: Assignment


class Go(Message, frozen=True, kw_only=True):
    """Every rank has joined `generation`: make the groups, restore, train."""

    generation: Generation


class Running(Message, frozen=True, kw_only=True):
    """Every rank of `generation` has made its first step."""

    generation: Generation


class Release(Message, frozen=True, kw_only=True):
    """Every rank's training function has returned: the processes may go on to their end."""

    generation: Generation


class Strike(Message, frozen=True, kw_only=True):
    """Do what this drill is, to the slot (or the node's agent), if it is still in `generation`; once."""

    generation: Generation
    place: Place
    drill: Drill


class Prepare(Message, frozen=True, kw_only=True):
    """Have the spares that get ranks in this assignment build for it, while `generation` goes on.

    It is what the next generation is to be; nothing of it is agreed on, or told where the state is.
    `state`: they have built, and are given the next commits of these ranks, too.
    """

    generation: Generation
    assignment: Assignment
    state: bool = False


class End(Message, frozen=True, kw_only=True):
    """The job is over, or (`here_only`) goes on without this node: end every process of it."""

    outcome: Outcome
    here_only: bool = False


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""

    seq: Number


class Pong(Message, frozen=True, kw_only=True):
    """Yes."""

    seq: Number


STACKS_SIGNAL = 61
"""Has a process with hooks write the stacks of all its threads behind its page.

Also where something holds its interpreter. SIGRTMAX - 3, as Linux has it. Its agent copies them to the log.
"""


Order: TypeAlias = Stop | Assign | Go | Running | Release | Strike | Prepare | End


class Draw(Message, frozen=True, kw_only=True):
    """Leading daemon to its agent: so many late nodes (see JobSpec) should have come, or come soon."""

    nodes: NodeCount


class GiveBack(Message, frozen=True, kw_only=True):
    """Leading daemon to its agent: these nodes are out of the job, and Slurm is to have them again."""

    nodes: Nodes


class Announce(Message, frozen=True, kw_only=True):
    """Leading daemon to its agent: a line for the job's output, which its user reads."""

    text: Annotated[str, Meta(max_length=MAX_ANNOUNCED)]


class JobStarted(Clipped, Message, frozen=True, kw_only=True):
    """Prolog to daemon: Slurm gives this node to a job that asked for ckptless. `spec` is the user's word."""

    protocol: Protocol
    job_id: JobId
    uid: Uid
    spec: Text = ""


class JobEnded(Clipped, Message, frozen=True, kw_only=True):
    """Epilog to daemon: Slurm takes this node from the job."""

    protocol: Protocol
    job_id: JobId
    uid: Uid
    spec: Text = ""


Notice: TypeAlias = JobStarted | JobEnded
ToAgent: TypeAlias = Order | Draw | GiveBack | Announce | Renewed | JobKey | Admitted | Denied | Ping
FromAgent: TypeAlias = AgentHello | AgentState | AgentEvent | Cancel | Resize

# ---------------------------------------------------------------------------------- rank and agent


class Hello(Message, frozen=True, kw_only=True):
    """First message of a rank to its agent, which knows the slot by the peer's pid (SO_PEERCRED)."""

    protocol: Protocol


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello, and the memfd of the rank's page (protocol/page.py).

    `run`: JobSpec.run_id. `host` is the address this node's groups bind to.
    """

    job: JobName
    run: Name
    slot: SlotNumber
    host: Name
    pong_s: Seconds


class Assigned(Message, frozen=True, kw_only=True):
    """A rank's part of an assignment.

    `store` is (host, port); `peers` are the addresses of the job's nodes; `local_ranks` this one's ranks.
    `ranks_per_root`: what torch is to be told of NCCL's roots. `cache_key` is made of the job's key, to
    encrypt cached data with; it is empty where the agent does not know that yet. `former_shards`: another
    number of ranks has committed the step that is restored, and this is what each of them had tensors of;
    empty where it was this one. `cut`: see Assignment. `sizes`: the numbers of ranks that the job may have,
    where it is elastic. `done_step`: see Assignment. `faults`: the ids of those that led here, for logs.
    `ahead`: the others train yet, and this is what to build for; the same comes again when it is needed.
    """

    generation: Generation
    rank: Rank
    world_size: RankCount
    local_world_size: SlotCount
    group_rank: NodeNumber
    restore_step: Step | None
    store: tuple[Name, Port]
    peers: Names
    ranks_per_root: RankCount = 1
    cache_key: Key = b""
    local_ranks: Ranks = ()
    cut: Generation = 1
    former_shards: Ranks = ()
    sizes: Ranks = ()
    done_step: Step = 0
    faults: Annotated[tuple[Name, ...], OF_RANKS] = ()
    ahead: bool = False


class Prepared(Message, frozen=True, kw_only=True):
    """Built for `generation`, which was told ahead, and ready to join it."""

    generation: Generation


class Left(Message, frozen=True, kw_only=True):
    """The main thread is out of the training function of `generation`; see Reuse."""

    generation: Generation
    cause: Cause
    reuse: Reuse = "any"


class Broken(Clipped, Message, frozen=True, kw_only=True):
    """A collective failed before anybody said STOP; the main thread may still be inside the function."""

    generation: Generation
    text: Text


class Joined(Message, frozen=True, kw_only=True):
    """Ready to make the groups of `generation`."""

    generation: Generation


class Restored(Message, frozen=True, kw_only=True):
    """Groups and state of `generation` are there."""

    generation: Generation


class Finished(Message, frozen=True, kw_only=True):
    """The training function returned."""

    generation: Generation


class Twins(Message, frozen=True, kw_only=True):
    """These ranks, this one among them, have the same tensors; none named: all ranks have."""

    generation: Generation
    ranks: Ranks


class Writes(Message, frozen=True, kw_only=True):
    """Answer to Twins: whether this rank writes the tensors that it and its twins on this node share."""

    generation: Generation
    writes: bool


class Allocate(Message, frozen=True, kw_only=True):
    """Give me a memfd of `slots` x `slot_nbytes` bytes for my shard's tensors."""

    generation: Generation
    slot_nbytes: Nbytes
    slots: SlotCount


class Allocated(Clipped, Message, frozen=True, kw_only=True):
    """Answer to Allocate; the memfd comes with it (SCM_RIGHTS). `error`: why none does."""

    region: Number = 0
    error: Text | None = None


class TensorsAt(Value, frozen=True, kw_only=True):
    """The place of a version of a step's tensors: `nbytes` with the header; `digest` is the header's."""

    region: Number
    offset: Nbytes
    nbytes: Nbytes
    digest: Digest


class Commit(Message, frozen=True, kw_only=True):
    """Step `step` is done: my record, and the tensors if I write them. `digest` is the record's xxh3_128.

    Each `every`-th step is committed for now, which takes `share` of the time.
    """

    generation: Generation
    step: Step
    record: RecordBytes
    digest: Digest
    tensors: TensorsAt | None
    loss: float | None
    every: Number = 1
    share: Share | None = None


class Stepped(Message, frozen=True, kw_only=True):
    """Step `step` is done, and is not to be restored. `every` and `share` as in Commit."""

    generation: Generation
    step: Step
    loss: float | None
    every: Number
    share: Share | None


class Acked(Message, frozen=True, kw_only=True):
    """Every holder has the record of `step`, and the tensors where they have holders of their own."""

    generation: Generation
    step: Step


class Fetch(Clipped, Message, frozen=True, kw_only=True):
    """Give me my record and my shard's tensors of `step`; not `unsound` again, which is bad: see `why`."""

    generation: Generation
    step: Step
    unsound: TensorsAt | None = None
    why: Text = ""


class Fetched(Clipped, Message, frozen=True, kw_only=True):
    """Answer to Fetch; the memfd comes with it (SCM_RIGHTS), in slots of `slot_nbytes`. `error`: why not."""

    step: Step
    record: RecordBytes = b""
    tensors: TensorsAt | None = None
    slot_nbytes: Nbytes = 0
    error: Text | None = None


class FetchRecord(Message, frozen=True, kw_only=True):
    """Give me the record of one of the former ranks (`Assigned.former_shards`), of the restored step."""

    generation: Generation
    rank: Rank


class FetchedRecord(Clipped, Message, frozen=True, kw_only=True):
    """Answer to FetchRecord. `error`: why not."""

    record: RecordBytes = b""
    error: Text | None = None


class FetchSpans(Message, frozen=True, kw_only=True):
    """Give me these parts of the payload of a former shard's tensors, of the restored step.

    `layout`: the digest of the layout that they are packed by, as its record has it.
    """

    generation: Generation
    shard: Rank
    layout: Digest
    spans: Spans


class FetchedSpans(Clipped, Message, frozen=True, kw_only=True):
    """Answer to FetchSpans; a memfd comes with it (SCM_RIGHTS) that has them, one after the other.

    They are verified. `error`: why none comes.
    """

    nbytes: Nbytes = 0
    error: Text | None = None


class Refused(Clipped, Message, frozen=True, kw_only=True):
    """No to a message that belongs to a generation that is over."""

    generation: Generation
    what: Text


class Note(Clipped, Message, frozen=True, kw_only=True):
    """A rank's line for the ledger."""

    level: Literal["info", "warning", "error"]
    kind: Word
    text: Text


FromRank: TypeAlias = (
    Hello
    | Prepared
    | Left
    | Broken
    | Joined
    | Restored
    | Finished
    | Twins
    | Allocate
    | Commit
    | Stepped
    | Fetch
    | FetchRecord
    | FetchSpans
    | Pong
    | Note
)
ToRank: TypeAlias = (
    Welcome
    | Assigned
    | Stop
    | Go
    | Release
    | Writes
    | Allocated
    | Acked
    | Fetched
    | FetchedRecord
    | FetchedSpans
    | Refused
    | Ping
)
