"""Tensors that come to lie in one memory: what was cut off is put right, what is committed so is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.state import State, TensorSet


def made() -> tuple[Any, TensorSet]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    slow = copy.deepcopy(model)
    with torch.no_grad():
        for p in slow.parameters():
            p.add_(1)
    state = State(model=model, slow=slow)
    return state, TensorSet(state)


def packed(tensors: TensorSet) -> tuple[torch.Tensor, Any]:
    buffer = torch.empty(tensors.layout.nbytes, dtype=torch.uint8)
    return buffer, tensors.pack(buffer)


def values(tensors: TensorSet) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.named()}


def test_weights_that_are_exchanged_when_it_ends_come_back_apart() -> None:
    state, tensors = made()
    buffer, layout = packed(tensors)
    before = values(tensors)
    for p, slow in zip(state.model.parameters(), state.slow.parameters(), strict=True):
        p.data = slow.data
    tensors.unpack(buffer, layout)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.named())
    with torch.no_grad():
        state.slow[0].weight.add_(1)
    assert torch.equal(state.model[0].weight, before["p:model:0.weight"])
    tensors.check_shared()


def test_weights_that_are_exchanged_at_a_commit_are_refused() -> None:
    state, tensors = made()
    own = state.model[0].weight.data
    state.model[0].weight.data = state.slow[0].weight.data
    for _ in range(2):
        with pytest.raises(UsageError, match=r"0.weight and state.slow.0.weight lie in one memory"):
            tensors.check_shared()
    state.model[0].weight.data = own
    tensors.check_shared()
    state.model[0].weight.data = own.clone()
    tensors.check_shared()


def test_memory_that_is_shared_as_built_stays_so() -> None:
    flat = nn.Parameter(torch.arange(6.0))
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = flat.data.view(3, 2)
    state: Any = State(model=model, optimizer=torch.optim.SGD([flat], lr=0.1))
    tensors = TensorSet(state)
    buffer, layout = packed(tensors)
    with torch.no_grad():
        flat.zero_()
    tensors.unpack(buffer, layout)
    assert model.weight.flatten().tolist() == list(range(6))
    with torch.no_grad():
        flat.zero_()
    assert not model.weight.any()
    model.weight.data = torch.ones(3, 2)
    with pytest.raises(UsageError, match="do not lie in one memory any more"):
        tensors.check_shared()
    with pytest.raises(RecoveryError, match="any more"):
        tensors.unpack(buffer, layout)


def test_a_buffer_whose_elements_share_memory_is_given_its_own() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("places", torch.arange(4).expand(3, 4))
    tensors = TensorSet(State(model=model))
    buffer, layout = packed(tensors)
    tensors.unpack(buffer, layout)
    assert torch.equal(model.get_buffer("places"), torch.arange(4).expand(3, 4))
