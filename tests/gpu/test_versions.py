"""Versions of tensors on a device: packed right, into memory that is page-locked. `make test-gpu`."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol import messages as m
from ckptless.pytorch_hooks.commit.copying import Copying
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet
from tests.gpu import kind
from tests.gpu.commits import Session

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))

WIDTH = 512


def test_a_version_is_what_lives_on_the_device_and_its_memory_is_pinned() -> None:
    kind.install()
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model = body.to(kind.name())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind.name() == "cuda")
    tensors = TensorSet(State(model=model, optimizer=optimizer))
    session = Session()
    versions = Versions(cast("Any", session))
    copying = Copying(versions, "off", lambda _text: None)
    for step in range(1, 6):
        model(torch.randn(64, WIDTH, device=kind.name())).pow(2).mean().backward()
        copying.before_update()
        optimizer.step()
        optimizer.zero_grad()
        commit = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
        versions.send(commit, copying.write(tensors, step, 1, 0, 0))
        copying.wait()
        wanted = torch.zeros(tensors.layout.nbytes, dtype=torch.uint8)
        tensors.pack(wanted)
        assert session.sent[step] == bytes(wanted.numpy())
    assert versions._slots is not None
    pinned = [ready.result() for ready in versions._slots._ready.values()]
    assert all(one is not None and one.is_pinned for one in pinned)
    versions.close()
    tensors.release()
    os.close(session.memory)
