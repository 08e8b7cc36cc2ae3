"""Finds what can be reached from an object and changes in training, and no commit has, by two looks at it."""

import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, FrameType, FunctionType, MethodType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptless.pytorch_hooks.state import attributes

if TYPE_CHECKING:
    from ckptless.pytorch_hooks.state.second_look import SecondLook

# So much of what is reached from one place is looked at.
LEAVES = 5000
DEPTH = 8
# So many things of a script are told of, each once.
TOLD = 4
_PLAIN = (bool, int, float, complex, str, bytes)
# What changes from step to step, and torch looks after.
_TRAINS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)

Leaves = dict[str, Any]
"""By place: what compares equal as long as it has not changed."""


def is_own(kind: type) -> bool:
    """Whether a class is somebody's own: neither Python's, torch's nor numpy's."""
    top = kind.__module__.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    return top not in ("numpy", "ckptless") and not attributes.is_foreign(kind)


def leaf(value: Any) -> Any:
    """Return what a tensor, an array or a generator has, to be compared; None for anything else."""
    if isinstance(value, torch.Tensor):
        # A graph's: made anew by each forward pass.
        return None if value.grad_fn is not None else attributes.content(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy"):
        return attributes.content(value)
    return None


class Eyes(NamedTuple):
    """How things are looked at: into objects of which classes, and what has no inside."""

    into: Callable[[type], bool] = is_own
    leaf: Callable[[Any], Any] = leaf
    # Also at what functions keep for themselves.
    functions: bool = True


ALL = Eyes()


def leaves(value: Any, path: str, known: Mapping[int, Any], *, eyes: Eyes = ALL) -> Leaves:
    """Look at everything under `value` that is not `known` (by id): numbers, tensors, arrays, generators."""
    found: Leaves = {}
    for place, one in _walk(value, path, {*known}, eyes, 0):
        if len(found) >= LEAVES:
            break
        found[place] = one
    return found


def changed(before: Leaves, now: Leaves) -> str | None:
    """The first place at which something else is now, has come or has gone."""
    for place in (*now, *before):
        if place not in now or place not in before or before[place] != now[place]:
            return place
    return None


def is_looked_into(value: Any) -> bool:
    """Whether it is an object of a class of somebody's own: see `is_own`."""
    return is_own(type(value))


def _walk(value: Any, path: str, seen: set[int], eyes: Eyes, depth: int) -> Iterator[tuple[str, Any]]:
    if type(value) in _PLAIN or value is None:
        yield path, (type(value), value)
        return
    if id(value) in seen or depth > DEPTH:
        return
    seen.add(id(value))
    if (found := eyes.leaf(value)) is not None:
        yield path, found
        return
    if not eyes.functions and (isinstance(value, (FunctionType, MethodType)) or _is_native_method(value)):
        return
    for step, item in _inside(value, eyes):
        yield from _walk(item, path + step, seen, eyes, depth + 1)


def _inside(value: Any, eyes: Eyes) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f".{key}", tensor
    elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        yield from _of_container(value)
    elif isinstance(value, (FunctionType, MethodType)):
        yield from _of_function(value, eyes)
    elif _is_native_method(value):
        yield ".__self__", value.__self__
    elif isinstance(value, type):
        yield from _of_class(value) if eyes.into(value) else ()
    elif eyes.into(type(value)) and not isinstance(value, torch.Tensor):
        yield from ((f".{key}", item) for key, item in attributes.fields(value))


def _is_native_method(value: Any) -> bool:
    """Whether it is a method, of an object that it has, which C has made: a generator's, say."""
    return isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, (NoneType, ModuleType))


def _of_container(value: Any) -> Iterator[tuple[str, Any]]:
    if len(value) > attributes.MANY or isinstance(value, (set, frozenset)):
        yield ".len", len(value)
    elif isinstance(value, dict):
        yield from ((f"[{attributes.short(key)}]", item) for key, item in list(value.items()))
    else:
        yield from ((f"[{index}]", item) for index, item in enumerate(list(value)))


def _of_function(value: Any, eyes: Eyes) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps for itself: its closure and its defaults, and whose method it is."""
    if isinstance(value, MethodType):
        # Of numpy's generators methods are such, too.
        if eyes.into(type(value.__self__)) or eyes.leaf(value.__self__) is not None:
            yield ".__self__", value.__self__
        value = value.__func__
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for index, item in enumerate(value.__defaults__ or ()):
        yield f".__defaults__[{index}]", item
    for key, item in (value.__kwdefaults__ or {}).items():
        yield f".__kwdefaults__[{key!r}]", item


def _of_class(value: type) -> Iterator[tuple[str, Any]]:
    """Yield what all objects of a class have together, and what its methods keep."""
    for key, item in list(vars(value).items()):
        if isinstance(item, (staticmethod, classmethod)):
            yield f".{key}", item.__func__
        elif isinstance(item, property):
            yield f".{key}", item.fget
        elif not (key.startswith("__") and key.endswith("__")) or isinstance(item, FunctionType):
            yield f".{key}", item


class Outside:
    """The surroundings of a training function, beside its State.

    They are its script's globals, its closure, its object; what functions in the State, and the classes of
    its objects, keep for themselves; and of its own variables what torch trains with, a scheduler, say,
    random generators, and objects of the script's classes. Of a script that is no function (`train` is None)
    all globals are such variables.

    Nobody can say whether the next step depends on it: what changes is told of, each once, and few in all.
    `train` is the function itself, of one that was wrapped or given arguments. Main thread only.
    """

    def __init__(self, train: Callable[..., Any] | None, tell: Callable[[str], None]) -> None:
        while isinstance(train, functools.partial):
            train = train.func
        self.train, self._tell = None if train is None else inspect.unwrap(train), tell
        self._before: dict[str, Leaves] = {}
        # By id, what somebody else looked at then.
        self._others: frozenset[int] = frozenset()
        self._told: set[str] = set()

    def forget(self) -> None:
        """The State is built anew: what a script sets as it does that is no change."""
        self._before = {}

    def look(self, state: "SecondLook", loaders: Callable[[], Mapping[int, Any]] = dict) -> None:
        """Look, at a commit, once `state` has. `loaders()`: by id, what somebody else looks at."""
        if len(self._told) >= TOLD or not state.is_whole:
            return
        others = loaders()
        known = {**state.known(), **others}
        roots: dict[str, Any] = dict(_variables(self.train, known))
        if self.train is not None:
            roots |= {f"the global {name}": value for name, value in _globals(self.train)}
            roots["the training function"] = self.train
        found_already = set(map(id, roots.values()))
        roots |= {place: value for place, value in state.functions() if id(value) not in found_already}
        now = {
            place: leaves(value, place, known) for place, value in roots.items() if place not in self._told
        }
        before, self._before = self._before, now
        # A loader that has begun since: what it has, a dataset say, is not gone.
        begun, self._others = others.keys() - self._others, frozenset(others)
        known_then = {key: one for key, one in known.items() if key not in begun}
        for place in [place for place in now if place in before]:
            found = changed(before[place], now[place])
            if found is not None and begun:
                found = changed(before[place], leaves(roots[place], place, known_then))
            if found is not None and len(self._told) < TOLD:
                self._told.add(place)
                self._tell(
                    f"{found} changes in training and no commit has it: after a fault it is what the script, "
                    "or a step that was cut off, has made of it. Put into the State what the next step "
                    "depends on"
                )


def script_frames(train: Callable[..., Any] | None) -> list[FrameType]:
    """Return the frames of the script's functions that are under way here, up to the training function's.

    None where that is a framework's, or is not under way.
    """
    function = getattr(train, "__func__", train)
    if getattr(function, "__module__", "").partition(".")[0] == "ckptless":
        return []
    of_script = sys.modules["__main__"].__dict__ if train is None else getattr(function, "__globals__", None)
    code, frame = getattr(function, "__code__", None), sys._getframe()
    found: list[FrameType] = []
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_globals is of_script:
            found.append(frame)
            if frame.f_code is code:
                return found
    return [] if code is not None else found


def variables(frame: FrameType, kind: Callable[[Any], bool]) -> dict[str, Any]:
    """Return those of a frame's variables that are of a kind."""
    found = frame.f_locals
    these = {name: one for name, one in list(found.items()) if kind(one)}
    if isinstance(found, dict) and found is not frame.f_globals:
        # A copy, until Python 3.13: what it has would live for a step longer.
        found.clear()
    return these


def _variables(train: Callable[..., Any] | None, known: Mapping[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what trains, and the script's objects, among the variables of its functions under way here."""
    seen = {*known}
    for frame in script_frames(train):
        where = "global" if frame.f_code.co_name == "<module>" else "local"
        for name, one in variables(frame, _may_train).items():
            if id(one) not in seen:
                seen.add(id(one))
                is_torchs = isinstance(one, _TRAINS) and not isinstance(one, torch.nn.Module)
                yield f"the {where} {name}", one.state_dict() if is_torchs else one


def _may_train(value: Any) -> bool:
    draws = isinstance(value, (torch.Generator, random.Random))
    draws |= type(value).__module__.startswith("numpy.random")
    return draws or isinstance(value, _TRAINS) or is_looked_into(value)


def _globals(train: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    function = getattr(train, "__func__", train)
    for name, value in list(getattr(function, "__globals__", {}).items()):
        if name.startswith("__"):
            continue
        if not isinstance(value, (FunctionType, type)) or value.__module__ == function.__module__:
            yield name, value
