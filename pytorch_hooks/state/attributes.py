"""Plain attributes of the objects in a State, which no state_dict has: those that change belong to a record.

An optimizer of the script's own that counts its steps in `self.t`, or a moving average in a list: nobody
would ask for it. Every attribute of such an object is remembered as it was built. One that has changed since
is saved from then on; what never changes (a device, a file, this process's number) is this process's own and
is left alone. Classes of torch itself say everything in their state, and are not looked into.
"""

import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ckptless.daemon.api.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.state import codec
from ckptless.pytorch_hooks.state.codec import Ref

LIMIT = 16 << 20
"""Bytes that the changed attributes of one object may have: they are copied to other nodes at each commit."""

_FOREIGN = ("torch", "ckptless", "builtins", "typing", "abc", "collections")
# What torch itself puts on optimizers from outside, now and then.
_PATCHED = frozenset({"step", "grad_scale", "found_inf"})
_OPAQUE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.Generator, torch.dtype)
DEPTH = 12
_SMALL = 256

Saved = dict[str, tuple[dict[str, bytes], list[str]]]
"""Of each object by name: its changed attributes, packed, and those that `load_state_dict` brings back."""


def is_foreign(kind: type) -> bool:
    """Whether a class is torch's (or ours), with all that it inherits: it has no attributes of a script's."""
    return all(base.__module__.partition(".")[0] in _FOREIGN for base in kind.__mro__)


class Attributes:
    """The attributes of named objects: as they were built, and which have changed. Main thread only."""

    def __init__(self, holders: dict[str, Any]) -> None:
        self._holders = {name: one for name, one in holders.items() if not is_foreign(type(one))}
        self._built: dict[str, dict[str, bytes]] = {}
        self._changed: dict[str, set[str]] = {}

    @property
    def holders(self) -> dict[str, Any]:
        """The objects that are looked into, by name."""
        return self._holders

    def begin(self, names: Callable[[], Mapping[int, str]]) -> None:
        """Remember what was built, the first time; `names` are those of tensors that are saved elsewhere."""
        for name, one in self._holders.items():
            if name not in self._built:
                self._built[name], self._changed[name] = packed(one, names()), set()

    def adopt(
        self, name: str, module: torch.nn.Module, changed: Iterable[str], built: dict[str, bytes]
    ) -> None:
        """Look at these attributes of a module, too; those in `built` were like that when it was built."""
        self._holders[name] = module
        self._built.setdefault(name, {}).update(built)
        self._changed.setdefault(name, set()).update(changed)

    def capture(self, ask: Callable[[], Mapping[int, str]], states: Mapping[str, Any]) -> Saved:
        """Give what has changed.

        `states`: the state_dicts of those that have one; of what is in there no second copy is made.
        UsageError where it is too much.
        """
        self.begin(ask)
        names = ask() if self._holders else {}
        saved: Saved = {}
        for name, one in self._holders.items():
            built, changed = self._built[name], self._changed[name]
            now = packed(one, names, only=changed if isinstance(one, torch.nn.Module) else None)
            changed.update(key for key, value in now.items() if built.get(key) != value)
            changed.update(key for key in built if key not in vars(one))
            if not changed:
                continue
            large = [key for key in changed if len(now.get(key, b"")) > _SMALL]
            told = _told(states[name], names) if large and name in states else set()
            covered = {key for key in large if now[key] in told}
            kept = {key: now[key] for key in sorted(changed - covered) if key in now}
            if (size := sum(map(len, kept.values()))) > LIMIT:
                largest = max(kept, key=lambda key: len(kept[key]))
                raise UsageError(
                    f"state.{name} has {size} bytes in attributes that change, such as {largest}, where "
                    f"{LIMIT} are the limit: keep large tensors in an optimizer's state or in a module"
                )
            saved[name] = kept, sorted(covered)
        return saved

    def restore(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `capture` gave; what had not changed then goes back to what was built.

        After `load_state_dict` of the objects. RecoveryError where a tensor that it names is not here.
        """
        for name, one in self._holders.items():
            kept, covered = saved.get(name, ({}, []))
            built, living = self._built[name], vars(one)
            for key in self._changed[name] - kept.keys() - set(covered):
                if key in built:
                    _put(living, key, built[key], tensors)
                else:
                    living.pop(key, None)
            for key, value in kept.items():
                _put(living, key, value, tensors)
            self._changed[name] = {*kept, *covered}


def packed(one: Any, names: Mapping[int, str], only: Container[str] | None = None) -> dict[str, bytes]:
    """Give the attributes of an object that are plain data or tensors, each packed by `codec`."""
    found = {}
    for key, value in own(one):
        if only is None or key in only:
            try:
                found[key] = codec.pack(_tree(value, names, 0))
            except UsageError:
                continue  # an object: `hidden` says whether it has tensors
    return found


def own(one: Any) -> Iterator[tuple[str, Any]]:
    """Give the attributes of an object that torch's base classes have not."""
    base: frozenset[str] = frozenset()
    if isinstance(one, torch.optim.Optimizer):
        base = _base("optimizer") | _PATCHED
    elif isinstance(one, torch.nn.Module):
        base = _base("module")
    elif isinstance(getattr(one, "param_groups", None), list):
        base = frozenset({"param_groups", "state"})
    for key, value in list(getattr(one, "__dict__", {}).items()):
        if key not in base:
            yield key, value


_BASES: dict[str, frozenset[str]] = {}


def _base(kind: str) -> frozenset[str]:
    if not _BASES:
        _BASES["module"] = frozenset(vars(torch.nn.Module()))
        _BASES["optimizer"] = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))
    return _BASES[kind]


def hidden(one: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Give the tensors, arrays and generators in an object that `packed` does not have, with their places."""
    seen: set[int] = set()
    for key, value in own(one):
        try:
            codec.pack(_tree(value, names, 0))
        except UsageError:
            yield from _inside(value, key, names, seen, 0)


def _inside(
    value: Any, path: str, names: Mapping[int, str], seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or id(value) in names or depth > DEPTH or isinstance(value, _OPAQUE):
        return
    seen.add(id(value))
    if _has_state(value):
        yield path, value
        return
    if isinstance(value, dict):
        items = [(f"[{_short(key)}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        inside = {} if is_foreign(type(value)) else getattr(value, "__dict__", {})
        items = [(f".{key}", item) for key, item in inside.items()]
    for step, item in items:
        yield from _inside(item, path + step, names, seen, depth + 1)


def _has_state(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.numel()) and not value.is_meta
    kind = type(value)
    is_numpy = (kind.__module__, kind.__name__) == ("numpy", "ndarray") or kind.__module__.startswith(
        "numpy.random"
    )
    return is_numpy or isinstance(value, random.Random)


def _short(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _tree(value: Any, names: Mapping[int, str], depth: int) -> Any:
    """The same as a tree that `codec` packs, with the names of tensors that are saved elsewhere."""
    if depth > DEPTH:
        raise UsageError("nested too deep")
    if isinstance(value, torch.Tensor):
        known = names.get(id(value))
        return Ref(known) if known is not None else value
    if isinstance(value, dict):
        return {_tree(k, names, depth + 1): _tree(v, names, depth + 1) for k, v in value.items()}
    if isinstance(value, deque):
        return deque((_tree(v, names, depth + 1) for v in value), value.maxlen)
    if isinstance(value, list) or type(value) is tuple:
        made = [_tree(v, names, depth + 1) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def _told(state: Any, names: Mapping[int, str]) -> set[bytes]:
    """What a state_dict has, as a whole and item by item, packed."""
    found = set()
    for value in (state, *(state.values() if isinstance(state, dict) else ())):
        try:
            found.add(codec.pack(_tree(value, names, 0)))
        except UsageError:
            continue
    return found


def _put(living: dict[str, Any], key: str, value: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        living[key] = _merge(living.get(key), codec.unpack(value), tensors)
    except KeyError as error:
        raise RecoveryError(f"the attribute {key} has the tensor {error}, which is not here") from error


def _merge(living: Any, saved: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was saved, in the living containers and tensors where they fit: others may hold on to them."""
    if type(saved) is Ref:
        return tensors[saved.name]
    if isinstance(saved, torch.Tensor):
        fits = isinstance(living, torch.Tensor) and living.shape == saved.shape
        if not fits or living.dtype != saved.dtype or living.device.type != saved.device.type:
            return saved
        with torch.no_grad():
            living.copy_(saved)
        return living
    if isinstance(saved, dict):
        old = living if isinstance(living, dict) else {}
        pairs = [(_key(k, tensors), v) for k, v in saved.items()]
        made = {k: _merge(old.get(k), v, tensors) for k, v in pairs}
        if isinstance(living, dict):
            living.clear()
            living.update(made)
            return living
        return made
    if isinstance(saved, (list, tuple, deque)):
        before = list(living) if isinstance(living, (list, tuple, deque)) else []
        before += [None] * (len(saved) - len(before))
        items = [_merge(b, s, tensors) for b, s in zip(before, saved, strict=False)]
        if isinstance(living, (list, deque)) and isinstance(saved, type(living)):
            living.clear()
            living.extend(items)
            return living
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return saved


def _key(key: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    return tensors[key.name] if type(key) is Ref else key
