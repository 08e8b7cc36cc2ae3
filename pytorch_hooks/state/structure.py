"""What a State is made of by name: the same in every process, as the function that builds it made it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.state import private
from ckptless.pytorch_hooks.state.objects import State, every_parameter, parts_of, tree_of
from ckptless.pytorch_hooks.state.walk import shown


class Structure(NamedTuple):
    """Modules, parameters (shape and dtype of this rank's part), buffers, and each optimizer's parameters."""

    modules: dict[str, None]
    parameters: dict[str, tuple[torch.Size, torch.dtype]]
    buffers: dict[str, None]
    optimizers: dict[str, list[list[str]]]


def structure_of(state: State) -> Structure:
    """Give what is there now."""
    names = {id(tensor): name for name, tensor in every_parameter(state)}
    parts = {name: private.local(tensor) for name, tensor in every_parameter(state)}
    return Structure(
        modules=dict.fromkeys(f"m:{prefix}" for prefix, _module in tree_of(state).modules()),
        parameters={name: (part.shape, part.dtype) for name, part in parts.items()},
        buffers=dict.fromkeys(tree_of(state).slots()),
        optimizers={
            name: [[names[id(tensor)] for tensor in group["params"]] for group in one.param_groups]
            for name, one in parts_of(state).optimizers.items()
        },
    )


def check_built(built: Structure, state: State) -> None:
    """Raise UsageError, with a sentence that says what to do, where a State is not made of what it was."""
    now = structure_of(state)
    what = next(_changes(built, now), None)
    if what is not None:
        raise UsageError(
            f"{what} since run.keep, and a new process would build the state without that: make all of it in "
            "the function given to run.keep (what is to be trained later can be frozen until then, by "
            "requires_grad_(False))"
        )


def _changes(built: Structure, now: Structure) -> Iterator[str]:
    for name, groups in now.optimizers.items():
        before = built.optimizers[name]
        if len(groups) != len(before):
            yield f"state.{name} has {len(groups)} parameter groups, where it had {len(before)},"
        for number, (group, old) in enumerate(zip(groups, before, strict=False)):
            if group != old:
                yield f"the parameters in group {number} of state.{name} have changed"
    yield from _came_or_went("parameter", built.parameters, now.parameters)
    yield from _came_or_went("buffer", built.buffers, now.buffers)
    yield from _came_or_went("module", built.modules, now.modules)
    for name, (shape, dtype) in now.parameters.items():
        if built.parameters[name] != (shape, dtype):
            yield f"the parameter {shown(name)} has become {tuple(shape)} {dtype}"


def _came_or_went(kind: str, there: Iterable[str], here: Iterable[str]) -> Iterator[str]:
    known, present = set(there), set(here)
    yield from (f"the {kind} {shown(name)} has come" for name in here if name not in known)
    yield from (f"the {kind} {shown(name)} has gone" for name in there if name not in present)
