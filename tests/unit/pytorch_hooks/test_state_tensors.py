"""The tensors' buffer: its layout, what `TensorSet` notices, and what does not fit."""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks.state import Layout, State, TensorSet, read, restore
from ckptless.pytorch_hooks.state import layout as layouts
from ckptless.pytorch_hooks.state.objects import watch_of

from .captured import capture


def buffer_for(layout: Layout) -> torch.Tensor:
    return torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)


def make() -> State:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return State(model=model, optimizer=torch.optim.Adam(model.parameters()))


def step(state: State) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(5, 4)).square().mean().backward()
    state.optimizer.step()


# ---- layout


def test_plan_aligns_and_names() -> None:
    layout = layouts.plan([("a", torch.zeros(3)), ("b", torch.ones((), dtype=torch.bfloat16))])
    assert [(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in layout.entries] == [
        ("a", "float32", (3,), 0, 12),
        ("b", "bfloat16", (), 64, 2),
    ]
    assert layout.nbytes == 128
    layouts.check(layout)
    assert layouts.unpack(layout.packed) == layout
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout
    assert layouts.plan([]).nbytes == 0


def test_plan_refuses() -> None:
    for tensor, why in (
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (nn.LazyLinear(3).weight, "initialised"),
    ):
        with pytest.raises(UsageError, match=why):
            layouts.plan([("x", tensor)])
    with pytest.raises(UsageError, match="same name"):
        layouts.plan([("x", torch.zeros(1)), ("x", torch.zeros(1))])


@pytest.mark.parametrize(
    "change",
    [
        lambda e: {"offset": e.offset + 64},
        lambda e: {"offset": e.offset - 64},
        lambda e: {"offset": 1},
        lambda e: {"nbytes": e.nbytes + 4},
        lambda e: {"shape": (1 << 40, 1 << 40)},
        lambda e: {"shape": (-1,)},
        lambda e: {"dtype": "object"},
        lambda e: {"name": "a"},
    ],
)
def test_check_refuses(change: Callable[[Any], dict[str, Any]]) -> None:
    good = layouts.plan([("a", torch.zeros(3)), ("b", torch.zeros(40)), ("c", torch.zeros(1))])
    entry = msgspec.structs.replace(good.entries[1], **change(good.entries[1]))
    entries = (good.entries[0], entry, good.entries[2])
    wrong = [(entries, good.nbytes), (good.entries, good.nbytes - 64), (good.entries, good.nbytes + 64)]
    for listed, size in wrong:
        # With a digest that is right, so that it is the content that is refused.
        with pytest.raises(ProtocolError, match=r"layout: (?!the digest)"):
            layouts.check(Layout(listed, size, layouts._digest(listed, size)))
    with pytest.raises(ProtocolError, match="digest"):
        layouts.check(msgspec.structs.replace(good, digest="0" * 32))


def test_a_packed_layout_that_is_broken() -> None:
    packed = layouts.plan([("a", torch.zeros(3))]).packed
    for data in (b"", packed[:-3], packed + b"x", b"\xff" * 20):
        with pytest.raises(ProtocolError):
            layouts.unpack(data)


# ---- pack


def test_names_in_order() -> None:
    state = make()
    step(state)
    names = [name for name, _ in TensorSet(state).named()]
    assert names[:2] == ["p:model:0.weight", "p:model:0.bias"]
    assert names[6:9] == ["b:model:1.running_mean", "b:model:1.running_var", "b:model:1.num_batches_tracked"]
    assert names[9:12] == ["o:optimizer:0.0:exp_avg", "o:optimizer:0.0:exp_avg_sq", "o:optimizer:0.0:step"]
    assert len(names) == 9 + 18


def test_what_is_not_trained_comes_first() -> None:
    """So that whole chunks of it stay as they are, and go to the holders once."""
    state = make()
    state.model[2].requires_grad_(False)
    tensors = TensorSet(state)
    before = tensors.layout
    names = [name for name, _ in tensors.named()]
    assert names[:3] == ["p:model:2.weight", "p:model:2.bias", "p:model:0.weight"]
    state.model[2].requires_grad_(True)
    assert tensors.refresh()
    assert [name for name, _ in tensors.named()][:2] == ["p:model:0.weight", "p:model:0.bias"]
    # A new process sees the same, before and after.
    assert tensors.layout == TensorSet(state).layout
    state.model[2].requires_grad_(False)
    assert tensors.layout == before


def test_values_of_every_kind() -> None:
    module = nn.Module()
    kinds = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    for name, value in kinds.items():
        module.register_buffer(name, value.clone())
    state = State(model=module)
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    for name in kinds:
        getattr(module, name).fill_(0)
    tensors.unpack(buffer, layout)
    for name, value in kinds.items():
        living = getattr(module, name)
        assert living.dtype == value.dtype
        assert living.stride() == value.stride() or name == "complex"
        again = State(model=module)
        assert TensorSet(again).pack(buffer_for(layout)) == layout
        if name == "nan":
            assert living.view(torch.int32).equal(value.view(torch.int32))
        else:
            assert living.to(torch.complex64).equal(value.to(torch.complex64))


def test_gaps_are_zero_so_that_twins_agree() -> None:
    state = make()
    tensors = TensorSet(state)
    one, other = buffer_for(tensors.layout), torch.zeros(tensors.layout.nbytes, dtype=torch.uint8)
    tensors.pack(one)
    tensors.pack(other)
    assert one.equal(other)


def test_spans_are_those_of_what_each_rank_has_for_itself() -> None:
    """Batch norm's statistics lie side by side: twins compare what is before them, and behind."""
    state = make()
    tensors = TensorSet(state)
    assert tensors.spans(watch_of(state).recorded) == ()
    step(state)
    own = frozenset(item.name for item in watch_of(state).record())
    buffer, twin = buffer_for(tensors.layout), buffer_for(tensors.layout)
    tensors.pack(buffer)
    spans = tensors.spans(own)
    assert len(spans) == 1
    state.model[1].running_mean.add_(1)
    tensors.pack(twin)
    (start, end), different = spans[0], (buffer != twin).nonzero().flatten()
    assert len(different)
    assert start <= int(different.min())
    assert int(different.max()) < end
    inside = {e.name for e in tensors.layout.entries if start <= e.offset < end}
    assert inside == own
    assert tensors.spans(own) is spans


def test_buffers_that_do_not_fit() -> None:
    tensors = TensorSet(make())
    size = tensors.layout.nbytes
    for buffer in (
        torch.zeros(size - 1, dtype=torch.uint8),
        torch.zeros(size),
        torch.zeros(2, size, dtype=torch.uint8),
        torch.zeros(2 * size, dtype=torch.uint8)[::2],
        torch.zeros(size + 1, dtype=torch.uint8)[1:],
    ):
        with pytest.raises(UsageError, match="buffer"):
            tensors.pack(buffer)


def test_a_buffer_is_let_go() -> None:
    tensors = TensorSet(make())
    memory = bytearray(tensors.layout.nbytes)
    alone = sys.getrefcount(memory)
    tensors.pack(torch.frombuffer(memory, dtype=torch.uint8))
    assert sys.getrefcount(memory) > alone
    tensors.release()
    assert sys.getrefcount(memory) == alone


# ---- changes


def test_it_notices_what_comes_and_is_replaced() -> None:
    state = make()
    tensors = TensorSet(state)
    assert not tensors.refresh()
    step(state)
    assert tensors.refresh()
    assert not tensors.refresh()
    step(state)
    assert not tensors.refresh()
    state.model[2] = nn.Linear(3, 2)  # the same layout, other tensors: no state of theirs
    tensors.refresh()
    assert any(t.data_ptr() == state.model[2].weight.data_ptr() for _n, t in tensors.named())


def _load(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _reset(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _other_groups(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]


@pytest.mark.parametrize("change", [_load, _reset, _other_groups])
def test_it_notices_an_optimizer_whose_state_is_replaced(
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    state = make()
    step(state)
    tensors = TensorSet(state)
    for _ in range(2):
        change(state.optimizer)
        assert _as_looked_at_anew(tensors)
        step(state)
        assert _as_looked_at_anew(tensors)
        step(state)
        assert _as_looked_at_anew(tensors)


def _as_looked_at_anew(tensors: TensorSet) -> bool:
    """Whether the bytes are those that a look at all containers finds."""
    fresh = TensorSet(tensors.state)
    mine, others = buffer_for(tensors.layout), buffer_for(fresh.layout)
    same = tensors.pack(mine) == fresh.pack(others) and torch.equal(mine, others)
    return same and tensors.names == fresh.names


def test_the_parameters_of_a_group_are_replaced() -> None:
    state = make()
    tensors = TensorSet(state)
    state.optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(UsageError, match=r"group 0 of state\.optimizer have changed"):
        tensors.check_built()


def test_state_that_was_empty_is_filled() -> None:
    """A script that only looks at a parameter's state makes it: an optimizer's is a defaultdict."""
    state = make()
    assert not any(state.optimizer.state[parameter] for parameter in state.model.parameters())
    tensors = TensorSet(state)
    step(state)
    assert tensors.refresh()
    assert _as_looked_at_anew(tensors)


def test_it_sees_new_storage_and_dtype_under_the_same_parameter() -> None:
    state = make()
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    state.model[0].weight.data = torch.full((3, 4), 7.0)
    tensors.pack(buffer)
    assert buffer[:4].view(torch.float32).item() == 7.0
    state.model[0].bfloat16()
    assert tensors.refresh()
    with pytest.raises(RecoveryError, match="bfloat16"):
        tensors.unpack(buffer, layout)
    state.model[0].float()
    state.model[2].weight.data = torch.zeros(2, 5)
    with pytest.raises(RecoveryError, match=r"\(2, 5\)"):
        tensors.unpack(buffer, layout)


def test_a_buffer_that_grew_or_came_is_put_back() -> None:
    module: Any = nn.Module()
    module.register_buffer("cache", torch.ones(3))
    module.register_buffer("late", None)
    state = State(model=module)
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    record = capture(state, 0, tensors=tensors)
    module.cache = torch.zeros(9)
    module.late = torch.zeros(2)
    grown = buffer_for(tensors.layout)
    grown_layout = tensors.pack(grown)
    later = capture(state, 1, tensors=tensors)
    tensors.unpack(buffer, layout)
    restore(record, state)
    assert module.cache.equal(torch.ones(3))
    assert not isinstance(module.late, torch.Tensor)
    tensors.unpack(grown, grown_layout)
    restore(later, state)
    assert module.cache.equal(torch.zeros(9))
    assert isinstance(module.late, torch.Tensor)
    # The record alone is enough for a buffer that changed.
    module.cache = None
    restore(later, state)
    assert isinstance(module.cache, torch.Tensor)


def test_a_frozen_model_has_no_buffer_in_its_record() -> None:
    state = make()
    state.model.eval()
    state.model(torch.randn(2, 4))
    small = len(capture(state, 1))
    state.model[1].running_var.add_(1)
    assert len(capture(state, 1)) > small
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    fresh = make()
    fresh.model.eval()
    TensorSet(fresh).unpack(buffer, tensors.pack(buffer))
    assert len(capture(fresh, 1)) == small  # unpacking is no change of the model's own


class Norm(nn.Module):
    """Batch norm by hand: torch does not count what it writes to the statistics, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = (self.get_buffer(n) for n in ("running_mean", "running_var"))
        return nn.functional.batch_norm(x, mean, var, training=self.training)


@pytest.mark.parametrize("kind", [Norm, lambda: nn.BatchNorm1d(4)], ids=["by-hand", "module"])
def test_each_rank_gets_its_own_statistics(kind: Callable[[], nn.Module]) -> None:
    # Two twins of one node: the first writes the tensors, both write records.
    first, second = State(model=kind()), State(model=kind())
    first.model(torch.randn(5, 4))
    second.model(torch.randn(5, 4) + 3)
    if kind is not Norm:
        second.model.eval()
    tensors = TensorSet(first)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    record = capture(second, 1)
    expected = {name: b.clone() for name, b in second.model.named_buffers()}
    for target in (second, State(model=kind())):
        target.model(torch.randn(5, 4) - 9)
        TensorSet(target).unpack(buffer, layout)
        restore(record, target)
        for name, b in target.model.named_buffers():
            assert b.equal(expected[name])
        assert target.model.training == (kind is Norm)
        assert len(capture(target, 1)) == len(record)


def test_a_buffer_that_is_written_unseen_is_each_ranks_own() -> None:
    """A codebook that moves by `.data`: torch does not count that."""
    states = []
    for value in (1.0, 2.0):
        module = nn.Linear(2, 2)
        module.register_buffer("codes", torch.zeros(3))
        states.append(State(model=module))
        capture(states[-1], 0)
        module.get_buffer("codes").data.fill_(value)
    first, second = states
    tensors = TensorSet(first)
    buffer = buffer_for(tensors.layout)
    layout, record = tensors.pack(buffer), capture(second, 1)
    TensorSet(second).unpack(buffer, layout)
    restore(record, second)
    assert second.model.codes.tolist() == [2.0] * 3


def test_state_that_was_not_there_is_removed() -> None:
    state = make()
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    layout, record = tensors.pack(buffer), capture(state, 0)
    step(state)
    tensors.unpack(buffer, layout)
    assert not state.optimizer.state
    state.optimizer.state[state.model[0].weight] = {"count": 1}
    restore(record, state)
    assert not state.optimizer.state


def test_another_model_is_refused_before_anything_moves() -> None:
    state = make()
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    others: list[nn.Module] = [nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(5, 3), nn.Identity())]
    for other in others:
        held = [p.clone() for p in other.parameters()]
        with pytest.raises(RecoveryError):
            TensorSet(State(model=other)).unpack(buffer, layout)
        assert all(a.equal(b) for a, b in zip(held, other.parameters(), strict=True))
        with pytest.raises(RecoveryError):
            restore(capture(state, 1), State(model=other))
    step(state)
    buffer = buffer_for(tensors.layout)
    with pytest.raises(RecoveryError, match="optimizer"):
        TensorSet(State(model=state.model)).unpack(buffer, tensors.pack(buffer))
    bad = msgspec.structs.replace(layout, nbytes=layout.nbytes + 64)
    with pytest.raises(ProtocolError):
        tensors.unpack(buffer, bad)


def test_restore_without_the_tensors_it_needs() -> None:
    state = make()
    step(state)
    with pytest.raises(RecoveryError, match="lacks the tensor"):
        restore(capture(state, 1), make())


def test_state_of_a_stranger_is_refused() -> None:
    state = make()
    state.optimizer.state[torch.zeros(2)] = {"x": torch.zeros(2)}
    with pytest.raises(UsageError, match="none of its parameter groups"):
        TensorSet(state)


def test_a_failed_look_is_not_forgotten() -> None:
    state = make()
    tensors = TensorSet(state)
    state.model[1].register_buffer("bad", torch.zeros(2, device="meta"))
    for _ in range(2):
        with pytest.raises(UsageError, match="meta"):
            tensors.refresh()
    del state.model[1].bad
    assert not tensors.refresh()


def test_master_parameters_of_no_module_are_kept() -> None:
    model = nn.Linear(2, 2)
    own = nn.Parameter(torch.ones(3))
    state = State(model=model, optimizer=torch.optim.SGD([*model.parameters(), own], lr=0.1))
    tensors = TensorSet(state)
    assert [n for n, _ in tensors.named()][-1] == "p:optimizer:0.2"
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    with torch.no_grad():
        own.zero_()
    tensors.unpack(buffer, layout)
    assert own.tolist() == [1, 1, 1]


# ---- FSDP2


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.usefixtures("world")
def test_fsdp(name: str) -> None:
    def build() -> State:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        fully_shard(model[0])
        fully_shard(model)  # the root, with model[2], stays gathered after a forward pass
        options = {"momentum": 0.9} if name == "SGD" else {}
        return State(
            model=model, optimizer=getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        )

    def train(state: State, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            state.optimizer.zero_grad()
            loss = state.model(torch.randn(5, 4)).square().mean()
            loss.backward()
            state.optimizer.step()
            losses.append(float(loss.detach()).hex())
        return losses

    torch.manual_seed(0)
    state = build()
    tensors = TensorSet(state)
    train(state, 2)
    with torch.no_grad():
        state.model(torch.ones(1, 4))
    assert not isinstance(state.model[2].weight, DTensor)
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    record = capture(state, 2, tensors=tensors)
    assert layout == read(record).layout
    reference = train(state, 3)
    kinds = {e.sharding for e in layout.entries if e.name.startswith("o:")}
    fresh = build()
    for one, its in ((state, tensors), (fresh, TensorSet(fresh))):
        its.unpack(buffer, layout)
        restore(record, one)
        assert its.layout == layout
        assert train(one, 3) == reference
    assert "param" in kinds
    held = fresh.optimizer.state[next(fresh.model.parameters())]
    assert any(isinstance(v, DTensor) for v in held.values())


@pytest.mark.usefixtures("world")
def test_optimizer_state_that_is_another_dtensor() -> None:
    def build() -> State:
        model = nn.Linear(4, 8)
        fully_shard(model)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    state = build()
    weight = state.model.weight
    total = DTensor.from_local(torch.ones(3), weight.device_mesh, [Replicate()])
    state.optimizer.state[weight] = {"total": total}
    tensors = TensorSet(state)
    buffer = buffer_for(tensors.layout)
    fresh = build()
    TensorSet(fresh).unpack(buffer, tensors.pack(buffer))
    made = fresh.optimizer.state[fresh.model.weight]["total"]
    assert isinstance(made, DTensor)
    assert made.placements == total.placements
    assert made.to_local().equal(torch.ones(3))
    # One that cannot be made anew is put back where it lives, and refused where it does not.
    partial = DTensor.from_local(torch.ones(3), weight.device_mesh, [Partial()])
    state.optimizer.state[weight] = {"total": partial}
    buffer = buffer_for(tensors.layout)
    layout = tensors.pack(buffer)
    tensors.unpack(buffer, layout)
    with pytest.raises(RecoveryError, match="cannot be made anew"):
        TensorSet(build()).unpack(buffer, layout)
