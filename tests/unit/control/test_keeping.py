"""What a daemon keeps of ended runs, and for how long."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.requeue_table import Entry, EntryTable, NotKeptError

TTL_S = 60.0


def entry(number: int, since_s: float) -> Entry:
    return Entry(
        number=number,
        job=str(number),
        uid=5,
        node=0,
        program="t",
        run=str(number),
        restarts=0,
        nbytes=10,
        pieces=1,
        since_s=since_s,
    )


def test_each_is_kept_for_its_time_and_what_is_on_its_way_for_longer() -> None:
    table = EntryTable(limit_nbytes=100, ttl_s=TTL_S)
    for number, since_s in ((1, 1000.0), (2, 1010.0), (3, 1000.0)):
        table.put(entry(number, since_s))
    table.settled(entry(1, 1000.0))
    table.settled(entry(2, 1010.0))
    found = [tuple(one.number for one in table.expired(now)) for now in (1059.0, 1060.0, 1070.0)]
    assert found == [(), (1,), (1, 2)]


@pytest.mark.parametrize(("limit", "why"), [(0, r"^keep\.memory is 0 on this node$"), (9, "it is 10 bytes")])
def test_what_is_too_much_is_refused_in_a_sentence(limit: int, why: str) -> None:
    table = EntryTable(limit_nbytes=limit, ttl_s=TTL_S)
    with pytest.raises(NotKeptError, match=why):
        table.put(entry(1, 0.0))
