"""The parts of a State, and which of them share memory: the same in every process, as it was built.

Some scripts put other weights into a model by `p.data = other`. Where that is cut off two tensors share
memory that did not; to copy both back into it would make one of them wrong.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.state import private
from ckptless.pytorch_hooks.state.layout import Named
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


# ---- memory that several tensors share

Shared = frozenset[frozenset[str]]
"""The names of the tensors in each memory that several have."""


def addresses(named: Iterable[Named]) -> list[int]:
    """Give where each tensor begins: cheap, and another where one was put somewhere else."""
    return [private.local(one.tensor).data_ptr() for one in named]


def shared(named: Iterable[Named]) -> Shared:
    """Give which tensors lie in one memory, as far as one range of bytes for each can tell."""
    found: list[set[str]] = []
    last: torch.device | None = None
    upto = 0
    for device, begin, end, name in sorted((_range(one) for one in named), key=lambda r: (str(r[0]), *r[1:])):
        if end == begin:
            continue
        if device == last and begin < upto:
            found[-1].add(name)
        else:
            found.append({name})
            upto = 0
        last, upto = device, max(upto, end)
    return frozenset(frozenset(names) for names in found if len(names) > 1)


def _range(one: Named) -> tuple[torch.device, int, int, str]:
    part = private.local(one.tensor)
    begin = part.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    nbytes = (steps + 1) * part.element_size() if part.numel() else 0
    return part.device, begin, begin + nbytes, one.name


def check_shared(built: Shared, now: Shared) -> None:
    """Raise UsageError where tensors share memory that did not, or the other way round."""
    for names in sorted(map(sorted, now ^ built)):
        what = "lie in one memory" if frozenset(names) in now else "do not lie in one memory any more"
        raise UsageError(
            f"{shown(names[0])} and {shown(names[1])} {what}, other than in run.keep, and a new process "
            "would not have it so: copy values (copy_), and put weights that are exchanged by .data back "
            "before run.commit"
        )


def separate(built: Shared, named: Sequence[Named]) -> None:
    """Give memory of its own to each tensor that shares it, other than as built; its value is lost.

    RecoveryError where that cannot be done in this process.
    """
    now = shared(named)
    wrong = frozenset[str]().union(*(now - built))
    for names in built - now:
        raise RecoveryError(f"{shown(min(names))} does not lie in the memory any more that it shared")
    for name, tensor, _like in named:
        part = private.local(tensor)
        if name in wrong and part is not tensor:
            raise RecoveryError(f"{shown(name)}, which is a DTensor, lies in the memory of another tensor")
        if name in wrong or any(s == 0 and n > 1 for s, n in zip(part.stride(), part.shape, strict=True)):
            tensor.data = torch.empty_like(part, memory_format=torch.contiguous_format)
