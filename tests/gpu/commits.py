"""A rank that commits what lies on a device, without an agent: for tests of what is copied, and when."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.pytorch_hooks.commit.copying import Copying, Wanted
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet, raw
from tests.gpu import kind

CHUNK_NBYTES = 16 * version.PAGE_NBYTES


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
    """A model, an optimizer and others, on the device; its commits, and their bytes."""

    def __init__(self, model: nn.Module, overlap: Wanted = "off", **others: Any) -> None:
        kind.install()
        self.model: Any = model.to(kind.name())
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        state = State(model=self.model, optimizer=self.optimizer, **others)
        # The other one for what a test makes of the tensors: it remembers where it has packed them.
        self.tensors, self._others = TensorSet(state), TensorSet(state)
        self.session = Session()
        # Many chunks, though the model is small.
        self.versions = Versions(cast("Any", self.session), CHUNK_NBYTES)
        self.told: list[str] = []
        self.copying = Copying(self.versions, overlap, self.told.append)
        self.step = 0

    def train(self) -> None:
        """Give every trained parameter a gradient, and update it."""
        for one in self.optimizer.param_groups[0]["params"]:
            one.grad = torch.ones_like(one)
        self.copying.before_update()
        self.optimizer.step()

    def commit(self) -> None:
        """Begin a commit; wait for the one before."""
        self.copying.wait()
        self.step += 1
        told = m.Commit(generation=1, step=self.step, record=b"", digest="", tensors=None, loss=None)
        self.versions.send(told, self.copying.write(self.tensors, self.step, 1, 0, 0))

    def sealed(self, step: int) -> bytes:
        """Return the payload of a version."""
        return self.session.sent[step]

    def packed(self) -> bytes:
        """Return the payload that a version of what lives now would have."""
        payload = torch.zeros(self._others.layout.nbytes, dtype=torch.uint8)
        self._others.pack(payload)
        self._others.release()
        return bytes(raw.window(payload))

    def close(self) -> None:
        """End threads, and give memory back."""
        self.versions.close()
        self.tensors.release()
        os.close(self.session.memory)
