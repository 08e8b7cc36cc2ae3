"""What a daemon keeps: never more than it may, never for too long, and never for anybody but who left it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.requeue_table import (
    MAX_PIECES,
    Entry,
    EntryTable,
    NotKeptError,
    allocation_of,
    is_short,
)

LIMIT, TTL_S = 100, 10.0


def entry(number: int = 1, **fields: Any) -> Entry:
    told: dict[str, Any] = {"job": "1", "uid": 1, "node": 0, "program": "p", "run": "1", "restarts": 0}
    told |= {"nbytes": 40, "pieces": 1, "since_s": 0.0}
    return Entry(number=number, **{**told, **fields})


def kept(table: EntryTable, new: Entry) -> tuple[Entry, ...]:
    gone = table.put(new)
    table.settled(new)
    return gone


entries = st.builds(
    entry,
    number=st.just(0),
    job=st.sampled_from("12"),
    uid=st.sampled_from((1, 2)),
    program=st.sampled_from("pq"),
    restarts=st.integers(0, 3),
    nbytes=st.integers(1, 120),
    pieces=st.sampled_from((1, 5, MAX_PIECES)),
)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("put"), entries),
        st.tuples(st.just("lend"), entries),
        st.tuples(st.sampled_from(("settle", "drop")), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(acts)
def test_whatever_comes(acts: list[tuple[str, Any]]) -> None:
    table, now, moving = EntryTable(LIMIT, TTL_S), 0.0, set[int]()
    for number, (what, with_) in enumerate(acts, 1):
        before = table.entries
        if what == "put":
            new = entry(**{f: getattr(with_, f) for f in Entry.__dataclass_fields__} | {"number": number})
            new = entry(**{f: getattr(new, f) for f in Entry.__dataclass_fields__} | {"since_s": now})
            try:
                gone = table.put(new)
            except NotKeptError:
                assert table.entries == before
            else:
                moving.add(number)
                assert set(table.entries) == {*before, new} - set(gone)
                # Only the same user's, and nothing that is on its way.
                assert all(old.uid == new.uid and old.number not in moving for old in gone)
        elif what == "lend":
            found = table.lend(with_.owner, with_.restarts)
            if found is not None:
                assert found.owner == with_.owner
                assert found.restarts < with_.restarts
                assert found.number not in moving
                moving.add(found.number)
        elif what in ("settle", "drop"):
            for one in [old for old in before if old.number == with_]:
                (table.settled if what == "settle" else table.drop)(one)
                moving.discard(with_)
        else:
            now += with_
        for old in table.expired(now):
            assert now - old.since_s >= TTL_S
            assert old.number not in moving
            table.drop(old)
        assert all(now - old.since_s < TTL_S for old in table.resting)
        assert table.nbytes == sum(old.nbytes for old in table.entries) <= LIMIT
        assert sum(old.pieces for old in table.entries) <= MAX_PIECES
        owners = [old.owner for old in table.entries]
        assert len(owners) == len(set(owners))


def test_only_a_later_start_of_the_same_job_user_and_program_gets_it() -> None:
    table = EntryTable(LIMIT, TTL_S)
    mine = entry(restarts=1)
    kept(table, mine)
    for owner in (("2", 1, "p"), ("1", 2, "p"), ("1", 1, "q")):
        assert table.lend(owner, 9) is None
    assert table.lend(mine.owner, 0) is None
    assert table.lend(mine.owner, 1) is None, "the start that left it does not get it"
    assert table.lend(mine.owner, 2) == mine
    assert table.lend(mine.owner, 2) is None, "one at a time"
    table.settled(mine)
    assert table.lend(mine.owner, 3) == mine


def test_who_makes_room_for_whom() -> None:
    table = EntryTable(LIMIT, TTL_S)
    first, second = entry(1, program="p", since_s=1), entry(2, program="q", since_s=2)
    kept(table, first)
    kept(table, second)
    third = entry(3, program="r", since_s=3)
    assert kept(table, third) == (first,)
    again = entry(4, program="r", restarts=1, since_s=4)
    assert kept(table, again) == (third,)
    with pytest.raises(NotKeptError, match="later start"):
        table.put(entry(5, program="r", restarts=0))
    with pytest.raises(NotKeptError, match="others have 80 of it"):
        table.put(entry(6, uid=2))
    with pytest.raises(NotKeptError, match=r"keep\.memory is 100"):
        table.put(entry(7, nbytes=101))
    with pytest.raises(NotKeptError, match=r"keep\.memory is 0"):
        EntryTable(0, TTL_S).put(entry(8))


def test_words() -> None:
    assert {allocation_of(run) for run in ("4711", "4711.1", "4711.s3", "4711.s3r1")} == {"4711"}
    assert [is_short(available, 100) for available in (0, 9, 10, 100)] == [True, True, False, False]
