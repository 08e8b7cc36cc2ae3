"""What a version could not bring into a new process is refused before it is committed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.process_groups.models import Buckets, Sharded
from ckptless.pytorch_hooks.state import State, TensorSet
from ckptless.pytorch_hooks.state.gradients import check_used, mark_used, watch_steps
from ckptless.pytorch_hooks.torch_private.calls import HashStore
from ckptless.pytorch_hooks.torch_private.ddp import bucket_layout


def made() -> tuple[Any, TensorSet]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(mark_used)
    state = State(model=model, optimizer=optimizer)
    return state, TensorSet(state)


def backward(state: Any, factor: float = 1.0) -> None:
    (state.model(torch.randn(4, 3)).sum() * factor).backward()


# ---------------------------------------------------------------------------- what it is made of


def test_what_training_changes_is_no_other_state() -> None:
    state, tensors = made()
    for _ in range(2):
        state.optimizer.zero_grad()
        backward(state)
        state.optimizer.step()
        tensors.check_built()
    state.model[0].requires_grad_(False)
    state.model[1].running_mean = torch.zeros(5)
    state.model.eval()
    tensors.check_built()


def swap(state: Any) -> None:
    group = state.optimizer.param_groups[0]["params"]
    group[0], group[4] = group[4], group[0]


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        "state.optimizer has 2 parameter groups, where it had 1,",
    ),
    (lambda s: s.optimizer.param_groups.clear(), "has 0 parameter groups"),
    (lambda s: s.optimizer.param_groups[0]["params"].pop(), "group 0 of state.optimizer have changed"),
    (swap, "group 0 of state.optimizer have changed"),
    (lambda s: s.model.register_buffer("mask", torch.ones(2)), "the buffer state.model.mask has come"),
    (lambda s: s.model.register_buffer("mask", None), "the buffer state.model.mask has come"),
    (lambda s: s.model[1].__delattr__("running_mean"), "the buffer state.model.1.running_mean has gone"),
    (
        lambda s: s.model[2].register_parameter("scale", nn.Parameter(torch.ones(2))),
        "the parameter state.model.2.scale has come",
    ),
    (lambda s: s.model.append(nn.Dropout()), "the module state.model.3 has come"),
    (lambda s: s.model.__setitem__(1, nn.Identity()), "state.optimizer"),
    (
        lambda s: setattr(s.model[2].weight, "data", torch.zeros(2, 4)),
        "the parameter state.model.2.weight has become (2, 4) torch.float32",
    ),
    (lambda s: s.model[2].bfloat16(), "the parameter state.model.2.weight has become (2, 3) torch.bfloat16"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_came_later_is_named(change: Callable[[Any], object], words: str) -> None:
    state, tensors = made()
    tensors.check_built()
    change(state)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"make all of it in the function given to run\.keep") as caught:
            tensors.check_built()
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", [lambda: nn.LazyLinear(3), nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d])
def test_a_lazy_module_is_refused_when_it_is_built(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(UsageError, match="run one forward pass first"):
        TensorSet(State(model=kind()))


# ------------------------------------------------------------------------------------ gradients


def test_gradients_that_were_used_may_stay() -> None:
    state, _ = made()
    check_used(state)
    for to_none in (True, False):
        backward(state)
        state.optimizer.step()
        check_used(state)
        state.optimizer.zero_grad(set_to_none=to_none)
        check_used(state)


def refused(state: Any) -> str:
    with pytest.raises(UsageError, match="a gradient that no optimizer has used") as caught:
        check_used(state)
    return str(caught.value)


def test_gradients_that_were_not_used_are_refused() -> None:
    state, _ = made()
    backward(state)
    assert refused(state).startswith("state.model.0.weight has")
    state.optimizer.step()
    backward(state)
    refused(state)
    state.optimizer.step()
    check_used(state)
    # Another gradient in its place, maybe at its address.
    state.optimizer.zero_grad()
    backward(state)
    refused(state)
    state.optimizer.zero_grad(set_to_none=False)
    check_used(state)
    backward(state, float("nan"))
    refused(state)


def test_gradients_that_are_never_zeroed_are_refused() -> None:
    state, _ = made()
    watch_steps(state)
    for to_none in (True, False, True, False):
        backward(state)
        backward(state)
        state.optimizer.step()
        check_used(state)
        state.optimizer.zero_grad(set_to_none=to_none)
    backward(state)
    state.optimizer.step()
    check_used(state)
    backward(state)
    state.optimizer.step()
    with pytest.raises(UsageError, match=r"state\.model\.0\.weight carries its gradient over"):
        check_used(state)


def test_a_gradient_of_what_is_not_trained_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    optimizer.register_step_post_hook(mark_used)
    state = State(model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert "state.model.bias" in refused(state)
    model.bias.grad = None
    check_used(state)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_step_that_a_scaler_leaves_out_has_used_them(factor: float) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = State(model=model, optimizer=optimizer, scaler=scaler)
    watch_steps(state)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
    refused(state)
    scaler.step(optimizer)
    scaler.update()
    check_used(state)
    assert torch.equal(before, model.weight) == (factor != 1.0)


class Own:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)


def test_an_optimizer_of_ones_own_has_used_them() -> None:
    model = nn.Linear(2, 2)
    optimizer = Own(list(model.parameters()))
    state = State(model=model, optimizer=optimizer)
    watch_steps(state)
    model(torch.ones(1, 2)).sum().backward()
    refused(state)
    optimizer.step()
    check_used(state)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.usefixtures("world")
def test_ddp_accumulates_gradients_that_are_not_used_yet(view: bool, static: bool) -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(body, gradient_as_bucket_view=view, static_graph=static)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(mark_used)
    state = State(model=model, optimizer=optimizer)
    buckets = Buckets(state)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 3:
            with model.no_sync():
                model(torch.randn(2, 4)).sum().backward()
            refused(state)
        model(torch.randn(2, 4)).sum().backward()
        refused(state)
        optimizer.step()
        check_used(state)
        buckets.settle()


@pytest.mark.parametrize("when", ["before the state is built", "in training"])
@pytest.mark.usefixtures("world")
def test_ddp_s_buckets_have_what_was_frozen_after_it_was_made(when: str) -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    body[0].bias.requires_grad_(False)
    body[1].tied = body[2].bias
    model = nn.parallel.DistributedDataParallel(body, find_unused_parameters=True, bucket_cap_mb=1e-5)
    made = bucket_layout(model)
    assert sorted(number for bucket in made for number in bucket) == list(range(5))
    if when == "in training":
        buckets = Buckets(State(model=model))
    body[1].weight.requires_grad_(False)
    if when != "in training":
        buckets = Buckets(State(model=model))
    model(torch.randn(2, 4)).sum().backward()
    buckets.settle()
    assert list(buckets.layouts.values()) == [made]
    buckets.renew(dict(buckets.layouts))
    # The record says what is trained, where that is not as it was built.
    assert body[1].weight.requires_grad == (when == "in training")
    assert not body[0].bias.requires_grad
    assert bucket_layout(model) == made


def sharded_state() -> tuple[Any, State]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    sharded: Any = fully_shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters())
    optimizer.register_step_post_hook(mark_used)
    state = State(model=model, optimizer=optimizer)
    watch_steps(state)
    return sharded, state


@pytest.mark.usefixtures("world")
def test_fsdp_s_gradients_that_are_never_zeroed_are_refused() -> None:
    model, state = sharded_state()
    for to_none in (True, False, False, True):
        loss = model(torch.randn(2, 4)).sum()
        state.optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        model(torch.randn(2, 4)).sum().backward()
        state.optimizer.step()
        check_used(state)
    model(torch.randn(2, 4)).sum().backward()
    state.optimizer.step()
    with pytest.raises(UsageError, match=r"state\.model\.\d\.weight carries its gradient over"):
        check_used(state)


def test_of_two_optimizers_each_zeroes_its_own_gradients() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    for one in optimizers:
        one.register_step_post_hook(mark_used)
    state = State(model=models, optimizer=optimizers)
    watch_steps(state)

    def step(*zeroed: torch.optim.Optimizer) -> None:
        """As a GAN's: the first is trained, then the second through the first."""
        for each in zeroed:
            each.zero_grad()
        models[0](torch.ones(1, 2)).square().sum().backward()
        optimizers[0].step()
        models[0](models[1](torch.ones(1, 2))).square().sum().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        check_used(state)

    step(*optimizers)
    step(*optimizers)
    with pytest.raises(UsageError, match=r"state\.model\[1\]\.weight carries its gradient over"):
        step(optimizers[0])


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.usefixtures("world")
def test_fsdp_accumulates_gradients_that_are_not_used_yet(reduced: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    sharded: Any = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(mark_used)
    state = State(model=model, optimizer=optimizer)
    hidden = Sharded(model.modules())
    for _ in range(3):
        optimizer.zero_grad()
        sharded.set_requires_gradient_sync(reduced)
        sharded(torch.randn(2, 4)).sum().backward()
        assert hidden.holds_gradients() != reduced
        sharded.set_requires_gradient_sync(True)
        sharded(torch.randn(2, 4)).sum().backward()
        assert not hidden.holds_gradients()
        refused(state)
        optimizer.step()
        check_used(state)
        sharded(torch.randn(2, 4)).sum().backward()
        refused(state)
