"""Copies beside the training, on a device whose streams run as late and as interleaved as they may.

A tensor's values lie where only the device's queued work gets at them; what the host does at once is to count
a write, as torch does. So the host is ahead of the device by any amount, and the copies of one commit run
between any two operations of the steps after it, but for what the streams' waits forbid.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptless.daemon.api import messages as m
from ckptless.daemon.api import version
from ckptless.pytorch_hooks.commit import versions as subject
from ckptless.pytorch_hooks.commit.overlap import Guard
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import Copy, State, TensorSet, private

PARAMETERS = 3
STEPS = 4


def fill(tensor: torch.Tensor, part: int, value: float) -> None:
    """What the device does of a write: nobody counts it."""
    tensor.data[part] = value


class Event:
    """Recorded once what was queued before it is done."""

    done = False


@dataclass
class Stream:
    """Work in its order: a call, or an event that is waited for."""

    queue: deque[Callable[[], None] | Event] = field(default_factory=deque)

    @property
    def runs(self) -> bool:
        """Whether it can do its next piece of work."""
        return bool(self.queue) and not (isinstance(self.queue[0], Event) and not self.queue[0].done)

    def go(self) -> None:
        """Do it."""
        work = self.queue.popleft()
        if not isinstance(work, Event):
            work()

    def record(self) -> Event:
        """An event behind all that is queued."""
        event = Event()
        self.queue.append(lambda: setattr(event, "done", True))
        return event


class FakeDevice:
    """Two streams, in an order that `chance` chooses. `fences`: whether an update waits for the copies."""

    def __init__(self, chance: random.Random, *, fences: bool = True) -> None:
        self._chance, self._fences = chance, fences
        self.training, self._beside = Stream(), Stream()
        # How eager it is: at 0 it does nothing that nobody waits for.
        self._eager = chance.choice((0.0, 0.3, 0.9))

    def some(self) -> None:
        """The device does as much as it likes."""
        while self._chance.random() < self._eager and (runs := self._running()):
            self._chance.choice(runs).go()

    def until(self, event: Event) -> None:
        """Somebody waits on the host."""
        while not event.done:
            self._chance.choice(self._running()).go()

    def _running(self) -> list[Stream]:
        return [stream for stream in (self.training, self._beside) if stream.runs]

    def hold(self, memory: torch.Tensor) -> None:
        """See Device."""

    def release(self) -> None:
        """See Device."""

    def begin(self, now: Sequence[Copy], later: Sequence[Copy]) -> Event:
        """See Device."""
        self._queue(self.training, now)
        self._beside.queue.append(self.training.record())
        self._queue(self._beside, later)
        return self._beside.record()

    def _queue(self, stream: Stream, copies: Sequence[Copy]) -> None:
        for one in copies:
            stream.queue.append(partial(private.copy_all, [one.target], [one.source]))

    def complete(self, ticket: Event, _came: Callable[[int], None]) -> None:
        """See Device."""
        self.until(ticket)

    def fence(self, ticket: Event) -> None:
        """See Device."""
        if self._fences:
            self.training.queue.append(ticket)


class Thread:
    """The thread that seals versions; it runs when it is told to, between two things that the host does."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: call(*args)))
        return future

    def run(self, _wanted: object = None) -> None:
        """All that it has to do."""
        tasks, self._tasks = self._tasks, []
        for future, call in tasks:
            future.set_result(call())

    def shutdown(self) -> None:
        """It is not needed any more."""


class Job:
    """A model of one number for each tensor: parameters, and a buffer that the forward pass moves."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.thread = device, Thread()
        self.welcome = SimpleNamespace(job="job", run="0" * 32)
        self.memory = -1
        self.versions = Versions(cast("Any", self), device=device)
        self.versions._threads.shutdown()
        self.versions._threads = cast("Any", self.thread)
        module = nn.Module()
        self.living = [nn.Parameter(torch.zeros(2)) for _ in range(PARAMETERS)]
        for index, parameter in enumerate(self.living):
            module.register_parameter(f"p{index}", parameter)
        self.buffer = torch.zeros(2)
        module.register_buffer("b", self.buffer)
        self.tensors = TensorSet(State(model=module, optimizer=torch.optim.SGD(self.living, lr=0.1)))
        # What the values are once the device has done all that was queued.
        self.values = dict.fromkeys(range(PARAMETERS + 1), 0.0)
        self.wanted: dict[int, list[float]] = {}
        self.sent: list[int] = []

    # ---- the session

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        """See Session."""
        self.memory = os.memfd_create("ckptless-test")
        os.ftruncate(self.memory, slot_nbytes * slots)
        return m.Allocated(region=1), os.dup(self.memory)

    def send(self, commit: m.Commit) -> None:
        """It is sealed: is it what it says?"""
        assert commit.tensors is not None
        data = os.pread(self.memory, commit.tensors.nbytes, commit.tensors.offset)
        header = version.verify(memoryview(data), commit.tensors.digest)
        payload = torch.frombuffer(bytearray(data[header.header_nbytes :]), dtype=torch.uint8)
        entries = {e.name: payload[e.offset : e.offset + e.nbytes] for e in self.tensors.layout.entries}
        names = [*(f"p:model:p{index}" for index in range(PARAMETERS)), "b:model:b"]
        found = [entries[name].view(torch.float32).tolist() for name in names]
        assert found == [[value] * 2 for value in self.wanted[commit.step]], f"step {commit.step} is torn"
        self.sent.append(commit.step)

    # ---- the training

    def write(self, index: int, value: float, *, counted: bool) -> None:
        """The host queues a write, in two parts: its counter moves at once."""
        tensor = [*self.living, self.buffer][index]
        self.values[index] = value
        if counted:
            with torch.no_grad():
                tensor.add_(0)
        for part in range(2):
            self.device.training.queue.append(partial(fill, tensor, part, value))

    def step(self, step: int, stranger: int | None) -> None:
        """Forward, which moves the buffer; maybe a write by somebody else; update; commit."""
        self.write(PARAMETERS, step + 0.5, counted=False)
        self.pause()
        if stranger is not None:
            self.write(stranger, -step, counted=True)
            self.pause()
        self.versions.fence()
        for index in range(PARAMETERS):
            self.write(index, step + index / 10, counted=index > 0)
            self.pause()
        self.versions.wait()
        self.wanted[step] = [float(torch.tensor(value)) for value in self.values.values()]
        written = self.versions.begin(self.tensors, step, 1, 0, 0)
        commit = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
        self.versions.send(commit, written)
        self.pause()

    def pause(self) -> None:
        """Between two things that the host does anybody else may do something."""
        self.device.some()
        if self.device._chance.random() < 0.3:
            self.thread.run()
        self.device.some()


@contextmanager
def job(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(device)
    # The host is between two of its operations whenever the thread runs, and waits by running it.
    with monkeypatch.context() as patch:
        patch.setattr(subject, "between_bytecodes", lambda close: close())
        patch.setattr(subject, "wait", made.thread.run)
        try:
            yield made
        finally:
            made.tensors.release()
            if made.memory >= 0:
                os.close(made.memory)


def train(chance: random.Random, strangers: dict[int, int], *, fences: bool = True) -> None:
    """Some steps; every version that is sealed is compared with what was committed."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        job(FakeDevice(chance, fences=fences), monkeypatch) as made,
    ):
        begun = 0
        try:
            for step in range(1, STEPS + 1):
                made.step(step, strangers.get(step))
                begun = step
            made.versions.wait()
        except StateMoved:
            made.versions.leave()
            # A stranger has written after the commit before: that one alone is not committed.
            assert begun + 1 in strangers
            assert made.sent == list(range(1, begun))
        else:
            assert made.sent == list(range(1, STEPS + 1))


# On a machine without time to spare an example takes long; what a planted bug does need not be made small.
SLOW = [HealthCheck.too_slow]
FIRST = (Phase.generate,)
runs = given(
    chance=st.randoms(use_true_random=False),
    strangers=st.dictionaries(st.integers(1, STEPS), st.integers(0, PARAMETERS - 1), max_size=2),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@runs
def test_no_torn_version_is_sealed(chance: random.Random, strangers: dict[int, int]) -> None:
    train(chance, strangers)


def test_an_update_that_does_not_wait_is_found() -> None:
    @settings(max_examples=300, deadline=None, derandomize=True, phases=FIRST, suppress_health_check=SLOW)
    @given(chance=st.randoms(use_true_random=False))
    def without(chance: random.Random) -> None:
        train(chance, {}, fences=False)

    with pytest.raises(AssertionError, match="torn"):
        without()


def test_a_guard_that_does_not_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Guard.close

    def blind(guard: Guard) -> None:
        close(guard)
        guard.moved = None

    monkeypatch.setattr(Guard, "close", blind)

    @settings(max_examples=300, deadline=None, derandomize=True, phases=FIRST, suppress_health_check=SLOW)
    @given(
        chance=st.randoms(use_true_random=False),
        # After a commit, so that there is something to tear.
        strangers=st.dictionaries(st.integers(2, STEPS), st.integers(0, PARAMETERS - 1), min_size=1),
    )
    def without(chance: random.Random, strangers: dict[int, int]) -> None:
        train(chance, strangers)

    with pytest.raises(AssertionError, match="torn"):
        without()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_are_digested_in_whatever_pieces_they_come(data: st.DataObject) -> None:
    payload = memoryview(os.urandom(data.draw(st.integers(0, 5 * version.PAGE_NBYTES))))
    digests = version.ChunkDigests(payload, version.PAGE_NBYTES)
    for upto in sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=6))):
        digests.came(upto)
    spans = version.spans(len(payload), version.PAGE_NBYTES)
    assert digests.finish() == tuple(version.digest_of(payload[start:end]) for start, end in spans)
