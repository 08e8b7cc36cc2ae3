"""The actions that the agent's core asks its edge for, in the order in which they are carried out."""

from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.protocol import messages as m


@dataclass(frozen=True)
class StartProcess:
    """Fork a process for a slot: with a rank of `assignment`, or as a spare (None)."""

    slot: int
    birth: int
    assignment: m.Assignment | None


@dataclass(frozen=True)
class KillProcess:
    """End a process with SIGKILL. `hung`: it is to write its stacks to its log before."""

    birth: int
    hung: bool = False


@dataclass(frozen=True)
class PauseProcess:
    """Stop a process with SIGSTOP, and have it go on after so many seconds."""

    birth: int
    for_s: float


@dataclass(frozen=True)
class KillAgent:
    """End this agent with SIGKILL, and its processes with it: a drill."""


@dataclass(frozen=True)
class SendToRank:
    """Send a message to a process that has said Hello."""

    birth: int
    message: m.ToRank


@dataclass(frozen=True)
class AssignRank:
    """Tell a process its rank in the current assignment. `fresh`: it has had none before."""

    birth: int
    rank: int
    fresh: bool


@dataclass(frozen=True)
class PrepareRank:
    """Tell a spare the rank that it is to get in an assignment that may come, so that it builds for it."""

    birth: int
    rank: int
    assignment: m.Assignment


@dataclass(frozen=True)
class GiveAhead:
    """Give the next commits also to where their ranks are about to go, see `Replication.give_ahead`."""

    assignment: m.Assignment


@dataclass(frozen=True)
class PrefetchState:
    """Get the state of a rank whose process is only being started."""

    rank: int


@dataclass(frozen=True)
class FollowAssignment:
    """Make all services follow a new assignment, before its processes hear of it."""

    assignment: m.Assignment


@dataclass(frozen=True)
class StopAccepting:
    """Take no more replicas from other nodes: what is told of the holdings stays true."""


@dataclass(frozen=True)
class ReleaseReplicas:
    """Training is over: nobody has to hold anything any more."""


@dataclass(frozen=True)
class ReportState:
    """Tell the daemon the state of this node at once, or `soon`, together with what else changes by then."""

    soon: bool = False


@dataclass(frozen=True)
class NoteEvent:
    """Write an event of level warning into the ledger and the log."""

    kind: str
    text: str


@dataclass(frozen=True)
class EndJob:
    """The job is over on this node; `here_only`: maybe not on others."""

    outcome: m.Outcome
    here_only: bool


Action: TypeAlias = (
    StartProcess
    | KillProcess
    | PauseProcess
    | KillAgent
    | SendToRank
    | AssignRank
    | PrepareRank
    | GiveAhead
    | PrefetchState
    | FollowAssignment
    | StopAccepting
    | ReleaseReplicas
    | ReportState
    | NoteEvent
    | EndJob
)
