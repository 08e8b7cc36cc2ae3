"""What a script's own callbacks, and its subclass of a framework's trainer, have in their attributes.

Frameworks do not ask for it: a moving average in a dict, losses in a list that a line of log is made of.
Plain data and tensors of it that change in training belong to the step, as attributes of an object in a State
do. What the framework's own classes set in the same object is left to the adapter, which knows it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ckptless.pytorch_hooks.state import attributes


class Kept:
    """The attributes of a script's objects under a framework; an object of a State has it in its own state.

    `objects` by name, of which those of the framework's classes are left out; `model` has tensors that are
    saved elsewhere. Begin once it is built, before the first step.
    """

    def __init__(self, framework: str, objects: Mapping[str, Any], model: torch.nn.Module) -> None:
        self._objects = {name: one for name, one in objects.items() if not _is_of(framework, type(one))}
        self._set_elsewhere = {name: set_by(framework, type(one)) for name, one in self._objects.items()}
        self._attributes = attributes.Attributes(self._objects, self._set_elsewhere)
        self._tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._attributes.begin(lambda: self._names)

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Return the modules in the objects that are none of `model`'s, by place: parts of their own."""
        known = {id(one) for one in model.modules()}
        return {
            f"{name}_{key}": value
            for name, one in self._objects.items()
            for key, value in attributes.own(one)
            if isinstance(value, torch.nn.Module) and key not in self._set_elsewhere[name]
            if id(value) not in known
        }

    def state_dict(self, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what has changed; `told`: by name what state_dicts of theirs have. Raises UsageError."""
        return self._attributes.capture(lambda: self._names, told or {})

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put it back, in the objects that live. Raises RecoveryError."""
        self._attributes.restore(saved, self._tensors, self._names)

    def left_out(self) -> dict[str, Any]:
        """Return by place what is neither plain data nor a tensor: who looks at it tells where it changes."""
        return {
            place: value
            for place, value in self.all().items()
            if attributes.packed(value, self._names) is None
        }

    def all(self) -> dict[str, Any]:
        """Return by place whatever the script's classes have set."""
        return {
            f"{name}.{key}": value
            for name, one in self._objects.items()
            for key, value in attributes.own(one)
            if key not in self._set_elsewhere[name]
        }


def _is_of(framework: str, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == framework


def set_by(framework: str, kind: type) -> frozenset[str]:
    """Return the names of the attributes that a framework's classes, of which `kind` is derived, ever set."""
    found = set()
    for base in kind.__mro__:
        if _is_of(framework, base):
            for function in map(_function, vars(base).values()):
                if function is not None:
                    steps = dis.get_instructions(function)
                    found |= {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
    return frozenset(found)


def _function(value: Any) -> Any:
    """Return what is behind a decorator or a property's setter; None of what is no function of Python's."""
    value = value.fset if isinstance(value, property) else getattr(value, "__func__", value)
    return inspect.unwrap(value) if inspect.isfunction(value) else None
