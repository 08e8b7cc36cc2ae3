"""What the self-test says of a torch that has changed inside: a line "PLACE KIND" in, a line of JSON out.

`gone`: torch uses another name, and this one is not there for ckptless. `inert`: it is there, but calls do
nothing, what it holds reads as None, and what is written to it is lost. Torch is loaded once for all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ckptless.pytorch_hooks import self_test
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.names import DDP, FSDP, GROUPS, MESHES, Name, version

OURS = "ckptless.pytorch_hooks"
TEST = "ckptless.pytorch_hooks.self_test"
# What stands between code and an attribute of a module.
BETWEEN = "torch.nn.modules.module"


def names() -> dict[str, Name]:
    """All that this torch is asked for, by where they are."""
    return {name.where: name for name in (*GROUPS, *DDP, *FSDP, *MESHES) if version() >= name.since}


def _by_us() -> bool:
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") == BETWEEN:
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(OURS) and not name.startswith(TEST)


def _nothing(*_words: object, **_more: object) -> None:
    return None


class _Changed:
    """An attribute of a class that is as it was for torch, and not for ckptless."""

    def __init__(self, name: str, real: Any, kind: str) -> None:
        self._name, self._real, self._kind = name, real, kind

    def __get__(self, one: Any, owner: Any = None) -> Any:
        if _by_us():
            if self._kind == "gone":
                raise AttributeError(self._name)
            return _nothing if callable(self._real) else None
        if one is not None and self._name in getattr(one, "__dict__", {}):
            return one.__dict__[self._name]
        if self._real is None:
            raise AttributeError(self._name)
        bind = getattr(type(self._real), "__get__", None)
        return self._real if bind is None else bind(self._real, one, owner)

    def __set__(self, one: Any, value: Any) -> None:
        if _by_us():
            if self._kind == "gone":
                raise AttributeError(self._name)
        elif hasattr(type(self._real), "__set__"):
            self._real.__set__(one, value)
        else:
            one.__dict__[self._name] = value


def _plant(name: Name, kind: str) -> None:
    special = SPECIAL.get(name.last)
    if kind == "inert" and special is not None:
        special()
        return
    module, _, path = name.where.partition(":")
    holder: Any = importlib.import_module(module)
    for part in path.split(".")[:-1]:
        holder = getattr(holder, part)
    if isinstance(holder, types.ModuleType):
        real = vars(holder).get(name.last)
        changed = type("Changed", (types.ModuleType,), {name.last: _Changed(name.last, real, kind)})
        holder.__class__ = changed
        if hasattr(torch_private, name.last):
            setattr(torch_private, name.last, _nothing)
        return
    owner = holder if isinstance(holder, type) else type(holder)
    real = next((vars(base)[name.last] for base in owner.__mro__ if name.last in vars(base)), None)
    setattr(owner, name.last, _Changed(name.last, real, kind))


def _no_backends() -> None:
    """What is registered is not asked."""
    torch.distributed.Backend.register_backend = classmethod(_nothing)  # type: ignore[assignment]


def _no_replacing() -> None:
    """What is waited for stays."""
    kind = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives").AllGatherResult
    kind._replace = lambda self, **_words: self


SPECIAL: dict[str, Callable[[], None]] = {"Backend": _no_backends, "all_gather_work": _no_replacing}


def said(name: Name, kind: str) -> str:
    """Return what the self-test says of it, in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _plant(name, kind)
            text = self_test.tried()
        except BaseException as error:  # noqa: BLE001 - it is told as what it is
            text = f"planting {name.where} raised {type(error).__name__}: {error}"
        os.write(write, text.encode()[:4096])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    # no deadline: it has closed the pipe with its last act, and the self-test has a deadline of its own
    os.waitpid(pid, 0)
    return text


def main() -> None:
    self_test.load()
    for line in sys.stdin:
        where, kind = line.split()
        print(json.dumps(said(names()[where], kind)), flush=True)


if __name__ == "__main__":
    main()
