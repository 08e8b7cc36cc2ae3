"""A second look at the objects of a State, by other ways than a commit takes: is anything not seen?

At modules' own attributes at each commit. At everything else at the first commits of a process, before the
first step and when whatever is made lazily is there, and then now and then (`is_due`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import attributes, private, reach
from ckptless.pytorch_hooks.state.objects import State, attributes_of, parts_of, tree_of
from ckptless.pytorch_hooks.state.reach import Leaves
from ckptless.pytorch_hooks.state.tensors import TensorSet

# The first commit, and the two after it: with a gradient scaler the first update may be skipped.
LOOKS = 3
# Not a multiple of anything: what happens each few steps happens between two looks as well.
SELDOM = 257
# Of a module's attribute that changes; what is larger should be a buffer.
SMALL = 64 << 10
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)


def is_due(commit: int) -> bool:
    """Whether all is looked at, at this commit of a process: 1, 2, 3, 5, 9, 17 ... 129, 257, 514, 771 ..."""
    doubled = commit < SELDOM and (commit - 1) & (commit - 2) == 0
    return commit <= LOOKS or commit % SELDOM == 0 or doubled


class SecondLook:
    """At one State, as it was built. Main thread only."""

    def __init__(self, state: State, names: Mapping[int, str] | None = None) -> None:
        self._state = state
        self._looks = 0
        self._seen: dict[str, Any] = {}
        self._reached: dict[str, Leaves] = {}
        self._names = names if names is not None else TensorSet(state).names
        modules = [(name, one) for name, one in tree_of(state).modules() if _is_watched(one)]
        self._modules = [_Watched(name, one, self._names) for name, one in modules]

    def look(self, tensors: TensorSet) -> None:
        """Look, before a commit. UsageError, with its place, for a tensor that no commit would have."""
        self._looks += 1
        self._names = tensors.names
        self.at_modules()
        if not is_due(self._looks):
            return
        if self._looks == 1:
            self._at_state_dicts(tensors)
        if self._looks <= LOOKS:
            self._at_holders(tensors)
        self._at_objects()
        attributes_of(self._state).check_large(self._names)

    def many(self) -> str | None:
        """The name of plain data in the State that has so many items that to write them out takes long."""
        given = dict(parts_of(self._state).data)
        for name, one in parts_of(self._state).stateful.items():
            found: dict[str, Any] = getattr(one, "ckptless_looks_through", dict)()
            given |= {f"{name}.{place}": value for place, value in found.items()}
        for name, value in given.items():
            if sum(1 for _ in islice(_items(value), attributes.MANY + 1)) > attributes.MANY:
                return name
        return None

    @property
    def is_whole(self) -> bool:
        """Whether the last look was at everything."""
        return is_due(self._looks)

    def functions(self) -> Iterator[tuple[str, Any]]:
        """Yield what may keep something that no commit has: functions that its objects call, their classes,
        and what a forward pass has left of its graph.
        """
        for prefix, module in tree_of(self._state).modules():
            for place, hook in (*private.hooks_of(module), *private.hooks_of_parameters(module)):
                yield f"state.{prefix.replace(':', '.')}{place}", hook
            for key, value in _own(module):
                of_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
                if of_graph and not _is_small(value):
                    yield f"state.{prefix.replace(':', '.')}{key}", value.detach()
                elif isinstance(value, (FunctionType, MethodType)):
                    yield f"state.{prefix.replace(':', '.')}{key}", value
        yield from self._of_stateful()
        classes = {k: None for one in self.known().values() for k in type(one).__mro__ if reach.is_own(k)}
        for each in classes:
            yield f"the class {each.__name__}", each

    def _of_stateful(self) -> Iterator[tuple[str, Any]]:
        for name, one in parts_of(self._state).stateful.items():
            for index, function in enumerate(getattr(one, "lr_lambdas", ())):
                if not isinstance(function, FunctionType):
                    continue  # of an object LambdaLR's state_dict has the attributes
                yield f"state.{name}.lr_lambdas[{index}]", function
            # What an adapter's object says that it does not have of the script's.
            for place, value in getattr(one, "ckptless_leaves_out", dict)().items():
                yield f"{name}.{place}", value

    def has(self, tensors: TensorSet) -> Callable[[Any], bool]:
        """Return who tells what the State has: also views of its tensors, and its optimizers' groups."""
        own = {id(given) for one in parts_of(self._state).optimizers.values() for given in _own_of(one)}
        ids = {*self.known(), *own}
        storages = {private.storage(tensor) for tensor in tensors.living.values()}

        def has(one: Any) -> bool:
            is_stock = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided
            return id(one) in ids or (is_stock and private.storage(one) in storages)

        return has

    def at_modules(self) -> None:
        """Attributes of modules that training changes: they are saved from now on. Before a restore, too."""
        for watched in self._modules:
            if watched.is_as_known(self._names):
                continue
            changed, built = watched.changes(self._names)
            if changed:
                attributes_of(self._state).adopt(watched.name, watched.module, changed, built)
            key = watched.large_change()
            if key is not None:
                raise UsageError(
                    f"state.{watched.name.replace(':', '.')}{key} changes in training and is no buffer: "
                    f"make it one, by register_buffer({key!r}, ..., persistent=False)"
                )

    def _at_state_dicts(self, tensors: TensorSet) -> None:
        """Whatever torch would save of a model is a parameter, a buffer or extra state, or made of these."""
        storages = {private.storage(tensor) for tensor in tensors.living.values()}
        for root, module in parts_of(self._state).modules.items():
            for key, value in private.bare_state_dict(module).items():
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
            stateful = name in parts_of(self._state).stateful
            tree = one.state_dict() if stateful else {}
            told = [value for value in _items(tree) if isinstance(value, torch.Tensor)]
            names = {**tensors.names, **{id(t): name for t in told}}
            for path, value in attributes.hidden(one, names):
                if any(_same(value, other) for other in (*told, *tensors.living.values())):
                    continue
                if (drawn := attributes.state_of_generator(value)) is not None and _tells(tree, drawn):
                    continue
                # Whoever has a state_dict may keep constants, such as a dataset.
                now = attributes.look(value)
                before = self._seen.setdefault(f"{name}.{path}", now) if self._looks == 1 else None
                if not stateful or now != (before or self._seen.get(f"{name}.{path}")):
                    raise UsageError(_unseen(name, path, value, stateful=stateful))

    def _at_objects(self) -> None:
        """Objects in the attributes of modules, and of what has no state_dict."""
        parts = parts_of(self._state)
        known = self.known()
        roots = [(w.name.replace(":", "."), w.module, w.is_script_s) for w in self._modules]
        without = {name: one for name, one in parts.holders.items() if name not in parts.stateful}
        roots += [(f"{name}.", one, not attributes.is_foreign(type(one))) for name, one in without.items()]
        for name, one, looked_into in roots:
            if not looked_into:
                continue
            now: Leaves = {}
            for key, value in attributes.own(one):
                if attributes.packed(value, self._names) is None:
                    now |= reach.leaves(value, f"{name}{key}", known, eyes=reach.Eyes(functions=False))
            place = reach.changed(self._reached[name], now) if name in self._reached else None
            if place is not None:
                raise UsageError(
                    f"state.{place} changes in training, and no commit would have it: make it a buffer of a "
                    "module or a plain attribute, or give it by get_extra_state and set_extra_state (of an "
                    "object in the State by state_dict and load_state_dict)"
                )
            self._reached[name] = now

    def known(self) -> dict[int, Any]:
        """Return by id what the State has anyway."""
        parts = parts_of(self._state)
        objects = {
            **self._state.__dict__["_objects"],
            **parts.holders,
            **parts.generators,
            **parts.stateful,
            **parts.optimizers,
            "State": self._state,
        }
        # An adapter's object has a framework's state, which is reached from the model.
        for name, one in parts.stateful.items():
            objects |= {f"{name} {n}": other for n, other in enumerate(getattr(one, "ckptless_covers", ()))}
        modules = {f"m:{prefix}": module for prefix, module in tree_of(self._state).modules()}
        given = {id(one): one for one in (*objects.values(), *modules.values()) if type(one) not in _PLAIN}
        return {**self._names, **given, **parts.own}


class _Watched:
    """A module's own attributes: as they were built, and as they were looked at last."""

    def __init__(self, name: str, module: torch.nn.Module, names: Mapping[int, str]) -> None:
        self.name, self.module = name, module
        self.is_script_s = not attributes.is_foreign(type(module))
        self._built = _small(module, names)
        self._large = dict(_large(module))
        self._ids: tuple[int, ...] = ()
        # Whose id would be another one's otherwise.
        self._held: list[Any] = []
        self._looks: dict[str, Any] = {}
        self.is_as_known(names)

    def is_as_known(self, names: Mapping[int, str]) -> bool:
        """Whether no attribute has been set, nor any that can be changed in place has changed."""
        values = self.module.__dict__.values()
        ids = tuple(map(id, values))
        if same := ids == self._ids:
            if not self._looks:
                return True
        else:
            self._ids = ids
            self._held = [value for value in values if type(value) in _PLAIN]
        looks = {
            key: _look(value, names)
            for key, value in _own(self.module)
            if isinstance(value, (torch.Tensor, *_CONTAINERS)) or attributes.is_array(value)
        }
        before, self._looks = self._looks, looks
        return same and looks == before

    def changes(self, names: Mapping[int, str]) -> tuple[set[str], dict[str, bytes]]:
        """The small ones that are not as they were built, and those as they were."""
        now = _small(self.module, names)
        return {key for key, value in now.items() if self._built.get(key) != value}, self._built

    def large_change(self) -> str | None:
        """A large tensor that has been written to or replaced; one that has come is known from now on."""
        found = None
        for key, version in _large(self.module):
            if self._large.setdefault(key, version) != version:
                found = key
        return found


def _own_of(optimizer: Any) -> Iterator[Any]:
    yield optimizer.state
    yield optimizer.param_groups
    yield from optimizer.param_groups


def _items(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Give everything in a container of plain data, what is in those inside it, too."""
    if isinstance(tree, _CONTAINERS) and depth < attributes.DEPTH:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield item
            yield from _items(item, depth + 1)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes, but for weights that each forward pass makes (pruned, an old norm)."""
    made_of = private.parameters_of(module)
    for key, value in attributes.own(module):
        if f"{key}_orig" not in made_of and f"{key}_g" not in made_of:
            yield key, value


def _is_watched(module: torch.nn.Module) -> bool:
    kind = type(module)
    return not attributes.is_foreign(kind) or kind.__module__.startswith("torch.nn.modules")


def _look(value: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, torch.Tensor) and not _is_small(value):
        return id(value), value.grad_fn is None and private.version(value)
    return attributes.look_at(value, names) if _is_small(value) else (id(value), len(value))


def _small(module: torch.nn.Module, names: Mapping[int, str]) -> dict[str, bytes]:
    """The attributes that are plain data or small tensors, packed."""
    found = {key: attributes.packed(value, names) for key, value in _own(module) if _is_small(value)}
    return {key: data for key, data in found.items() if data is not None and len(data) <= SMALL}


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() <= SMALL
    if attributes.is_array(value):
        return bool(value.nbytes <= SMALL)
    return not isinstance(value, _CONTAINERS) or len(value) <= SMALL // 8


def _large(module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield which object each large tensor is, and how often it was written in place."""
    for key, value in _own(module):
        if isinstance(value, torch.Tensor) and value.grad_fn is None and not _is_small(value):
            yield key, (id(value), private.version(value))


def _unseen(name: str, path: str, value: Any, *, stateful: bool) -> str:
    how = "its state_dict" if stateful else "its state, by parameter,"
    return (
        f"state.{name}.{path} is a {type(value).__name__} that no commit would have: keep it in {how} or in "
        "a module that the State has, too"
    )


def _tells(tree: Any, state: Any) -> bool:
    """Whether a state_dict has the state of a generator of random numbers."""
    return any(type(one) is type(state) and repr(one) == repr(state) for one in (tree, *_items(tree)))


def _same(value: Any, other: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    value, other = private.local(value), private.local(other)
    if private.storage(value) == private.storage(other):
        return True
    alike = value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    return alike and torch.equal(value, other)
