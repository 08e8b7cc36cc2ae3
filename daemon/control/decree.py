"""Values of the agreement: ballots, decrees, and what daemons say to each other to choose one."""

from typing import TypeAlias

from ckptless.daemon.api.messages import Message, Outcome
from ckptless.daemon.api.model import Assignment, Value

MAX_VOTERS = 7


class Ballot(Value, frozen=True, order=True):
    """A try to lead: higher numbers win, and of one number no two nodes have the same ballot."""

    number: int
    node: int


NO_BALLOT = Ballot(number=0, node=-1)


class Decree(Value, frozen=True, kw_only=True):
    """All that a job's daemons have agreed on, and nothing that is only told.

    `index` counts decrees from 0, the one that everybody starts with. `voters` choose the decree after this.
    """

    index: int
    voters: tuple[int, ...]
    assignment: Assignment | None = None
    outcome: Outcome | None = None


class Vote(Value, frozen=True, kw_only=True):
    """That a voter has accepted a decree, and in which ballot."""

    ballot: Ballot
    decree: Decree


class Durable(Value, frozen=True, kw_only=True):
    """What a daemon must know again after its death: it is on the disk before an answer tells of it.

    `vote` is for the decree after `known`, the newest that this daemon knows to be chosen.
    """

    promised: Ballot
    vote: Vote | None
    known: Decree


class Prepare(Message, frozen=True, kw_only=True):
    """Will you take no ballot below this one? And have you voted for a successor of decree `index`?"""

    ballot: Ballot
    index: int


class Promise(Message, frozen=True, kw_only=True):
    """Yes to Prepare."""

    ballot: Ballot
    index: int
    vote: Vote | None


class Propose(Message, frozen=True, kw_only=True):
    """Accept this decree."""

    ballot: Ballot
    decree: Decree


class Accepted(Message, frozen=True, kw_only=True):
    """Yes to Propose."""

    ballot: Ballot
    index: int


class Refusal(Message, frozen=True, kw_only=True):
    """No to Prepare or Propose of `ballot`: `promised` is higher, or `index` is all the sender knows of.

    `content`: it hears its leader well, and wants no other one.
    """

    ballot: Ballot
    promised: Ballot
    index: int
    content: bool = False


class Decided(Message, frozen=True, kw_only=True):
    """The decree is chosen. From whomever it comes, it is true."""

    decree: Decree


Say: TypeAlias = Prepare | Promise | Propose | Accepted | Refusal | Decided


def first_decree(nodes: tuple[int, ...]) -> Decree:
    """What a job begins with: nothing is assigned. Voters are far apart: neighbours share a rack."""
    count = min(MAX_VOTERS, len(nodes))
    spread = (number * len(nodes) // count for number in range(count))
    return Decree(index=0, voters=tuple(sorted(nodes)[number] for number in spread))


def choose_voters(current: tuple[int, ...], living: set[int], sound: set[int]) -> tuple[int, ...]:
    """The voters of the next decree: of those who vote now whoever lives, and others who can be reached.

    But the same as now, where most of those could not be reached: the daemon of a lost node may still vote.
    """
    stay = [node for node in current if node in living]
    others = sorted(sound.difference(stay))
    voters = tuple(sorted([*stay, *others][:MAX_VOTERS]))
    return voters if 2 * len(sound.intersection(voters)) > len(voters) else current


def is_quorum(voters: tuple[int, ...], have: set[int], dead: set[int]) -> bool:
    """Whether `have` may speak for `voters`: more than half, or half and the rest is `dead` for good.

    Any two of these have a voter in common, as long as nobody holds both halves for dead.
    """
    yes = have.intersection(voters)
    rest = set(voters) - yes
    return 2 * len(yes) > len(voters) or (2 * len(yes) == len(voters) and rest <= dead)
