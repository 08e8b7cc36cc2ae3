"""Copies on a side stream, over simulated streams: in whatever order a device runs them, no version is torn.

The simulation keeps what CUDA promises and nothing else: the operations of one stream run in order, those of
different streams beside each other, cell by cell, in an order that chance chooses; only events hold one back
until another has come so far. What a device itself does is tested on one: `make test-gpu`.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckptless.pytorch_hooks.commit import device_copy
from ckptless.pytorch_hooks.commit.copying import Copying
from ckptless.pytorch_hooks.commit.device_copy import DeviceCopies
from ckptless.pytorch_hooks.commit.host_copy import HostCopies
from ckptless.pytorch_hooks.commit.overlap import Policy
from ckptless.pytorch_hooks.state import Copy

SEEDS = 300
COMMITS = 6
CELLS = 4
DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
CPU = torch.device("cpu")

# -------------------------------------------------------------------------------------- the simulation


@dataclass(eq=False)
class Tensor:
    """Cells that all have the same value, but for the moment in which they are written."""

    device: torch.device
    cells: list[int] = field(default_factory=lambda: [0] * CELLS)


@dataclass(eq=False)
class Mark:
    """A place in a stream; `passed` when all before it has run."""

    passed: bool = False


class Stream:
    """A queue: what to run, a piece at a time, a mark to pass, or a mark of another stream to wait for."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.device = device
        self.queue: deque[Callable[[], object] | tuple[str, Mark]] = deque()
        machine.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        """As torch.cuda.Stream."""
        mark = Mark()
        other.queue.append(("pass", mark))
        self.queue.append(("wait", mark))

    def wait_event(self, event: Event) -> None:
        """As torch.cuda.Stream: of an event that was never recorded nothing is waited for."""
        if event.mark is not None:
            self.queue.append(("wait", event.mark))

    @property
    def ready(self) -> bool:
        """Whether it can go on."""
        head = self.queue[0] if self.queue else ("wait", Mark())
        return not isinstance(head, tuple) or head[0] == "pass" or head[1].passed

    def go_on(self) -> None:
        """By one."""
        head = self.queue.popleft()
        if not isinstance(head, tuple):
            head()
        elif head[0] == "pass":
            head[1].passed = True


class Event:
    """As torch.cuda.Event."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        """What is queued there by now is what is waited for."""
        self.mark = Mark()
        stream.queue.append(("pass", self.mark))

    def synchronize(self) -> None:
        """Hold up the host."""
        while self.mark is not None and not self.mark.passed:
            assert self._machine.run(1), "the host waits for what never comes"


class Machine:
    """Two devices, each with a stream that the training runs on; in the place of `torch` for the subject."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = {device: Stream(self, device) for device in DEVICES}
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(self, device),
            Event=lambda: Event(self),
            current_stream=lambda device: self.current[device],
            stream=self._stream,
        )

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before

    def run(self, pieces: int) -> bool:
        """So many pieces of what can run, in an order of chance; whether there was that much."""
        for _ in range(pieces):
            ready = [stream for stream in self.streams if stream.ready]
            if not ready:
                return False
            self.chance.choice(ready).go_on()
        return True

    def some(self) -> None:
        """Meanwhile the devices go on, a bit or a lot."""
        self.run(self.chance.choice([0, 0, 1, 3, 10, 100]))

    def copy(self, copies: Sequence[Copy]) -> None:
        """In the place of the subject's: on the CPU at once, else on the current stream of the source."""
        for one in copies:
            source, target = cast("Tensor", one.source), cast("Tensor", one.target)
            if source.device == CPU:
                target.cells[:] = source.cells
                continue
            for index in range(CELLS):
                self.current[source.device].queue.append(_setter(target, index, source))

    def write(self, tensor: Tensor, value: int) -> None:
        """What the training does: on the CPU at once, else on the current stream."""
        if tensor.device == CPU:
            tensor.cells[:] = [value] * CELLS
            return
        for index in range(CELLS):
            self.current[tensor.device].queue.append(_writer(tensor, index, value))


def _setter(target: Tensor, index: int, source: Tensor) -> Callable[[], None]:
    def run() -> None:
        target.cells[index] = source.cells[index]

    return run


def _writer(tensor: Tensor, index: int, value: int) -> Callable[[], None]:
    def run() -> None:
        tensor.cells[index] = value

    return run


# ---------------------------------------------------------------------------------------- the training


class Torn(Exception):
    """A version that is not the one of its step."""


def _train(machine: Machine, copies: DeviceCopies) -> None:
    """Parameters that only updates change, and buffers that each forward pass does; on all devices."""
    devices = (*DEVICES, CPU)
    parameters = [Tensor(device) for device in devices for _ in range(2)]
    buffers = [Tensor(device) for device in devices]
    for step in range(1, COMMITS + 1):
        for one in (*parameters, *buffers):
            machine.write(one, step)
        machine.some()
        now, later = ([_copy_of(one) for one in group] for group in (buffers, parameters))
        ticket = copies.begin(now, later)
        complete_at = machine.chance.randrange(3)
        for moment in range(3):
            machine.some()
            if moment == complete_at:
                came: list[int] = []
                copies.complete(ticket, came.append)
                _check((*now, *later), step)
            elif moment == 0:
                for one in buffers:
                    machine.write(one, -step)
            elif moment == 1:
                copies.fence(ticket)
                for one in parameters:
                    machine.write(one, -step)
        # As Versions does: the next commit comes when this one is through.
        copies.complete(ticket, lambda _upto: None)
        _check((*now, *later), step)
        copies.fence(ticket)


def _copy_of(tensor: Tensor) -> Copy:
    return Copy("", 0, cast("Any", Tensor(CPU)), cast("Any", tensor), cast("Any", tensor))


def _check(copies: Sequence[Copy], step: int) -> None:
    for one in copies:
        if (cells := cast("Tensor", one.target).cells) != [step] * CELLS:
            raise Torn(f"step {step}: {cells}")


def _run(subject: type[DeviceCopies], patch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        machine = Machine(seed)
        patch.setattr(device_copy, "torch", machine)
        patch.setattr(device_copy, "_copy", machine.copy)
        _train(machine, subject())


def test_no_version_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(DeviceCopies, monkeypatch)


# ------------------------------------------------------------------------------------ mistakes are found


class NoFence(DeviceCopies):
    """The update does not wait for the copies."""

    def fence(self, ticket: Any) -> None:
        """Nothing."""


class NotComplete(DeviceCopies):
    """The header is written before the bytes are there."""

    def complete(self, ticket: Any, came: Any) -> None:
        """Nothing."""


class TooLate(DeviceCopies):
    """What the next step changes is copied beside it."""

    def begin(self, now: Sequence[Copy], later: Sequence[Copy]) -> Any:
        """All of it later."""
        return super().begin((), (*now, *later))


def _waits_for_nothing(_stream: Stream, _other: Stream) -> None:
    """The copies do not wait for what the training has queued."""


def _records_at_once(event: Event, _stream: Stream) -> None:
    """The event is in front of the copies."""
    event.mark = Mark(passed=True)


@pytest.mark.parametrize("mistaken", [NoFence, NotComplete, TooLate])
def test_a_mistake_is_found(mistaken: type[DeviceCopies], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Torn):
        _run(mistaken, monkeypatch)


@pytest.mark.parametrize(
    ("where", "name", "mistake"),
    [(Stream, "wait_stream", _waits_for_nothing), (Event, "record", _records_at_once)],
    ids=["copies-do-not-wait", "the-event-is-in-front"],
)
def test_a_missing_event_is_found(
    where: type, name: str, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, mistake)
    with pytest.raises(Torn):
        _run(DeviceCopies, monkeypatch)


# -------------------------------------------------------------------------------------- pinned memory


class Pins:
    """In the place of torch.cuda.cudart(): knows what is registered, and refuses what is so already."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.refused = 0

    def cudaHostRegister(self, pointer: int, _nbytes: int, _flags: int) -> int:
        """712 where it is registered."""
        if pointer in self.registered:
            self.refused += 1
            return 712
        self.registered.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """713 where it is not."""
        if pointer not in self.registered:
            self.refused += 1
            return 713
        self.registered.remove(pointer)
        return 0


class StandIn:
    """In the place of Versions, for tensors of a device; its memory is mapped anew when it is told."""

    def __init__(self) -> None:
        self.device: Any = HostCopies()
        self.memory = torch.zeros(64, dtype=torch.uint8)

    def write(self, *_what: object) -> None:
        """As in order."""
        self.device.hold(self.memory)

    def map_anew(self) -> None:
        """As for a larger state."""
        self.device.release()
        self.memory = torch.zeros(128, dtype=torch.uint8)


def test_memory_is_pinned_once_and_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a recovery brings other tensors."""
    pins, versions = Pins(), StandIn()
    monkeypatch.setattr(device_copy, "_cudart", lambda: pins)
    copying = Copying(cast("Any", versions), Policy("off"), lambda _text: None)
    for recovery in range(4):
        tensors = SimpleNamespace(named=lambda: [("p", SimpleNamespace(is_cuda=True))])
        for step in range(3):
            copying.write(cast("Any", tensors), step, recovery, 0, 0)
            assert pins.registered == {versions.memory.data_ptr()}
        if recovery % 2:
            versions.map_anew()
            assert not pins.registered
    assert not pins.refused


def test_memory_that_is_not_taken_is_not_let_go_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pins, memory = Pins(), torch.zeros(64, dtype=torch.uint8)
    pins.registered.add(memory.data_ptr())
    monkeypatch.setattr(device_copy, "_cudart", lambda: pins)
    copies = DeviceCopies()
    copies.hold(memory)
    copies.release()
    assert pins.registered == {memory.data_ptr()}
    assert "CUDA error 712" in caplog.text
