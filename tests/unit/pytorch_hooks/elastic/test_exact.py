"""A step by virtual ranks, in one process: its gradients, its random numbers, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.elastic import exact
from ckptless.pytorch_hooks.elastic.exact import Exact, ExactSteps, check_saved
from ckptless.pytorch_hooks.elastic.sums import Share
from ckptless.pytorch_hooks.state import State, rng

from . import worlds

VIRTUAL = 4


def model(*more: nn.Module) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), *more, nn.Linear(5, 1))


def steps(net: nn.Module, at: Callable[[], int] = lambda: 3, **state: Any) -> ExactSteps:
    return ExactSteps(Exact(VIRTUAL, seed=2), State(model=net, **state), Share(0, 1, VIRTUAL), at)


def parts(sizes: tuple[int, ...] = (3, 2, 3, 2)) -> list[torch.Tensor]:
    whole = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(9))
    return list(torch.split(whole, list(sizes)))


def mean_of(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: net(x).square().mean()


def grads(net: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in net.parameters()]


def test_it_is_the_mean_over_the_whole_batch() -> None:
    net = model(nn.GELU())
    loss = steps(net).step(parts(), mean_of(net))
    whole = copy.deepcopy(net)
    whole.zero_grad()
    wanted = mean_of(whole)(torch.cat(parts()))
    wanted.backward()  # type: ignore[no-untyped-call]
    assert loss.shape == ()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(grads(net), grads(whole))


def test_weights_in_place_of_sizes() -> None:
    net = model()
    loss = steps(net).step(parts(), mean_of(net), weights=[1, 0, 0, 3])
    first, last = (mean_of(net)(parts()[i]).detach() for i in (0, 3))
    torch.testing.assert_close(loss, (first + 3 * last) / 4)


def test_gradients_are_added_to_those_that_are_there() -> None:
    net = model()
    taken = steps(net)
    taken.step(parts(), mean_of(net))
    once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    taken.step(parts(), mean_of(net))
    torch.testing.assert_close(grads(net), [2 * grad for grad in once])


def test_random_numbers_are_those_of_the_virtual_rank_and_the_step() -> None:
    net, drawn = model(), list[float]()

    def forward(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(1).item())
        return mean_of(net)(x)

    at = 3
    taken = steps(net, lambda: at)
    torch.manual_seed(4)
    before = rng.capture()
    taken.step(parts(), forward)
    assert rng.equal(before, rng.capture())
    # Whatever is drawn outside, and in another process: the second call of a step draws other numbers.
    torch.manual_seed(77)
    steps(net, lambda: 3).step(parts(), forward)
    assert drawn[:VIRTUAL] == drawn[VIRTUAL:]
    taken.step(parts(), forward)
    at = 4
    taken.step(parts(), forward)
    assert len(set(drawn)) == 3 * VIRTUAL


def test_virtual_ranks_of_any_block_draw_the_same() -> None:
    net, drawn = model(), dict[int, float]()
    for rank in range(3):
        share = Share(rank, 3, VIRTUAL)
        taken = ExactSteps(Exact(VIRTUAL, seed=2), State(model=net), share, lambda: 3)
        ours = list(taken.virtual_ranks)

        def forward(x: torch.Tensor, ours: list[int] = ours) -> torch.Tensor:
            drawn[ours.pop(0)] = torch.rand(1).item()
            return mean_of(net)(x)

        leaves = taken._leaves(zip(parts(), (1.0,) * len(ours), strict=False), (forward, None), [], [])
        for _leaf in range(len(ours)):
            next(leaves)
    alone: list[float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        alone.append(torch.rand(1).item())
        return mean_of(net)(x)

    steps(net).step(parts(), note)
    assert [drawn[number] for number in range(VIRTUAL)] == alone


def test_a_parameter_without_gradient_stays_without() -> None:
    net = nn.ModuleDict({"used": nn.Linear(6, 1), "now_and_then": nn.Linear(6, 1), "unused": nn.Linear(6, 1)})
    calls = iter(range(VIRTUAL))

    def forward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net["used"](x).square().mean()
        return loss + net["now_and_then"](x).mean() if next(calls) == 2 else loss

    steps(net).step(parts(), forward)
    assert [p.grad is not None for p in net.parameters()] == [True] * 4 + [False] * 2


def test_a_scaler_scales_gradients_and_not_the_loss() -> None:
    net = model()
    plain = steps(net).step(parts(), mean_of(net))
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = steps(net).step(parts(), mean_of(net), scaler=scaler)
    assert loss == plain
    # Powers of two change no bits.
    assert all(
        torch.equal(p.grad / 8, w)
        for p, w in zip(net.parameters(), wanted, strict=True)
        if p.grad is not None
    )


class Counts(nn.Module):
    """Keeps something of each call."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.BatchNorm1d(5), "state.model.1 is a BatchNorm1d that is trained"),
        (nn.SyncBatchNorm(5), "state.model.1 is a SyncBatchNorm"),
        (Counts(), "state.model.1.count is a buffer that the forward or backward pass writes to"),
    ],
)
def test_what_one_part_would_leave_for_the_next_is_refused(module: nn.Module, words: str) -> None:
    net = model(module)
    with pytest.raises(UsageError, match=words):
        steps(net).step(parts(), mean_of(net))
    # Nothing is left behind.
    assert grads(net) == [None] * len(list(net.parameters()))


def test_a_generator_that_parts_draw_from_is_refused() -> None:
    net, own = model(), torch.Generator().manual_seed(3)
    made = steps(net, noise=own, others=[torch.Generator(), torch.default_generator])
    # Of torch's own each virtual rank has its numbers.
    made.step(parts(), lambda x: net(x + torch.randn(x.shape)).square().mean())
    torch.randn(2, generator=own)
    made.step(parts(), mean_of(net))
    net.zero_grad()
    with pytest.raises(UsageError, match=r"state\.noise is a random generator that the forward"):
        made.step(parts(), lambda x: net(x + torch.randn(x.shape, generator=own)).square().mean())
    assert grads(net) == [None] * len(list(net.parameters()))


class Warms(nn.Module):
    """Counts what it has been given, which is nobody's business; and may cool down as it is used."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.calls, self.tau, self.nothing, self._by = 0, 1.0, float("nan"), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.tau = self.calls + 1, self.tau * self._by
        return x * self.tau


def test_a_fraction_that_a_forward_pass_changes_is_refused() -> None:
    kept, cools = model(Warms(1.0)), model(Warms(0.99))
    steps(kept).step(parts(), mean_of(kept))
    with pytest.raises(UsageError, match=r"\.tau is a number that the forward or backward pass changes"):
        steps(cools).step(parts(), mean_of(cools))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5).eval(), nn.BatchNorm1d(5, track_running_stats=False)])
def test_batch_norm_that_keeps_nothing_is_taken(norm: nn.Module) -> None:
    net = model(norm)
    steps(net).step(parts(), mean_of(net))


def test_models_that_are_not_whole_on_every_rank_are_refused() -> None:
    with worlds.rank_of(0, 3):
        with pytest.raises(
            UsageError,
            match=r"state\.model is a DistributedDataParallel, which adds up gradients in an order",
        ):
            steps(nn.parallel.DistributedDataParallel(model()))
        sharded = worlds.built("fsdp", 3, trained=False)
        assert any(isinstance(p, DTensor) for p in sharded.model.parameters())
        with pytest.raises(UsageError, match="is a DTensor"):
            ExactSteps(Exact(VIRTUAL), sharded, Share(0, 3, VIRTUAL), lambda: 0)


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(UsageError, match="sparse=False"):
        steps(net).step([torch.tensor([n]) for n in range(4)], lambda part: net(part).mean())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (parts()[:3], "each of this rank's 4 virtual ranks, as run.batches gives it: this is 3 of them"),
        (parts()[0], "this is Tensor"),
        ([{"text": "no tensor"}] * 4, "give weights"),
    ],
)
def test_other_batches_are_refused(given: Any, words: str) -> None:
    net = model()
    with pytest.raises(UsageError, match=words):
        steps(net).step(given, mean_of(net))


@pytest.mark.parametrize("wrong", [1.0, torch.zeros(2), torch.zeros(1, dtype=torch.int64)])
def test_no_loss_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="mean loss over a part"):
        steps(model()).step(parts(), lambda _part: wrong)


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, -1], [float("nan")] * 4])
def test_no_weights_are_refused(weights: list[float]) -> None:
    net = model()
    with pytest.raises(UsageError, match="weights must be 4 numbers"):
        steps(net).step(parts(), mean_of(net), weights=weights)


def test_parts_that_count_nothing_are_refused() -> None:
    net = model()
    with pytest.raises(UsageError, match="count nothing together"):
        steps(net).step(parts(), mean_of(net), weights=[0] * 4)


@pytest.mark.parametrize("wrong", [(0, 0), (exact.MOST_VIRTUAL_RANKS + 1, 0), (2.0, 0), (2, 1 << 63)])
def test_numbers_that_cannot_be(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="virtual_ranks is 1 to 4096"):
        Exact(*wrong).checked()


def test_more_ranks_than_virtual_ones() -> None:
    Exact(4).check_ranks(4)
    with pytest.raises(UsageError, match=r"may have 5 ranks, and exact=Exact\(virtual_ranks=4, seed=0\)"):
        Exact(4).check_ranks(5)


@pytest.mark.parametrize(
    ("saved", "now"), [((4, 0), None), (None, Exact(4)), ((4, 0), Exact(8)), ((4, 0), Exact(4, seed=1))]
)
def test_another_kind_of_job_does_not_go_on(saved: tuple[int, int] | None, now: Exact | None) -> None:
    with pytest.raises(UsageError, match="the step was committed by a job that was"):
        check_saved(saved, now)
    check_saved((4, 0), Exact(4))
    check_saved(None, None)


def test_loaders_that_cannot_deal_are_refused() -> None:
    with pytest.raises(UsageError, match="a DataLoader cannot deal its batches to virtual ranks"):
        Exact(4).deal(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
