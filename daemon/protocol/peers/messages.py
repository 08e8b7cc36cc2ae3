"""The messages between daemons, and those between agents."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.codec import CONTROL_LIMIT
from ckptless.daemon.protocol.limits import (
    OF_NODES,
    OF_RANKS,
    Age,
    Clipped,
    Digest,
    Generation,
    JobName,
    Key,
    Nbytes,
    NodeNumber,
    NodeOrNone,
    Nodes,
    Number,
    Rank,
    RecordBytes,
    Seconds,
    Spans,
    Step,
    Text,
    TryCount,
)
from ckptless.daemon.protocol.messages import Drill, FromAgent, Introduction, Message, Order
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Ballot, Say
from ckptless.daemon.protocol.peers.membership import Beat, Have, Saw, Suspect, Want
from ckptless.daemon.protocol.records import FaultSource, Record

Stage = Literal["forming", "joining", "restoring", "running", "stopping", "releasing", "ended"]


@dataclass(frozen=True)
class Leave:
    """The word that the job is to leave a node that lives, and whose word that is.

    `at_once`: what it holds is not trusted, and it counts as lost. Else its ranks move with
    their state. `shrink`: also where no spare is left for them, and the job can go on with fewer nodes.
    """

    reason: Text
    source: FaultSource
    at_once: bool = False
    shrink: bool = False


@dataclass(frozen=True)
class Standing:
    """A daemon's word when two meet: who leads, how far the job is, which nodes are lost.

    `term` and `leader` are the ballot by which somebody leads, for all that the sender knows; `index` is the
    number of the newest decree that it knows; `promised` the ballot below which it accepts nothing. `lost`
    has the node, the reason, and whose word that is. `able`: the sender can vote; else its disk takes
    nothing, or has lost what it had promised. `apart`: nodes that it cannot reach, though others see them.
    `dead`: voters that are dead by the witness's word, whoever asked it. `unwell`: why the job is to leave
    the sender's node, by a health check's word. `asked`: nodes that it is to leave by a person's, as far as
    the sender has heard. `stopped`: the sender's agent and all of its ranks are stopped by a signal.
    """

    term: Number
    leader: NodeOrNone
    stage: Stage
    index: Number
    promised: Ballot = NO_BALLOT
    lost: Annotated[tuple[tuple[NodeNumber, Text, FaultSource], ...], OF_NODES] = ()
    able: bool = True
    apart: Nodes = ()
    dead: Nodes = ()
    unwell: Leave | None = None
    asked: Annotated[tuple[tuple[NodeNumber, Leave], ...], OF_NODES] = ()
    stopped: bool = False


@dataclass(frozen=True)
class Report:
    """An agent's message, from the own node or passed on by another daemon."""

    node: NodeNumber
    message: FromAgent | Introduction


class PeerMessage(Message, frozen=True, kw_only=True):
    """Root of what daemons say of one job."""

    job: JobName


class Meeting(PeerMessage, frozen=True, kw_only=True):
    """The sender's standing, and what its agent last said."""

    standing: Standing
    reports: Annotated[tuple[Report, ...], OF_RANKS]


class Forwarded(PeerMessage, frozen=True, kw_only=True):
    """A report of the sender's agent, for the leader."""

    report: Report


class Ordered(PeerMessage, frozen=True, kw_only=True):
    """A leader's order."""

    term: Number
    order: Order


class Agree(PeerMessage, frozen=True, kw_only=True):
    """The messages by which the control planes choose the next decree."""

    say: Say


class Packed(PeerMessage, frozen=True, kw_only=True):
    """Agree(Propose) of `ballot`, or without one Agree(Decided), for whoever knows decree `base`.

    `body` and `digest`: see `consensus/packing.py`.
    """

    base: Number
    digest: Digest
    body: Annotated[bytes, Meta(max_length=CONTROL_LIMIT)]
    ballot: Ballot | None = None


class Rows(PeerMessage, frozen=True, kw_only=True):
    """Rows that belong in every ledger of the job."""

    records: Annotated[tuple[Record, ...], OF_RANKS]


class Gone(Clipped, PeerMessage, frozen=True, kw_only=True):
    """The sender is sure that a node is lost; see `edges.NodeLost`."""

    node: NodeNumber
    reason: Text
    age_s: Age
    source: FaultSource
    dark: bool = False


class LeaveAsked(Clipped, PeerMessage, frozen=True, kw_only=True):
    """Somebody has asked the sender that the job leave a node, which lives; see `Leave`."""

    node: NodeNumber
    leave: Leave


class DrillAsked(PeerMessage, frozen=True, kw_only=True):
    """Somebody has asked the sender for a drill: the leader has it done, within `left_s`."""

    drill: Drill
    left_s: Seconds


class JobKey(PeerMessage, frozen=True, kw_only=True):
    """The key that the job's agents know each other by, masked for this connection (`Link.mask`)."""

    salt: Key
    masked: Key


Said: TypeAlias = Meeting | Forwarded | Ordered | Agree | Packed | Rows | Gone | LeaveAsked | DrillAsked


class Relayed(PeerMessage, frozen=True, kw_only=True):
    """A message of the daemon of node `origin`, passed on: to that of node `to`, or with None to all.

    `serial` grows with every message of an origin, `clock_ms` is its clock; `hops` is how often it may still
    be passed on.
    """

    origin: NodeNumber
    to: NodeNumber | None
    serial: Number
    clock_ms: Number
    hops: TryCount
    said: Said


class Bundle(PeerMessage, frozen=True, kw_only=True):
    """Several `Relayed` that go the same way, see `bundles`."""

    body: Annotated[bytes, Meta(max_length=CONTROL_LIMIT)]


DaemonMessage: TypeAlias = Said | Relayed | Bundle | JobKey | Beat | Suspect | Saw | Have | Want


class PutRecord(Message, frozen=True, kw_only=True):
    """Hold this record of another node's rank."""

    generation: Generation
    rank: Rank
    shard: Rank
    step: Step
    record: RecordBytes
    digest: Digest


Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 50)]
# Of what is said of the key-value store at once: see agent/kvstore/wire.py.
MOST_STORE_NBYTES = 1 << 29
# So many runs of chunks are left out of a transfer at most.
MOST_RUNS = 4096
VersionHeader: TypeAlias = Annotated[bytes, Meta(max_length=CONTROL_LIMIT)]


class OfferTensors(Message, frozen=True, kw_only=True):
    """Hold the version that this header heads (`api.version`); you may have it, or chunks of it."""

    generation: Generation
    header: VersionHeader


class PutTensors(Message, frozen=True, kw_only=True):
    """Hold what you have said is wanted: its payload follows as bulk, but for the chunks that are there."""


class TensorsAnswer(Message, frozen=True, kw_only=True):
    """Answer to both: verified and held; wanted; not of this agent's generation; or they do not verify.

    `have`: (first, count) of chunks that are here, with the digests that the offer's header has for them.
    "later" is no answer yet, and says that one will come: another node is giving them, or they are read.
    """

    answer: Literal["held", "wanted", "stale", "unsound", "later"]
    have: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_RUNS)] = ()


class Held(Message, frozen=True, kw_only=True):
    """Answer to PutRecord: the record is verified and held, or not taken."""

    generation: Generation
    rank: Rank
    step: Step
    held: bool = True


class TwinsMessage(Message, frozen=True, kw_only=True):
    """The digest of a shard's step that `rank` has here; `known`: it has agreed with twins before."""

    generation: Generation
    shard: Rank
    step: Step
    rank: Rank
    digest: Digest
    known: bool


class CompareTwins(TwinsMessage, frozen=True, kw_only=True):
    """And what have you?"""


class TwinsCompared(TwinsMessage, frozen=True, kw_only=True):
    """Answer to CompareTwins: the same of this end, once its rank has committed that step."""


class GetRecord(Message, frozen=True, kw_only=True):
    """Give me a rank's record of a step. The rank is one of `cut`, see Assignment."""

    cut: Generation
    rank: Rank
    step: Step


class RecordReply(Message, frozen=True, kw_only=True):
    """Answer to GetRecord; `record` is empty where it is not held. `shard`: see Holdings."""

    shard: Rank

    record: RecordBytes
    digest: Digest


class GetTensors(Message, frozen=True, kw_only=True):
    """A question: what have you of a shard's tensors of a step? The shard is one of `cut`."""

    cut: Generation
    shard: Rank
    step: Step


class TensorsReply(Message, frozen=True, kw_only=True):
    """Answer to GetTensors: the header of the version that is held; empty where none is."""

    header: VersionHeader = b""


class GetChunks(Message, frozen=True, kw_only=True):
    """Give me these bytes of the payload, whole chunks, of the version with this digest.

    With `verify`, since what came did not, look at yours first.
    """

    shard: Rank
    step: Step
    digest: Digest
    start: Nbytes
    nbytes: Nbytes
    verify: bool = False


class ChunksReply(Message, frozen=True, kw_only=True):
    """Answer to GetChunks: so many bytes follow as bulk; 0 where that version is not held (any more)."""

    nbytes: Nbytes


class GetSpans(Message, frozen=True, kw_only=True):
    """Give me these parts of the payload of a shard's tensors of a step; look at their chunks first.

    The shard is one of `cut`; `layout`: the digest of the layout that they are to be packed by.
    """

    cut: Generation
    shard: Rank
    step: Step
    layout: Digest
    spans: Spans


class SpansReply(Message, frozen=True, kw_only=True):
    """Answer to GetSpans: so many bytes follow as bulk, all the parts one after the other.

    0 where they are not held soundly. `digest`: their xxh3_128, hex.
    """

    nbytes: Nbytes
    digest: Digest = ""


class SaveAsk(Message, frozen=True, kw_only=True):
    """A question: how far are your ranks? With `step`: save that one, too, when they have it."""

    generation: Generation
    step: Step | None = None


class SaveReply(Message, frozen=True, kw_only=True):
    """Answer to SaveAsk; None where none has committed anything, or it is another generation."""

    newest: Step | None
    steps_per_s: Seconds = 0.0


class StoreJoin(Message, frozen=True, kw_only=True):
    """This connection is for the keys of that generation from now on, which the other end keeps."""

    generation: Generation


class StoreSaid(Message, frozen=True, kw_only=True):
    """Words about the keys; see `agent/kvstore/wire.py`."""

    body: Annotated[bytes, Meta(max_length=MOST_STORE_NBYTES)]


class StoreStale(Message, frozen=True, kw_only=True):
    """Refused: your generation is an older one than this."""

    generation: Generation


class StorePing(Message, frozen=True, kw_only=True):
    """Are you there?"""


class StorePong(Message, frozen=True, kw_only=True):
    """Answer to StorePing."""


AgentMessage: TypeAlias = (
    PutRecord
    | Held
    | CompareTwins
    | TwinsCompared
    | OfferTensors
    | PutTensors
    | TensorsAnswer
    | GetRecord
    | RecordReply
    | GetTensors
    | TensorsReply
    | GetChunks
    | ChunksReply
    | GetSpans
    | SpansReply
    | SaveAsk
    | SaveReply
    | StoreJoin
    | StoreSaid
    | StoreStale
    | StorePing
    | StorePong
)
