"""The terms of the control plane: jobs, slots, limits, assignments, outcomes."""

from bisect import bisect_left
from functools import cached_property, lru_cache
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from ckptless.daemon.protocol.limits import (
    MOST_GROUPS,
    MOST_RANKS,
    OF_NODES,
    OF_RANKS,
    Addresses,
    Age,
    Clipped,
    Command,
    Digest,
    ExitCode,
    Generation,
    JobName,
    Name,
    Names,
    Nbytes,
    NodeCount,
    NodeNumber,
    NodeOrNone,
    Nodes,
    Number,
    Pid,
    Port,
    Rank,
    RankCount,
    Ranks,
    Seconds,
    Share,
    Sizes,
    SlotCount,
    SlotNumber,
    Step,
    Steps,
    Text,
    TryCount,
    Uid,
    Word,
    clip_command,
)


class Value(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Root of what messages are made of; frozen, without a tag, and in no cycle that Python had to find."""


class Place(Value, frozen=True, order=True):
    """A slot: node id and local index on it."""

    node: NodeNumber
    slot: SlotNumber


class Limits(Value, frozen=True, kw_only=True):
    """Deadlines in seconds, all derived from one knob (`from_max_stall`), and the budgets of the ladder.

    `pong_s`: a rank that does not answer for so long is killed. `leave_s`: from STOP until a rank must have
    left its training function. `join_s`: from an assignment until a rank must have joined. `stall_s`: the
    longest time without any new step before the generation is stopped. `lease_s`: a node that does not hear a
    majority of the job's voters for so long ends its ranks.

    The ladder, and how often a rung is tried before the next one. "In a row" is without a step committed in
    between; the last budget is for what comes again and again with steps in between.

    rung        answers                          budget                            over it
    none        a rank refused, no step yet,     none                              the job fails
                or what no version has
    in-process  a rank raised                    `raise_tries` in a row            process
                a collective broke, no step      `process_tries` in a row          the job fails
    process     a rank raised again              1 more in a row                   the job fails
                a process ended by itself        `raise_tries` in a row            the job fails
                the same without ckptless.run    `start_tries` in a row            the job fails
                a process was killed, or hung    `process_tries` in a row          spare
                any of these, with steps since   `flap_tries` in `flap_window_s`   spare, else process
    spare       a node is lost, a slot given up  as many as there are              shrink
    shrink      no spare is left                 down to the least of `sizes`      draw in
    draw in     it cannot have fewer nodes       `draw_s`, while any may come      the job fails
    """

    pong_s: Seconds
    leave_s: Seconds
    join_s: Seconds
    stall_s: Seconds
    lease_s: Seconds = 3.0
    raise_tries: TryCount = 1
    process_tries: TryCount = 3
    start_tries: TryCount = 0
    flap_tries: TryCount = 5
    flap_window_s: Seconds = 3600.0

    @classmethod
    def from_max_stall(cls, max_stall_s: float, start_tries: int = 0) -> "Limits":
        """All deadlines from the longest stall (seconds) that the user accepts."""
        return cls(
            pong_s=max(3.0, max_stall_s / 30),
            leave_s=max(1.0, max_stall_s / 10),
            join_s=max_stall_s,
            stall_s=max_stall_s,
            lease_s=min(10.0, max(2.0, max_stall_s / 30)),
            start_tries=start_tries,
        )


RunId: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
NO_RUN = "0" * 32
"""JobSpec.run_id, or JobSpec.launch, where nobody gave one."""


class JobSpec(Value, frozen=True, kw_only=True):
    """The job that the user asked for: the first `nodes` nodes train, `spares` more wait.

    `names` are the nodes' names, where a node's number is its place in them (empty in local mode). `domains`
    are the nodes' failure domains (racks, switches, power units) in the same order; "" is one that nobody
    knows, and an empty tuple that of none is known. `saved_step` is the one on the disk, if any.
    Every agent of a job must tell the same: the first voters follow from it.

    `recovers` False is tier 1: no fault is answered, the first one ends the job. Ranks know of no agent then.

    `sizes`: an elastic job may train on so many nodes, ascending, `nodes` among them; none: on `nodes`
    alone. It grows once it could for `grow_after_s` seconds.

    `late` nodes more may come while it runs, drawn in from others that are idle, and get the numbers after
    the spares'; `names` has those that are known. Where no spare is left, and the job cannot shrink, it
    waits `draw_s` seconds for one.

    `run_id` tells jobs of one name apart, 32 hex digits: on Slurm it is of the job on its cluster, the same
    in all of its runs and after a requeue (see launch/allocation.py); in local mode each run has its own.
    `launch` tells runs of one name apart: this run has it alone, and nothing of another one counts here.
    """

    job: JobName
    command: Command
    nodes: NodeCount
    spares: NodeCount
    slots_per_node: SlotCount
    limits: Limits
    names: Names = ()
    domains: Names = ()
    run_id: RunId = NO_RUN
    launch: RunId = NO_RUN
    saved_step: Step | None = None
    recovers: bool = True
    sizes: Sizes = ()
    grow_after_s: Seconds = 0.0
    late: NodeCount = 0
    draw_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.sizes and (self.nodes not in self.sizes or list(self.sizes) != sorted({*self.sizes} - {0})):
            raise ValueError(f"sizes {self.sizes}, of which {self.nodes} is to be one, ascending")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"{self.world_size} ranks; a job has {MOST_RANKS} at most")
        force_setattr(self, "command", clip_command(self.command))

    @property
    def world_size(self) -> int:
        """Number of ranks that the job begins with."""
        return self.nodes * self.slots_per_node

    @property
    def elastic(self) -> bool:
        """Whether the job may go on with another number of nodes."""
        return len(self.sizes) > 1


class NodeInfo(Value, frozen=True, kw_only=True):
    """The addresses of a node's agent: they are numeric; ports are TCP.

    `nccl_port` is where NCCL's ranks find their roots, at `address`; 0 where there are none. `interfaces`:
    where the agent listens on each further interface that copies go over.
    """

    node: NodeNumber
    name: Name
    address: Name
    agent_port: Port
    nccl_port: Port = 0
    interfaces: Addresses = ()


# What an agent knows of the process in a slot:
#   empty     no process                         left      out of its training function, waiting
#   starting  forked; has not said Hello         joined    ready for the generation's groups
#   waiting   said Hello; a spare or replacement restored  groups and state are there, training
#   assigned  told its rank                      finished  training function returned
#   exited    ended; see `exit_code`
#   preparing a spare that builds for a rank which it is about to get; prepared: it has
Phase = Literal[
    "empty",
    "starting",
    "waiting",
    "preparing",
    "prepared",
    "assigned",
    "left",
    "joined",
    "restored",
    "finished",
    "exited",
]

# The phases of a spare that can take a rank at once.
WARM: frozenset[Phase] = frozenset(("waiting", "preparing", "prepared"))


Reuse = Literal["any", "going-on", "none"]
"""The generations that a process which has left one can take a rank in: any; those in which its part of the
state goes on (what it has built it cannot build again); or none, since it was cut off as it set itself up."""


class Cause(Clipped, Value, frozen=True, kw_only=True):
    """The reason why a rank left or ended.

    kind: stop, raised, refused, no-state, no-memory, no-room, broken, hung, died, renewed.
    """

    kind: Word
    text: Text = ""


class Call(Value, frozen=True, kw_only=True):
    """What a rank waits in: the group's `number`-th collective, or a message to or from rank `peer`.

    `group` is its name, "" of messages and of what a rank asks its agent; `size` its ranks. `elements`: of
    the tensor, where that is known.
    """

    group: Name
    size: RankCount = 0
    number: Number = 0
    operation: Word
    elements: Number = 0
    peer: Rank | None = None


# What a rank that does not get on is at, by what the kernel says of its process:
#   asleep    no thread of it, and no child, runs       stopped   by a signal
#   working   they run, or wait for a disk              deaf      it answers nothing: its interpreter is held
Stillness = Literal["asleep", "working", "stopped", "deaf", "spinning"]


class Still(Clipped, Value, frozen=True, kw_only=True):
    """A rank that has not got on for `still_s`.

    `late`: that is much longer than any step before, of which the longest took `longest_s`. `phase` is where,
    `over`: for longer than the script has said. `call`: it waits in that. `queued`: the collectives that its
    device was given, in each group. `at`: the place in the script, where it is known.
    """

    still_s: Age
    late: bool
    how: Stillness
    phase: Word
    longest_s: Seconds = 0.0
    over: bool = False
    call: Call | None = None
    queued: Annotated[tuple[tuple[Name, Number], ...], Meta(max_length=MOST_GROUPS)] = ()
    at: Text = ""


class Pace(Value, frozen=True, kw_only=True):
    """Medians over a rank's last steps, up to `step`: seconds of a step, and what of it went where.

    `own_s` is neither `waited_s`, for others, nor `commit_s`; `data_s`, waiting for a batch, is part of it.
    """

    step: Number
    took_s: Seconds
    own_s: Seconds
    waited_s: Seconds
    data_s: Seconds
    commit_s: Seconds


class Spent(Value, frozen=True, kw_only=True):
    """The seconds that a slot's processes have spent in steps since its agent began; each is in one field.

    The first step of a generation is part of the start or of a recovery, and not here. `training_s`: steps
    done for the first time, without what the next three have; `data_s`: waiting for batches; `commit_s`:
    held up by commits; `checkpoint_s`: in `run.phase("checkpoint")`. `redone_s`: whole steps that had been
    done before a fault. `since_s`: how long ago the newest of all was done.
    """

    training_s: Seconds = 0.0
    data_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    checkpoint_s: Seconds = 0.0
    redone_s: Seconds = 0.0
    since_s: Age = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self.training_s + self.data_s + self.commit_s + self.checkpoint_s + self.redone_s


class SlotState(Value, frozen=True, kw_only=True):
    """A slot as its agent sees it. `generation` is the one that `phase` speaks of.

    `step` is the newest that is done (prepared: that has come to this node of what it is to go on from); each
    `every`-th is committed, which takes `share` of the time.
    `stepped`: one was done in this generation, whatever became of the process since. `still`: it does
    not get on. `allowed_s`: by its script's word what it is at, instead of a step, may last so long yet
    (None: nothing was said). `pace`: of its last steps. `spent`: on all of them; None before the first.
    `exit_code` is negative for a signal. `hooked` tells whether the process speaks to the agent
    (`ckptless.run`), or is a plain script. `age_s`: how long ago that began.
    """

    slot: SlotNumber
    phase: Phase
    generation: Generation
    pid: Pid | None = None
    hooked: bool = False
    step: Step | None = None
    stepped: bool = False
    still: Still | None = None
    allowed_s: Seconds | None = None
    pace: Pace | None = None
    spent: Spent | None = None
    loss: float | None = None
    every: Number | None = None
    share: Share | None = None
    cause: Cause | None = None
    exit_code: ExitCode | None = None
    age_s: Age = 0.0


class Holdings(Value, frozen=True, kw_only=True):
    """The holdings of a frozen agent: (shard, steps) of tensors, and (rank, shard, steps) of records.

    A shard is the tensors that a set of twins have alike; its number is the lowest of their ranks. `digests`
    are (shard, step, the rank that wrote it, digest) of those tensors that are compared (`api.twins`).
    Ranks and shards are those of `cut`, see Assignment.
    """

    tensors: Annotated[tuple[tuple[Rank, Steps], ...], OF_RANKS]
    records: Annotated[tuple[tuple[Rank, Rank, Steps], ...], OF_RANKS]
    digests: Annotated[tuple[tuple[Rank, Step, Rank, Digest], ...], OF_RANKS] = ()
    cut: Generation = 1


class Doubt(Value, frozen=True, kw_only=True):
    """A difference: this node's rank has not of a shard's step what its twin, rank `other`, has."""

    shard: Rank
    step: Step
    rank: Rank
    other: Rank


class Brought(Value, frozen=True, kw_only=True):
    """The memory that an agent has from an earlier start of its job: what `run` held in `generation`.

    `ranks`: the number of ranks that have committed it.
    """

    run: Name
    generation: Generation
    ranks: RankCount
    holdings: Holdings


class StreamState(Value, frozen=True, kw_only=True):
    """Batches of one replica on a node: how many lie there, and how many of these nobody has taken yet."""

    stream: Number
    ready: Number
    ahead: Number


class ReaderState(Value, frozen=True, kw_only=True):
    """A process that takes batches: its slot, and how many it has taken.

    It waited `waits` times for one, `waited_s` in all; `share` is that of the time lately, None where that is
    not known yet. `starved`: it has taken all that it was sent.
    """

    slot: SlotNumber
    stream: Number
    taken: Number
    waits: Number
    waited_s: Seconds
    share: Share | None = None
    starved: bool = False


class RingState(Value, frozen=True, kw_only=True):
    """The batches of one loader on a node, for people. Counts are those since the ring was opened.

    `producer` is the process that makes them.
    """

    loader: Name
    manifest: Digest
    nbytes: Nbytes
    budget_nbytes: Nbytes
    prefetch: Number
    made: Number
    given: Number
    streams: Annotated[tuple[StreamState, ...], OF_RANKS]
    readers: Annotated[tuple[ReaderState, ...], OF_RANKS]
    producer: Pid | None = None
    closed: bool = False


class Copies(Value, frozen=True, kw_only=True):
    """The holdings of an agent now: (shard, steps, bytes) of tensors, (rank, shard, steps, bytes) of records.

    Bytes are those of all these steps; `nbytes` is the memory that is taken for them, used or not. `rings`:
    training data, for which there is other memory.
    """

    tensors: Annotated[tuple[tuple[Rank, Steps, Nbytes], ...], OF_RANKS]
    records: Annotated[tuple[tuple[Rank, Rank, Steps, Nbytes], ...], OF_RANKS]
    nbytes: Nbytes
    rings: Annotated[tuple[RingState, ...], OF_RANKS] = ()


class Tries(Value, frozen=True, kw_only=True):
    """The count of one cause in a row without progress; `step` is where the job stood then."""

    cause: Text
    count: TryCount
    step: Step


class Replaced(Value, frozen=True, kw_only=True):
    """The latest times a slot's process was replaced: Unix times in s, at most `Limits.flap_tries`."""

    place: Place
    at_s: Annotated[tuple[Age, ...], OF_NODES]


@lru_cache(maxsize=2)
def numbers(count: int) -> tuple[int, ...]:
    """Return 0 to `count` - 1. Of 100,000 ranks the numbers alone take 3 MB: here they are there once."""
    return tuple(range(count))


class Former(Value, frozen=True, kw_only=True):
    """The step that is restored, where another number of ranks has committed it: who holds what of it.

    `cut`: the generation from which on the state was cut for those ranks; the rest is as in Assignment.
    """

    cut: Generation
    shards: Ranks
    tensor_nodes: Annotated[tuple[tuple[Rank, Nodes], ...], OF_RANKS]
    record_nodes: Annotated[tuple[Nodes, ...], OF_RANKS]


class Wish(Value, frozen=True, kw_only=True):
    """Somebody wants an elastic job to be trained on so many nodes (None: as many as there are).

    Said at `at_s`, Unix time: the newest word counts. `give_back`: what is then neither trained on nor a
    spare is given back to Slurm. `gives_way`: nobody said it, the job makes room for another one.
    """

    nodes: NodeCount | None = None
    at_s: Age = 0.0
    give_back: bool = False
    gives_way: bool = False


# What a drill does:
#   kill-rank   a rank's process ends by SIGKILL
#   pause-rank  it is stopped (SIGSTOP), and goes on after `for_s` (SIGCONT)
#   kill-agent  a node's agent ends by SIGKILL, and its ranks with it: the node is lost
#   cut-node    nothing comes into a node or out of it for `for_s`, as if its cable were pulled
DrillKind = Literal["kill-rank", "pause-rank", "kill-agent", "cut-node"]
DRILLS_OF_NODES: tuple[DrillKind, ...] = ("kill-agent", "cut-node")
DRILLS_WITH_LENGTH: tuple[DrillKind, ...] = ("pause-rank", "cut-node")


class Drill(Value, frozen=True, kw_only=True):
    """A fault that `uid` wants to have, of a rank or of a node, once `step` is done.

    `force`: also where the job would end over it.
    """

    kind: DrillKind
    rank: Rank | None = None
    node: NodeNumber | None = None
    step: Step = 0
    for_s: Seconds = 0.0
    force: bool = False
    uid: Uid

    def __post_init__(self) -> None:
        of_node = self.kind in DRILLS_OF_NODES
        if (self.node is not None) is not of_node or (self.rank is not None) is of_node:
            raise ValueError(f"{self.kind} of rank {self.rank}, node {self.node}")

    @property
    def what(self) -> str:
        """Return the drill as a sentence."""
        if self.kind == "kill-agent":
            return f"the agent of node-{self.node} is killed"
        if self.kind == "cut-node":
            return f"node-{self.node} is cut off from the network for {self.for_s:g} s"
        if self.kind == "kill-rank":
            return f"rank {self.rank}'s process is killed"
        return f"rank {self.rank}'s process is paused for {self.for_s:g} s"


class Assignment(Clipped, Value, frozen=True, kw_only=True, dict=True, gc=True):
    """One generation: who has which rank, and where the state comes from.

    `places[rank]` is the rank's slot. `restore_step` is None where every rank builds anew.
    `shards[rank]` is what the rank has tensors of (see Holdings); `tensor_nodes` are (shard, nodes that hold
    its tensors of that step) by shard, `record_nodes[rank]` those that hold the rank's record, nearest first.
    `renew` are slots whose process is replaced although it lives. `tries`, `replaced` and `bad` (slots that
    may hold no rank any more) are the memory of the ladder. `flapping` are the slots of the generation before
    whose process was replaced too often.
    `origin`: what the first generation goes on from, for people.
    `done_step`: the newest step that any rank had done before; those up to it are done again.
    `stock_roots`: an agent does not know this job's NCCL, which makes roots of its own from now on.

    The state is *cut* for a number of ranks: which rank has which part of it. `cut` is the generation that
    was the first with this cut. Where `former` is there, the restored step is of another cut, and each rank
    takes its part of it; `shards`, `tensor_nodes` and `record_nodes` are empty then. `wanted`: the wish
    that is followed.
    """

    job: JobName
    generation: Generation
    term: Number
    leader: NodeOrNone
    places: Annotated[tuple[Place, ...], OF_RANKS]
    nodes: Annotated[tuple[NodeInfo, ...], OF_RANKS]
    restore_step: Step | None
    shards: Ranks = ()
    tensor_nodes: Annotated[tuple[tuple[Rank, Nodes], ...], OF_RANKS] = ()
    record_nodes: Annotated[tuple[Nodes, ...], OF_RANKS] = ()
    renew: Annotated[tuple[Place, ...], OF_RANKS] = ()
    rung: Word = "start"
    faults: Annotated[tuple[Name, ...], OF_RANKS] = ()
    tries: Annotated[tuple[Tries, ...], OF_RANKS] = ()
    bad: Annotated[tuple[Place, ...], OF_RANKS] = ()
    replaced: Annotated[tuple[Replaced, ...], OF_RANKS] = ()
    flapping: Annotated[tuple[Place, ...], OF_RANKS] = ()
    origin: Text = ""
    stock_roots: bool = False
    cut: Generation = 1
    former: Former | None = None
    wanted: Wish = Wish()
    done_step: Step = 0

    @cached_property
    def ranks_by_node(self) -> dict[int, tuple[int, ...]]:
        """Ranks of each node that has any, ascending."""
        found: dict[int, list[int]] = {}
        for rank, place in zip(numbers(len(self.places)), self.places, strict=True):
            found.setdefault(place.node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @cached_property
    def members(self) -> frozenset[int]:
        """The nodes of this generation, spares too."""
        return frozenset(info.node for info in self.nodes)

    def rank_at(self, place: Place) -> int | None:
        """The rank in a slot, or None for a spare."""
        return next((rank for rank in self.ranks_on(place.node) if self.places[rank] == place), None)

    def holders_of(self, shard: int) -> tuple[int, ...]:
        """Nodes that hold a shard's tensors of the step that is restored."""
        at = bisect_left(self.tensor_nodes, shard, key=lambda known: known[0])
        found = self.tensor_nodes[at : at + 1]
        return found[0][1] if found and found[0][0] == shard else ()

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """Ranks of one node, ascending."""
        return self.ranks_by_node.get(node, ())


# Why a job ended, for scripts: these words stay, whatever the sentence beside them says.
#   done            every rank ended by itself     no-spare        a rank has no slot left
#   script          it raised or ended, each time  no-common-step  no step that every rank could give
#   cancelled       somebody wanted it             no-progress     broken or stalled again and again
#   corrupt         twins differ, each time        no-room         a node's memory cannot hold the state
#   never-formed    too few nodes came up          after-training  a rank failed when training was over
#   ""              for this node alone: the job goes on without it
Why = Literal[
    "",
    "done",
    "script",
    "cancelled",
    "never-formed",
    "no-spare",
    "no-common-step",
    "no-progress",
    "corrupt",
    "no-room",
    "after-training",
    "no-quorum",
    "node-lost",
]


class Outcome(Clipped, Value, frozen=True, kw_only=True):
    """The end of a job. `reason` is for people, `why` for scripts.

    `rank` and its `node` are those of the process that failed, where it is one: its log says more.
    """

    state: Literal["done", "failed", "stopped"]
    exit_code: ExitCode
    reason: Text
    why: Why = ""
    rank: Rank | None = None
    node: NodeNumber | None = None
