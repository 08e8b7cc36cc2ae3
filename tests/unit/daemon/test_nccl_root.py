"""The roots of an agent: every rank hears of the next one, in any order, and nobody of an old generation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.nccl import root as nccl_root
from ckptless.daemon.agent.nccl.blocks import (
    block,
)
from ckptless.daemon.agent.nccl.root import DEADLINE_S, Answer, Roots
from ckptless.daemon.agent.nccl.wire import Address, CheckIn
from ckptless.daemon.protocol.errors import ProtocolError

from .nccl_rank import root_of

MAGIC = 77


def said(rank: int, ranks: int, root: int = 0, roots: int = 1, *, of: int | None = None) -> CheckIn:
    """What rank `of` says; to the root before its own it gives itself the number after that one's last."""
    of = rank if of is None else of
    return CheckIn(rank, ranks, root, roots, 0, Address("10.0.0.1", 1000 + of), b"ring of %d" % of)


def all_say(ranks: int, roots: int) -> list[CheckIn]:
    """Every check-in of a communicator, as NCCL's ranks make them."""
    sent = []
    for rank in range(ranks):
        mine = root_of(rank, ranks, roots)
        sent.append(said(rank, ranks, mine, roots))
        before = (rank - 1) % ranks
        if roots > 1 and block(mine, ranks, roots)[0] == rank:
            sent.append(said(before + 1, ranks, root_of(before, ranks, roots), roots, of=rank))
    return sent


def expected(ranks: int, magic: int = MAGIC) -> list[Answer]:
    return [
        Answer(magic, rank, Address("10.0.0.1", 1000 + rank), b"ring of %d" % ((rank + 1) % ranks))
        for rank in range(ranks)
    ]


SIZES = st.integers(1, 40).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, ranks)))


def test_blocks_are_those_that_one_gets_by_dealing_out() -> None:
    for ranks in range(1, 41):
        for roots in range(1, ranks + 1):
            sizes = [len(range(root, ranks, roots)) for root in range(roots)]
            owners = [root for root, size in enumerate(sizes) for _ in range(size)]
            assert [root_of(rank, ranks, roots) for rank in range(ranks)] == owners
            for root in range(roots):
                assert list(block(root, ranks, roots)) == [r for r, o in enumerate(owners) if o == root]


@given(SIZES, st.randoms(use_true_random=False))
def test_in_any_order_each_rank_is_told_once_who_is_next(size: tuple[int, int], order: random.Random) -> None:
    ranks, roots = size
    sent = all_say(ranks, roots)
    order.shuffle(sent)
    # All of its roots in one agent: the others' would be further away, and no different.
    at = Roots()
    answers = [answer for message in sent for answer in at.check_in(MAGIC, 1, message, 0.0)]
    assert sorted(answers, key=lambda a: a.rank) == expected(ranks)
    assert (at._kept, at.due()) == (0, None)


@given(st.lists(SIZES, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_communicators_do_not_disturb_each_other(sizes: list[tuple[int, int]], order: random.Random) -> None:
    sent = [(magic, message) for magic, size in enumerate(sizes) for message in all_say(*size)]
    order.shuffle(sent)
    at = Roots()
    answers = [a for magic, message in sent for a in at.check_in(magic, 1, message, 0.0)]
    for magic, (ranks, _) in enumerate(sizes):
        of = sorted((a for a in answers if a.magic == magic), key=lambda a: a.rank)
        assert of == expected(ranks, magic)


def test_a_rank_is_answered_as_soon_as_the_next_one_is_there() -> None:
    at = Roots()
    assert at.check_in(MAGIC, 1, said(2, 4, 1, 2), 0.0) == []
    assert [a.rank for a in at.check_in(MAGIC, 1, said(3, 4, 1, 2), 0.0)] == [2]
    # Rank 0 is the first of root 0, and reports to root 1 as the one after its last.
    assert [a.rank for a in at.check_in(MAGIC, 1, said(4, 4, 1, 2, of=0), 0.0)] == [3]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (said(0, 4, 0, 2), "checked in before"),
        (said(1, 5, 0, 2), "others 4 with 2"),
        (said(1, 4, 0, 4), "others 4 with 2"),
        (said(3, 4, 0, 2), "none of root 0"),
        (said(-1, 4, 0, 2), "none of root 0"),
        (said(0, 4, 2, 2), "root 2 of 2"),
        (said(0, 4, -1, 2), "root -1 of 2"),
        (said(0, 2, 0, 3), "2 ranks with 3 roots"),
        (said(0, 0, 0, 1), "0 ranks"),
        (said(0, -4, 0, 1), "-4 ranks"),
        (said(0, nccl_root.MAX_RANKS + 1, 0, 1), "ranks with 1 roots"),
        (CheckIn(0, 4, 0, 2, 1, Address("10.0.0.1", 1), b""), "made larger"),
    ],
)
def test_a_check_in_that_makes_no_sense_changes_nothing(message: CheckIn, why: str) -> None:
    at = Roots()
    at.check_in(MAGIC, 1, said(0, 4, 0, 2), 0.0)
    with pytest.raises(ProtocolError, match=why):
        at.check_in(MAGIC, 1, message, 0.0)
    assert at._kept == 1
    rest = [at.check_in(MAGIC, 1, message, 0.0) for message in (said(1, 4, 0, 2), said(2, 4, 0, 2, of=2))]
    assert [answer.rank for answers in rest for answer in answers] == [0, 1]


def test_one_that_comes_again_when_all_are_answered_is_refused() -> None:
    at = Roots()
    for message in all_say(3, 1):
        at.check_in(MAGIC, 1, message, 0.0)
    with pytest.raises(ProtocolError, match="comes again"):
        at.check_in(MAGIC, 1, said(0, 3), 0.0)


def test_nobody_of_an_old_generation_is_answered() -> None:
    at = Roots()
    at.follow(1)
    at.check_in(MAGIC, 1, said(0, 2), 0.0)
    # Its node has heard of the next generation before this agent did.
    at.check_in(MAGIC + 1, 2, said(1, 2), 0.0)
    assert [(d.generation, d.missing) for d in at.follow(2)] == [(1, (1,))]
    with pytest.raises(ProtocolError, match="generation 1 is over"):
        at.check_in(MAGIC, 1, said(1, 2), 0.0)
    assert len(at.check_in(MAGIC + 1, 2, said(0, 2), 0.0)) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_answers_are_only_ever_of_the_present_generation(steps: list[tuple[bool, int, int]]) -> None:
    at, generation, magics = Roots(), 1, {}
    for bump, age, rank in steps:
        if bump:
            generation += 1
            at.follow(generation)
        of = max(1, generation - age)
        magics[of * 1000] = of
        try:
            answers = at.check_in(of * 1000, of, said(rank, 4), 0.0)
        except ProtocolError:
            continue
        assert all(magics[answer.magic] == generation for answer in answers)


def test_what_waits_too_long_is_given_up_and_says_for_whom_it_waited() -> None:
    at = Roots()
    at.check_in(MAGIC, 1, said(3, 5, 1, 2), 10.0)
    assert at.due() == 10.0 + DEADLINE_S
    assert at.expire(9.0 + DEADLINE_S) == []
    (dropped,) = at.expire(10.0 + DEADLINE_S)
    assert (dropped.root, dropped.missing) == (1, (4, 0))
    assert (at._kept, at.due()) == (0, None)


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_root, "MAX_KEPT", 3)
    at = Roots()
    for magic in range(3):
        at.check_in(magic, 1, said(0, 2), 0.0)
    with pytest.raises(ProtocolError, match="more than 3"):
        at.check_in(MAGIC, 1, said(0, 2), 0.0)
    at.expire(DEADLINE_S)
    assert at.check_in(MAGIC, 1, said(0, 2), 0.0) == []
