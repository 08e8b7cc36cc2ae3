"""The agent's vault: nothing that does not match its digest, the newest steps only, no memory kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.versions.store import KEEP, HeldRecord, VersionStore, digest
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.messages import Assignment, TensorsAt

PAGE = 4096
SLOTS = 3


@pytest.fixture
def vault() -> Iterator[VersionStore]:
    made = VersionStore()
    yield made
    made.close()


def put(vault: VersionStore, rank: int, *steps: int) -> None:
    for step in steps:
        data = f"{rank}/{step}".encode()
        vault.put_record(rank, step, HeldRecord(data, digest(data)))


def at(region: int, slot: int, nbytes: int = 10) -> TensorsAt:
    return TensorsAt(region=region, offset=slot * PAGE, nbytes=nbytes, digest="any")


def test_records(vault: VersionStore) -> None:
    put(vault, 0, 1, 2)
    put(vault, 3, 2)
    held = vault.record(0, 1)
    assert held is not None
    assert held.record == b"0/1"
    assert vault.record(0, 3) is None
    assert vault.record(9, 1) is None
    assert vault.holdings().records == ((0, 0, (1, 2)), (3, 0, (2,)))
    assert vault.nbytes == 9


def test_copies_say_how_many_bytes_and_each_change_is_told(vault: VersionStore) -> None:
    told: list[int] = []
    vault.on_held = lambda: told.append(1)
    put(vault, 0, 1, 2)
    region = vault.allocate(0, PAGE, 3)
    vault.put_tensors(0, 1, at(region.number, 0, nbytes=10))
    vault.put_tensors(0, 2, at(region.number, 1, nbytes=30))
    copies = vault.copies()
    assert copies.records == ((0, 0, (1, 2), 6),)
    assert copies.tensors == ((0, (1, 2), 40),)
    assert copies.nbytes == vault.nbytes == 6 + 3 * PAGE
    assert len(told) == 4
    vault.drop_after(None)
    assert (vault.copies().records, vault.copies().tensors) == ((), ())


def test_a_record_that_does_not_match_is_refused(vault: VersionStore) -> None:
    put(vault, 0, 1)
    with pytest.raises(ProtocolError, match="rank 0, step 1"):
        vault.put_record(0, 1, HeldRecord(b"something else", digest(b"0/1")))
    held = vault.record(0, 1)
    assert held is not None
    assert held.record == b"0/1"


def test_a_record_that_rots_is_not_given(vault: VersionStore) -> None:
    put(vault, 0, 1)
    vault._records[0][1] = HeldRecord(b"0/!", digest(b"0/1"))
    assert vault.record(0, 1) is None


@given(st.lists(st.integers(0, 12), max_size=30))
def test_the_newest_steps_are_kept(steps: list[int]) -> None:
    vault = VersionStore()
    region = vault.allocate(0, PAGE, SLOTS)
    for number, step in enumerate(steps):
        put(vault, 0, step)
        vault.put_tensors(0, step, at(region.number, number % SLOTS))
        held = vault.holdings().records[0][2]
        assert held == tuple(sorted(held))
        assert len(held) <= KEEP
        assert max(steps[: number + 1]) in held
        tensors = vault.holdings().tensors[0][1]
        assert len(tensors) <= KEEP
        places = [found[0].offset for s in tensors if (found := vault.tensors(0, s)) is not None]
        assert len(set(places)) == len(tensors), "two steps in one place"
    vault.close()


def test_writing_a_slot_again_forgets_what_was_there(vault: VersionStore) -> None:
    region = vault.allocate(0, PAGE, SLOTS)
    for step in (1, 2, 3):
        vault.put_tensors(0, step, at(region.number, step % SLOTS))
    vault.put_tensors(0, 4, at(region.number, 1))
    assert vault.holdings().tensors == ((0, (2, 3, 4)),)
    # The same step, redone after a recovery, in another place.
    vault.put_tensors(0, 3, at(region.number, 2))
    assert vault.holdings().tensors == ((0, (3, 4)),)
    found = vault.tensors(0, 3)
    assert found is not None
    assert found[0].offset == 2 * PAGE


@pytest.mark.parametrize(
    ("slot", "nbytes", "region"),
    [
        pytest.param(0, PAGE + 1, 1, id="too long for its slot"),
        pytest.param(0, 10, 2, id="a region that is not there"),
        pytest.param(SLOTS, 10, 1, id="behind the last slot"),
        pytest.param(-1, 10, 1, id="before the first slot"),
        pytest.param(0, -1, 1, id="a negative length"),
    ],
)
def test_tensors_in_a_wrong_place_are_refused(
    vault: VersionStore, slot: int, nbytes: int, region: int
) -> None:
    vault.allocate(0, PAGE, SLOTS)
    with pytest.raises(ProtocolError, match="step 1"):
        vault.put_tensors(0, 1, at(region, slot, nbytes))
    assert all(not steps for _, steps in vault.holdings().tensors)


def test_tensors_between_two_slots_are_refused(vault: VersionStore) -> None:
    region = vault.allocate(0, PAGE, SLOTS)
    with pytest.raises(ProtocolError):
        vault.put_tensors(0, 1, TensorsAt(region=region.number, offset=100, nbytes=10, digest="any"))


def test_a_new_generation_drops_what_never_happened(vault: VersionStore) -> None:
    region = vault.allocate(0, PAGE, SLOTS)
    for step in (5, 6, 7):
        put(vault, 0, step)
        vault.put_tensors(0, step, at(region.number, step % SLOTS))
    put(vault, 1, 5)
    vault.drop_after(6)
    assert vault.holdings().records == ((0, 0, (5, 6)), (1, 0, (5,)))
    assert vault.holdings().tensors == ((0, (5, 6)),)
    vault.drop_after(None)
    assert all(not steps for _, steps in vault.holdings().tensors)
    assert vault.holdings().records == ()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_regions_that_hold_nothing_are_given_back() -> None:
    before = open_files()
    vault = VersionStore()
    step = 0
    for _ in range(10):
        # As when a new process takes the writing over, again and again.
        region = vault.allocate(0, PAGE, SLOTS)
        for _ in range(4):
            step += 1
            vault.put_tensors(0, step, at(region.number, step % SLOTS))
    assert open_files() - before <= 2
    assert vault.nbytes <= 2 * SLOTS * PAGE
    vault.close()
    assert open_files() == before


def test_a_region_never_written_to_is_given_back() -> None:
    """A writer that dies between asking for memory and its first commit, many times over."""
    before = open_files()
    vault = VersionStore()
    for step in range(1, 11):
        vault.allocate(0, PAGE, SLOTS)
        region = vault.allocate(0, PAGE, SLOTS)
        vault.put_tensors(0, step, at(region.number, 0))
    # Two descriptors each: the memfd, and the one that its mapping holds.
    assert open_files() - before <= 2 * KEEP
    vault.close()


def test_regions_are_sealed_and_readable(vault: VersionStore) -> None:
    region = vault.allocate(0, PAGE, SLOTS)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 10 * PAGE)
    os.pwrite(region.fd, b"hello", PAGE)
    with region.view(PAGE, 5) as view:
        assert bytes(view) == b"hello"
    for offset, nbytes in ((-1, 2), (0, 3 * PAGE + 1), (3 * PAGE, 1)):
        with pytest.raises(ValueError, match="region"):
            region.view(offset, nbytes)


# ------------------------------------------------------------------------------- several shards, and others'


def test_a_shard_of_another_node_gets_a_place_of_its_own(vault: VersionStore) -> None:
    own = vault.allocate(0, PAGE, SLOTS)
    vault.put_tensors(0, 1, at(own.number, 0))
    for step in range(1, 6):
        with vault.room(7, 100) as (region, offset):
            assert region.number != own.number
            # What is kept is never written over, but for the oldest.
            assert all(
                found is None or found[0].offset != offset
                for kept in range(max(1, step - KEEP + 1), step)
                for found in [vault.tensors(7, kept)]
            )
            vault.put_tensors(7, step, TensorsAt(region=region.number, offset=offset, nbytes=100, digest="d"))
    assert vault.holdings().tensors == ((0, (1,)), (7, (3, 4, 5)))


def test_two_that_come_at_once_are_not_written_to_one_place(vault: VersionStore) -> None:
    with ExitStack() as under_way:
        rooms = [under_way.enter_context(vault.room(7, 100)) for _ in range(SLOTS + 1)]
        assert len({(region.number, offset) for region, offset in rooms}) == SLOTS + 1


def test_larger_tensors_get_a_larger_region_and_the_old_one_is_given_back(vault: VersionStore) -> None:
    before = open_files()
    for step, nbytes in ((1, PAGE), (2, 3 * PAGE), (3, 3 * PAGE), (4, 3 * PAGE), (5, 3 * PAGE)):
        with vault.room(7, nbytes) as (region, offset):
            vault.put_tensors(
                7, step, TensorsAt(region=region.number, offset=offset, nbytes=nbytes, digest="d")
            )
    # A memfd, and its mapping's own descriptor of it.
    assert open_files() == before + 2


def test_a_region_that_is_being_sent_is_closed_later(vault: VersionStore) -> None:
    small = vault.allocate(0, PAGE, SLOTS)
    vault.put_tensors(0, 1, at(small.number, 0))
    view = small.view(0, 10)
    large = vault.allocate(0, 2 * PAGE, SLOTS)
    for step in (2, 3, 4):
        vault.put_tensors(0, step, at(large.number, 0))
        vault.put_tensors(
            0, step, TensorsAt(region=large.number, offset=2 * PAGE * (step % 3), nbytes=1, digest="d")
        )
    assert vault.region(small.number) is small
    view.release()
    vault.put_tensors(0, 5, TensorsAt(region=large.number, offset=0, nbytes=1, digest="d"))
    assert vault.region(small.number) is None


def test_tensors_of_another_shard_cannot_lie_in_a_region(vault: VersionStore) -> None:
    region = vault.allocate(3, PAGE, SLOTS)
    with pytest.raises(ProtocolError):
        vault.put_tensors(0, 1, at(region.number, 0))


def test_what_others_are_not_to_have_from_here_is_not_used_here(vault: VersionStore) -> None:
    """The restored step of a shard whose version here was not named as sound; older ones stay."""
    region = vault.allocate(0, PAGE, SLOTS)
    for step in (6, 7):
        vault.put_tensors(0, step, at(region.number, step - 6))
    named = Assignment(
        job="j",
        generation=2,
        term=1,
        leader=0,
        places=(),
        nodes=(),
        restore_step=7,
        tensor_nodes=((0, (1, 2)),),
    )
    vault.follow(named, 1)
    assert vault.holdings().tensors == ((0, (6, 7)),)
    vault.follow(named, 3)
    assert vault.holdings().tensors == ((0, (6,)),)
