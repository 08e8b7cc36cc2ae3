"""What is `torch.simdev` once the device is installed: what torch.cuda has, and some things for tests."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import torch

from tests.simdev.build import load_extension as _driver

_Device = torch.device | str | int | None


def is_available() -> bool:
    """Return whether there is a device: there is."""
    return True


def is_initialized() -> bool:
    """Return whether this process has used the device."""
    return bool(_driver().initialised())


def init() -> None:
    """Make the device, as the first use of it would."""
    _driver().initialise()


def _is_in_bad_fork() -> bool:
    return bool(_driver().in_bad_fork())


def device_count() -> int:
    """Return how many devices a process sees."""
    return 1


def current_device() -> int:
    """Return the number of the one device."""
    return 0


class Properties(NamedTuple):
    """What is asked of a device's properties."""

    name: str
    uuid: str


def get_device_properties(device: _Device = None) -> Properties:
    """Return them. Each process has a device of its own, but where SIMDEV_UUID says which one it is."""
    _check(device)
    return Properties("simdev", os.environ.get("SIMDEV_UUID", f"simdev of {os.getpid()}"))


def _check(device: _Device) -> None:
    index = device if isinstance(device, int) else torch.device(device or "simdev").index
    if index not in (None, 0):
        raise RuntimeError(f"simdev has one device, not number {index}")


def set_device(device: _Device) -> None:
    """Choose the device, of which there is one."""
    _check(device)


class device:
    """A context in which the device is the current one; it always is."""

    def __init__(self, device: _Device) -> None:
        _check(device)
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:
    """Return a stream of the device. (torch takes no subclasses of its streams and events everywhere.)"""
    _check(device)
    return torch.Stream(device="simdev", priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Return an event of the device: a point in a stream's work."""
    return torch.Event("simdev", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: _Device = None) -> torch.Stream:
    """Return the stream that this thread launches on."""
    _check(device)
    return torch.accelerator.current_stream()


def default_stream(device: _Device = None) -> torch.Stream:
    """Return the stream that a thread launches on where it has chosen none."""
    _check(device)
    return torch.Stream(stream_id=0, device_index=0, device_type=current_stream().device_type)


def set_stream(stream: torch.Stream) -> None:
    """Launch on this stream from now on, in this thread."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Launch on another stream inside the context; None changes nothing."""
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: _Device = None) -> None:
    """Wait for all that is queued on all streams."""
    _check(device)
    _driver().synchronize()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return the free bytes, over all processes of the ledger, and the device's size."""
    _check(device)
    free, total = _driver().memory_info()
    return free, total


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes that this process's tensors hold."""
    _check(device)
    return int(_driver().allocated_bytes())


def memory_reserved(device: _Device = None) -> int:
    """Return the bytes that this process keeps for tensors: nothing is cached."""
    return memory_allocated(device)


def empty_cache() -> None:
    """Give back what is cached: nothing is."""


def _generator() -> torch.Generator:
    generator: torch.Generator = _driver().default_generator()
    return generator


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Return the state of the device's generator, on the host; it waits for nothing."""
    _check(device)
    return _generator().get_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    """Set the state of the device's generator for what is launched from now on."""
    _check(device)
    _generator().set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state()]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for number, state in enumerate(states):
        set_rng_state(state, number)


def manual_seed(seed: int) -> None:
    """Seed the device's generator."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices' generators."""
    manual_seed(seed)


def initial_seed() -> int:
    """Return what the device's generator was seeded with."""
    return _generator().initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what autocast may choose."""
    return [torch.float16, torch.bfloat16]


def synchronizations() -> int:
    """Return how often the host has waited for the device so far."""
    return int(_driver().synchronizations())


def set_sync_debug_mode(mode: int | str) -> None:
    """Let waits of the host be ("default") or raise RuntimeError ("error")."""
    if mode not in ("default", "error", 0, 2):
        raise ValueError(f"simdev's sync-debug mode is 'default' or 'error', not {mode!r}")
    _driver().set_sync_debug(mode in ("error", 2))


def get_sync_debug_mode() -> int:
    """Return 0 for "default" and 2 for "error", as torch.cuda does."""
    return 2 if _driver().sync_debug() else 0


def inject_sticky_error(text: str) -> None:
    """Fail every call of the device from now on with this text, as after a device-side assert."""
    _driver().inject_sticky_error(text)


def host_register(pointer: int, nbytes: int) -> None:
    """Pin host memory that is there already, as cudaHostRegister does."""
    _driver().host_register(pointer, nbytes)


def host_unregister(pointer: int) -> None:
    """Undo `host_register`."""
    _driver().host_unregister(pointer)


def _spin(seconds: float) -> None:
    _driver().spin(seconds)


@contextmanager
def _held() -> Iterator[None]:
    """Have the current stream go no further until the end of the block."""
    release = _driver().hold()
    try:
        yield
    finally:
        release()


def _throw_on_device(text: str) -> None:
    _driver().throw_on_device(text)


class _Runtime:
    """The calls of CUDA's runtime that `torch.cuda.cudart()` has and ckptless asks for; 0 is success."""

    @staticmethod
    def cudaHostRegister(pointer: int, nbytes: int, _flags: int) -> int:
        """See `host_register`."""
        host_register(pointer, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        """See `host_unregister`."""
        host_unregister(pointer)
        return 0


def cudart() -> type[_Runtime]:
    """Return what has runtime calls by CUDA's names."""
    return _Runtime
