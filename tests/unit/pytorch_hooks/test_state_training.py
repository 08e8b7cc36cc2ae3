"""Training goes on with the same bits after a restore, for every optimizer, scheduler and kind of model."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.state import State, TensorSet, restore

from .captured import capture

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Any]
Build = Callable[[], State]
Step = Callable[[State], float]
BEFORE, AFTER = 3, 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Tied, frozen and 0-dim parameters, dropout, batch norm, a constant buffer and an empty tensor."""

    def __init__(self, empty: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(empty, 4))
        self.register_buffer("mask", torch.rand(3) > 0.2)
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.tied(self.inner(x))))
        mask = self.mask
        assert isinstance(mask, torch.Tensor)
        out: torch.Tensor = (self.out(self.drop(x)) + self.frozen) * self.gain * mask
        return out + self.empty.sum()


class Flat(nn.Module):
    """Weights with two dimensions only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8, bias=False)
        self.b = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(torch.tanh(self.a(x)), 0.2))  # type: ignore[no-any-return]


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # All three generators: a restore that misses one shows in the first loss.
    return (torch.randn(5, 6) + random.random() + float(np.random.rand())).to(dtype)


def plain_step(s: State) -> float:
    x = batch(next(s.model.parameters()).dtype)

    def closure() -> Any:
        s.optimizer.zero_grad()
        loss = s.model(x).float().square().mean()
        loss.backward()
        return loss

    if type(s.optimizer) is torch.optim.LBFGS:
        optimizer: Any = s.optimizer
        return float(optimizer.step(closure).detach())
    loss = closure()
    s.optimizer.step()
    schedulers = s.scheduler if isinstance(s.scheduler, list) else [s.scheduler]
    for one in schedulers:
        if isinstance(one, lrs.ReduceLROnPlateau):
            one.step(float(loss.detach()))
        elif one is not None:
            one.step()
    return float(loss.detach())


def run(state: State, steps: int, step: Step = plain_step) -> list[str]:
    return [step(state).hex() for _ in range(steps)]


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Kept:
    """A commit: the packed tensors and the record."""

    def __init__(self, state: State, tensors: TensorSet, step: int) -> None:
        self.layout = tensors.layout
        self.buffer = torch.empty(self.layout.nbytes + 128, dtype=torch.uint8)
        assert tensors.pack(self.buffer) is self.layout
        self.record = capture(state, step, {"at": step}, {"model": [[1, 0]]}, tensors)
        self.digest = bytes(self.buffer[: self.layout.nbytes].numpy())

    def put_back(self, state: State, tensors: TensorSet) -> None:
        tensors.unpack(self.buffer, self.layout)
        view = restore(self.record, state)
        assert view.cursor == {"at": view.step}
        assert view.ddp_layouts == {"model": [[1, 0]]}
        assert view.layout == self.layout
        # The very state of then: packed again it has the same bytes, and the record too.
        again = Kept(state, tensors, view.step)
        assert again.layout == self.layout
        assert again.digest == self.digest
        assert again.record == self.record


def check(build: Build, step: Step = plain_step) -> tuple[State, State]:
    """Run through commit, fault and restore; returns the living state and the one built anew."""
    seed(1)
    state = build()
    tensors = TensorSet(state)
    start = Kept(state, tensors, 0)
    first = run(state, BEFORE, step)
    kept = Kept(state, tensors, BEFORE)
    reference = run(state, AFTER, step)
    end = Kept(state, tensors, BEFORE + AFTER)
    assert len(set(reference)) > 1

    run(state, AFTER, step)
    kept.put_back(state, tensors)
    assert run(state, AFTER, step) == reference
    assert Kept(state, tensors, BEFORE + AFTER).digest == end.digest

    seed(999)
    fresh = build()
    random.random()
    others = TensorSet(fresh)
    kept.put_back(fresh, others)
    assert run(fresh, AFTER, step) == reference
    assert Kept(fresh, others, BEFORE + AFTER).digest == end.digest

    for one, its in ((state, tensors), (fresh, others)):
        start.put_back(one, its)
        assert run(one, BEFORE, step) == first
        kept.put_back(one, its)
        assert run(one, AFTER, step) == reference
    start.put_back(state, tensors)
    return state, fresh


def optimizers() -> Iterator[Any]:
    plain: dict[str, dict[str, Any]] = {
        "ASGD": {"t0": 2},
        "Adadelta": {},
        "Adafactor": {},
        "Adagrad": {"initial_accumulator_value": 0.1},
        "Adam": {"amsgrad": True},
        "AdamW": {},
        "Adamax": {},
        "LBFGS": {"max_iter": 3, "history_size": 4},
        "Muon": {},
        "NAdam": {},
        "RAdam": {},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "Rprop": {},
        "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    }
    if not hasattr(torch.optim, "Muon"):  # new with torch 2.9
        del plain["Muon"]
    known = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)}
    # SparseAdam takes sparse gradients only: test_sparse_adam.
    assert known - {"Optimizer", "SparseAdam"} == set(plain)
    fused = {"Adam", "AdamW", "SGD", "Adagrad"}
    for name, options in plain.items():
        yield pytest.param(name, options, id=name)
        if name not in ("LBFGS", "Muon"):
            yield pytest.param(name, {**options, "foreach": True}, id=f"{name}-foreach")
        if name in fused:
            yield pytest.param(name, {**options, "fused": True}, id=f"{name}-fused")
    yield pytest.param("SGD", {}, id="SGD-bare")
    yield pytest.param("LBFGS", {"line_search_fn": "strong_wolfe", "max_iter": 3}, id="LBFGS-wolfe")
    yield pytest.param("Adam", {"lr": torch.tensor(0.01)}, id="Adam-tensor-lr")


@pytest.mark.parametrize(("name", "options"), list(optimizers()))
def test_every_optimizer(name: str, options: dict[str, Any]) -> None:
    def build() -> State:
        # Adafactor divides by the number of elements.
        model: nn.Module = Flat() if name in ("Muon", "LBFGS") else Net(int(name == "Adafactor"))
        given = {"lr": 0.02, **options}
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        return State(model=model, optimizer=getattr(torch.optim, name)(model.parameters(), **given))

    check(build)


def test_back_at_step_0_the_state_is_empty() -> None:
    def build() -> State:
        model = Net()
        return State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    seed(1)
    state = build()
    tensors = TensorSet(state)
    start = Kept(state, tensors, 0)
    run(state, 2)
    assert state.optimizer.state
    start.put_back(state, tensors)
    assert not state.optimizer.state


def test_sparse_adam() -> None:
    def build() -> State:
        model = nn.EmbeddingBag(10, 4, sparse=True)
        return State(model=model, optimizer=torch.optim.SparseAdam(list(model.parameters()), lr=0.1))

    def step(s: State) -> float:
        s.optimizer.zero_grad()
        loss = s.model(torch.randint(0, 10, (3, 4))).square().mean()
        loss.backward()
        s.optimizer.step()
        return float(loss.detach())

    check(build, step)


def schedulers() -> dict[str, Callable[[Any], Any]]:
    class Warm:
        """A callable with state of its own, as LambdaLR saves it."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, epoch: float) -> float:
            self.calls += 1
            return 1.0 / (1 + self.calls)

    def sequence(o: Any) -> Any:
        parts = [lrs.LinearLR(o, 0.1, total_iters=2), lrs.LambdaLR(o, lambda e: 0.9**e), lrs.StepLR(o, 1)]
        return lrs.SequentialLR(o, parts, milestones=[2, 5])

    def chain(o: Any) -> Any:
        return lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)])

    return {
        "LambdaLR": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
        "LambdaLR-object": lambda o: lrs.LambdaLR(o, Warm()),
        "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.95),
        "StepLR": lambda o: lrs.StepLR(o, 2),
        "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 4, 4, 6]),
        "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 4),
        "LinearLR": lambda o: lrs.LinearLR(o, 0.5, total_iters=5),
        "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
        "SequentialLR": sequence,
        "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
        "ChainedScheduler": chain,
        "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, cooldown=1),
        "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range"),
        "CyclicLR-lambda": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5**x),
        "CyclicLR-object": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Warm()),
        "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
        "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
        "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
        "LRScheduler-SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
    }


def test_every_scheduler_is_tried() -> None:
    assert {name.split("-")[0] for name in schedulers()} == set(lrs.__all__)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["", "tensor-lr"])
@pytest.mark.parametrize("name", list(schedulers()))
def test_every_scheduler(name: str, tensor_lr: bool) -> None:
    def build() -> State:
        model = Net()
        lr = torch.tensor(0.05) if tensor_lr else 0.05
        groups: list[dict[str, Any]] = [
            {"params": [*model.out.parameters()]},
            {"params": [model.inner.weight], "momentum": 0.8},
        ]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        return State(model=model, optimizer=optimizer, scheduler=schedulers()[name](optimizer))

    group = build().optimizer.param_groups[0]
    if tensor_lr and group["lr"] is group.get("initial_lr"):
        assert name == "SequentialLR"
        assert torch.__version__.startswith(("2.8.", "2.9."))
        with pytest.raises(UsageError, match="give it as a number, or take torch 2"):
            check(build)
        return
    check(build)


def test_a_learning_rate_that_is_one_tensor_with_the_initial_one_is_refused() -> None:
    """As SequentialLR of older torches makes it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05))
    (group,) = optimizer.param_groups
    group["initial_lr"] = group["lr"].clone()
    TensorSet(State(model=model, optimizer=optimizer))
    group["initial_lr"] = group["lr"]
    with pytest.raises(UsageError, match=r"state\.optimizer has a learning rate that is one tensor"):
        TensorSet(State(model=model, optimizer=optimizer))


def test_ema_as_an_extra_module() -> None:
    def build() -> State:
        model = Net()
        average: Any = get_ema_multi_avg_fn
        ema = AveragedModel(model, multi_avg_fn=average(0.9), use_buffers=False)
        return State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), ema=ema)

    def step(s: State) -> float:
        loss = plain_step(s)
        s.ema.update_parameters(s.model)
        with torch.no_grad():
            return loss + float(s.ema(batch()).sum())

    check(build, step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def build() -> State:
        model = Net().to(dtype)
        return State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))

    check(build)


class Master(torch.optim.Optimizer):
    """fp32 moments of bf16 weights, a plain step count, a history list and state of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole: Any = self.state
        with torch.no_grad():
            whole["total"] = whole.get("total", 0) + 1
            for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("z", torch.zeros_like(p, dtype=torch.float32))
                state.setdefault("past", {"last": [], "n": (0, None)})
                state["count"] = state.get("count", 0) + 1
                state["z"].mul_(0.9).add_(p.grad.float())
                state["past"]["last"] = [*state["past"]["last"], p.grad.norm()][-3:]
                scale = sum(state["past"]["last"]) + state["count"] + whole["total"]
                p.add_(state["z"].to(p.dtype) / scale, alpha=-0.05)


def test_an_optimizer_with_state_of_every_kind() -> None:
    def build() -> State:
        model = Net().bfloat16()
        return State(model=model, optimizer=Master(model.parameters()))

    state, _ = check(build)
    run(state, 1)
    held = state.optimizer.state[state.model.inner.weight]
    assert held["z"].dtype == torch.float32
    assert list(held) == ["z", "past", "count"]


def test_grad_scaler() -> None:
    def build() -> State:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    def step(s: State) -> float:
        s.optimizer.zero_grad()
        loss = s.model(batch()).square().mean()
        # Every now and then a step that the scaler skips.
        s.scaler.scale(loss * (float("inf") if random.random() < 0.3 else 1.0)).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        return float(loss.detach()) + float(s.scaler.get_scale())

    state, _ = check(build, step)
    tensors = TensorSet(state)
    kept = Kept(state, tensors, 1)
    reference = run(state, 2, step)
    # A fault between unscale_ and update: "unscale_() has already been called" if it were not forgotten.
    s = state
    s.scaler.scale(s.model(batch()).square().mean()).backward()
    s.scaler.unscale_(s.optimizer)
    with pytest.raises(UsageError, match="update"):
        capture(state, 1)
    s.optimizer.grad_scale = torch.tensor(3.0)
    kept.put_back(state, tensors)
    assert not hasattr(s.optimizer, "grad_scale")
    s.scaler.scale(s.model(batch()).square().mean()).backward()
    s.scaler.unscale_(s.optimizer)
    kept.put_back(state, tensors)
    assert run(state, 2, step) == reference


def test_scaler_off_on_one_side() -> None:
    on, off = (State(scaler=torch.amp.GradScaler("cpu", enabled=e)) for e in (True, False))
    restore(capture(off, 1), off)
    with pytest.raises(RecoveryError, match="scaler"):
        restore(capture(off, 1), on)
    with pytest.raises(RecoveryError, match="scaler"):
        restore(capture(on, 1), off)


def test_several_models_and_optimizers() -> None:
    def build() -> State:
        gen, critic = Flat(), Net()
        first = torch.optim.Adam(gen.parameters(), lr=0.01)
        second = torch.optim.RMSprop(critic.parameters(), lr=0.01)
        return State(
            model={"gen": gen, "critic": critic},
            optimizer=(first, second),
            scheduler=[lrs.StepLR(first, 2), lrs.CosineAnnealingLR(second, 9)],
            draws=torch.Generator().manual_seed(7),
            best=float("inf"),
            history=[],
        )

    def step(s: State) -> float:
        total = 0.0
        for model, optimizer, schedule in zip(s.model.values(), s.optimizer, s.scheduler, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss = model(batch() + torch.rand((), generator=s.draws)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        best: float = min(s.best, total)
        s.best = best
        s.history.append(total)
        return total + best + len(s.history)

    state, fresh = check(build, step)
    assert (state.best, state.history) == (float("inf"), [])
    assert len(fresh.history) == BEFORE + AFTER


def test_gradients_that_were_zero_stay_zero() -> None:
    # Momentum moves a parameter whose gradient is zero, and not one whose gradient is None.
    def build() -> State:
        model = Net()
        model.extra = nn.Linear(2, 2)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(s: State) -> float:
        x = s.model(batch()).square().mean()
        if random.random() < 0.5:
            x = x + s.model.extra(torch.ones(2)).sum()
        x.backward()
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=False)
        return float(x.detach())

    check(build, step)


def test_modes_and_flags_that_change() -> None:
    def build() -> State:
        model = Net()
        return State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))

    seed(3)
    state = build()
    tensors = TensorSet(state)
    run(state, 2)
    state.model.norm.eval()
    state.model.inner.weight.requires_grad_(False)
    kept = Kept(state, tensors, 2)
    reference = run(state, 3)
    state.model.train()
    state.model.inner.weight.requires_grad_(True)
    run(state, 1)
    fresh = build()
    for one, its in ((state, tensors), (fresh, TensorSet(fresh))):
        kept.put_back(one, its)
        assert not one.model.norm.training
        assert one.model.drop.training
        assert not one.model.inner.weight.requires_grad
        assert run(one, 3) == reference


def test_cost_of_a_commit() -> None:
    """Prints what a commit costs (pytest -rP); the bounds only catch something gone badly wrong."""
    layer = nn.TransformerEncoderLayer(192, 4, 768, 0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 192), nn.TransformerEncoder(layer, 6), nn.Linear(192, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = lrs.OneCycleLR(optimizer, 1e-3, total_steps=100)
    state = State(model=model, optimizer=optimizer, scheduler=schedule)
    model(torch.randint(0, 1000, (2, 8))).square().mean().backward()
    optimizer.step()
    tensors = TensorSet(state)
    buffer = torch.zeros(tensors.layout.nbytes, dtype=torch.uint8)

    def cost(act: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times[2:])

    pack = cost(lambda: tensors.pack(buffer))
    look = cost(tensors.refresh)
    record = cost(lambda: capture(state, 1, {"epoch": 0}, {}, tensors))
    size = len(capture(state, 1, {"epoch": 0}, {}, tensors))
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, {len(tensors.named())} tensors, {buffer.numel() / 1e6:.0f} MB")
    print(f"pack {pack:.2f} ms (look {look:.2f}), capture {record:.2f} ms, {size} bytes")
    assert size < 32_000
    assert record < 100
