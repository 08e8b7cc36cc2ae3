"""The values that a job's daemons agree on, and what they say to each other to choose one."""

from typing import TypeAlias

from ckptless.daemon.protocol.limits import (
    NodeOrNone,
    Number,
    Voters,
)
from ckptless.daemon.protocol.messages import Message, Outcome
from ckptless.daemon.protocol.model import Assignment, Value


class Ballot(Value, frozen=True, order=True):
    """A try to lead: higher numbers win, and of one number no two nodes have the same ballot."""

    number: Number
    node: NodeOrNone


NO_BALLOT = Ballot(number=0, node=-1)


class Decree(Value, frozen=True, kw_only=True):
    """All that a job's daemons have agreed on, and nothing that is only told.

    `index` counts decrees from 0, the one that everybody starts with. `voters` choose the decree after this.
    """

    index: Number
    voters: Voters
    assignment: Assignment | None = None
    outcome: Outcome | None = None


class Vote(Value, frozen=True, kw_only=True):
    """A voter's acceptance of a decree, and its ballot."""

    ballot: Ballot
    decree: Decree


class Durable(Value, frozen=True, kw_only=True):
    """The facts that a daemon must know again after its death: on the disk before an answer tells of them.

    `vote` is for the decree after `known`, the newest that this daemon knows to be chosen.
    """

    promised: Ballot
    vote: Vote | None
    known: Decree


class Canvass(Message, frozen=True, kw_only=True):
    """Would you promise this ballot? Nobody is bound by the answer, and nothing is written for it."""

    ballot: Ballot
    index: Number


class Support(Message, frozen=True, kw_only=True):
    """Yes to Canvass."""

    ballot: Ballot
    index: Number


class Prepare(Message, frozen=True, kw_only=True):
    """Will you take no ballot below this one? And have you voted for a successor of decree `index`?"""

    ballot: Ballot
    index: Number


class Promise(Message, frozen=True, kw_only=True):
    """Yes to Prepare."""

    ballot: Ballot
    index: Number
    vote: Vote | None


class Propose(Message, frozen=True, kw_only=True):
    """Accept this decree."""

    ballot: Ballot
    decree: Decree


class Accepted(Message, frozen=True, kw_only=True):
    """Yes to Propose."""

    ballot: Ballot
    index: Number


class Refusal(Message, frozen=True, kw_only=True):
    """No to Canvass, Prepare or Propose of `ballot`.

    `promised` is higher, or `index` is all the sender knows of, or its disk takes nothing. `content`: it
    hears its leader well, and wants no other one.
    """

    ballot: Ballot
    promised: Ballot
    index: Number
    content: bool


class Decided(Message, frozen=True, kw_only=True):
    """The decree is chosen. From whomever it comes, it is true."""

    decree: Decree


Say: TypeAlias = Canvass | Support | Prepare | Promise | Propose | Accepted | Refusal | Decided
