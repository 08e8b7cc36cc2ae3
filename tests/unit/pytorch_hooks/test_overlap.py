"""Copies beside the training: the same bytes as copies in order, and never of a state that was written to."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, UsageError
from ckptless.pytorch_hooks.commit import versions as subject
from ckptless.pytorch_hooks.commit.copying import TRIALS, Copying, Wanted, checked_overlap
from ckptless.pytorch_hooks.commit.overlap import PIECE_NBYTES, BesideTraining
from ckptless.pytorch_hooks.commit.slots import SLOTS
from ckptless.pytorch_hooks.commit.versions import Versions, WrittenVersion
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import State, TensorCopy, TensorSet

DEADLINE_S = 30.0


class FakeSession:
    """Memory of its own; says what was sent."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(job="job", run="0" * 32)
        self.sent: list[m.Commit] = []
        self.memory: list[int] = []

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        self.memory.append(os.memfd_create("ckptless-test"))
        os.ftruncate(self.memory[-1], slot_nbytes * slots)
        return m.Allocated(region=len(self.memory)), os.dup(self.memory[-1])

    def send(self, message: m.Commit) -> None:
        self.sent.append(message)

    def sound(self, commit: m.Commit) -> bytes:
        """The payload that was sent, verified."""
        at = commit.tensors
        assert at is not None
        data = os.pread(self.memory[at.region - 1], at.nbytes, at.offset)
        return data[version.verify(memoryview(data), at.digest).header_nbytes :]


class Gate:
    """Copies do not begin before it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.fenced = threading.Event()

    def copies(self, later: Sequence[TensorCopy]) -> BesideTraining:
        return GatedCopies(later, self)


class GatedCopies(BesideTraining):
    def __init__(self, copies: Sequence[TensorCopy], gate: Gate) -> None:
        super().__init__(copies)
        self.gated = gate

    def complete(self, came: Callable[[int], None]) -> None:
        assert self.gated.gate.wait(DEADLINE_S)
        super().complete(came)

    def fence(self) -> None:
        self.gated.fenced.set()
        super().fence()


class Model(nn.Module):
    """Tensors of many kinds, some larger than what is copied at a time, and over the bounds of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(1000, 700)
        self.turned = nn.Parameter(torch.randn(300, 200).t())
        self.short = nn.Parameter(torch.randn(77, 3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(50), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.norm = nn.BatchNorm1d(700)
        self.register_buffer("none", torch.empty(0))


class Rank:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.session = FakeSession()
        self.versions = Versions(cast("Any", self.session), 16 * version.PAGE_NBYTES)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = copy.deepcopy(self.model.big)
        self.tensors = TensorSet(State(model=self.model, optimizer=self.optimizer, ema=self.ema))
        self.update()

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def send(self, written: WrittenVersion, step: int = 1) -> None:
        commit = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
        self.versions.send(commit, written)

    def begin(self, step: int = 1) -> WrittenVersion:
        written = self.versions.begin(self.tensors, step, 1, 0, 0)
        self.send(written, step)
        return written

    def packed(self) -> bytes:
        buffer = torch.empty(self.tensors.layout.nbytes, dtype=torch.uint8)
        self.tensors.pack(buffer)
        return bytes(buffer.numpy())

    def close(self) -> None:
        self.versions.close()
        self.tensors.release()
        for fd in self.session.memory:
            os.close(fd)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Gate]]:
    gate, rank = Gate(), Rank()
    monkeypatch.setattr(subject, "BesideTraining", gate.copies)
    yield rank, gate
    gate.gate.set()
    rank.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_the_bytes_are_those_of_a_copy_in_order(rank: Rank) -> None:
    assert rank.tensors.layout.nbytes > 3 * PIECE_NBYTES
    for step in range(2 * SLOTS):
        wanted = rank.packed()
        rank.begin(step)
        rank.versions.fence()
        rank.update()
        rank.versions.wait()
        assert rank.session.sent[-1].step == step
        assert rank.session.sound(rank.session.sent[-1]) == wanted


def test_an_update_waits_for_the_copy(gated: tuple[Rank, Gate]) -> None:
    rank, device = gated
    wanted = rank.packed()
    rank.begin()

    def let() -> None:
        device.fenced.wait(DEADLINE_S)
        device.gate.set()

    letting = threading.Thread(target=let)
    letting.start()
    rank.versions.fence()
    rank.update()
    rank.versions.wait()
    letting.join()
    assert rank.session.sound(rank.session.sent[-1]) == wanted


def test_what_may_change_in_a_forward_pass_is_copied_at_once(gated: tuple[Rank, Gate]) -> None:
    rank, device = gated
    wanted = rank.packed()
    rank.begin()
    rank.model.norm(torch.randn(4, 700))
    with torch.no_grad():
        rank.ema.weight.mul_(0.5)
    device.gate.set()
    rank.versions.wait()
    assert rank.session.sound(rank.session.sent[-1]) == wanted


def writes() -> list[tuple[str, Callable[[Model], object]]]:
    def on(model: Model) -> torch.Tensor:
        return model.big.weight

    return [
        ("in place", lambda model: on(model).mul_(0.5)),
        ("foreach", lambda model: torch._foreach_mul_(list(model.parameters()), 0.5)),
        ("detached", lambda model: on(model).detach().clamp_(-0.1, 0.1)),
        ("loaded", lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})),
        ("frozen", lambda model: model.frozen.add_(1)),
        ("initialised", lambda model: nn.init.normal_(on(model))),
    ]


@pytest.mark.parametrize(("what", "write"), writes())
@pytest.mark.parametrize("then", ["fence", "wait"])
def test_a_version_that_was_written_to_is_never_sealed(
    gated: tuple[Rank, Gate], what: str, write: Callable[[Model], object], then: str
) -> None:
    rank, device = gated
    written = rank.begin()
    with torch.no_grad():
        write(rank.model)
    device.gate.set()
    with pytest.raises(StateMoved, match=r"^[po]:(model|optimizer):"):
        getattr(rank.versions, then)()
    assert (rank.versions.leave() is not None) == (then == "fence")
    assert rank.session.sent == [], what
    with pytest.raises(BadVersionError):
        version.decode(bytes(written.slot.numpy()))
    # It was that commit alone.
    rank.begin(2)
    rank.versions.wait()
    assert rank.session.sound(rank.session.sent[-1]) == rank.packed()


@pytest.mark.parametrize("where", ["big", "turned", "short", "scalar"])
@pytest.mark.parametrize("how", ["data", "inference", "another thread"])
def test_a_version_that_was_written_to_unseen_is_never_sealed(
    gated: tuple[Rank, Gate], how: str, where: str
) -> None:
    """An update by hand through `.data` has no hook and no count: only the bytes tell."""
    rank, device = gated
    rank.begin()
    tensor = rank.model.big.weight if where == "big" else getattr(rank.model, where)

    def write() -> None:
        if how == "inference":
            with torch.inference_mode():
                tensor.mul_(0.5)
        else:
            tensor.data.view(-1)[-1:].mul_(0.5) if where == "big" else tensor.data.mul_(0.5)

    if how == "another thread":
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(DEADLINE_S)
    else:
        write()
    device.gate.set()
    with pytest.raises(StateMoved, match=r"^[po]:(model|optimizer):"):
        rank.versions.wait()
    assert rank.session.sent == []


def test_memory_that_is_put_in_place_of_a_tensors_is_not_what_is_copied(
    gated: tuple[Rank, Gate],
) -> None:
    """Torch does not count it, and need not: the copy has what was there, and keeps it alive."""
    rank, device = gated
    wanted = rank.packed()
    rank.begin()
    rank.model.big.weight.data = torch.zeros(700, 1000)
    device.gate.set()
    rank.versions.wait()
    assert rank.session.sound(rank.session.sent[-1]) == wanted
    rank.begin(2)
    rank.versions.wait()
    assert rank.session.sound(rank.session.sent[-1]) == rank.packed()


def test_a_version_is_sealed_without_another_call(rank: Rank) -> None:
    rank.begin()
    deadline = time.monotonic() + DEADLINE_S
    while not rank.session.sent and time.monotonic() < deadline:
        torch.randn(10)
    assert rank.session.sound(rank.session.sent[-1]) == rank.packed()


class FailingCopies(BesideTraining):
    def __init__(self, copies: Sequence[TensorCopy]) -> None:
        super().__init__([copies[0]._replace(source=torch.zeros(3)), *copies])


def test_a_copy_that_fails_holds_up_nobody(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "BesideTraining", FailingCopies)
    rank.begin()
    rank.versions.fence()
    with pytest.raises(RuntimeError, match="size"):
        rank.versions.wait()
    assert rank.session.sent == []


# ------------------------------------------------------------------------------------------ policy


class Trained:
    """A rank whose steps may write between commit and update."""

    def __init__(self, rank: Rank, overlap: Wanted) -> None:
        self.rank, self.told = rank, list[str]()
        self.copying = Copying(rank.versions, overlap, self.told.append)
        self.steps = 0

    def step(self, between: Callable[[Model], object] = lambda _model: None) -> bool:
        """Whether its commit was copied beside."""
        self.steps += 1
        self.copying.wait()
        written = self.copying.write(self.rank.tensors, self.steps, 1, 0, 0)
        self.rank.send(written, self.steps)
        between(self.rank.model)
        self.copying.before_update()
        self.rank.update()
        return written.coming is not None


def test_copies_run_beside_once_that_was_tried(rank: Rank) -> None:
    trained = Trained(rank, "on")
    assert [trained.step() for _ in range(TRIALS + 2)] == [False] * TRIALS + [True] * 2
    assert trained.told == []


@pytest.mark.parametrize("way", ["data", "inference", "put in place"])
def test_a_script_that_writes_unseen_never_gets_them(rank: Rank, way: str) -> None:
    def write(model: Model) -> None:
        if way == "data":
            model.big.weight.data.mul_(0.99)
        elif way == "inference":
            with torch.inference_mode():
                model.big.weight.mul_(0.99)
        else:
            model.big.weight.data = model.big.weight.data * 0.99

    trained = Trained(rank, "on")
    assert [trained.step(write) for _ in range(5)] == [False] * 5
    (told,) = trained.told
    assert "p:model:big.weight" in told
    assert "overlap='on'" in told


def test_after_a_write_that_was_counted_copies_are_in_order(gated: tuple[Rank, Gate]) -> None:
    rank, device = gated
    trained = Trained(rank, "on")
    for _ in range(TRIALS):
        trained.step()

    def write(model: Model) -> None:
        with torch.no_grad():
            model.scalar.add_(1)
        device.gate.set()

    with pytest.raises(StateMoved, match="overlap='on'"):
        trained.step(write)
    trained.copying.leave()
    assert len(trained.told) == 1
    assert not trained.step(write)
    trained.copying.leave()
    assert len(trained.told) == 1


def test_nothing_is_copied_beside_unless_the_script_says_so(rank: Rank) -> None:
    trained = Trained(rank, "off")
    assert [trained.step() for _ in range(TRIALS + 2)] == [False] * (TRIALS + 2)


def test_what_the_user_says() -> None:
    assert checked_overlap("on") == "on"
    with pytest.raises(UsageError, match='"on" or "off"'):
        checked_overlap(True)
