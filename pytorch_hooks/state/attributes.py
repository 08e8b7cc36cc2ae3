"""Plain attributes of the objects in a State, which no state_dict has: those that change belong to a record.

An optimizer of the script's own that counts its steps in `self.t`, or a moving average in a list: nobody
would ask for it. Every attribute of such an object is remembered as it was built. One that has changed since
is saved from then on; what never changes (a device, a file, this process's number) is this process's own and
is left alone. Classes of torch itself say everything in their state, and are not looked into.
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash

from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.state import codec, private, raw
from ckptless.pytorch_hooks.state.codec import Ref

LIMIT = 16 << 20
"""Bytes that the changed attributes of one object may have: they are copied to other nodes at each commit."""

_FOREIGN = ("torch", "ckptless", "builtins", "typing", "abc", "collections")
# What torch itself puts on optimizers from outside, now and then.
_PATCHED = frozenset({"step", "grad_scale", "found_inf"})
_OPAQUE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.Generator, torch.dtype)
DEPTH = 12
_SMALL = 256
# Bytes of a tensor up to which a copy of them is had sooner than a view.
_COPIED = 16 << 10
# As many back a recovery may go, and one that is under way.
CAPTURES = 4
MANY = 10_000
"""Items of a container up to which it is seen that one of them has changed."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)

Saved = dict[str, tuple[dict[str, bytes], list[str]]]
"""Of each object by name: its changed attributes, packed, and those that `load_state_dict` brings back."""


def is_foreign(kind: type) -> bool:
    """Whether a class is torch's (or ours), with all that it inherits: it has no attributes of a script's."""
    return all(base.__module__.partition(".")[0] in _FOREIGN for base in kind.__mro__)


class Attributes:
    """The attributes of named objects: as they were built, and which have changed. Main thread only."""

    def __init__(
        self, holders: dict[str, Any], left_alone: Mapping[str, Container[str]] | None = None
    ) -> None:
        """`left_alone`: by holder the attributes that are somebody else's to keep."""
        self.holders = {name: one for name, one in holders.items() if not is_foreign(type(one))}
        self._left_alone = left_alone or {}
        self._built: dict[str, dict[str, bytes]] = {}
        self._changed: dict[str, set[str]] = {}
        # How each attribute looked when it was packed last, what that gave, and the things in it (`_tree`).
        self._packed: dict[str, dict[str, tuple[Any, bytes | None, list[Any]]]] = {}
        # Those that had changed the last time: they are packed without a look, which would take as long.
        self._lively: dict[str, set[str]] = {}
        # Of each attribute as it was built, and of the newest captures: what was packed, and the things then.
        self._stood: dict[tuple[str, str], deque[tuple[bytes, list[Any]]]] = {}

    def begin(self, names: Callable[[], Mapping[int, str]]) -> None:
        """Remember what was built, the first time; `names` are those of tensors that are saved elsewhere."""
        for name, one in self.holders.items():
            if name not in self._built:
                self._built[name], self._changed[name] = self._pack(name, one, names()), set()
                self._note(name, self._built[name])

    def _note(self, name: str, those: dict[str, bytes]) -> None:
        """Remember which objects these attributes have just now: they are put back into the same ones."""
        for key, data in those.items():
            stood = self._stood.setdefault((name, key), deque())
            stood.append((data, self._packed[name][key][2]))
            if len(stood) > 1 + CAPTURES:
                # Not the first one, which was built.
                del stood[1]

    def _put(self, name: str, key: str, data: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set an attribute to what was packed, in the objects that stood there then, if that was here."""
        stood = self._stood.get((name, key), ())
        there = next((things for known, things in reversed(stood) if known == data), None)
        put(self.holders[name], key, data, tensors, there)

    def _pack(self, name: str, one: Any, names: Mapping[int, str]) -> dict[str, bytes]:
        """Pack all attributes that can be packed; what looks as it did is not packed again."""
        known, lively = self._packed.setdefault(name, {}), self._lively.setdefault(name, set())
        only = self._changed[name] if isinstance(one, torch.nn.Module) else None
        but = self._left_alone.get(name, ())
        for key, value in own(one):
            if key in but or not (only is None or key in only):
                continue
            looked, before, _objects = known.get(key, (None, None, []))
            things: list[Any] = []
            data = packed(value, names, things) if key in lively else None
            if data is not None and data != before:
                known[key] = None, data, things
                continue
            lively.discard(key)
            now = look_at(value, names)
            if now != looked:
                if looked is not None:
                    lively.add(key)
                if data is None:
                    things = []
                    data = packed(value, names, things)
                known[key] = now, data, things
        living = dict(fields(one))
        return {key: data for key, (_look, data, _) in known.items() if data is not None and key in living}

    def check_large(self, names: Mapping[int, str]) -> None:
        """Raise UsageError where something has changed that is too large to be looked at in each commit."""
        for name, one in self.holders.items():
            for key, value in own(one):
                found, before, _things = self._packed.get(name, {}).get(key, (None, None, []))
                if before is None or not _is_large(value, 0) or found != look_at(value, names):
                    continue
                if packed(value, names) != before:
                    raise UsageError(
                        f"state.{name}.{key} changes in training and is too large to be looked through at "
                        f"each commit ({MANY} items, {LIMIT} bytes): keep it in a tensor of an optimizer's "
                        "state or a buffer of a module"
                    )

    def adopt(
        self, name: str, module: torch.nn.Module, changed: Iterable[str], built: dict[str, bytes]
    ) -> None:
        """Look at these attributes of a module, too; those in `built` were like that when it was built."""
        self.holders[name] = module
        self._built.setdefault(name, {}).update(built)
        self._changed.setdefault(name, set()).update(changed)

    def capture(self, ask: Callable[[], Mapping[int, str]], states: Mapping[str, Any]) -> Saved:
        """Give what has changed.

        `states`: the state_dicts of those that have one; of what is in there no second copy is made.
        UsageError where it is too much.
        """
        self.begin(ask)
        names = ask() if self.holders else {}
        saved: Saved = {}
        for name, one in self.holders.items():
            built, changed = self._built[name], self._changed[name]
            now = self._pack(name, one, names)
            changed.update(key for key, value in now.items() if built.get(key) != value)
            living = dict(fields(one))
            changed.update(key for key in built if key not in living)
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
            self._note(name, kept)
        return saved

    def restore(self, saved: Saved, tensors: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> None:
        """Put back what `capture` gave; what had not changed then goes back to what was built.

        After `load_state_dict` of the objects. RecoveryError where a tensor that it names is not here.
        """
        for name, one in self.holders.items():
            kept, covered = saved.get(name, ({}, []))
            built = self._built[name]
            if not isinstance(one, torch.nn.Module):
                # What has changed for the first time in the step that was cut off.
                now = self._pack(name, one, names)
                self._changed[name].update(k for k, v in now.items() if built.get(k) != v)
            for key in self._changed[name] - kept.keys() - set(covered):
                if key in built:
                    self._put(name, key, built[key], tensors)
                elif key in dict(fields(one)):  # Its class may have one, too.
                    object.__delattr__(one, key)
            for key, value in kept.items():
                self._put(name, key, value, tensors)
            # Of a module only those are looked at.
            watched = self._changed[name] if isinstance(one, torch.nn.Module) else set()
            self._changed[name] = {*watched, *kept, *covered}


class _Same:
    """Equal to itself only; keeps it alive, so that nothing else has its id."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.one is other.one

    __hash__ = None  # type: ignore[assignment]


def look_at(value: Any, names: Mapping[int, str], depth: int = 0) -> Any:
    """Give what tells, without packing it, whether an attribute has changed.

    `names` are those of tensors that are saved elsewhere.
    """
    if isinstance(value, torch.Tensor):
        known = names.get(id(value))
        return _Same(value), known, _written(value) if known is None else 0
    if isinstance(value, (dict, list, tuple, deque)):
        if len(value) > MANY or depth > DEPTH:
            return _Same(value), len(value)
        items = value.values() if isinstance(value, dict) else ()
        return type(value), _look_at_each(value, names, depth), _look_at_each(items, names, depth)
    if isinstance(value, (set, frozenset)):
        return _Same(value), frozenset(value) if len(value) <= MANY else len(value)
    if is_array(value) and codec.is_plain_array(value):
        return _Same(value), xxhash.xxh3_64_intdigest(value.tobytes()) if value.nbytes <= LIMIT else 0
    return (type(value), value) if type(value) in _PLAIN else _Same(value)


def _look_at_each(items: Collection[Any], names: Mapping[int, str], depth: int) -> Any:
    plain = codec.encode_plain(items)
    return [look_at(item, names, depth + 1) for item in items] if plain is None else plain


def _is_large(value: Any, depth: int) -> bool:
    """Whether `look_at` does not see each change in it."""
    if isinstance(value, (dict, list, tuple, deque)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) > MANY or depth > DEPTH or any(_is_large(item, depth + 1) for item in items)
    return is_array(value) and value.nbytes > LIMIT


def look(value: Any) -> Any:
    """Return what compares equal for a tensor, array or random generator as long as it has not changed."""
    state = state_of_generator(value)
    return look_at(value, {}) if state is None else repr(state)


def state_of_generator(value: Any) -> Any:
    """The state of one of Python's or numpy's generators of random numbers; None of anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", value)
        return bits.state if hasattr(bits, "state") else bits.get_state()
    return None


def set_generator(living: Any, state: Any) -> None:
    """Put back what `state_of_generator` gave."""
    if isinstance(living, random.Random):
        living.setstate(state)
        return
    bits = getattr(living, "bit_generator", living)
    if hasattr(bits, "state"):
        bits.state = state
    else:
        bits.set_state(state)


def packed(value: Any, names: Mapping[int, str], things: list[Any] | None = None) -> bytes | None:
    """Pack plain data or tensors by `codec`; None for an object: `hidden` says whether it has tensors.

    `things`: see `_tree`.
    """
    try:
        return codec.pack(_tree(value, names, things))
    except UsageError:
        return None


def pack_value(value: Any) -> bytes:
    """Pack what a generator of random numbers has now, or plain data. UsageError."""
    state = state_of_generator(value)
    return codec.pack(_tree(value, {}) if state is None else state)


def content(value: Any) -> Any:
    """Return the same as `look`, whichever tensor or array it is that has the bytes."""
    found = look(value)
    if isinstance(value, torch.Tensor):
        return found[2], value.shape
    is_array = type(found) is tuple and isinstance(found[0], _Same) and len(found) > 1
    return found[1:] if is_array else found


def fields(one: Any) -> Iterator[tuple[str, Any]]:
    """Give an object's attributes, those in `__slots__` too."""
    yield from list(getattr(one, "__dict__", {}).items())
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in ("__dict__", "__weakref__") and hasattr(one, key):
                yield key, getattr(one, key)


def _written(tensor: torch.Tensor) -> int:
    """A digest, since writes by `.data` are not counted; of what could not be saved anyway, their count."""
    part = private.local(tensor)
    if raw.why_not(part) or tensor.nbytes > LIMIT:
        return private.version(tensor)
    if part.nbytes > _COPIED and raw.lies_here(part):
        return xxhash.xxh3_64_intdigest(raw.window(part))
    return xxhash.xxh3_64_intdigest(raw.to_bytes(part))


def own(one: Any) -> Iterator[tuple[str, Any]]:
    """Give the attributes of an object that torch's base classes have not."""
    base: frozenset[str] = frozenset()
    if isinstance(one, torch.optim.Optimizer):
        base = _base("optimizer") | _PATCHED
    elif isinstance(one, torch.nn.Module):
        base = _base("module")
    elif isinstance(getattr(one, "param_groups", None), list):
        base = frozenset({"param_groups", "state"})
    for key, value in fields(one):
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
        if packed(value, names) is None:
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
        items = [(f"[{short(key)}]", item) for key, item in value.items()]
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
    return (
        is_array(value)
        or type(value).__module__.startswith("numpy.random")
        or isinstance(value, random.Random)
    )


def short(key: object) -> str:
    """Return a key of a dict as a place has it."""
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _tree(value: Any, names: Mapping[int, str], things: list[Any] | None = None, depth: int = 0) -> Any:
    """The same as a tree that `codec` packs, with the names of tensors that are saved elsewhere.

    What can be written to in it is added to `things`, in the order in which `merge` comes by it.
    """
    if depth > DEPTH:
        raise UsageError("nested too deep")
    if isinstance(value, torch.Tensor) and (known := names.get(id(value))) is not None:
        return Ref(known)
    if things is not None and _is_thing(value):
        things.append(value)
    if isinstance(value, (list, tuple)) and codec.are_plain(value):
        return [*value] if isinstance(value, list) else value
    if isinstance(value, dict):
        return {
            _tree(k, names, None, depth + 1): _tree(v, names, things, depth + 1) for k, v in value.items()
        }
    if isinstance(value, deque):
        return deque((_tree(v, names, things, depth + 1) for v in value), value.maxlen)
    if isinstance(value, list) or type(value) is tuple:
        made = [_tree(v, names, things, depth + 1) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def things_in(value: Any) -> list[Any]:
    """Return what can be written to in plain data, in the order in which `merge` comes by it."""
    found = [value] if _is_thing(value) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, _LISTS) else ()
    if not codec.are_plain(items):
        for item in items:
            found += things_in(item)
    return found


def _told(state: Any, names: Mapping[int, str]) -> set[bytes | None]:
    """Return what a state_dict has, as a whole and item by item, packed."""
    return {packed(value, names) for value in (state, *(state.values() if isinstance(state, dict) else ()))}


def put(
    one: Any,
    key: str,
    value: bytes,
    tensors: Mapping[str, torch.Tensor],
    stood: Iterable[Any] | None = None,
) -> None:
    """Set an attribute to what was packed; in place where it fits. RecoveryError.

    `stood`: the objects that it had then, as `_tree` gave them; they are written to, whatever there is now.
    """
    living = dict(fields(one)).get(key)
    try:
        made = merge(living, codec.unpack(value), tensors, stood=None if stood is None else iter(stood))
    except KeyError as error:
        raise RecoveryError(f"the attribute {key} has the tensor {error}, which is not here") from error
    # Not by the object's own __setattr__, nor by a module's.
    inside = getattr(one, "__dict__", {})
    if key in inside or not hasattr(type(one), key):
        inside[key] = made
    else:
        object.__setattr__(one, key, made)


def merge(
    living: Any,
    saved: Any,
    tensors: Mapping[str, torch.Tensor],
    may: Callable[[Any], bool] = lambda _living: True,
    stood: Iterator[Any] | None = None,
) -> Any:
    """Put what was saved into the living containers and tensors where it fits: others may hold on to them.

    Only in those that `may` be written to. `stood`: in these in the place of the living ones, in this order.
    """
    if type(saved) is Ref:
        return tensors[saved.name]
    if stood is not None and _is_thing(saved):
        living = next(stood, None)
    into = living if _fits(living, saved) and may(living) else None
    if isinstance(saved, dict):
        old = {} if into is None else into
        pairs = [(_key(k, tensors), v) for k, v in saved.items()]
        made = {k: merge(old.get(k), v, tensors, may, stood) for k, v in pairs}
        return type(saved)(made) if into is None else _refill(into, made)
    if isinstance(saved, (list, tuple, deque)):
        before = [] if into is None else list(into)
        before += [None] * (len(saved) - len(before))
        items = [merge(b, s, tensors, may, stood) for b, s in zip(before, saved, strict=False)]
        if isinstance(into, (list, deque)):
            return _refill(into, items)
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return saved if into is None else _write(into, saved)


def _is_thing(value: Any) -> bool:
    """Whether it is what can be written to: another object with the same content is another thing."""
    return isinstance(value, (torch.Tensor, list, dict, deque, set)) or is_array(value)


def _write(living: Any, saved: Any) -> Any:
    """A tensor, array or set, in place."""
    if isinstance(saved, torch.Tensor):
        with torch.no_grad():
            private.local(living).copy_(saved)
        return _usable(living)
    if is_array(saved):
        living[...] = saved
    elif type(saved) is set:
        return _refill(living, saved)
    else:
        return saved
    return living


def _usable(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor that was written to in place, or another one with the same memory if autograd refuses it.

    It refuses what was made under `no_grad` as a view of a tensor that needs gradients.
    """
    try:
        _ = tensor.grad_fn
    except RuntimeError:
        return tensor.detach()
    return tensor


def _refill(living: Any, content: Any) -> Any:
    living.clear()
    (living.extend if isinstance(living, (list, deque)) else living.update)(content)
    return living


def _fits(living: Any, saved: Any) -> bool:
    """Whether a living container, tensor or array can be made to hold what was saved."""
    if isinstance(saved, torch.Tensor):
        alike = isinstance(living, torch.Tensor) and living.shape == saved.shape
        return alike and living.dtype == saved.dtype and living.device.type == saved.device.type
    if is_array(saved):
        alike = is_array(living) and (living.shape, living.dtype) == (saved.shape, saved.dtype)
        return bool(alike and living.flags.writeable)
    if isinstance(saved, deque):
        return isinstance(living, deque) and living.maxlen == saved.maxlen
    # Of a class derived from dict or list an attribute was saved as the plain one.
    plain = isinstance(living, type(saved)) if type(saved) in (dict, list) else False
    return plain or type(living) is type(saved)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array, without importing numpy."""
    return (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")


def _key(key: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    return tensors[key.name] if type(key) is Ref else key
