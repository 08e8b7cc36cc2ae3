"""How many connections, messages, log lines and events anybody gets: without a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.admission import (
    CONNECTIONS,
    CONNECTIONS_PER_UID,
    EVENTS_AT_ONCE,
    EVENTS_PER_S,
    LINES_AT_ONCE,
    LINES_PER_S,
    LOG_AGAIN_S,
    MESSAGES_AT_ONCE,
    MESSAGES_PER_S,
    MOST_CONNECTIONS,
    MOST_KEPT,
    Admission,
    EventQuota,
)

ROOT, USER = 0, 1001


def test_connections_of_one_user() -> None:
    admission = Admission((ROOT,))
    assert [admission.enter(USER) for _ in range(CONNECTIONS_PER_UID)] == [""] * CONNECTIONS_PER_UID
    assert admission.enter(USER) != ""
    assert admission.enter(1002) == ""
    admission.leave(USER)
    assert admission.enter(USER) == ""
    assert admission.enter(USER) != ""


def test_connections_of_all_and_root_always() -> None:
    admission = Admission((ROOT,))
    assert not any(admission.enter(uid) for uid in range(1, CONNECTIONS + 1))
    crowded = [admission.crowded]
    assert admission.enter(CONNECTIONS + 1) == ""
    crowded.append(admission.crowded)
    assert crowded == [False, True]
    refused = [uid for uid in range(CONNECTIONS + 2, MOST_CONNECTIONS + 3) if admission.enter(uid)]
    assert refused == [MOST_CONNECTIONS + 1, MOST_CONNECTIONS + 2]
    assert all(admission.enter(ROOT) == "" for _ in range(2 * MOST_CONNECTIONS))
    for uid in range(1, MOST_CONNECTIONS - CONNECTIONS + 1):
        admission.leave(uid)
    assert not admission.crowded, "root's do not count"


@given(st.lists(st.integers(1, 5)))
def test_who_leaves_makes_room(uids: list[int]) -> None:
    admission = Admission()
    inside = [uid for uid in uids if not admission.enter(uid)]
    for uid in inside:
        admission.leave(uid)
    assert [admission.enter(1) for _ in range(CONNECTIONS_PER_UID)] == [""] * CONNECTIONS_PER_UID


def test_messages_are_slowed_down_and_none_is_lost() -> None:
    admission = Admission((ROOT,))
    waits = [admission.pace(USER, 1, 0, 5.0) for _ in range(int(MESSAGES_AT_ONCE) + 200)]
    assert waits[: int(MESSAGES_AT_ONCE)] == [0.0] * int(MESSAGES_AT_ONCE)
    assert waits[-1] == 200 / MESSAGES_PER_S
    assert admission.pace(1002, 1, 0, 5.0) == 0.0
    assert admission.pace(USER, 0, 1 << 20, 1e6) == 0.0
    assert admission.pace(USER, 0, 1 << 30, 1e6) > 60
    assert admission.pace(ROOT, 1 << 20, 1 << 40, 1e6) == 0.0


def test_a_refusal_is_logged_once_in_a_while() -> None:
    admission = Admission((ROOT,))
    assert [admission.may_log(USER, 1.0) for _ in range(4)] == [0, None, None, None]
    assert admission.may_log("10.0.0.1", 1.0) == 0
    assert admission.may_log(USER, 1.0 + LOG_AGAIN_S) == 3
    assert [admission.may_log(ROOT, 1.0) for _ in range(3)] == [0, 0, 0]


def test_lines_of_all_have_a_limit() -> None:
    """A local user has as many addresses as 127/8, and each would have a line of its own."""
    admission = Admission()
    told = [admission.may_log(f"127.0.{n // 256}.{n % 256}", 1.0) for n in range(1000)]
    assert sum(one is not None for one in told) == LINES_AT_ONCE
    assert admission.may_log("10.0.0.9", 1.0 + 1 / LINES_PER_S) == 1000 - LINES_AT_ONCE


def test_many_users_are_not_remembered_for_ever() -> None:
    admission = Admission()
    for uid in range(3 * MOST_KEPT):
        admission.may_log(uid, 1.0)
        admission.pace(uid, 1, 0, 1.0)
    assert len(admission._logged) <= MOST_KEPT + 1
    assert len(admission._buckets) <= MOST_KEPT + 2


def test_events_beyond_are_counted_and_told() -> None:
    quota = EventQuota()
    assert quota.dropped(0.0) == 0
    assert sum(quota.take(0.0) for _ in range(1000)) == EVENTS_AT_ONCE
    assert quota.dropped(0.0) == 1000 - EVENTS_AT_ONCE
    assert not quota.take(0.1)
    assert quota.dropped(1.0) == 0, "it was told just now"
    assert quota.dropped(LOG_AGAIN_S) == 1
    assert quota.dropped(9 * LOG_AGAIN_S) == 0
    assert quota.take(2 / EVENTS_PER_S)
