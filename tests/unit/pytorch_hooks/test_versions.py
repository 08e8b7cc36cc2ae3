"""A rank's versions: the header comes last, the commit after it; what goes wrong comes to the main thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, StateUnavailableError
from ckptless.pytorch_hooks.commit import versions as subject
from ckptless.pytorch_hooks.commit.slots import SLOTS
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet, raw

DEADLINE_S = 20.0


class FakeSession:
    """Memory of its own; says what was sent, and gives `replies` to Fetch."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(job="job", run="0" * 32)
        self.sent: list[m.Commit] = []
        self.fails = False
        self.memory: list[int] = []
        self.slot_nbytes = 0
        self.replies: list[m.Fetched] = []
        self.asked: list[tuple[m.TensorsAt | None, str]] = []

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        self.memory.append(os.memfd_create("ckptless-test"))
        os.ftruncate(self.memory[-1], slot_nbytes * slots)
        self.slot_nbytes = slot_nbytes
        return m.Allocated(region=len(self.memory)), os.dup(self.memory[-1])

    def send(self, message: m.Commit) -> None:
        if self.fails:
            raise BrokenPipeError("the agent is gone")
        self.sent.append(message)

    def fetch(
        self, _generation: int, _step: int, unsound: m.TensorsAt | None = None, why: str = ""
    ) -> tuple[m.Fetched, int | None]:
        self.asked.append((unsound, why))
        reply = self.replies.pop(0)
        return reply, os.dup(self.memory[reply.tensors.region - 1]) if reply.tensors is not None else None

    def bytes_at(self, at: m.TensorsAt) -> bytes:
        return os.pread(self.memory[at.region - 1], at.nbytes, at.offset)


class Rank:
    def __init__(self) -> None:
        self.session = FakeSession()
        # Many chunks, though the model is small.
        self.versions = Versions(cast("Any", self.session), version.PAGE_NBYTES)
        self.model = nn.Linear(300, 300)
        self.tensors = TensorSet(State(model=self.model))

    def commit(self, step: int, generation: int = 1) -> None:
        written = self.versions.write(self.tensors, step, generation, shard=2, rank=3)
        self.versions.send(
            m.Commit(generation=generation, step=step, record=b"", digest="", tensors=None, loss=None),
            written,
        )

    def committed(self, step: int) -> m.TensorsAt:
        self.commit(step)
        self.versions.wait()
        at = self.session.sent[-1].tensors
        assert at is not None
        return at

    def spoil(self, at: m.TensorsAt, where: int) -> None:
        fd = self.session.memory[at.region - 1]
        (byte,) = os.pread(fd, 1, at.offset + where)
        os.pwrite(fd, bytes([byte ^ 4]), at.offset + where)

    def answer(self, *places: m.TensorsAt) -> None:
        self.session.replies += [
            m.Fetched(step=1, record=b"r", tensors=at, slot_nbytes=self.session.slot_nbytes) for at in places
        ]

    def fetch(self) -> subject.FetchedStep:
        return self.versions.fetch(2, 1, 2, self.tensors)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.versions.close()
    made.tensors.release()
    for fd in made.session.memory:
        os.close(fd)


def test_a_commit_says_what_lies_in_the_slot(rank: Rank) -> None:
    for step in range(2 * SLOTS):
        at = rank.committed(step)
        assert at.offset == step % SLOTS * rank.session.slot_nbytes
        header = version.verify(memoryview(rank.session.bytes_at(at)), at.digest)
        assert (header.job, header.shard, header.rank) == ("job", 2, 3)
        assert (header.step, header.generation) == (step, 1)
        assert header.layout == rank.tensors.layout.digest
    assert [commit.step for commit in rank.session.sent] == list(range(2 * SLOTS))


def test_a_slot_that_is_being_written_holds_no_version(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header comes when every chunk has its digest, and the commit after it."""
    old = rank.committed(0)
    rank.committed(1)
    rank.committed(2)
    go, digest_of = threading.Event(), version.digest_of

    def held_up(chunk: memoryview) -> int:
        assert go.wait(DEADLINE_S)
        return digest_of(chunk)

    monkeypatch.setattr(version, "digest_of", held_up)
    rank.commit(3)
    assert len(rank.session.sent) == 3
    with pytest.raises(BadVersionError, match="not written to its end"):
        version.decode(rank.session.bytes_at(old))
    go.set()
    rank.versions.wait()
    at = rank.session.sent[-1].tensors
    assert at is not None
    assert at.offset == old.offset
    assert version.verify(memoryview(rank.session.bytes_at(at)), at.digest).step == 3


def test_what_goes_wrong_with_a_commit_is_raised_by_the_next(rank: Rank) -> None:
    rank.session.fails = True
    rank.commit(1)
    with pytest.raises(BrokenPipeError):
        rank.versions.wait()
    rank.versions.wait()
    rank.commit(2)
    # Over with the generation: whoever leaves it has another reason.
    rank.versions.leave()
    rank.versions.wait()


def test_nothing_is_sent_after_leaving(rank: Rank) -> None:
    for step in range(20):
        rank.commit(step)
        rank.versions.leave()
        assert len(rank.session.sent) == step + 1


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    rank = Rank()
    rank.commit(1)
    rank.versions.close()
    assert threading.active_count() == before
    assert len(rank.session.sent) == 1
    rank.tensors.release()


def test_a_larger_state_gets_other_memory(rank: Rank) -> None:
    first = rank.committed(0)
    rank.model.register_buffer("more", torch.ones(500_000))
    second = rank.committed(1)
    assert (first.region, second.region) == (1, 2)
    version.verify(memoryview(rank.session.bytes_at(second)), second.digest)


def test_what_is_fetched_is_what_was_committed(rank: Rank) -> None:
    at = rank.committed(1)
    rank.answer(at)
    found = rank.fetch()
    assert found.record == b"r"
    again = nn.Linear(300, 300)
    TensorSet(State(model=again)).unpack(found.payload, rank.tensors.layout)
    assert all(map(torch.equal, again.parameters(), rank.model.parameters()))


@pytest.mark.parametrize(
    ("chunk", "words"), [(None, "header"), (0, "chunk 0 of"), (7, "chunk 7 of"), (88, "chunk 88 of 89")]
)
def test_a_bad_copy_is_told_and_the_next_is_used(rank: Rank, chunk: int | None, words: str) -> None:
    bad, _, sound = rank.committed(1), rank.committed(0), rank.committed(1)
    begin = bad.nbytes - rank.tensors.layout.nbytes
    where = 100 if chunk is None else begin + chunk * version.PAGE_NBYTES
    rank.spoil(bad, where)
    rank.answer(bad, sound)
    found = rank.fetch()
    assert found.at == sound
    ((first, _), (told, why)) = rank.session.asked
    assert (first, told) == (None, bad)
    assert words in why


def test_bad_again_and_again_is_not_asked_for_for_ever(rank: Rank) -> None:
    bad = rank.committed(1)
    rank.spoil(bad, bad.nbytes - 1)
    rank.answer(*[bad] * 100)
    with pytest.raises(StateUnavailableError, match="step 1, shard 2"):
        rank.fetch()
    assert len(rank.session.asked) == subject.TRIES


def test_a_version_of_another_step_is_not_used(rank: Rank) -> None:
    other, own = rank.committed(0), rank.committed(1)
    rank.answer(other, own)
    assert rank.fetch().at == own
    assert "in place of step 1" in rank.session.asked[1][1]


def test_a_window_is_the_slot(rank: Rank) -> None:
    """The threads read the slot through a window, which keeps no memory alive: the commit does."""
    written = rank.versions.write(rank.tensors, 1, 1, 2, 3)
    assert len(raw.window(written.slot)) == written.at.nbytes
    rank.versions.leave()
