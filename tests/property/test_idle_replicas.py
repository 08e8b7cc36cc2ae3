"""Which replicas a producer lets go of: never one that is asked for in its turn, and every other one soon."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ckptless.pytorch_hooks.data.idle import IDLE_ROUNDS, Replicas

replicas = st.integers(0, 5)
orders = st.lists(replicas, max_size=150)
rounds = st.integers(1, 4)


def newest(jobs: Sequence[int], replica: int) -> int:
    """How many jobs ago it was asked for."""
    return jobs[::-1].index(replica)


@given(orders, rounds)
def test_who_is_kept_follows_from_the_jobs(jobs: list[int], given_rounds: int) -> None:
    kept, there = Replicas(given_rounds), set[int]()
    for done, replica in enumerate(jobs, 1):
        gone = kept.ask(replica)
        there.add(replica)
        assert replica not in gone
        assert there >= set(gone)
        there -= set(gone)
        assert len(kept) == len(there)
        for other in there:
            # Whoever is kept was asked for within so many jobs: that bounds how many there are.
            ago = newest(jobs[:done], other)
            assert ago <= given_rounds * (len(set(jobs[done - ago : done])) + 1)
        for other in gone:
            assert newest(jobs[:done], other) > given_rounds


@given(orders, st.lists(replicas, min_size=1, max_size=6, unique=True), st.data())
def test_one_that_is_asked_for_in_its_turn_stays(
    before: list[int], all_: list[int], data: st.DataObject
) -> None:
    kept = Replicas()
    for replica in before:
        kept.ask(replica)
    me, others = all_[0], all_[1:]
    kept.ask(me)
    for _ in range(5):
        for _ in range(data.draw(st.integers(0, IDLE_ROUNDS))):
            # Each of the others once: the longest that it may have to wait for its turn.
            for other in others:
                assert me not in kept.ask(other)
        assert me not in kept.ask(me)


@given(orders, st.lists(replicas, min_size=1, max_size=6, unique=True), rounds)
def test_what_nobody_asks_for_is_gone_after_so_many_jobs(
    before: list[int], asked: list[int], given_rounds: int
) -> None:
    kept = Replicas(given_rounds)
    for replica in before:
        kept.ask(replica)
    # One that goes shortens what the next one may miss.
    for job in range(given_rounds * (len(asked) + 1) + len(asked) + len(set(before))):
        kept.ask(asked[job % len(asked)])
    assert len(kept) == len(asked)
