"""Copies from a device beside the training, and those that are left out: the same bytes. `make test-gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.pytorch_hooks.commit import frozen
from ckptless.pytorch_hooks.commit.copying import TRIALS, Wanted
from ckptless.pytorch_hooks.commit.device_overlap import BesideOnDevice
from ckptless.pytorch_hooks.commit.frozen import Frozen, Needed
from ckptless.pytorch_hooks.commit.slots import SLOTS
from ckptless.pytorch_hooks.devices.sums import DeviceSums
from ckptless.pytorch_hooks.errors import FrozenChanged, StateMoved
from ckptless.pytorch_hooks.state import State, TensorCopy, restore
from ckptless.pytorch_hooks.state.record import draft
from tests.gpu import kind
from tests.gpu.commits import Rank

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))

# Of 1 MiB, which is worth to be copied beside or left out, and smaller.
WIDE, NARROW = 512, 64


class Model(nn.Module):
    """Large and small parameters, trained and frozen; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE, bias=False).requires_grad_(False)
        self.large = nn.Linear(WIDE, WIDE)
        self.small = nn.Linear(NARROW, NARROW)
        self.register_buffer("table", torch.randn(WIDE, WIDE))


class Make(Protocol):
    """Makes a rank with such a model."""

    def __call__(self, overlap: Wanted = "off") -> Rank:
        """Return one that is closed after the test."""


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rank] = []

    def rank(overlap: Wanted = "off") -> Rank:
        kind.install()
        torch.manual_seed(1)
        made.append(Rank(Model(), overlap))
        return made[-1]

    yield rank
    for one in made:
        one.close()


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_bytes_are_those_at_the_commit(make: Make, overlap: Wanted) -> None:
    rank = make(overlap)
    wanted: dict[int, bytes] = {}
    for _ in range(4 * SLOTS + TRIALS):
        rank.train()
        rank.commit()
        wanted[rank.step] = rank.packed()
    rank.copying.wait()
    assert rank.session.sent == wanted
    assert rank.told == []


def overlapped(make: Make) -> Rank:
    """Return a rank whose trials are over."""
    rank = make("on")
    for _ in range(TRIALS + 1):
        rank.train()
        rank.commit()
    rank.train()
    return rank


def test_an_update_waits_on_the_device_for_the_copies_and_no_thread_does(make: Make) -> None:
    """The copies are held up; the update is queued behind them, and the training goes on."""
    rank = overlapped(make)
    wanted = rank.packed()
    rank.copying.wait()
    with contextlib.ExitStack() as gate:
        hold(rank, gate)
        with kind.no_waits():
            rank.commit()
            rank.train()
        assert rank.step not in rank.session.sent
    rank.copying.wait()
    assert rank.sealed(rank.step) == wanted
    assert rank.packed() != wanted


def hold(rank: Rank, gate: contextlib.ExitStack) -> None:
    """Have the copies beside the training wait until `gate` is closed."""
    assert rank.versions._stream is not None
    with rank.versions._stream:
        gate.enter_context(kind.held())


def uncounted(weight: torch.Tensor) -> None:
    """Write to a tensor without torch's counting it."""
    weight.data[3, 4] += 1


def swapped(weight: torch.Tensor) -> None:
    """Move whole rows."""
    weight.data[[0, 7]] = weight.data[[7, 0]]


@pytest.mark.parametrize("write", [uncounted, swapped])
def test_a_write_before_the_copy_is_found(make: Make, write: Callable[[torch.Tensor], None]) -> None:
    rank = overlapped(make)
    rank.copying.wait()
    # A kernel's first launch in a process may wait for the device.
    write(rank.model.large.weight.detach().clone())
    with contextlib.ExitStack() as gate:
        hold(rank, gate)
        rank.commit()
        write(rank.model.large.weight)
        torch.accelerator.current_stream().synchronize()
    with pytest.raises(StateMoved, match=r"p:model:large\.weight is changed between run.commit and"):
        rank.copying.wait()
    assert rank.step not in rank.session.sent
    assert len(rank.told) == 1
    # In order from now on.
    rank.commit()
    wanted = rank.packed()
    write(rank.model.large.weight)
    rank.copying.wait()
    assert rank.sealed(rank.step) == wanted


def test_an_update_that_does_not_wait_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a CUDA graph replays: nothing of ours is called before it."""
    rank = overlapped(make)
    rank.copying.wait()
    monkeypatch.setattr(BesideOnDevice, "fence", lambda _self: None)
    with contextlib.ExitStack() as gate:
        hold(rank, gate)
        rank.commit()
        rank.train()
        torch.accelerator.current_stream().synchronize()
    with pytest.raises(StateMoved):
        rank.copying.wait()
    assert rank.step not in rank.session.sent


def test_a_script_that_writes_between_commit_and_update_is_never_overlapped(make: Make) -> None:
    rank = make("on")
    for _ in range(TRIALS + 3):
        uncounted(rank.model.large.weight)
        rank.train()
        rank.commit()
        wanted = rank.packed()
        uncounted(rank.model.large.weight)
        with contextlib.suppress(StateMoved):
            rank.copying.before_update()
        rank.copying.wait()
        assert rank.sealed(rank.step) == wanted
    assert len(rank.told) == 1


# ---- frozen tensors


class Copied:
    """Notes what is copied of frozen tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[set[str]] = []
        real = Frozen.begin

        def begin(
            frozen: Frozen, slot: int, copies: list[TensorCopy], device: torch.device, layout: str
        ) -> Needed:
            needed = real(frozen, slot, copies, device, layout)
            self.names.append({one.name for one in needed.copies if one.frozen})
            return needed

        monkeypatch.setattr(Frozen, "begin", begin)


BOTH = {"p:model:base.weight", "b:model:table"}
# Commits before one is left out: its mark is noted, then its sums, which are then the same TRIALS times.
QUIET = frozen.TRIALS + 2
# It shares chunks with what is trained.
MIXED = {"b:model:table"}


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_nobody_writes_to_is_not_copied_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: Wanted
) -> None:
    copied = Copied(monkeypatch)
    rank = make(overlap)
    for _ in range(QUIET + SLOTS):
        rank.train()
        rank.commit()
    rank.copying.wait()
    assert copied.names == [BOTH] * QUIET + [MIXED] * SLOTS
    assert rank.sealed(rank.step) == rank.packed()


def test_what_is_written_to_is_copied_into_every_slot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    rank = make()
    wanted = {}
    for _ in range(2 * QUIET + 3 * SLOTS):
        rank.train()
        if rank.step == QUIET + SLOTS:
            with torch.no_grad():
                rank.model.base.weight.mul_(2)
        rank.commit()
        wanted[rank.step] = rank.packed()
    rank.copying.wait()
    assert rank.session.sent == wanted
    assert copied.names.count(BOTH) == 2 * QUIET


@pytest.mark.parametrize("write", [uncounted, swapped])
def test_an_uncounted_write_makes_one_version_void_and_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], None]
) -> None:
    copied = Copied(monkeypatch)
    rank = make()
    for _ in range(QUIET + SLOTS):
        rank.train()
        rank.commit()
    rank.copying.wait()
    write(rank.model.base.weight)
    rank.commit()
    with pytest.raises(FrozenChanged, match=r"p:model:base\.weight needs no gradient"):
        rank.copying.wait()
    assert rank.step not in rank.session.sent
    for _ in range(3 * SLOTS):
        write(rank.model.base.weight)
        rank.commit()
        rank.copying.wait()
        assert rank.sealed(rank.step) == rank.packed()
        assert "p:model:base.weight" in copied.names[-1]


def test_a_moving_average_is_copied_at_every_commit(make: Make) -> None:
    """It is written to by .data from the beginning: no version is void for it."""
    rank = make()
    for _ in range(4 * SLOTS):
        rank.train()
        rank.model.base.weight.data.mul_(0.9)
        rank.commit()
        wanted = rank.packed()
        rank.copying.wait()
        assert rank.sealed(rank.step) == wanted


def test_what_is_written_to_is_not_added_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the count, or found out once: the sums would be of no use."""
    summed: list[int] = []
    real = DeviceSums

    def sums(tensors: list[torch.Tensor]) -> DeviceSums:
        summed.append(len(tensors))
        return real(tensors)

    monkeypatch.setattr(frozen, "DeviceSums", sums)
    rank = make()
    for _ in range(8):
        with torch.no_grad():
            rank.model.table.mul_(0.9)
        rank.model.base.weight.data.mul_(0.9)
        rank.commit()
    rank.copying.wait()
    # Of the one whose writes are not counted, until it is found to change.
    assert summed == [1, 1]


def test_slots_that_were_read_back_may_hold_anything(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    rank = make()
    for _ in range(QUIET + SLOTS):
        rank.train()
        rank.commit()
    rank.copying.leave()
    rank.commit()
    rank.copying.wait()
    assert copied.names[-2:] == [MIXED, BOTH]


def test_memory_that_rots_is_found(make: Make) -> None:
    """The digest of a tensor that was left out is that of when it came."""
    rank = make()
    for _ in range(QUIET + SLOTS):
        rank.train()
        rank.commit()
    rank.copying.wait()
    slots = rank.versions._slots
    assert slots is not None
    for index in range(SLOTS):
        # In the payload's first tensor, which is frozen.
        slots.slot(index)[1 << 18] ^= 4
    rank.commit()
    with pytest.raises(BadVersionError):
        rank.copying.wait()


class Sums:
    """An adapter's object, with tensors on the device and off it."""

    # Into those of a script's own somebody looks at each commit.
    __module__ = "ckptless"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums = {"loss": torch.zeros((), device=device), "count": torch.zeros((), dtype=torch.int64)}
        self.names = ["a", "b"]

    def state_dict(self) -> dict[str, object]:
        return {"sums": self.sums, "names": self.names, "pair": (1, 2.5, None)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.sums, self.names = saved["sums"], saved["names"]
        assert saved["pair"] == (1, 2.5, None)


def test_tensors_of_an_object_on_the_device_are_not_waited_for() -> None:
    kind.install()
    device = torch.device(kind.name())
    model = nn.Linear(NARROW, NARROW).to(device)
    sums = Sums(device)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), sums=sums)
    sums.sums["loss"] += 1.5
    sums.sums["count"] += 3
    with kind.held(), kind.no_waits():
        made = draft(state, 1)
        # The training goes on.
        sums.sums["loss"] += 1
        sums.sums["count"] += 1
        sums.names.append("c")
    assert not made.is_whole
    restore(made.finish(), state)
    assert {name: (one.item(), one.device.type) for name, one in sums.sums.items()} == {
        "loss": (1.5, device.type),
        "count": (3, "cpu"),
    }
    assert sums.names == ["a", "b"]
