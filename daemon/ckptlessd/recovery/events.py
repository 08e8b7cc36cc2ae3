"""Inputs and outputs of the control plane: plain values, whoever carries them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from ckptless.daemon.ckptlessd.consensus.agreement import Save as Save
from ckptless.daemon.ckptlessd.consensus.agreement import Tell as Tell
from ckptless.daemon.ckptlessd.planning.faults import NodeLost as NodeLost
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.limits import (
    OF_RANKS,
    NodeNumber,
    Number,
    Seconds,
    Text,
)
from ckptless.daemon.protocol.peers.agreement import Say
from ckptless.daemon.protocol.peers.messages import Leave as Leave
from ckptless.daemon.protocol.peers.messages import Report as Report
from ckptless.daemon.protocol.peers.messages import Stage as Stage
from ckptless.daemon.protocol.peers.messages import Standing as Standing
from ckptless.daemon.protocol.records import Record

DarkState = Literal["dark", "gone", "back"]


# -------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Connected:
    """A connection to a daemon is there; nothing has come over it yet."""

    node: NodeNumber


@dataclass(frozen=True)
class PeerUp:
    """A daemon has told where it stands; `direct`: over a connection, whose end will be heard of."""

    node: NodeNumber
    standing: Standing
    direct: bool = True


@dataclass(frozen=True)
class PeerDown:
    """A daemon cannot be reached; its node may live."""

    node: NodeNumber


@dataclass(frozen=True)
class AgentAnswers:
    """Whether the agent of a node whose daemon is away has answered just now."""

    node: NodeNumber
    answers: bool


@dataclass(frozen=True)
class Heartbeats:
    """The voters that have given a new sign of life lately, however it came here."""

    nodes: frozenset[int]


@dataclass(frozen=True)
class Apart:
    """The nodes that this daemon cannot reach itself, though others see them: all of them, each time."""

    nodes: frozenset[int]


@dataclass(frozen=True)
class Unwell:
    """The job is to leave this node, by a health check's word; None: it may stay. See `leaving.Leaving`."""

    leave: Leave | None


@dataclass(frozen=True)
class Drained:
    """The same of all nodes that Slurm's administrators want for themselves: all of them, each time."""

    nodes: Mapping[int, Leave]


@dataclass(frozen=True)
class LeaveAsked:
    """The job is to leave a node, which lives, because a person wants that."""

    node: NodeNumber
    leave: Leave


@dataclass(frozen=True)
class DrillAsked:
    """A drill is asked for at the daemon of `node`; it is done within `left_s`, or not at all."""

    node: NodeNumber
    drill: m.Drill
    left_s: Seconds


@dataclass(frozen=True)
class OrderFrom:
    """A leader's order."""

    node: NodeNumber
    term: Number
    order: m.Order


@dataclass(frozen=True)
class Said:
    """A message of the agreement from a daemon; the own one's, too."""

    node: NodeNumber
    say: Say


@dataclass(frozen=True)
class Witnessed:
    """The cluster's manager holds these nodes for dead, and will not hold this one and its like for that."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """The disk takes votes again: the newest `Save`, which holds all of those before it, is there."""


@dataclass(frozen=True)
class NotSaved:
    """The disk has not taken what `Save` asked for, and nothing was said."""

    reason: str


@dataclass(frozen=True)
class Suspended:
    """The whole job was suspended for so long, by the word of the cluster's manager: no time for the job.

    But for the lease: by then others may have given this node's ranks to another.
    """

    seconds: float


@dataclass(frozen=True)
class Stopped:
    """This node's agent and all of its ranks are stopped by a signal; or one of them goes on."""

    stopped: bool


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Input: TypeAlias = (
    Report
    | Connected
    | PeerUp
    | PeerDown
    | NodeLost
    | AgentAnswers
    | Heartbeats
    | Apart
    | Unwell
    | Drained
    | LeaveAsked
    | DrillAsked
    | OrderFrom
    | Said
    | Witnessed
    | Saved
    | NotSaved
    | Suspended
    | Stopped
    | Tick
)

# ------------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True)
class Broadcast:
    """Send the order to every daemon of the job."""

    term: Number
    order: m.Order


@dataclass(frozen=True)
class ToAgent:
    """Give the order, or the words, to this node's agent."""

    order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed


@dataclass(frozen=True)
class Forward:
    """Pass an agent's message on to the leader's daemon."""

    node: NodeNumber
    report: Report


@dataclass(frozen=True)
class Meet:
    """Tell one daemon (or, with None, all) where this one stands, and what its agent last said."""

    node: NodeNumber | None
    standing: Standing
    reports: Annotated[tuple[Report, ...], OF_RANKS]


@dataclass(frozen=True)
class Write:
    """Rows for the ledger; `share`: other daemons' ledgers want them too."""

    records: Annotated[tuple[Record, ...], OF_RANKS]
    share: bool


@dataclass(frozen=True)
class CutNetwork:
    """Cut this node off from the network for so long: a drill."""

    for_s: float


@dataclass(frozen=True)
class NodeIsDark:
    """The cluster's manager should know that a node does not answer (said by the leader only).

    `state`: "dark" at first, when a cable may be all that is wrong; "gone" where it has stayed so, or the job
    has ended over it; "back" where it was heard again.
    """

    node: NodeNumber
    reason: Text
    state: DarkState


@dataclass(frozen=True)
class AskWitness:
    """Half of the voters is silent: are these nodes dead by the word of the cluster's manager?

    It is to hold them for dead from now on, and to say yes only if it does not hold one of `ours` for dead.
    """

    nodes: tuple[int, ...]
    ours: tuple[int, ...]


Output: TypeAlias = (
    Broadcast | ToAgent | Forward | Meet | Write | CutNetwork | NodeIsDark | Tell | Save | AskWitness
)
