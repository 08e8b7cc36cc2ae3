"""`State`: the living objects that one training step depends on."""

from collections.abc import Iterator
from typing import Any

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import optim
from ckptless.pytorch_hooks.state.attributes import Attributes
from ckptless.pytorch_hooks.state.layout import Named
from ckptless.pytorch_hooks.state.parts import Parts, take_apart
from ckptless.pytorch_hooks.state.walk import BufferWatch, Tree


class State:
    """Everything that makes the next training step what it is; each object is an attribute: `s.model`.

    `State(model=model, optimizer=optimizer, loader=loader, best=0.0)`. Random numbers (of Python, numpy and
    torch) are taken without being named.

    `loader` is only kept: its position is the cursor of a record. The others may be modules, optimizers,
    generators, what has `state_dict` and `load_state_dict`, lists, tuples and dicts of such, and objects that
    hold such in their attributes; under names of your own also plain data, which is saved by value and may be
    set: `s.best_loss = 3.0`. Everything else stays the same object. Build it once all parameters and buffers
    are there. UsageError for what cannot be saved, in one sentence.
    """

    _parts: Parts
    _tree: Tree
    _buffers: BufferWatch
    _attributes: Attributes

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
        roles = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        for name in extra:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a State cannot have something named {name!r}: choose another name")
        parts = take_apart(roles, extra)
        objects = {**roles, "loader": loader, **{k: v for k, v in extra.items() if k not in parts.data}}
        self.__dict__["_objects"] = objects
        self.__dict__["_parts"] = parts
        self.__dict__["_tree"] = Tree(parts.modules)
        self.__dict__["_buffers"] = BufferWatch(self._tree)
        self.__dict__["_attributes"] = Attributes(parts.holders)

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


def attributes_of(state: State) -> Attributes:
    """Give what knows which attributes of a State's objects have changed."""
    return state._attributes


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


def every_tensor(state: State) -> Iterator[Named]:
    """Give every tensor that a version has once: parameters, buffers, the optimizers' state."""
    for name, tensor in every_parameter(state):
        yield Named(name, tensor)
    for item in tree_of(state).buffers():
        yield Named(item.name, item.tensor)
    for name, optimizer in parts_of(state).optimizers.items():
        for place, parameter in optim.parameters(optimizer):
            for path, tensor in optim.leaves(optimizer.state.get(parameter) or {}):
                yield Named(f"o:{name}:{place}:{path}", tensor, parameter)
