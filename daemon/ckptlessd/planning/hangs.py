"""Pure: of ranks that all stand still, the ones that the others wait for.

A rank waits where a collective or a message that it has begun is not done. On a device nobody knows that:
there a rank waits whose device was given a collective that another one's was not yet. Whoever waits for
nobody, while others wait, holds them up. Where all wait, their calls do not fit each other: the ones that
fewest have made are the odd ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.page import FOR_AGENT

MOST_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """`suspects`: ranks, each with what it does, in a sentence; `why`: the same of a job without a suspect.

    `sure`: none of them is a process that runs, or waits for a disk, as it may.
    """

    suspects: tuple[tuple[int, str], ...] = ()
    why: str = ""
    sure: bool = False


def judge(still: Mapping[int, m.Still]) -> Verdict:
    """Return who holds up ranks of which none gets on."""
    least = _least(still.values())
    # Who is stopped, or holds the interpreter, cannot note what is done by now.
    free = [
        rank
        for rank, one in still.items()
        if one.how in ("stopped", "deaf") or (one.call is None and not _is_ahead(one, least))
    ]
    if not free:
        return _mismatch(still)
    waiting = [rank for rank in still if rank not in {*free}]
    if not waiting:
        return Verdict(why="no rank waits for another one")
    who = "1 other rank waits" if len(waiting) == 1 else f"{len(waiting)} other ranks wait"
    suspects = tuple(
        (rank, f"{who} in a collective that it has not come to: {what(still[rank])}") for rank in free
    )
    return Verdict(suspects, sure=all(_is_sure(still[rank]) for rank in free))


def left_alone(still: Mapping[int, m.Still], done: int) -> str | None:
    """Return why ranks wait for ever where so many have returned from the script; None where they may not.

    Each waits in a collective of a group with more ranks than are left: one of it has returned, and makes
    no other call. Of a device nobody knows what a rank waits in.
    """
    calls = {rank: one.call for rank, one in still.items() if one.call is not None}
    if not calls or len(calls) < len(still) or any(call.size <= len(still) for call in calls.values()):
        return None
    by_call = sorted((_key(call), rank) for rank, call in calls.items())
    alike = [[rank for _, rank in ranks] for _, ranks in groupby(by_call, key=lambda one: one[0])]
    who = "a rank has" if done == 1 else f"{done} ranks have"
    return f"{who} returned from the training function, and never come: {_all(alike, calls)}"


def _is_sure(one: m.Still) -> bool:
    """Whether it does not run, or runs for longer than its script has said it would."""
    return one.how != "working" or one.over


def what(still: m.Still) -> str:
    """Return in words what a rank is at that waits for nobody."""
    place = f" in {still.at}" if still.at else ""
    over = ", longer than the script has said" if still.over else ""
    phase = f" (phase {still.phase}{over})" if still.phase not in ("", "compute") else ""
    doing = {
        "asleep": "it sleeps",
        "stopped": "its process is stopped by a signal",
        "deaf": "it holds the interpreter and answers nothing",
        "working": "it runs, or waits for a disk",
        "spinning": "it runs, and does not leave one place",
    }[still.how]
    return f"{doing}{place}{phase}"


def _least(still: Iterable[m.Still]) -> dict[str, int]:
    """Return, of each group, the fewest collectives that the device of one of its ranks was given."""
    least: dict[str, int] = {}
    for one in still:
        for group, queued in one.queued:
            least[group] = min(queued, least.get(group, queued))
    return least


def _is_ahead(one: m.Still, least: Mapping[str, int]) -> bool:
    return any(queued > least[group] for group, queued in one.queued)


def _mismatch(still: Mapping[int, m.Still]) -> Verdict:
    """All ranks wait, those on a CPU in a call."""
    calls = {rank: one.call for rank, one in still.items() if one.call is not None}
    by_call = sorted((_key(call), rank) for rank, call in calls.items())
    alike = [[rank for _, rank in ranks] for _, ranks in groupby(by_call, key=lambda one: one[0])]
    # Where all ranks of a group have come, it is the network, or the backend, that does not get on.
    apart = sorted((ranks for ranks in alike if len(ranks) < calls[ranks[0]].size), key=len)
    if any(not call.group for call in calls.values()):
        # Of a message, or the agent, nobody knows from here how many it takes.
        return Verdict(why=f"all ranks wait: {_all(alike, calls)}{_of_commits(still)}")
    if len(alike) < 2 or not apart:
        return Verdict(why=f"all ranks wait in collectives: {_all(alike, calls)}")
    text = f"all ranks wait in collectives that do not fit: {_all(alike, calls)}"
    if len(apart) > 1 and len(apart[0]) == len(apart[1]):
        return Verdict(why=text, sure=True)
    return Verdict(tuple((rank, text) for rank in apart[0]), sure=True)


def _of_commits(still: Mapping[int, m.Still]) -> str:
    """Return what may be the cause where some ranks wait in a commit: for copies that others do not make."""
    commits = sorted(rank for rank, one in still.items() if one.phase == "commit")
    if not commits or len(commits) == len(still):
        return ""
    return f"; {ranks_in_words(commits)} in run.commit, which every rank has to call at each step"


def _key(call: m.Call) -> tuple[str, int, str, int]:
    return call.group, call.number, call.operation, -1 if call.peer is None else call.peer


def _all(alike: Sequence[Sequence[int]], calls: Mapping[int, m.Call]) -> str:
    told = [f"{ranks_in_words(ranks)} in {_call(calls[ranks[0]])}" for ranks in alike[:MOST_NAMED]]
    more = f", and {len(alike) - MOST_NAMED} other calls" if len(alike) > MOST_NAMED else ""
    return ", ".join(told) + more


def _call(call: m.Call) -> str:
    if call.operation == FOR_AGENT:
        return "a question to its agent"
    if not call.group:
        return call.operation if call.peer is None else f"{call.operation} with rank {call.peer}"
    return f"{call.operation} of {call.elements} elements, number {call.number} of group {call.group}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the ranks' names, of many the first ones."""
    more = len(ranks) - MOST_NAMED
    names = ", ".join(map(str, ranks[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
