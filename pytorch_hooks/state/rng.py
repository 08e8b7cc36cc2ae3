"""The random number generators of this process: read, and put back."""

import random
import sys
from array import array
from importlib import import_module
from typing import Any

import msgspec
import torch

from ckptless.daemon.api.errors import ProtocolError, RecoveryError
from ckptless.pytorch_hooks.state import rng_memory
from ckptless.pytorch_hooks.state.rng_memory import AskedNumpy, AskedPython


class _State(msgspec.Struct, forbid_unknown_fields=True):
    python: tuple[int, bytes, float | None]
    torch_cpu: Any
    numpy: dict[str, Any] | None
    cuda: list[Any]
    cuda_current: int


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """What the generators were like, as it was read. To look into it costs more, and is rarely wanted."""

    python: tuple[AskedPython, tuple[Any, ...]]
    numpy: tuple[AskedNumpy, tuple[Any, ...]] | None
    torch_cpu: torch.Tensor
    cuda: list[torch.Tensor]
    cuda_current: int

    def is_as(self, other: "Snapshot") -> bool:
        """Whether nothing has been drawn between the two."""
        return (
            self.python[1] == other.python[1]
            and (self.numpy is None) == (other.numpy is None)
            and (self.numpy is None or other.numpy is None or self.numpy[1] == other.numpy[1])
            and torch.equal(self.torch_cpu, other.torch_cpu)
            and len(self.cuda) == len(other.cuda)
            and all(map(torch.equal, self.cuda, other.cuda))
        )

    def tree(self) -> dict[str, Any]:
        """The same as a tree that `codec` can encode and `restore` takes.

        About 8 KB: 2.5 KB each for Python and numpy, 5 KB for torch, 16 B for a device.
        """
        reader, read = self.python
        return {
            "python": reader.state(read),
            "torch_cpu": self.torch_cpu,
            "numpy": self.numpy[0].state(self.numpy[1]) if self.numpy is not None else None,
            "cuda": self.cuda,
            "cuda_current": self.cuda_current,
        }


class _Readers:
    """How Python's and numpy's generators are read: looked for at first, and when a script replaces one."""

    python: AskedPython | None = None
    numpy: AskedNumpy | None = None


def snapshot() -> Snapshot:
    """Read the state of Python's `random`, numpy's global generator (where numpy is imported), torch's CPU
    generator and those of all CUDA devices (where CUDA is in use). No device is waited for.
    """
    # In one function: it is called where the caches are cold, and each call more takes microseconds there.
    python = _Readers.python
    while python is None or (python_read := python.read()) is None:
        python = _Readers.python = rng_memory.python_reader()
    numpy, numpy_read = _Readers.numpy, None
    module: Any = sys.modules.get("numpy")
    if module is not None:
        while numpy is None or (numpy_read := numpy.read()) is None:
            numpy = _Readers.numpy = rng_memory.numpy_reader(module)
    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return Snapshot(
        python=(python, python_read),
        numpy=(numpy, numpy_read) if numpy is not None and numpy_read is not None else None,
        torch_cpu=torch.default_generator.get_state(),
        cuda=torch.cuda.get_rng_state_all() if cuda else [],
        cuda_current=torch.cuda.current_device() if cuda else 0,
    )


def capture() -> dict[str, Any]:
    """A snapshot as a tree."""
    return snapshot().tree()


def restore(state: object) -> None:
    """Put back what `capture` read, maybe in another process.

    The state of the device that was current goes to the device that is current here: a spare may sit at
    another local index. ProtocolError if `state` is malformed; RecoveryError if numpy or CUDA were used then
    and are missing here.
    """
    try:
        wanted = msgspec.convert(state, _State)
        words = tuple(array("I", wanted.python[1]))
        random.setstate((wanted.python[0], words, wanted.python[2]))
        torch.set_rng_state(wanted.torch_cpu)
        _restore_numpy(wanted.numpy)
        _restore_cuda(wanted.cuda, wanted.cuda_current)
    except (msgspec.ValidationError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ProtocolError(f"malformed state of the random number generators: {error}") from error


def _restore_numpy(state: dict[str, Any] | None) -> None:
    if state is None:
        return
    try:
        # Not imported here yet, but it was there: what imports it later must not start from a fresh seed.
        numpy: Any = import_module("numpy")
    except ImportError as error:
        raise RecoveryError(
            "numpy was imported when the record was made and is not installed here"
        ) from error
    numpy.random.set_state(state)


def _restore_cuda(states: list[Any], current: int) -> None:
    if not states:
        return
    if not torch.cuda.is_available():
        raise RecoveryError("the record holds CUDA generators and this process has no CUDA device")
    if not 0 <= current < len(states):
        raise ProtocolError(f"the record's current device is {current} of {len(states)}")
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    order = list(range(max(count, len(states))))
    order[here], order[current] = order[current], order[here]
    for device, source in enumerate(order[:count]):
        if source < len(states):
            torch.cuda.set_rng_state(states[source], device)
