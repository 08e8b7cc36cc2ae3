"""An optimizer's state taken apart: its tensors by name, and a tree of everything else."""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks.state.codec import Ref


class OptimizerTree(msgspec.Struct, forbid_unknown_fields=True):
    """An optimizer without its tensors.

    `groups`: the options of each parameter group; `sizes`: its number of parameters. `kinds`: the lists of
    keys that occur, in order; `kind`: for each parameter which of them, -1 for no state at all. `values`:
    (parameter, key, tree) for what is not simply a tensor; tensors inside the tree are `Ref`s to their paths.
    `other`: (key, value) of the state that belongs to no parameter.
    """

    groups: list[dict[Any, Any]]
    sizes: list[int]
    kinds: list[list[Any]]
    kind: list[int]
    values: list[tuple[int, Any, Any]]
    other: list[tuple[Any, Any]]


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each parameter of an optimizer with its place, "group.index"."""
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            yield f"{i}.{j}", parameter


def leaves(state: dict[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors in the state of one parameter by path, sorted by key; also those in lists and dicts.

    Paths: `exp_avg`, `old_dirs[3]`, `inner['a']`. A tensor that stands under the key `old_dirs[3]` itself has
    the same path: so `TensorSet.unpack` leaves what `join` brings into its list.
    """
    # Most states hold only tensors under strings: no recursion for those.
    for key in sorted(state, key=str):
        value = state[key]
        if isinstance(value, torch.Tensor):
            yield str(key), value
        elif type(value) in (list, tuple, dict):
            yield from _inside(value, str(key))


def _inside(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, item in value.items() if type(value) is dict else enumerate(value):
        where = f"{path}[{key!r}]"
        if isinstance(item, torch.Tensor):
            yield where, item
        elif type(item) in (list, tuple, dict):
            yield from _inside(item, where)


def check(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for what cannot be put back as it was.

    That is state under a tensor that is in no parameter group, and a learning rate that is one tensor with
    the scheduler's `initial_lr`: each step changes both, and what is put back would be two.
    """
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), torch.Tensor) and group["lr"] is group.get("initial_lr"):
            raise UsageError(
                f"state.{name} has a learning rate that is one tensor with its initial_lr, as torch "
                f"{torch.__version__} makes it: give it as a number, or take torch 2.10 or newer"
            )
    known = {id(p) for _place, p in parameters(optimizer)}
    for key in optimizer.state:
        if isinstance(key, torch.Tensor) and id(key) not in known:
            raise UsageError(f"state.{name} keeps state for a tensor that is in none of its parameter groups")


def split(optimizer: torch.optim.Optimizer) -> OptimizerTree:
    """Take everything but the parameters and the tensors of their state; nothing is copied."""
    kinds: dict[tuple[Any, ...], int] = {}
    kind: list[int] = []
    values: list[tuple[int, Any, Any]] = []
    for index, (_place, parameter) in enumerate(parameters(optimizer)):
        state = optimizer.state.get(parameter)
        if state is None:
            kind.append(-1)
            continue
        kind.append(kinds.setdefault(tuple(state), len(kinds)))
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                values.append((index, key, _without(value, str(key))))
    return OptimizerTree(
        groups=[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        sizes=[len(group["params"]) for group in optimizer.param_groups],
        kinds=[list(keys) for keys in kinds],
        kind=kind,
        values=values,
        other=[(k, v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)],
    )


def _without(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        return Ref(path)
    if type(value) is dict:
        return {k: _without(v, f"{path}[{k!r}]") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without(v, f"{path}[{i!r}]") for i, v in enumerate(value))
    return value


def fits(name: str, saved: OptimizerTree, optimizer: torch.optim.Optimizer) -> None:
    """Raise RecoveryError unless the groups have the saved sizes; ProtocolError if `saved` is malformed."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved.sizes != sizes:
        raise RecoveryError(
            f"state.{name} has groups of {sizes} parameters where the record has {saved.sizes}"
        )
    count = sum(sizes)
    ok = len(saved.groups) == len(sizes) and len(saved.kind) == count
    ok = ok and all(-1 <= k < len(saved.kinds) for k in saved.kind)
    if not ok or not all(0 <= index < count for index, _key, _tree in saved.values):
        raise ProtocolError(f"record: the state of {name} is malformed")


def join(name: str, saved: OptimizerTree, optimizer: torch.optim.Optimizer) -> None:
    """Put `split`'s part back, around the tensors that are in the optimizer's state now.

    The dicts of the groups and of the state stay the same objects, and so do tensors (a tensor learning rate
    is written in place). RecoveryError where a tensor of the saved state is missing: tensors come first.
    """
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        _set_options(group, options)
    values = {(index, key): tree for index, key, tree in saved.values}
    for index, (place, parameter) in enumerate(parameters(optimizer)):
        if saved.kind[index] < 0:
            optimizer.state.pop(parameter, None)
            continue
        living = optimizer.state.setdefault(parameter, {})
        tensors = dict(leaves(living))
        made: dict[Any, Any] = {}
        try:
            for key in saved.kinds[saved.kind[index]]:
                given = (index, key) in values
                made[key] = _with(values[index, key], tensors) if given else tensors[str(key)]
        except KeyError as error:
            raise RecoveryError(f"state.{name} lacks the tensor {error} of parameter {place}") from error
        living.clear()
        living.update(made)
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(saved.other)


def _with(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if type(tree) is Ref:
        return tensors[tree.name]
    if type(tree) is dict:
        return {k: _with(v, tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_with(v, tensors) for v in tree)
    return tree


def _alike(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.shape == b.shape and a.dtype == b.dtype


def _set_options(group: dict[str, Any], options: dict[Any, Any]) -> None:
    for key in [key for key in group if key != "params" and key not in options]:
        del group[key]
    for key, value in options.items():
        living: Any = group.get(key)
        if _alike(living, value):
            with torch.no_grad():
                living.copy_(value)
        else:
            group[key] = value
