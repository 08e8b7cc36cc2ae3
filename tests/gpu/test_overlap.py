"""Copies beside the training on a CUDA device: bit for bit those of copies in order. `make test-gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptless.daemon.api import messages as m
from ckptless.daemon.api import version
from ckptless.pytorch_hooks.commit.device_copy import DeviceCopies
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import State, TensorSet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 200
WIDTH = 2048


class Session:
    """Memory of its own; reads what was sent at once."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(job="job", run="0" * 32)
        self.memory = -1
        self.sent: dict[int, bytes] = {}

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        """See Session."""
        self.memory = os.memfd_create("ckptless-test")
        os.ftruncate(self.memory, slot_nbytes * slots)
        return m.Allocated(region=1), os.dup(self.memory)

    def send(self, commit: m.Commit) -> None:
        """See Session."""
        assert commit.tensors is not None
        data = os.pread(self.memory, commit.tensors.nbytes, commit.tensors.offset)
        self.sent[commit.step] = data[version.verify(memoryview(data), commit.tensors.digest).header_nbytes :]


class Rank:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.session = Session()
        self.first = nn.Linear(WIDTH, WIDTH)
        body = nn.Sequential(self.first, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.model = body.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.tensors = TensorSet(State(model=self.model, optimizer=self.optimizer))
        self.versions = Versions(cast("Any", self.session), device=DeviceCopies())

    def backward(self) -> None:
        self.model(torch.randn(64, WIDTH, device="cuda")).pow(2).mean().backward()

    def update(self) -> None:
        self.versions.fence()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self, step: int) -> None:
        commit = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
        self.versions.send(commit, self.versions.begin(self.tensors, step, 1, 0, 0))

    def copied(self) -> bytes:
        buffer = torch.zeros(self.tensors.layout.nbytes, dtype=torch.uint8)
        self.tensors.pack(buffer)
        return bytes(buffer.numpy())


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.versions.close()
    made.tensors.release()
    os.close(made.session.memory)


@pytest.mark.timeout(600)
def test_the_bytes_are_those_of_a_copy_in_order(rank: Rank) -> None:
    """Twice the same training: once copied beside it, once in order, where nothing is queued meanwhile."""
    beside, in_order = rank, Rank()
    wanted = b""
    states = [torch.cuda.get_rng_state()] * 2
    for step in range(1, STEPS + 1):
        for number, one in enumerate((beside, in_order)):
            torch.cuda.set_rng_state(states[number])
            one.backward()
            one.update()
            states[number] = torch.cuda.get_rng_state()
            if one is beside:
                one.versions.wait()
                one.begin(step)
                if step > 1:
                    assert one.session.sent.pop(step - 1) == wanted
        wanted = in_order.copied()
    beside.versions.wait()
    assert beside.session.sent.pop(STEPS) == wanted
    in_order.versions.close()


def test_a_write_by_somebody_else_is_seen(rank: Rank) -> None:
    rank.backward()
    rank.update()
    rank.begin(1)
    with torch.no_grad():
        rank.first.weight.mul_(0.5)
    with pytest.raises(StateMoved):
        rank.versions.wait()
    assert not rank.session.sent


def test_memory_is_pinned_while_it_is_copied_into(rank: Rank) -> None:
    rank.backward()
    rank.update()
    rank.begin(1)
    rank.versions.wait()
    pinned = cast("DeviceCopies", rank.versions.device)._pinned
    assert pinned is not None
    assert pinned._is_pinned
