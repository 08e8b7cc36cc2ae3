"""The accelerator of this process, whatever its kind: asked through what torch has for all of them.

Nothing here makes a device context where there was none: a process that trains on the CPU, and a zygote that
others are forked from, stay without.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckptless.pytorch_hooks.errors import DeviceLost

# What is allocated and computed to see whether a device is sound (bytes; the sum of 0 to n - 1).
PROOF_NBYTES = 1 << 20
# It takes milliseconds; a machine that is busy elsewhere costs nobody its process.
PROOF_DEADLINE_S = 5.0
MEMORY_POLL_S = 0.05


def present() -> str | None:
    """Return the type of this machine's accelerator ("cuda"), or None where there is none to be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def in_use() -> torch.device | None:
    """Return the device that is current here, where this process has begun to use one; else None.

    Asked for at each commit and batch: no driver is.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not _module(found.type).is_initialized():
        return None
    return torch.device(found.type, _module(found.type).current_device())


def of_slot(slot: int) -> torch.device | None:
    """Return the device that a process in this slot of a node works on, as under torchrun; None of none.

    Where the process sees one device alone, that.
    """
    kind = present()
    if kind is None:
        return None
    return torch.device(kind, slot if slot < torch.accelerator.device_count() else 0)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Have a device be the current one of this thread, for the time of the block."""
    with _module(device.type).device(device):
        yield


def identity(device: torch.device) -> str | None:
    """Return what no other device anywhere has (the UUID); None where this kind of device does not tell."""
    properties = getattr(_module(device.type), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def wait_idle(deadline_s: float) -> None:
    """Wait until all streams of the current device have done what was queued on them. Raises DeviceLost."""
    device = in_use()
    if device is not None:
        within(deadline_s, lambda: _module(device.type).synchronize(device), f"{device} is not idle")


def prove_sound(deadline_s: float = PROOF_DEADLINE_S) -> None:
    """Allocate on the current device, and compute something whose result is known. Raises DeviceLost.

    After an error that sticks (an assert in a kernel, an illegal address) every call fails until the process
    ends.
    """
    device = in_use()
    if device is not None:
        within(deadline_s, lambda: _prove(device), f"{device} does not compute")


def other_nbytes() -> int | None:
    """Return the bytes of the current device that neither are free nor this process keeps for tensors."""
    device = in_use()
    if device is None:
        return None
    module = _module(device.type)
    free, total = module.mem_get_info(device)
    return int(total - free - module.memory_reserved(device))


def give_back() -> None:
    """Give back what this process has of the current device's memory, and uses for nothing any more."""
    device = in_use()
    if device is not None:
        _module(device.type).empty_cache()


def wait_for_memory(deadline_s: float) -> None:
    """Give back what this process does not use, and wait until the current device has more that is free.

    For as long as the deadline: a process that has died may take a moment to lose its memory.
    """
    device = in_use()
    if device is None:
        return
    gc.collect()
    give_back()
    module = _module(device.type)
    free, _ = module.mem_get_info(device)
    limit = time.monotonic() + deadline_s
    while module.mem_get_info(device)[0] <= free and time.monotonic() < limit:
        time.sleep(MEMORY_POLL_S)


def _prove(device: torch.device) -> None:
    count = PROOF_NBYTES // 4
    found = torch.arange(count, dtype=torch.int32, device=device).sum(dtype=torch.int64).item()
    if found != count * (count - 1) // 2:
        raise RuntimeError(f"the sum of 0 to {count - 1} is {found} there")


def within(deadline_s: float, call: Callable[[], object], trouble: str) -> None:
    """Make a call that may never return in a thread, which is left alone then. Raises DeviceLost.

    The thread works on the device that is current here.
    """
    errors: list[Exception] = []
    on_device = follow()

    def make() -> None:
        try:
            on_device()
            call()
        except Exception as error:  # noqa: BLE001  # it is raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=make, name="ckptless-device", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise DeviceLost(f"{trouble} within {deadline_s:g} s")
    if errors:
        raise DeviceLost(f"{trouble}: {errors[0]!r}") from errors[0]


def follow() -> Callable[[], None]:
    """Return what has the thread that calls it work on the device that is current here, if one is."""
    device = in_use()

    def here() -> None:
        if device is not None:
            _module(device.type).set_device(device)

    return here


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)
