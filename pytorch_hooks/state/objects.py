"""`State`: the living objects that one training step depends on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.state import codec
from ckptless.pytorch_hooks.state.walk import BufferWatch, Tree

_ROLES = ("model", "optimizer", "scheduler", "scaler", "loader")


@dataclass
class Parts:
    """What a State is made of, by name ("model", "optimizer['gen']", "ema"); made by `State`."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


class State:
    """Everything that makes the next training step what it is; each object is an attribute: `s.model`.

    `model`, `optimizer` and `scheduler` may each be one object or a dict, list or tuple of them. `loader` is
    only kept: its position is the cursor of a record. Other names (`ema=...`, `best_loss=0.0`) take modules,
    optimizers, generators, what has `state_dict` and `load_state_dict`, or plain data. Plain data is saved by
    value and may be set: `s.best_loss = 3.0`; everything else stays the same object. Build it once all
    parameters and buffers are there. UsageError for an object of a wrong type, in one sentence.
    """

    _parts: Parts
    _tree: Tree
    _buffers: BufferWatch

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        **extra: Any,
    ) -> None:
        parts = Parts()
        objects = dict(
            zip(_ROLES, (model, optimizer, scheduler, scaler, loader), strict=True),
        )
        for name, module in _several("model", model).items():
            _want(isinstance(module, torch.nn.Module), name, "a torch.nn.Module", module)
            parts.modules[name] = module
        for name, one in _several("optimizer", optimizer).items():
            _add_optimizer(parts, name, one)
        for name, one in _several("scheduler", scheduler).items():
            _want(_is_stateful(one), name, "a scheduler with state_dict and load_state_dict", one)
            parts.stateful[name] = one
        if scaler is not None:
            _want(_is_stateful(scaler), "scaler", "a GradScaler", scaler)
            parts.scalers["scaler"] = scaler
        for name, value in extra.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a State cannot have something named {name!r}: choose another name")
            _add_extra(parts, objects, name, value)
        self.__dict__["_objects"] = objects
        self.__dict__["_parts"] = parts
        self.__dict__["_tree"] = Tree(parts.modules)
        self.__dict__["_buffers"] = BufferWatch(self._tree)

    def __getattr__(self, name: str) -> Any:
        for place in ("_objects", "_parts"):
            held = self.__dict__.get(place)
            values = held.data if isinstance(held, Parts) else held
            if values is not None and name in values:
                return values[name]
        raise AttributeError(f"the State has no {name!r}: name it where the State is built")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__["_objects"]:
            raise UsageError(f"state.{name} is an object and stays the same: only plain data can be set")
        if name not in self._parts.data:
            raise UsageError(f"the State has no {name!r}: name it where the State is built")
        self._parts.data[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__["_objects"], *self._parts.data})


def parts_of(state: State) -> Parts:
    """Give what a State is made of."""
    return state._parts


def tree_of(state: State) -> Tree:
    """Give the modules under a State."""
    return state._tree


def watch_of(state: State) -> BufferWatch:
    """Give what knows which buffers of a State have changed."""
    return state._buffers


def every_parameter(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every parameter (any shape, dtype; maybe a DTensor) once: the modules', then the optimizers' own.

    An optimizer's own is one of no module, such as the master copy that some keep: `p:optimizer:0.3`.
    """
    seen: set[int] = set()
    for name, tensor in tree_of(state).parameters():
        seen.add(id(tensor))
        yield name, tensor
    for name, optimizer in parts_of(state).optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            for j, tensor in enumerate(group["params"]):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"p:{name}:{i}.{j}", tensor


def _several(role: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, (list, tuple)):
        return {f"{role}[{i}]": item for i, item in enumerate(value)}
    # By exact type: torch.nn.ModuleDict and the like are one object.
    if type(value) is dict:
        for key in value:
            if type(key) is not str or ":" in key:
                raise UsageError(f"state.{role} has the key {key!r}: keys must be strings without a colon")
        return {f"{role}[{key!r}]": item for key, item in value.items()}
    return {role: value}


def _want(right: bool, name: str, what: str, value: object) -> None:
    if not right:
        raise UsageError(f"state.{name} must be {what}, not {type(value).__name__}")


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _add_optimizer(parts: Parts, name: str, value: Any) -> None:
    groups, state = getattr(value, "param_groups", None), getattr(value, "state", None)
    fits = isinstance(groups, list) and isinstance(state, dict)
    _want(fits, name, "a torch.optim.Optimizer", value)
    if type(value).__name__ == "ZeroRedundancyOptimizer":
        raise UsageError(f"state.{name} hides its state: give the optimizer inside it, its attribute optim")
    parts.optimizers[name] = value


def _add_extra(parts: Parts, objects: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, torch.nn.Module):
        parts.modules[name] = value
    elif isinstance(value, torch.optim.Optimizer):
        _add_optimizer(parts, name, value)
    elif isinstance(value, torch.amp.GradScaler):
        parts.scalers[name] = value
    elif isinstance(value, torch.Generator):
        parts.generators[name] = value
    elif _is_stateful(value):
        parts.stateful[name] = value
    else:
        codec.pack(value, name=f"state.{name}")
        parts.data[name] = value
        return
    objects[name] = value
