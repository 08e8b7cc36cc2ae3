"""The store's keys, queues and waits, without a connection."""

import time
from collections.abc import Callable

import pytest

from ckptless.daemon.agent.kvstore.protocol import MAX_VALUE_NBYTES
from ckptless.daemon.agent.kvstore.state import ENTRY_NBYTES, StoreState
from ckptless.daemon.protocol.errors import ProtocolError


@pytest.fixture
def state() -> StoreState:
    return StoreState()


@pytest.fixture
def woken() -> list[str]:
    return []


@pytest.fixture
def wakes(woken: list[str]) -> Callable[[str], Callable[[], None]]:
    return lambda name: lambda: woken.append(name)


Wakes = Callable[[str], Callable[[], None]]


def test_set_get_delete(state: StoreState) -> None:
    state.set(b"a", b"1")
    state.multi_set([(b"b", b"2"), (b"a", b"3")])
    assert [state.get(key) for key in (b"b", b"a", b"none")] == [b"2", b"3", b""]
    assert (state.num_keys(), sorted(state.list_keys())) == (2, [b"a", b"b"])
    assert (state.delete(b"a"), state.delete(b"a"), state.num_keys()) == (True, False, 1)


@pytest.mark.parametrize(
    ("before", "amount", "after"),
    [
        (None, 5, 5),
        (b"7", -9, -2),
        (b" +7 or so", 1, 8),
        (b"-7", 0, -7),
        (str(2**63 - 2).encode(), 1, 2**63 - 1),
    ],
)
def test_add(state: StoreState, before: bytes | None, amount: int, after: int) -> None:
    if before is not None:
        state.set(b"n", before)
    assert state.add(b"n", amount) == after
    assert state.get(b"n") == str(after).encode()


@pytest.mark.parametrize("before", [b"", b"x", b"+", b"- 1", b"9" * 20, str(2**63 - 1).encode()])
def test_add_to_what_is_no_number_or_too_large_changes_nothing(state: StoreState, before: bytes) -> None:
    state.set(b"n", before)
    with pytest.raises(ProtocolError):
        state.add(b"n", 1)
    assert state.get(b"n") == before


def test_append_makes_and_extends_whoever_reads_in_between(state: StoreState) -> None:
    for piece in (b"1", b"2", b"3"):
        state.append(b"a", piece)
        assert state.get(b"a")[-1:] == piece
    assert state.get(b"a") == b"123"
    assert state.compare_set(b"a", b"123", b"x") == b"x"


def test_append_is_not_quadratic(state: StoreState) -> None:
    state.set(b"a", bytes(16 << 20))
    began = time.process_time()
    for _ in range(10_000):
        state.append(b"a", b"x")
    # Copying 16 MiB each time takes minutes.
    assert time.process_time() - began < 5
    assert len(state.get(b"a")) == (16 << 20) + 10_000


def test_append_stays_within_the_limit_of_a_value(state: StoreState) -> None:
    state.set(b"a", bytes(MAX_VALUE_NBYTES))
    with pytest.raises(ProtocolError):
        state.append(b"a", b"x")
    assert len(state.get(b"a")) == MAX_VALUE_NBYTES


def test_compare_set(state: StoreState) -> None:
    assert state.compare_set(b"k", b"expected", b"new") == b"expected"
    assert not state.check([b"k"])
    assert state.compare_set(b"k", b"", b"new") == b"new"
    assert state.compare_set(b"k", b"other", b"newer") == b"new"
    assert state.compare_set(b"k", b"new", b"newer") == b"newer"


def test_a_wait_ends_when_every_key_has_come(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    state.set(b"a", b"")
    assert state.wait([b"a"], wakes("no need")) is None
    assert state.wait([], wakes("nothing to wait for")) is None
    assert state.wait([b"a", b"b", b"c", b"c"], wakes("first")) is not None
    assert state.wait([b"b"], wakes("second")) is not None
    state.add(b"b", 1)
    assert woken == ["second"]
    # torch's server counts arrivals too: a key that came and went has come.
    state.delete(b"b")
    state.append(b"c", b"")
    assert woken == ["second", "first"]
    state.set(b"b", b"")
    state.set(b"c", b"")
    assert woken == ["second", "first"]


def test_waits_end_in_the_order_they_began(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    for name in "abc":
        state.wait([b"k"], wakes(name))
    assert state.compare_set(b"k", b"", b"v") == b"v"
    assert woken == ["a", "b", "c"]


def test_a_cancelled_wait_leaves_nothing_behind(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    first = state.wait([b"a", b"b"], wakes("first"))
    second = state.wait([b"b"], wakes("second"))
    assert first is not None
    assert second is not None
    state.set(b"a", b"")
    state.cancel(first)
    state.cancel(first)
    state.set(b"b", b"")
    assert woken == ["second"]
    state.cancel(second)
    assert state._waiting == {}


def test_a_failed_compare_set_wakes_nobody(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    state.wait([b"k"], wakes("too early"))
    state.compare_set(b"k", b"expected", b"new")
    assert woken == []


def test_queue(state: StoreState) -> None:
    assert (state.queue_pop(b"q"), state.queue_len(b"q")) == ((0, None), 0)
    state.queue_push(b"q", b"1")
    state.queue_push(b"q", b"2")
    assert (state.queue_len(b"q"), state.check([b"q"]), state.num_keys()) == (2, True, 0)
    assert [state.queue_pop(b"q") for _ in range(3)] == [(2, b"1"), (1, b"2"), (0, None)]
    assert not state.check([b"q"])


def test_a_push_wakes_one_and_never_twice(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    state.wait([b"q", b"k"], wakes("both"))
    state.wait([b"q"], wakes("first"))
    state.wait([b"q"], wakes("second"))
    state.queue_push(b"q", b"")
    assert woken == ["first"]
    state.queue_push(b"q", b"")
    assert woken == ["first", "second"]
    state.queue_push(b"q", b"")
    state.set(b"k", b"")
    assert woken == ["first", "second", "both"]


def test_barrier(state: StoreState, wakes: Wakes, woken: list[str]) -> None:
    assert state.barrier(b"b", 1, wakes("alone")) is None
    state.delete(b"b")
    assert state.barrier(b"b", 3, wakes("first")) is not None
    gone = state.barrier(b"b", 3, wakes("gone"))
    assert gone is not None
    state.cancel(gone)
    state.set(b"other", b"")
    assert woken == []
    assert state.barrier(b"b", 3, wakes("last")) is None
    assert woken == ["first"]
    assert state.get(b"b") == b"3"
    assert state.barrier(b"b", 3, wakes("late")) is None


def test_what_does_not_fit_is_refused_and_what_is_forgotten_makes_room() -> None:
    state = StoreState(max_nbytes=2 * ENTRY_NBYTES + 10)
    state.set(b"a", b"12345")
    state.queue_push(b"q", b"1")
    for change, key, value in (
        (state.set, b"b", b""),
        (state.set, b"a", b"12345678"),
        (state.append, b"a", b"678"),
        (state.queue_push, b"q", b""),
    ):
        with pytest.raises(ProtocolError, match="bytes of keys and values"):
            change(key, value)
    assert (state.get(b"a"), state.queue_len(b"q"), state.num_keys()) == (b"12345", 1, 1)
    state.append(b"a", b"67")
    state.queue_pop(b"q")
    state.set(b"b", b"8")
    for key in (b"a", b"b"):
        state.delete(key)
    assert state._nbytes == 0
