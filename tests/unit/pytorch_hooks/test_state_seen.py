"""What a State is taken apart into, whatever it is called; what is seen of no way at all is refused."""

from __future__ import annotations

import io
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import State, TensorSet, attributes, restore
from ckptless.pytorch_hooks.state.objects import parts_of
from ckptless.pytorch_hooks.state.second_look import SecondLook

from .captured import capture


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Container(torch.optim.Optimizer):
    """As torchtitan's."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [sgd(part) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": 0.1})


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: groups and state are those of the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu")

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


class Plain:
    """An object with nothing but attributes."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Stepping(Plain):
    def step(self) -> None:
        pass


class Own(torch.optim.SGD):
    """Takes any attribute."""


class Told(Plain):
    inner: Any

    def state_dict(self) -> dict[str, Any]:
        return {"inner": dict(vars(self.inner))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self.inner).update(state["inner"])


class Keeper(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_container_s_optimizers_are_found_beside_its_own_groups() -> None:
    parts: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 3)]
    made = parts_of(State(model=Plain(parts=parts), optimizer=Container(parts)))
    assert list(made.modules) == ["model.parts[0]", "model.parts[1]"]
    assert list(made.optimizers) == [
        "optimizer",
        "optimizer.optimizers[0]",
        "optimizer.optimizers[1]",
    ]


def test_a_wrapper_is_what_is_inside_it() -> None:
    model = nn.Linear(2, 2)
    made = parts_of(State(model=model, optimizer=Wrapper(sgd(model))))
    assert (list(made.optimizers), list(made.scalers)) == (["optimizer.optimizer"], ["optimizer.scaler"])


def test_a_scheduler_s_optimizer_is_taken_and_nothing_is_taken_twice() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert list(parts_of(State(model=model, scheduler=scheduler)).optimizers) == ["scheduler.optimizer"]
    both = parts_of(State(model=model, optimizer=optimizer, scheduler=scheduler, ema=Plain(of=model)))
    assert (list(both.optimizers), list(both.modules)) == (["optimizer"], ["model"])


@pytest.mark.parametrize("place", ["optimizer", "other", "listed", "inside"])
def test_what_hides_its_state_is_refused_under_every_name(place: str) -> None:
    model = nn.Linear(2, 2)
    hiding = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    given: dict[str, Any] = {
        "optimizer": {"optimizer": hiding},
        "other": {"other": hiding},
        "listed": {"other": {"a": [hiding]}},
        "inside": {"other": Plain(held=hiding)},
    }[place]
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer, which hides its state"):
        State(model=model, **given)


@pytest.mark.parametrize("place", ["optimizer", "other", "listed"])
def test_an_optimizer_of_which_nothing_is_known_is_refused_under_every_name(place: str) -> None:
    own = Stepping(m=[torch.zeros(2)])
    given: dict[str, Any] = {"listed": {"other": [own]}}.get(place, {place: own})
    with pytest.raises(UsageError, match="a Stepping whose state cannot be found: give it state_dict"):
        State(**given)


def test_plain_data_among_objects_is_refused() -> None:
    with pytest.raises(UsageError, match=r"state.gan\['steps'\] is a int among objects"):
        State(gan={"net": nn.Linear(1, 1), "steps": 3})


# ---- attributes


def optimizer_with(**given: Any) -> tuple[State, Any]:
    model = nn.Linear(2, 2)
    own: Any = Own(model.parameters(), lr=0.1)
    vars(own).update(given)
    return State(model=model, optimizer=own), own


def test_what_changes_comes_back_and_what_does_not_is_left_alone() -> None:
    state, own = optimizer_with(t=0, device="cuda:0", moments=[torch.zeros(2)], seen=defaultdict(int))
    first = capture(state, 0)
    own.t, own.seen["a"], own.late = 3, 1, (1, 2)
    own.moments[0] += 1
    moments, tensor = own.moments, own.moments[0]
    second = capture(state, 3)
    own.t, own.seen["a"], own.device, own.late = 4, 2, "cuda:1", ()
    own.moments[0] += 1
    restore(second, state)
    assert (own.t, own.seen, own.late, own.device) == (3, {"a": 1}, (1, 2), "cuda:0")
    assert own.moments is moments
    assert own.moments[0] is tensor
    assert torch.equal(tensor, torch.ones(2))
    # What had not changed then goes back to what was built, and what was not there is gone.
    restore(first, state)
    assert (own.t, own.seen, own.device) == (0, {}, "cuda:0")
    assert torch.equal(tensor, torch.zeros(2))
    assert not hasattr(own, "late")


@pytest.mark.parametrize("built", [0, 2])
def test_what_moves_through_a_list_is_not_written_over(built: int) -> None:
    """What stands in a place now may be a dataset's; at the commit another one stood there."""
    data = [torch.full((2,), float(n)) for n in range(5)]
    rows = [[n] for n in range(5)]
    state, own = optimizer_with(window=data[:built], rows=deque(rows[:built]), newest=data[0])
    capture(state, 0)
    found = []
    for step in range(1, 3):
        own.window[:], own.newest = data[step : step + 2], data[step]
        own.rows.extend(rows[step : step + 2])
        found.append(capture(state, step))
    for at, record in ((2, found[1]), (1, found[0])):
        own.window[:], own.newest = data[3:5], data[4]
        own.rows.rotate()
        restore(record, state)
        assert [one.tolist() for one in own.window] == [[float(n)] * 2 for n in (at, at + 1)]
        assert own.newest.tolist() == [float(at)] * 2
        assert [row for row in own.rows][-2:] == [[at], [at + 1]]
    assert [one[0].item() for one in data] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rows == [[n] for n in range(5)]
    # The very ones, as others may have them.
    assert own.window[0] is data[1]
    assert own.newest is data[1]


def test_plain_data_that_moves_is_not_written_over() -> None:
    data = [torch.full((2,), float(n)) for n in range(4)]
    state = State(model=nn.Linear(2, 2), window=data[:2])
    window = state.window
    first = capture(state, 0)
    window[:] = data[1:3]
    second = capture(state, 1)
    window[:] = data[2:]
    for at, record in ((1, second), (0, first)):
        restore(record, state)
        assert state.window is window
        assert window[0] is data[at]
        assert window[1] is data[at + 1]
    assert [one[0].item() for one in data] == [0.0, 1.0, 2.0, 3.0]


def test_what_moves_for_the_first_time_in_the_step_that_is_cut_off_is_not_written_over() -> None:
    data = [torch.full((2,), float(n)) for n in range(3)]
    state, own = optimizer_with(window=data[:2])
    record = capture(state, 0)
    own.window[:] = data[1:]
    restore(record, state)
    assert own.window[0] is data[0]
    assert own.window[1] is data[1]
    assert [one[0].item() for one in data] == [0.0, 1.0, 2.0]


def test_views_made_without_gradients_are_put_back_and_saved_again() -> None:
    """As predictions that a metric has in a list."""
    state, own = optimizer_with(seen=[])
    base = torch.zeros(2, 2, requires_grad=True)
    with torch.no_grad():
        own.seen += [base[0], base[1]]
        base.view(-1).copy_(torch.arange(4.0))
    first = capture(state, 0)
    with torch.no_grad():
        base.zero_()
    capture(state, 1)
    restore(first, state)
    assert [one.tolist() for one in own.seen] == [[0.0, 1.0], [2.0, 3.0]]
    assert base.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert not any(one.requires_grad for one in own.seen)
    again = capture(state, 0)
    with torch.no_grad():
        base.zero_()
    restore(again, state)
    assert [one.tolist() for one in own.seen] == [[0.0, 1.0], [2.0, 3.0]]


def test_a_new_process_gets_what_had_changed_by_parameter_too() -> None:
    state, own = optimizer_with(t=0, device="cuda:0", moments={})
    capture(state, 0)
    own.moments[own.param_groups[0]["params"][1]] = torch.full((2,), 2.0)
    own.t = 5
    kept = capture(state, 5)
    fresh, other = optimizer_with(t=0, device="cuda:1", moments={})
    restore(kept, fresh)
    assert (other.t, other.device) == (5, "cuda:1")
    ((key, value),) = other.moments.items()
    assert key is other.param_groups[0]["params"][1]
    assert torch.equal(value, torch.full((2,), 2.0))


def test_too_much_in_attributes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "LIMIT", 1000)
    state, own = optimizer_with(moments=[torch.zeros(1000)])
    capture(state, 0)
    own.moments[0] += 1
    with pytest.raises(
        UsageError, match=r"state.optimizer has \d+ bytes in attributes that change, such as moments"
    ):
        capture(state, 1)


# ---- extra state, and the second look


class Scaled(nn.Linear):
    def __init__(self, extra: Callable[[], Any]) -> None:
        super().__init__(2, 2)
        self.extra = extra
        self.got: Any = None

    def get_extra_state(self) -> Any:
        return self.extra()

    def set_extra_state(self, state: Any) -> None:
        self.got = state


@pytest.mark.parametrize(
    "value", [torch.ones(3), b"scales", {"scale": 1.5, "amax": [torch.ones(1)]}, io.BytesIO(b"pickled")]
)
def test_extra_state(value: Any) -> None:
    module = Scaled(lambda: value)
    restore(capture(State(model=nn.Sequential(module)), 1), State(model=nn.Sequential(module)))
    if isinstance(value, io.BytesIO):
        assert module.got.read() == b"pickled"
    else:
        assert repr(module.got) == repr(value)


def test_extra_state_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(UsageError, match=r"get_extra_state\(\)\['f'\]: cannot be saved: function"):
        capture(State(model=nn.Sequential(Scaled(lambda: {"f": lambda: 0}))), 1)


def looked(state: State, change: Callable[[], object] = lambda: None) -> None:
    tensors, look = TensorSet(state), SecondLook(state)
    look.look(tensors)
    change()
    look.look(tensors)


@pytest.mark.parametrize(
    ("hiding", "place"),
    [
        (Plain(m=[torch.ones(2)]), r"inner\.m\[0\] is a Tensor"),
        (Plain(a=Plain(rng=random.Random(1))), r"inner\.a\.rng is a Random"),
        (defaultdict(list, {object(): [torch.ones(2)]}), r"inner\[object\]\[0\] is a Tensor"),
        ([nn.Parameter(torch.ones(2))], r"inner\[0\] is a Parameter"),
    ],
)
def test_tensors_that_no_commit_would_have_are_named(hiding: Any, place: str) -> None:
    state, _own = optimizer_with(inner=hiding)
    with pytest.raises(UsageError, match=f"state.optimizer.{place} that no commit would have"):
        looked(state)


def test_what_a_state_dict_tells_is_no_secret() -> None:
    looked(State(ema=Told(inner=Plain(shadow=torch.ones(2)))))


def test_a_state_dict_that_has_more_than_parameters_and_buffers() -> None:
    class More(nn.Linear):
        hidden = torch.ones(2)

        def state_dict(self, *args: Any, **more: Any) -> Any:
            return {**super().state_dict(*args, **more), "hidden": self.hidden}

    with pytest.raises(UsageError, match=r"state_dict\(\) has hidden, which is neither"):
        looked(State(model=More(2, 2)))


def test_what_hooks_make_of_a_state_dict_is_not_asked_for() -> None:
    """As of torchtitan's fused projections, which gather for it: a new process would be alone with that."""
    model: Any = nn.Linear(2, 2)

    def split(_module: nn.Module, found: dict[str, Any], prefix: str, _meta: Any) -> None:
        found[f"{prefix}half"] = found.pop(f"{prefix}weight")[:1].clone()
        raise AssertionError("a hook was called")

    model.register_state_dict_post_hook(split)
    looked(State(model=model))
    with pytest.raises(AssertionError, match="a hook was called"):
        model.state_dict()


class Counting(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(2, 2)
        self.tau, self.queue = 1.0, torch.zeros(size)


def test_attributes_of_modules_that_change_are_saved() -> None:
    module = Counting(4)
    state = State(model=module)

    def change() -> None:
        module.tau = 0.5
        module.queue += 1

    looked(state, change)
    kept = capture(state, 1)
    change()
    module.tau = 0.1
    restore(kept, state)
    assert module.tau == 0.5
    assert torch.equal(module.queue, torch.ones(4))
    fresh = Counting(4)
    restore(kept, State(model=fresh))
    assert fresh.tau == 0.5
    assert torch.equal(fresh.queue, torch.ones(4))


def test_a_large_tensor_of_a_module_that_is_written_is_refused() -> None:
    module = Counting(100_000)
    with pytest.raises(UsageError, match=r"state\.model\.queue changes in training and is no buffer"):
        looked(State(model=module), lambda: module.queue.add_(1))
    looked(State(model=Counting(100_000)))


def test_constants_of_objects_with_a_state_dict_are_theirs() -> None:
    hidden: Any = Plain(data=torch.ones(2), rng=random.Random(1))
    keeper = Keeper(inner=hidden)
    looked(State(keeper=keeper), lambda: None)
    for change in (hidden.rng.random, lambda: hidden.data.data.add_(1)):
        with pytest.raises(UsageError, match=r"state\.keeper\.inner\.(data|rng) is a (Tensor|Random) that"):
            looked(State(keeper=keeper), change)


def test_writes_that_nobody_counts_are_seen() -> None:
    state, own = optimizer_with(moments=[torch.zeros(2)], many={"a": {1}})
    capture(state, 0)
    own.moments[0].data.add_(1)
    own.many["a"].add(2)
    fresh, other = optimizer_with(moments=[torch.zeros(2)], many={"a": {1}})
    restore(capture(state, 1), fresh)
    assert torch.equal(other.moments[0], torch.ones(2))
    assert other.many == {"a": {1, 2}}


def test_a_module_s_attributes_are_looked_at_after_going_back_to_before_they_changed() -> None:
    module = Counting(4)
    state = State(model=module)
    first = capture(state, 0)
    looked(state, lambda: setattr(module, "tau", 0.5))
    capture(state, 1)
    restore(first, state)
    assert module.tau == 1.0
    module.tau = 0.25
    kept = capture(state, 1)
    module.tau = 0.0
    restore(kept, state)
    assert module.tau == 0.25


def test_plain_data_of_which_each_commit_writes_many_items_is_named() -> None:
    rows = [[0.0] * 99 for _ in range(100)]
    state = State(model=nn.Linear(2, 2), few=[1.0] * 100, rows=rows)
    look = SecondLook(state)
    assert look.many() is None
    rows += [[0.0] * 99]
    assert look.many() == "rows"


class Adapter:
    """An adapter's object, which keeps a script's own and says what of it."""

    def __init__(self) -> None:
        self.rows: list[float] = []
        self.meter = object()

    def state_dict(self) -> dict[str, Any]:
        """Give it."""
        return {"rows": self.rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it."""
        self.rows = saved["rows"]

    def ckptless_looks_through(self) -> dict[str, Any]:
        return {"callback_1.rows": self.rows}

    def ckptless_leaves_out(self) -> dict[str, Any]:
        return {"callback_1.meter": self.meter}


def test_what_an_adapter_keeps_and_what_it_leaves_out_is_named() -> None:
    adapter = Adapter()
    look = SecondLook(State(model=nn.Linear(2, 2), trainer=adapter))
    assert look.many() is None
    assert dict(look.functions())["trainer.callback_1.meter"] is adapter.meter
    adapter.rows += [0.0] * 10_001
    assert look.many() == "trainer.callback_1.rows"
