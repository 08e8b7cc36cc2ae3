"""Takes a State apart: every object into what can be saved, or refused in one sentence."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import attributes, codec

_ROLES: dict[str, str] = {
    "model": "a torch.nn.Module",
    "optimizer": "a torch.optim.Optimizer",
    "scheduler": "a scheduler with state_dict and load_state_dict",
    "scaler": "a GradScaler",
}


@dataclass
class Parts:
    """The parts of a State, by name ("model", "optimizer['gen']", "ema"); made by `State`.

    `holders`: all that is none of torch's, whose own attributes may be state as well.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    holders: dict[str, Any] = field(default_factory=dict)
    # Plain data as it was given, and by id what can be changed in place there: others may have it, too.
    given: dict[str, Any] = field(default_factory=dict)
    own: dict[int, Any] = field(default_factory=dict)
    # Of plain data with more in it than numbers: what was packed at the newest commits, and the things then.
    stood: dict[str, deque[tuple[bytes, list[Any]]]] = field(default_factory=dict)

    def pack_data(self) -> dict[str, bytes]:
        """Pack plain data, for a record. UsageError."""
        found = {name: codec.pack(value, name=f"state.{name}") for name, value in self.data.items()}
        for name, stood in self.stood.items():
            stood.append((found[name], attributes.things_in(self.data[name])))
        return found

    def put_back(self, name: str, packed: bytes, saved: Any) -> None:
        """Set plain data to what was saved, in the objects that it had then, or else in those given first.

        `packed`: the same, as `pack_data` gave it.
        """
        for known, things in reversed(self.stood.get(name, ())):
            if known == packed:
                self.data[name] = attributes.merge(None, saved, {}, stood=iter(things))
                return
        used: set[int] = set()

        def may(living: Any) -> bool:
            free = id(living) in self.own and id(living) not in used
            used.add(id(living))
            return free

        self.data[name] = attributes.merge(self.given[name], saved, {}, may)


def take_apart(roles: dict[str, Any], extra: dict[str, Any]) -> Parts:
    """Sort what a State was given. UsageError for what cannot be saved."""
    parts = Parts()
    given = {**{role: value for role, value in roles.items() if value is not None}, **extra}
    objects: dict[str, Any] = {}
    for name, value in given.items():
        if name in roles or _has_objects(value):
            objects.update(_several(name, value))
        else:
            try:
                codec.pack(value, name=f"state.{name}")
            except UsageError as error:
                raise UsageError(f"{error}: {_PLAIN}") from None
            parts.data[name] = parts.given[name] = value
            parts.own.update(_inside(value))
            if len(attributes.things_in(value)) > 1:
                parts.stood[name] = deque(maxlen=attributes.CAPTURES)
    for name, value in objects.items():
        role = name.partition("[")[0]
        if not _add(parts, name, value) or not _fits(role, parts, name, value):
            raise UsageError(_why_not(role if role in roles else "", name, value))
    # Only now: what was given by its own name is not found a second time in something else.
    for name, value in objects.items():
        _add_inner(parts, name, value)
    return parts


_PLAIN = (
    "give it state_dict and load_state_dict, or keep in the State numbers, strings, tensors and numpy arrays "
    "in plain lists, tuples, dicts, sets, deques and Counters"
)


def _inside(value: Any) -> dict[int, Any]:
    found = {id(value): value}
    for item in value.values() if isinstance(value, dict) else value if type(value) in _LISTS else ():
        found |= _inside(item)
    return found


_LISTS = (list, tuple, deque)


def _several(role: str, value: Any) -> dict[str, Any]:
    """The objects in lists, tuples and dicts, by name."""
    found: dict[str, Any] = {}
    # By exact type: torch.nn.ModuleDict and the like are one object.
    if type(value) in (list, tuple):
        for i, item in enumerate(value):
            found.update(_several(f"{role}[{i}]", item))
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str or ":" in key:
                raise UsageError(f"state.{role} has the key {key!r}: keys must be strings without a colon")
            found.update(_several(f"{role}[{key!r}]", item))
    else:
        found[role] = value
    return found


def _has_objects(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_objects, value))
    if type(value) is dict:
        return any(map(_has_objects, value.values()))
    return _is_object(value)


def _is_object(value: Any) -> bool:
    known = isinstance(value, (torch.nn.Module, torch.Generator)) or is_stateful(value)
    return known or _is_optimizer(value) or callable(getattr(value, "step", None)) or any(_inner(value))


def is_stateful(value: object) -> bool:
    """Whether it has state_dict and load_state_dict, as DCP's `Stateful`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, type):
        return False
    groups, state = getattr(value, "param_groups", None), getattr(value, "state", None)
    return isinstance(groups, list) and isinstance(state, dict)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def _add(parts: Parts, name: str, value: Any) -> bool:
    """Put one object where it belongs; False where it is nothing that can be saved."""
    if isinstance(value, torch.nn.Module):
        parts.modules[name] = value
        return True
    if isinstance(value, torch.Generator):
        parts.generators[name] = value
        return True
    if isinstance(value, torch.amp.GradScaler) or (name == "scaler" and is_stateful(value)):
        parts.scalers[name] = value
    elif _is_optimizer(value):
        _refuse_hiding(name, value)
        if not _is_wrapper(value):
            parts.optimizers[name] = value
    elif is_stateful(value):
        parts.stateful[name] = value
    elif not any(_inner(value)):
        return False
    parts.holders[name] = value
    return True


def _fits(role: str, parts: Parts, name: str, value: Any) -> bool:
    """Whether an object is what its role says, or holds such."""
    inner = [one for _path, one in _inner(value)]
    match role:
        case "model":
            return name in parts.modules or any(isinstance(one, torch.nn.Module) for one in inner)
        case "optimizer":
            if name in parts.modules or name in parts.generators:
                return False
            return name in parts.optimizers or is_stateful(value) or any(map(_is_optimizer, inner))
        case "scheduler":
            return name in parts.stateful or any(map(_is_scheduler, inner))
        case "scaler":
            return name in parts.scalers
    return True


def _why_not(role: str, name: str, value: Any) -> str:
    kind = type(value).__name__
    if role in _ROLES and not (role == "optimizer" and callable(getattr(value, "step", None))):
        return f"state.{name} must be {_ROLES[role]}, not {kind}"
    if callable(getattr(value, "step", None)):
        return (
            f"state.{name} is a {kind} whose state cannot be found: give it state_dict and load_state_dict, "
            "or param_groups and state as torch.optim.Optimizer has them"
        )
    return (
        f"state.{name} is a {kind} among objects that are saved: give it state_dict and load_state_dict, "
        "or a name of its own in the State where it is plain data"
    )


def _refuse_hiding(name: str, value: Any) -> None:
    """Some of torch's optimizers have each rank's part of the state, or an average's step, out of sight."""
    hiding = next(
        (k for k in type(value).__mro__ if k.__module__.startswith("torch.distributed.optim")), None
    )
    if hiding is not None or type(value).__name__ == "ZeroRedundancyOptimizer":
        kind = (hiding or type(value)).__name__
        raise UsageError(
            f"state.{name} is a {kind}, which hides its state, each rank another part: use an optimizer of "
            "torch.optim, with torch.distributed.fsdp.fully_shard where its state is to be sharded"
        )


def _is_wrapper(optimizer: Any) -> bool:
    """Whether all of its groups and state are those of optimizers inside it."""
    inner = [one for _path, one in _inner(optimizer) if _is_optimizer(one)]
    groups = {id(group) for one in inner for group in one.param_groups}
    same = inner and all(id(group) in groups for group in optimizer.param_groups)
    return bool(same and (len(inner) > 1 or optimizer.state is inner[0].state))


def _inner(value: Any) -> Iterator[tuple[str, Any]]:
    """The modules, optimizers, scalers, generators and schedulers that an object which is no module has."""
    if isinstance(value, (torch.nn.Module, type)) or attributes.is_foreign(type(value)):
        # Of torch's own only a scheduler has another object that changes: its optimizer.
        optimizer = getattr(value, "optimizer", None) if _is_scheduler(value) else None
        if optimizer is not None:
            yield "optimizer", optimizer
        return
    for key, item in list(getattr(value, "__dict__", {}).items()):
        if type(item) in (list, tuple, dict):
            pairs = item.items() if type(item) is dict else enumerate(item)
            named = [(f"{key}[{k!r}]", one) for k, one in pairs if isinstance(k, (str, int))]
        else:
            named = [(key, item)]
        for path, one in named:
            kinds = (torch.nn.Module, torch.amp.GradScaler, torch.Generator)
            if isinstance(one, kinds) or _is_optimizer(one) or _is_scheduler(one):
                yield path, one


def _add_inner(parts: Parts, name: str, value: Any) -> None:
    """Add what an object has inside, as far as nobody else has it."""
    for path, one in _inner(value):
        known = {id(m) for root in parts.modules.values() for m in root.modules()}
        for role in (parts.optimizers, parts.stateful, parts.scalers, parts.generators, parts.holders):
            known |= {id(each) for each in role.values()}
        if id(one) not in known:
            inside = f"{name}.{path}".replace(":", "_")
            _add(parts, inside, one)
            _add_inner(parts, inside, one)
