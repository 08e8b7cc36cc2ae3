"""What a script's own callbacks have in their attributes goes back with a step, in new processes and old."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptless.pytorch_hooks.adapters.kept import Kept, set_by


class Framework:
    """Stands for a framework's class; what it sets is its adapter's."""

    __module__ = "framework.callbacks"

    def __init__(self) -> None:
        self.theirs = [0]

    def begin(self) -> None:
        self.bar = object()

    @property
    def shown(self) -> int:
        return 0

    @shown.setter
    def shown(self, value: int) -> None:
        self.set_late = value


class Own(Framework):
    """A script's."""

    count = 0

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.weights = [*model.parameters()]
        self.shadow: dict[str, torch.Tensor] = {}
        self.rows: dict[str, Any] = {"train": defaultdict(list)}
        self.teacher = torch.nn.Linear(1, 1)
        self.path = "mine"
        self.numbers: list[Any] = []
        self.meter = SimpleNamespace(n=0)

    def step(self, number: int) -> None:
        self.shadow["a"] = torch.tensor([float(number)])
        self.rows["train"]["loss"].append(number)
        self.theirs.append(number)


def made(path: str = "mine") -> tuple[Own, Kept]:
    model = torch.nn.Linear(2, 1)
    own = Own(model)
    own.path = path
    return own, Kept("framework", {"one": own, "other": Framework()}, model)


def test_what_the_framework_sets_is_known() -> None:
    assert set_by("framework", Own) == {"theirs", "bar", "set_late"}


@pytest.mark.parametrize("joins", [False, True])
def test_what_has_changed_goes_back(joins: bool) -> None:
    own, kept = made()
    own.step(1)
    own.step(2)
    saved = kept.state_dict()
    assert saved.keys() == {"one"}
    assert saved["one"][0].keys() == {"shadow", "rows"}
    if joins:
        own, kept = made("another's")
    else:
        rows = own.rows["train"]
        own.step(3)
    kept.load_state_dict(saved)
    assert float(own.shadow["a"]) == 2.0
    assert own.rows == {"train": {"loss": [1, 2]}}
    # What never changes is this process's own; and who holds a container sees the same one.
    assert own.path == ("another's" if joins else "mine")
    assert joins or own.rows["train"] is rows
    assert own.theirs == ([0] if joins else [0, 1, 2, 3])
    own.step(3)
    assert own.rows["train"]["loss"] == [1, 2, 3]


def test_a_number_that_its_class_begins_with_goes_back_twice() -> None:
    own, kept = made()
    saved = kept.state_dict()
    own.count += 1
    for _ in range(2):
        kept.load_state_dict(saved)
        assert "count" not in vars(own)
        assert own.count == 0
    own.count += 1
    kept.state_dict()
    # An adapter has been there before.
    del own.count
    kept.load_state_dict(saved)
    assert own.count == 0


def test_each_change_is_seen_whatever_it_looks_like_and_how_often_it_comes() -> None:
    """Also where what changed in the step before is not looked at first."""
    own, kept = made()
    own.numbers = [0.0, 1, "a"]
    kept.state_dict()

    def saved() -> Any:
        return kept.state_dict()["one"][0]

    seen = []
    for value in (-0.0, float("nan"), 0.0, 0, False, None, "0", b"0", 2**70, "\ud800", (0,), 0.0):
        own.numbers[0] = value
        seen.append(saved()["numbers"])
        # Twice the same: from now on it is looked at again.
        assert saved()["numbers"] == seen[-1]
        assert saved()["numbers"] == seen[-1]
    assert len({*seen}) == len(seen) - 1
    assert seen[-1] == seen[2]
    own.shadow = {"a": torch.zeros(3)}
    tensors = [saved()["shadow"]]
    for number in range(6):
        # Torch does not count it.
        own.shadow["a"].data[1] = number // 2 + 1
        tensors.append(saved()["shadow"])
    assert [tensors.index(one) for one in tensors] == [0, 1, 1, 3, 3, 5, 5]
    kept.load_state_dict({"one": ({"shadow": tensors[1]}, [])})
    assert own.shadow["a"].tolist() == [0.0, 1.0, 0.0]
    assert saved()["shadow"] == tensors[1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0)[1:4],
        torch.zeros(0),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(5, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(9000),
    ],
)
def test_tensors_of_any_shape_are_seen_to_change_and_go_back(tensor: torch.Tensor) -> None:
    own, kept = made()
    own.shadow = {"a": tensor}
    before = kept.state_dict()["one"][0]["shadow"]
    assert kept.state_dict()["one"][0]["shadow"] == before
    was = tensor.detach().clone()
    with torch.no_grad():
        tensor.mul_(2).add_(1)
    assert (kept.state_dict()["one"][0]["shadow"] == before) == (tensor.numel() == 0)
    kept.load_state_dict({"one": ({"shadow": before}, [])})
    assert torch.equal(own.shadow["a"], was)


def test_what_an_own_state_dict_tells_is_not_saved_twice() -> None:
    own, kept = made()
    own.shadow = {"a": torch.zeros(1000)}
    (only, told) = kept.state_dict({"one": {"shadow": own.shadow}})["one"]
    assert (only, told) == ({}, ["shadow"])


def test_modules_are_parts_and_objects_are_told_of() -> None:
    own, kept = made()
    assert kept.modules(own.model) == {"one_teacher": own.teacher}
    left: dict[str, Any] = kept.left_out()
    assert left.keys() == {"one.model", "one.teacher", "one.meter"}
    assert kept.all().keys() > left.keys() | {"one.rows", "one.shadow"}
    assert "one.theirs" not in kept.all()
