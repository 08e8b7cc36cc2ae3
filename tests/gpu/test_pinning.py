"""Batches in page-locked memory, on a CUDA device alone: the loader knows no other. `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from ckptless.pytorch_hooks.data import MappedLoader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SAMPLES = [torch.full((1000,), float(n)) for n in range(64)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_locked_and_the_same_on_the_device(workers: int) -> None:
    loader = MappedLoader(SAMPLES, batch_size=8, seed=1, shuffle=True, workers=workers, pin_memory=True)
    plain = MappedLoader(SAMPLES, batch_size=8, seed=1, shuffle=True, workers=0)
    found = []
    for batch in loader:
        assert batch.is_pinned()
        found.append(batch.to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    loader.close()
    assert len(found) == 8
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, plain, strict=True))
