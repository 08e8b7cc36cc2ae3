"""Every message between a rank, its agent and its daemon, and what they are made of.

All are frozen, tagged structs, parsed strictly (an unknown field or tag is a ProtocolError). State is told,
not changes of state: an agent sends its whole `AgentState` whenever it changes, so a message that is lost,
late or doubled does no harm, and a daemon that has just started knows all after one message.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from ckptless.daemon.api.codec import PROTOCOL as PROTOCOL
from ckptless.daemon.api.feed import Feeds
from ckptless.daemon.api.model import Assignment as Assignment
from ckptless.daemon.api.model import Brought as Brought
from ckptless.daemon.api.model import Cause as Cause
from ckptless.daemon.api.model import Copies as Copies
from ckptless.daemon.api.model import Doubt as Doubt
from ckptless.daemon.api.model import Holdings as Holdings
from ckptless.daemon.api.model import JobSpec as JobSpec
from ckptless.daemon.api.model import Limits as Limits
from ckptless.daemon.api.model import NodeInfo as NodeInfo
from ckptless.daemon.api.model import Outcome as Outcome
from ckptless.daemon.api.model import Phase as Phase
from ckptless.daemon.api.model import Place as Place
from ckptless.daemon.api.model import Replaced as Replaced
from ckptless.daemon.api.model import SlotState as SlotState
from ckptless.daemon.api.model import Tries as Tries
from ckptless.daemon.api.model import Value as Value
from ckptless.daemon.api.model import Why as Why

MAX_ANNOUNCED = 4096


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Root of every message; the tag is the class's name."""


# ------------------------------------------------------------------------------- agent and daemon


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of an agent to its daemon; `identity` is what an earlier Admitted said.

    `brought` is what a daemon had kept for it.
    """

    protocol: int
    spec: JobSpec
    info: NodeInfo
    pid: int
    identity: str = ""
    brought: Brought | None = None


class Introduction(Message, frozen=True, kw_only=True):
    """What daemons tell each other of an agent's hello. What the job is, each knows from its own agent."""

    info: NodeInfo
    pid: int
    brought: Brought | None = None


class AgentState(Message, frozen=True, kw_only=True):
    """All that an agent knows of its slots; sent on every change.

    `assigned` is the generation of the newest assignment that it has accepted. `frozen` is the generation it
    has stopped (no commit of it is taken any more), and `holdings` what it holds then. `copies` is what it
    holds at any time, for people: nothing is decided by it. `daemon_pid` is the daemon it talks to. `doubts`
    are of the generation `assigned`. `nccl_unknown` is what it has heard of an NCCL that it does not know, ""
    for nothing.
    """

    seq: int
    slots: tuple[SlotState, ...]
    assigned: int | None = None
    frozen: int | None = None
    holdings: Holdings | None = None
    copies: Copies | None = None
    daemon_pid: int | None = None
    doubts: tuple[Doubt, ...] = ()
    nccl_unknown: str = ""


class AgentEvent(Message, frozen=True, kw_only=True):
    """Something worth a line in the ledger."""

    level: Literal["info", "warning", "error"]
    kind: str
    text: str
    generation: int | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """The user wants the job to end, or Slurm does.

    `restarts`: how often Slurm had started the job again, where it is Slurm that knows the cause of a signal;
    None: `reason` is all that there is to say.
    """

    exit_code: int
    reason: str
    restarts: int | None = None


class Admitted(Message, frozen=True, kw_only=True):
    """Daemon to agent: the answer to its hello, and again whenever the daemon has promised something.

    `identity` names what the daemon has on its disk of the job; the agent's next hello has the newest one.
    """

    identity: str


class Denied(Message, frozen=True, kw_only=True):
    """Daemon to agent: this agent may not speak for that job here. The daemon hangs up after it."""

    reason: str


class JobKey(Message, frozen=True, kw_only=True):
    """Daemon to agent: what the job's agents prove to each other that they hold."""

    key: bytes


class Stop(Message, frozen=True, kw_only=True):
    """Leave `generation`: freeze, tell the ranks. `kill` are slots whose process must end now."""

    generation: int
    reason: str
    kill: tuple[Place, ...] = ()


class Assign(Message, frozen=True, kw_only=True):
    """The next generation."""

    assignment: Assignment


class Go(Message, frozen=True, kw_only=True):
    """Every rank has joined `generation`: make the groups, restore, train."""

    generation: int


class Running(Message, frozen=True, kw_only=True):
    """Every rank of `generation` has made its first step."""

    generation: int


class Release(Message, frozen=True, kw_only=True):
    """Every rank's training function has returned: the processes may go on to their end."""

    generation: int


class End(Message, frozen=True, kw_only=True):
    """The job is over, or (`here_only`) goes on without this node: end every process of it."""

    outcome: Outcome
    here_only: bool = False


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""

    seq: int


class Pong(Message, frozen=True, kw_only=True):
    """Yes."""

    seq: int


Order: TypeAlias = Stop | Assign | Go | Running | Release | End


class Announce(Message, frozen=True, kw_only=True):
    """Leading daemon to its agent: a line for the job's output, which its user reads."""

    text: Annotated[str, Meta(max_length=MAX_ANNOUNCED)]


class JobStarted(Message, frozen=True, kw_only=True):
    """Prolog to daemon: Slurm gives this node to a job that asked for ckptless. `spec` is the user's word."""

    protocol: int
    job_id: int
    uid: int
    spec: str = ""


class JobEnded(Message, frozen=True, kw_only=True):
    """Epilog to daemon: Slurm takes this node from the job."""

    protocol: int
    job_id: int
    uid: int
    spec: str = ""


Notice: TypeAlias = JobStarted | JobEnded
ToAgent: TypeAlias = Order | Announce | JobKey | Admitted | Denied | Ping
FromAgent: TypeAlias = AgentHello | AgentState | AgentEvent | Cancel

# ---------------------------------------------------------------------------------- rank and agent


class Hello(Message, frozen=True, kw_only=True):
    """First message of a rank to its agent, which knows the slot by the peer's pid (SO_PEERCRED)."""

    protocol: int


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello. `run`: JobSpec.run_id. `host` is the address this node's groups bind to."""

    job: str
    run: str
    slot: int
    host: str
    pong_s: float


class Assigned(Message, frozen=True, kw_only=True):
    """A rank's part of an assignment.

    `store` is (host, port); `peers` are the addresses of the job's nodes. `ranks_per_root`: what
    torch is to be told of NCCL's roots. `cache_key` is made of the job's key, to encrypt cached data with; it
    is empty where the agent does not know that yet.
    """

    generation: int
    rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    restore_step: int | None
    store: tuple[str, int]
    peers: tuple[str, ...]
    ranks_per_root: int = 1
    cache_key: bytes = b""


class Left(Message, frozen=True, kw_only=True):
    """The main thread is out of the training function of `generation`."""

    generation: int
    cause: Cause


class Broken(Message, frozen=True, kw_only=True):
    """A collective failed before anybody said STOP; the main thread may still be inside the function."""

    generation: int
    text: str


class Joined(Message, frozen=True, kw_only=True):
    """Ready to make the groups of `generation`."""

    generation: int


class Restored(Message, frozen=True, kw_only=True):
    """Groups and state of `generation` are there."""

    generation: int


class Finished(Message, frozen=True, kw_only=True):
    """The training function returned."""

    generation: int


class Twins(Message, frozen=True, kw_only=True):
    """These ranks, this one among them, have the same tensors; none named: all ranks have."""

    generation: int
    ranks: tuple[int, ...]


class Writes(Message, frozen=True, kw_only=True):
    """Answer to Twins: whether this rank writes the tensors that it and its twins on this node share."""

    generation: int
    writes: bool


class Allocate(Message, frozen=True, kw_only=True):
    """Give me a memfd of `slots` x `slot_nbytes` bytes for my shard's tensors."""

    generation: int
    slot_nbytes: int
    slots: int


class Allocated(Message, frozen=True, kw_only=True):
    """Answer to Allocate; the memfd comes with it (SCM_RIGHTS)."""

    region: int


class TensorsAt(Value, frozen=True, kw_only=True):
    """Where a version of a step's tensors lies: `nbytes` of header and payload; `digest` is the header's."""

    region: int
    offset: int
    nbytes: int
    digest: str


class Commit(Message, frozen=True, kw_only=True):
    """Step `step` is done: my record, and the tensors if I write them. `digest` is the record's xxh3_128.

    Each `every`-th step is committed for now, which takes `share` of the time. `feeds` is where this rank
    stands in its batches, of each ring.
    """

    generation: int
    step: int
    record: bytes
    digest: str
    tensors: TensorsAt | None
    loss: float | None
    every: int = 1
    share: float | None = None
    feeds: Feeds = ()


class Stepped(Message, frozen=True, kw_only=True):
    """Step `step` is done, and is not to be restored. `every` and `share` as in Commit."""

    generation: int
    step: int
    loss: float | None
    every: int
    share: float | None


class Acked(Message, frozen=True, kw_only=True):
    """Every holder has the record of `step`, and the tensors where they have holders of their own."""

    generation: int
    step: int


class Fetch(Message, frozen=True, kw_only=True):
    """Give me my record and my shard's tensors of `step`; not `unsound` again, which is bad: see `why`."""

    generation: int
    step: int
    unsound: TensorsAt | None = None
    why: str = ""


class Fetched(Message, frozen=True, kw_only=True):
    """Answer to Fetch; the memfd comes with it (SCM_RIGHTS), in slots of `slot_nbytes`. `error`: why not."""

    step: int
    record: bytes = b""
    tensors: TensorsAt | None = None
    slot_nbytes: int = 0
    error: str | None = None


class Refused(Message, frozen=True, kw_only=True):
    """What you sent belongs to a generation that is over."""

    generation: int
    what: str


class Note(Message, frozen=True, kw_only=True):
    """A rank's line for the ledger."""

    level: Literal["info", "warning", "error"]
    kind: str
    text: str


FromRank: TypeAlias = (
    Hello
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
    | Pong
    | Note
)
ToRank: TypeAlias = (
    Welcome | Assigned | Stop | Go | Release | Writes | Allocated | Acked | Fetched | Refused | Ping
)
