"""What goes into the control plane and what comes out: plain values, whoever carries them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import Record

Stage = Literal["forming", "joining", "restoring", "running", "stopping", "releasing", "ended"]


# -------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Standing:
    """What a daemon tells another when they meet: who leads, how far the job is, which nodes are lost."""

    term: int
    leader: int
    stage: Stage
    assignment: m.Assignment | None
    outcome: m.Outcome | None = None
    lost: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """An agent's message, from the own node or passed on by another daemon."""

    node: int
    message: m.FromAgent


@dataclass(frozen=True)
class Connected:
    """A connection to a daemon is there; nothing has come over it yet."""

    node: int


@dataclass(frozen=True)
class PeerUp:
    """A daemon has told where it stands."""

    node: int
    standing: Standing


@dataclass(frozen=True)
class PeerDown:
    """A daemon cannot be reached; its node may live."""

    node: int


@dataclass(frozen=True)
class NodeLost:
    """A node is gone: its agent is (whatever its daemon is). `dark`: nothing on it answers at all."""

    node: int
    reason: str
    age_s: float
    dark: bool = False


@dataclass(frozen=True)
class AgentAnswers:
    """Whether the agent of a node whose daemon is away has answered just now."""

    node: int
    answers: bool


@dataclass(frozen=True)
class OrderFrom:
    """A leader's order."""

    node: int
    term: int
    order: m.Order


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Input: TypeAlias = Report | Connected | PeerUp | PeerDown | NodeLost | AgentAnswers | OrderFrom | Tick

# ------------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True)
class Broadcast:
    """Send the order to every daemon of the job."""

    term: int
    order: m.Order


@dataclass(frozen=True)
class ToAgent:
    """Give the order to this node's agent."""

    order: m.Order


@dataclass(frozen=True)
class Forward:
    """Pass an agent's message on to the leader's daemon."""

    node: int
    report: Report


@dataclass(frozen=True)
class Meet:
    """Tell one daemon (or, with None, all) where this one stands, and what its agent last said."""

    node: int | None
    standing: Standing
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Write:
    """Rows for the ledger; `share`: other daemons' ledgers want them too."""

    records: tuple[Record, ...]
    share: bool


@dataclass(frozen=True)
class NodeIsDark:
    """The cluster's manager should know that a node does not answer (said by the leader only)."""

    node: int
    reason: str


Output: TypeAlias = Broadcast | ToAgent | Forward | Meet | Write | NodeIsDark
