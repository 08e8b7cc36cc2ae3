"""A rank's part in a rehearsal: it fails where it is told to, and writes down what there is at each step.

Not only what the State has: also what the script has beside it, in globals of its files, in local variables
of its functions, in their closures. The launcher compares that with a run without faults.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import private, raw, reach
from ckptless.rehearsal import LOST, OTHER, VARIABLE, VERSION, Line, Rehearsal, fault_file, lines_file

# Of a plain value so much is shown; of a longer one a digest.
SHOWN = 60
# The launcher looks many times a second.
LOSE_DEADLINE_S = 60.0


def begun() -> Rehearsing | None:
    """Return this process's part, where there is a rehearsal. Raises UsageError."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        plan = msgspec.json.decode(text, type=Rehearsal)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{VARIABLE} is ckptless-run's own: leave it out of the environment") from error
    if plan.version != VERSION:
        raise UsageError(f"a rehearsal of version {plan.version}, not {VERSION}: one ckptless for all of it")
    return Rehearsing(plan)


class Seen(NamedTuple):
    """Tensors and other values (packed) of a State by name, and all objects that it covers by id."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, bytes]
    known: Mapping[int, Any]


class Rehearsing:
    """One rank's part. Main thread only."""

    def __init__(self, plan: Rehearsal) -> None:
        self._plan, self._home = plan, Path(plan.directory)
        # Ranks of several nodes share this machine's GPUs, which NCCL takes where each has a host of its own.
        os.environ.setdefault("NCCL_HOSTID", f"rehearsal-{os.getpid()}")

    def before(self, step: int, rank: int) -> None:
        """Fail in this step, once, where that is the plan; its work is done and not committed."""
        for number, fault in enumerate(self._plan.faults):
            if (fault.step, fault.rank) == (step, rank) and self._is_first(number):
                if fault.kind == "node":
                    self._lose_node()
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, number: int) -> bool:
        try:
            fault_file(self._home, number).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _lose_node(self) -> NoReturn:
        partial = self._home / f".{LOST}"
        partial.write_text(str(os.getppid()))
        partial.rename(self._home / LOST)
        time.sleep(LOSE_DEADLINE_S)
        raise RuntimeError(f"the launcher has not ended this node in {LOSE_DEADLINE_S:g} s")

    def note(self, at: tuple[int, int, int], loss: float | torch.Tensor | None, seen: Seen) -> None:
        """Write down what there is at a commit of `at`: step, generation, rank. Waits for the device."""
        step, generation, rank = at
        line = Line(
            step=step,
            generation=generation,
            pid=os.getpid(),
            loss=None if loss is None else repr(float(loss)),
            tensors={name: _digest(tensor) for name, tensor in seen.tensors.items()},
            values={name: _shown(packed) for name, packed in seen.values.items()},
            beside={place: _shown(value) for place, value in _beside(seen.known)},
        )
        with lines_file(self._home, rank, os.getpid()).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def is_over(self, step: int) -> bool:
        """Whether that was the last one."""
        return step >= self._plan.steps


def _beside(known: Mapping[int, Any]) -> Iterator[tuple[str, Any]]:
    roots = dict(_locals(sys._getframe(1)))
    for module in [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]:
        if is_users(vars(module)):
            # Files of several folders may have one name.
            is_script = module.__name__ == "__main__"
            where = Path(module.__file__ or "").name if is_script else module.__name__
            roots |= {f"the global {name} of {where}": value for name, value in _named(vars(module))}
    for place, value in roots.items():
        yield from reach.leaves(value, place, known, eyes=EYES).items()


def _locals(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the local variables of the script's functions that are being called, innermost first."""
    while frame is not None:
        if is_users(frame.f_globals) and frame.f_code.co_name != "<module>":
            where = f"{frame.f_code.co_qualname}() in {Path(frame.f_code.co_filename).name}"
            yield from ((f"the local {name} of {where}", value) for name, value in _named(frame.f_locals))
        frame = frame.f_back


def _named(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from (
        (k, v) for k, v in list(names.items()) if not k.startswith("__") and not isinstance(v, ModuleType)
    )


def is_users(names: Mapping[str, Any]) -> bool:
    """Whether a module with these globals is the user's own, neither installed nor Python's."""
    file = names.get("__file__")
    if not isinstance(file, str) or str(names.get("__name__")).partition(".")[0] == "ckptless":
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(place) for place in _INSTALLED)


_INSTALLED = frozenset(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def _is_seen(kind: type) -> bool:
    """Whether objects of a class are looked into: of the user's own, and of torch what orders samples."""
    if kind.__module__.startswith("torch.utils.data."):
        return True
    module = sys.modules.get(kind.__module__)
    return module is not None and is_users(vars(module))


class _Told(str):
    """Text that is written down as it is."""

    __slots__ = ()


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A graph's: made anew by each forward pass.
        return None if value.grad_fn is not None else _Told(_digest(value))
    if isinstance(value, (io.TextIOWrapper, io.BufferedReader)):
        return _position(value)
    return reach.leaf(value)


def _position(file: io.TextIOWrapper | io.BufferedReader) -> str | None:
    """Return how far a file has been read; None for one that is written, or is none."""
    try:
        if file.writable() or not file.seekable():
            return None
        try:
            return _Told(f"position {file.tell()}")
        except OSError:
            # Text that is gone through line by line.
            return _Told(f"position {os.lseek(file.fileno(), 0, os.SEEK_CUR)}, read ahead")
    except (OSError, ValueError):
        return None


def _digest(tensor: torch.Tensor) -> str:
    part = private.local(tensor).detach()
    if part.device.type == "meta" or part.layout is not torch.strided:
        return f"{part.layout} {tuple(part.shape)}"
    flat = part.cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{part.dtype} {tuple(part.shape)} {OTHER}{xxhash.xxh3_64_hexdigest(raw.window(flat))}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]  # a plain value, with its type
    elif isinstance(value, _Told):
        return str(value)
    text = repr(value)
    if len(text) <= SHOWN and isinstance(value, (bool, int, float, complex, str, type(None))):
        return text
    return f"{OTHER}{xxhash.xxh3_64_hexdigest(text.encode())}"


EYES = reach.Eyes(_is_seen, _leaf)
