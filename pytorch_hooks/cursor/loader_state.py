"""The state that a loader, its samplers and dataset keep: the order of batches may depend on it.

Read as an epoch begins, and put back where that epoch is begun again: a sampler that counts its epochs, that
shuffles its last order again, or has a generator of numpy's, goes on as it would have.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.state import attributes, codec, private, reach
from ckptless.pytorch_hooks.state.parts import is_stateful

LIMIT = 64 << 10
"""Bytes of one attribute: it is in each record of its epoch."""
DEPTH = 6
MANY = 64
# Of torch's own samplers and datasets: what a script may set.
_SETTABLE = frozenset({"weights", "indices"})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def generators(loader: Any) -> list[torch.Generator]:
    """Return the torch generators that a loader, its samplers and a loader inside it have for themselves."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    queue = [loader]
    while queue:
        one = queue.pop(0)
        seen.add(id(one))
        for key, value in getattr(one, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, (Sampler, DataLoader)) or key == "base_dataloader":
                queue += [value] if id(value) not in seen else []
    return list(found.values())


def drawn(loader: Any) -> list[Any]:
    """The states of those generators."""
    return [one.get_state() for one in generators(loader)]


def begin_with_new_workers(loader: Any) -> bool:
    """Have a DataLoader begin each time with new workers; whether it would have kept them.

    Those that go on from epoch to epoch have random numbers that nobody could give to new ones, and are given
    a seed once, which a new process draws once more.
    """
    keeps = isinstance(loader, DataLoader) and bool(loader.num_workers) and loader.persistent_workers
    if keeps:
        # It refuses itself to have that changed.
        object.__setattr__(loader, "persistent_workers", False)
    return keeps


def redraw(loader: Any, states: list[Any]) -> None:
    """Put back what `drawn` gave. ProtocolError where it is another loader's."""
    own = generators(loader)
    if len(own) != len(states):
        raise ProtocolError(f"the loader has {len(own)} generators where the position has {len(states)}")
    for one, state in zip(own, states, strict=True):
        one.set_state(state)


class LoaderState:
    """One loader's, from when it was given first: as it was built. Main thread only."""

    def __init__(self, loader: Any, shared: Callable[[], Container[int]] = tuple) -> None:
        """`shared()`: by id what is not the loader's alone, and is kept with the State."""
        self._loader, self._shared = loader, shared
        self._first = self.look()
        self._built = {place: _pack(getattr(*at)) for place, at in self._places().items()}
        self.large: str | None = None

    def look(self) -> dict[str, Any]:
        """Return, by place, what compares equal as long as nothing has changed."""
        return {place: _look(getattr(*at)) for place, at in self._places().items()}

    def read(self) -> list[Any]:
        """Return what an epoch begins with: as `drawn`, and behind it what else is not as built.

        `large`: the first place at which something has changed that cannot be kept.
        """
        changed: dict[str, bytes] = {}
        for place, at in self._places().items():
            value = getattr(*at)
            if place in self._first and self._first[place] == _look(value):
                continue
            packed = _pack(value)
            if packed is None:
                self.large = self.large or place
            elif packed != self._built.get(place):
                changed[place] = packed
        return [*drawn(self._loader), changed] if changed else drawn(self._loader)

    def put(self, saved: list[Any]) -> None:
        """Put back what `read` gave; what was as built then is so again. ProtocolError."""
        has_more = bool(saved) and type(saved[-1]) is dict
        redraw(self._loader, saved[:-1] if has_more else saved)
        changed: dict[str, bytes] = saved[-1] if has_more else {}
        for place, at in self._places().items():
            now, wanted = _pack(getattr(*at)), changed.get(place, self._built.get(place))
            if now is None or now == wanted:
                continue
            if wanted is None:
                object.__delattr__(*at)  # it came later
            else:
                _put(*at, wanted)
        for place in changed.keys() - self._places().keys():
            owner, _, key = place.rpartition(".")
            if owner in (objects := dict(_objects(self._loader, "", set(), 0))):
                _put(objects[owner], key, changed[place])

    def objects(self) -> dict[int, Any]:
        """Return all of it that is looked at, by id."""
        return {id(one): one for _path, one in _objects(self._loader, "", set(), 0)}

    def _places(self) -> dict[str, tuple[Any, str]]:
        """The attributes that a script sets: by place ("sampler.order") the object and the name."""
        shared = self._shared()
        return {
            f"{path}.{key}".lstrip("."): (one, key)
            for path, one in _objects(self._loader, "", set(), 0)
            for key, value in attributes.fields(one)
            if (reach.is_looked_into(one) or key in _SETTABLE)
            and _is_state(value)
            and id(value) not in shared
        }


def _objects(one: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """A loader, its samplers and dataset, and the script's own objects in those, by place."""
    if isinstance(one, (list, tuple)) and depth < DEPTH and len(one) <= MANY:
        for index, item in enumerate(one):
            yield from _objects(item, f"{path}[{index}]", seen, depth + 1)
        return
    is_part = isinstance(one, (DataLoader, Dataset, Sampler)) or (
        reach.is_looked_into(one) and not isinstance(one, (torch.Tensor, torch.nn.Module, type))
    )
    if not is_part or id(one) in seen or depth > DEPTH:
        return
    seen.add(id(one))
    if not is_stateful(one):
        yield path, one
    for key, value in attributes.fields(one):
        yield from _objects(value, f"{path}.{key}".lstrip("."), seen, depth + 1)


def _is_state(value: Any) -> bool:
    """Whether it may be state; not what is an object of its own, such as an open file."""
    plain = value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor, *_CONTAINERS))
    return plain or attributes.is_array(value) or attributes.state_of_generator(value) is not None


def _look(value: Any) -> Any:
    if _size(value, 0) <= LIMIT:
        return attributes.look(value)
    return id(value), len(value) if isinstance(value, _CONTAINERS) else _written(value)


def _written(value: Any) -> int:
    return private.version(value) if isinstance(value, torch.Tensor) else 0


def _size(value: Any, depth: int) -> int:
    """Bytes, about; more than LIMIT as soon as it is known to be more."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if attributes.is_array(value):
        return int(value.nbytes)
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, _CONTAINERS):
        return 8
    if len(value) > LIMIT // 8 or depth > attributes.DEPTH:
        return LIMIT + 1
    total = 8
    for item in (*value.keys(), *value.values()) if isinstance(value, dict) else tuple(value):
        total += _size(item, depth + 1)
        if total > LIMIT:
            break
    return total


def _pack(value: Any) -> bytes | None:
    """None for what is too large, or cannot be saved."""
    if _size(value, 0) > LIMIT:
        return None
    try:
        return attributes.pack_value(value)
    except UsageError:
        return None


def _put(one: Any, key: str, packed: bytes) -> None:
    living = getattr(one, key, None)
    if attributes.state_of_generator(living) is None:
        attributes.put(one, key, packed, {})
    else:
        attributes.set_generator(living, codec.unpack(packed))
