"""Whom ranks that all stand still wait for."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.hangs import MOST_NAMED, judge, left_alone
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.page import FOR_AGENT


def still(call: m.Call | None = None, how: m.Stillness = "asleep", **queued: int) -> m.Still:
    return m.Still(
        still_s=5.0,
        late=True,
        how=how,
        phase="compute",
        call=call,
        queued=tuple(queued.items()),
        at="f (a.py, line 3)",
    )


def call(number: int = 8, operation: str = "allreduce", group: str = "0", size: int = 3) -> m.Call:
    return m.Call(group=group, size=size, number=number, operation=operation, elements=72)


def message(peer: int | None) -> m.Call:
    return m.Call(group="", operation="recv", peer=peer)


AGENT = m.Call(group="", operation=FOR_AGENT)


def named(*ranks: m.Still) -> list[int]:
    return [rank for rank, _ in judge(dict(enumerate(ranks))).suspects]


def test_who_waits_for_nobody_holds_up_those_that_wait() -> None:
    verdict = judge({0: still(call()), 1: still(), 2: still(call())})
    text = "2 other ranks wait in a collective that it has not come to: it sleeps in f (a.py, line 3)"
    assert verdict.suspects == ((1, text),)
    assert verdict.sure


def test_a_commit_that_only_some_ranks_call_is_named() -> None:
    """As of a script that commits on rank 0 alone: it waits for copies of the step before."""
    alone = structs.replace(still(AGENT), phase="commit")
    why = judge({0: alone, 1: still(call())}).why
    assert why.endswith("; rank 0 in run.commit, which every rank has to call at each step")
    for others in ({0: alone, 1: alone}, {0: still(AGENT), 1: still(call())}):
        assert "run.commit" not in judge(others).why


@pytest.mark.parametrize(
    ("how", "sure", "says"),
    [
        ("asleep", True, "it sleeps"),
        ("stopped", True, "its process is stopped by a signal"),
        ("deaf", True, "it holds the interpreter and answers nothing"),
        ("spinning", True, "it runs, and does not leave one place"),
        ("working", False, "it runs, or waits for a disk"),
    ],
)
def test_only_of_one_that_does_not_run_it_is_sure(how: m.Stillness, sure: bool, says: str) -> None:
    verdict = judge({0: still(call()), 1: still(how=how)})
    assert [rank for rank, _ in verdict.suspects] == [1]
    assert (verdict.sure, says in verdict.suspects[0][1]) == (sure, True)


@pytest.mark.parametrize("sure", [False, True])
def test_one_that_runs_for_longer_than_its_script_has_said_hangs(sure: bool) -> None:
    one = structs.replace(still(how="working"), over=sure, phase="evaluation")
    verdict = judge({0: still(call()), 1: one})
    assert verdict.sure == sure
    assert ("(phase evaluation, longer than the script has said)" in verdict.suspects[0][1]) == sure


def test_one_that_cannot_note_what_is_done_is_not_taken_to_wait() -> None:
    assert named(still(call()), still(call(), how="deaf"), still(call())) == [1]
    assert named(still(call()), still(call(), how="stopped"), still(call())) == [1]


def test_all_that_wait_for_nobody_are_named() -> None:
    assert named(still(call()), still(), still()) == [1, 2]
    verdict = judge({0: still(call()), 1: still(), 2: still(how="working")})
    assert not verdict.sure, "it may be the one that runs"


def test_where_nobody_waits_nobody_is_in_the_way() -> None:
    verdict = judge({0: still(), 1: still()})
    assert (verdict.suspects, verdict.sure, verdict.why) == ((), False, "no rank waits for another one")


def test_where_all_have_come_it_is_nobody() -> None:
    verdict = judge({rank: still(call()) for rank in range(3)})
    assert (verdict.suspects, verdict.sure) == ((), False)
    assert "ranks 0, 1, 2 in allreduce of 72 elements, number 8 of group 0" in verdict.why


def test_one_call_of_all_is_nobody_s_whatever_its_size() -> None:
    """Of a group some of whose ranks have ended, say."""
    verdict = judge({rank: still(call(size=5)) for rank in range(3)})
    assert (verdict.suspects, verdict.sure) == ((), False)


@pytest.mark.parametrize("odd", [call(operation="barrier"), call(7), call(group="1")])
def test_of_calls_that_do_not_fit_the_rarest_is_the_odd_one(odd: m.Call) -> None:
    verdict = judge({0: still(call()), 1: still(odd), 2: still(call())})
    assert [rank for rank, _ in verdict.suspects] == [1]
    assert verdict.sure
    text = verdict.suspects[0][1]
    assert "ranks 0, 2 in allreduce" in text
    assert f"rank 1 in {odd.operation} of 72 elements, number {odd.number} of group {odd.group}" in text


def test_of_two_that_do_not_fit_nobody_knows_which_is_wrong_and_both_are_told() -> None:
    verdict = judge({0: still(call(size=2)), 1: still(call(operation="broadcast", size=2))})
    assert (verdict.suspects, verdict.sure) == ((), True)
    assert "rank 0 in allreduce" in verdict.why
    assert "rank 1 in broadcast" in verdict.why


def test_a_group_that_has_come_as_a_whole_is_not_the_odd_one() -> None:
    """Ranks 6 and 7 are together in a collective of theirs; of the others three are here, and three there."""
    one, other, whole = call(1, group="a", size=6), call(1, group="b", size=6), call(group="c", size=2)
    verdict = judge(dict(enumerate(map(still, (one, one, one, other, other, other, whole, whole)))))
    assert (verdict.suspects, verdict.sure) == ((), True)


def test_messages_are_followed_to_who_does_not_send() -> None:
    assert named(still(message(1)), still(message(2)), still()) == [2]
    verdict = judge({0: still(message(1)), 1: still(message(0))})
    assert (verdict.suspects, verdict.sure) == ((), False)
    assert "rank 1 in recv with rank 0, rank 0 in recv with rank 1" in verdict.why
    assert "rank 0 in recv," in judge({0: still(message(None)), 1: still(message(0))}).why


def test_a_question_to_the_agent_is_no_collective() -> None:
    verdict = judge({0: still(call()), 1: still(AGENT), 2: still(call())})
    assert (verdict.suspects, verdict.sure) == ((), False)
    assert "rank 1 in a question to its agent" in verdict.why


# ------------------------------------------------------------------------------------------- on devices


def test_on_a_device_the_numbers_tell_who_has_not_come() -> None:
    assert named(still(a=9), still(a=8), still(a=9)) == [1]
    assert named(still(a=9), still(a=9), still(a=9)) == []
    # A pipeline of two stages: 3 is behind 2, which waits for 1 in another group.
    assert named(still(dp0=5), still(dp0=4, tp=7), still(tp=8, dp1=4), still(dp1=5)) == [1]


def test_one_that_others_have_returned_from_waits_for_ever() -> None:
    alone = {1: still(call(9))}
    assert left_alone(alone, 2) == (
        "2 ranks have returned from the training function, and never come: rank 1 in allreduce of 72 "
        "elements, number 9 of group 0"
    )
    text = left_alone({0: still(call(9)), 1: still(call(4, group="3"))}, 1)
    assert text is not None
    assert text.startswith("a rank has returned from the training function, and never come: rank 0 in")


@pytest.mark.parametrize(
    "left",
    [
        [],
        # It may do something of its own: save, say.
        [still()],
        [still(call(9)), still()],
        # A group of those that are left; a message; a question to its agent; on a device nobody knows.
        [still(call(9, size=2)), still(call(9, size=2))],
        [still(call(9)), still(call(9, group="3", size=2))],
        [still(message(0))],
        [still(AGENT)],
        [still(group=7)],
    ],
)
def test_who_may_wait_for_another_one_or_for_itself_is_not_left_alone(left: list[m.Still]) -> None:
    assert left_alone(dict(enumerate(left)), 1) is None


def test_many_are_told_by_the_first_ones() -> None:
    calls = {rank: still(call(rank, size=99)) for rank in range(9)}
    text = judge(calls).why
    assert text.endswith(f"and {9 - MOST_NAMED} other calls")
    assert text.count("allreduce") == MOST_NAMED


def test_one_rank_that_hangs_is_found_in_any_layout() -> None:
    """Ranks in a grid of groups by rows and columns, each in its next collective with the others of a group.

    One hangs in user code; whoever has it in a group waits there, and so on: it alone waits for nobody.
    """
    for seed in range(500):
        draw = random.Random(seed)
        rows, columns = draw.randint(1, 4), draw.randint(2, 5)
        ranks = range(rows * columns)
        odd = draw.choice(ranks)
        on_device = draw.random() < 0.5
        found: dict[int, m.Still] = {}
        for rank in ranks:
            row, column = divmod(rank, columns)
            # First a collective of the row, then one of the column.
            in_row = row == odd // columns
            in_column = column == odd % columns
            if rank == odd:
                found[rank] = still(None, r=4, c=4) if on_device else still()
            elif in_row:
                one = call(5, group=f"r{row}", size=columns)
                found[rank] = still(None, r=5, c=4) if on_device else still(one)
            elif in_column or rows > 1:
                one = call(5, group=f"c{column}", size=rows)
                found[rank] = still(None, r0=5, c=5) if on_device else still(one)
        verdict = judge(found)
        assert [rank for rank, _ in verdict.suspects] == [odd], seed
