"""The guard over torch's private parts passes here, and speaks plainly when something has moved."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks import torch_private
from ckptless.pytorch_hooks.errors import TorchMismatch


def test_this_torch_has_all_that_is_used() -> None:
    torch_private.check()


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_ddp_init_helper")
    with pytest.raises(TorchMismatch, match=r"torch 2\..* has moved .*_ddp_init_helper is gone\.$") as caught:
        torch_private.check()
    assert torch.__version__ in str(caught.value)


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(self: object, parameters: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(DistributedDataParallel, "_ddp_init_helper", helper)
    with pytest.raises(TorchMismatch, match="no longer takes or gives expect_sparse_gradient"):
        torch_private.check()


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(TorchMismatch, match=r"torch 2\.7\.1 is too old for ckptless, which supports 2\.8"):
        torch_private.check()


def test_a_newer_torch_is_tried_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    torch_private.check()
    assert "2.99.0 is newer" in caplog.text
