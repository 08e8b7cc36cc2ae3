"""A second look at the objects of a State, by other ways than a commit takes: is anything not seen?

Once, at the first commits of a process: before the first step, and when whatever is made lazily is there.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.state import attributes, private
from ckptless.pytorch_hooks.state.objects import State, attributes_of, parts_of, tree_of
from ckptless.pytorch_hooks.state.parts import is_stateful
from ckptless.pytorch_hooks.state.tensors import TensorSet

# The first commit, and the two after it: with a gradient scaler the first update may be skipped.
LOOKS = 3
# Of a module's attribute that changes; what is larger should be a buffer.
SMALL = 64 << 10


class SecondLook:
    """At one State, as it was built. Main thread only."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._looks = 0
        modules = [(name, one) for name, one in tree_of(state).modules() if _is_script_s(one)]
        self._modules = {name: (one, _small(one)) for name, one in modules}
        self._versions = {name: dict(_large(one)) for name, one in modules}

    def look(self, tensors: TensorSet) -> None:
        """Look, before a commit. UsageError, with its place, for a tensor that no commit would have."""
        if self._looks >= LOOKS:
            return
        self._looks += 1
        if self._looks == 1:
            self._at_state_dicts(tensors)
        self._at_holders(tensors)
        self._at_modules()
        if self._looks == LOOKS:
            self._modules, self._versions = {}, {}

    def _at_state_dicts(self, tensors: TensorSet) -> None:
        """Whatever torch would save of a model is a parameter, a buffer or extra state."""
        storages = {private.storage(tensor) for tensor in tensors.living.values()}
        for root, module in parts_of(self._state).modules.items():
            for key, value in module.state_dict(keep_vars=True).items():
                if not isinstance(value, torch.Tensor) or "_extra_state" in key or not value.numel():
                    continue
                if private.storage(value) not in storages:
                    raise UsageError(
                        f"state.{root}.state_dict() has {key}, which is neither a parameter nor a buffer: "
                        "register it as one, or give it by get_extra_state and set_extra_state"
                    )

    def _at_holders(self, tensors: TensorSet) -> None:
        """Optimizers, schedulers and other objects of the script's own."""
        for name, one in parts_of(self._state).holders.items():
            if attributes.is_foreign(type(one)):
                continue
            told = list(_tensors(one.state_dict())) if name in parts_of(self._state).stateful else []
            names = {**tensors.names, **{id(t): name for t in told}}
            for path, value in attributes.hidden(one, names):
                if not any(_same(value, other) for other in (*told, *tensors.living.values())):
                    raise UsageError(_unseen(name, path, value, stateful=is_stateful(one)))

    def _at_modules(self) -> None:
        """Attributes of the script's own modules that training changes: they are saved from now on."""
        for name, (module, built) in self._modules.items():
            now = _small(module)
            changed = {key for key, value in now.items() if built.get(key) != value}
            if changed:
                attributes_of(self._state).adopt(name, module, changed, built)
            versions = self._versions[name]
            for key, version in _large(module):
                if version != versions.get(key, version) and version[0] == versions[key][0]:
                    raise UsageError(
                        f"state.{name.replace(':', '.')}{key} changes in training and is no buffer: "
                        f"make it one, by register_buffer({key!r}, ..., persistent=False)"
                    )


def _is_script_s(module: torch.nn.Module) -> bool:
    return not attributes.is_foreign(type(module))


def _small(module: torch.nn.Module) -> dict[str, bytes]:
    """The attributes that are plain data or small tensors; not what a forward pass leaves of its graph."""
    large = {key for key, value in attributes.own(module) if not _is_small(value)}
    only = [key for key, _value in attributes.own(module) if key not in large]
    return {k: v for k, v in attributes.packed(module, {}, only).items() if len(v) <= SMALL}


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and value.numel() * value.element_size() <= SMALL
    return not isinstance(value, (list, tuple, dict, set)) or len(value) <= SMALL // 8


def _large(module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of the large tensors which object it is, and how often it was written in place."""
    for key, value in attributes.own(module):
        if isinstance(value, torch.Tensor) and value.grad_fn is None and not _is_small(value):
            yield key, (id(value), private.version(value))


def _unseen(name: str, path: str, value: Any, *, stateful: bool) -> str:
    how = "its state_dict" if stateful else "its state, by parameter,"
    return (
        f"state.{name}.{path} is a {type(value).__name__} that no commit would have: keep it in {how} or in "
        "a module that the State has, too"
    )


def _tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)) and depth < attributes.DEPTH:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item, depth + 1)


def _same(value: Any, other: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    value, other = private.local(value), private.local(other)
    if private.storage(value) == private.storage(other):
        return True
    alike = value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    return alike and torch.equal(value, other)
