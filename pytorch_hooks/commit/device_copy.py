"""Copies from a CUDA device into pinned memory; with `overlap="on"` on a stream beside the training's.

So far this has run over simulated streams only, in any order that CUDA allows (tests/unit/pytorch_hooks);
`make test-gpu` compares it on a device with copies in order, bit for bit.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptless.pytorch_hooks.state import Copy, private

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceTicket:
    """Copies that are queued; `over` is recorded behind them on each device. It keeps their sources alive."""

    copies: Sequence[Copy]
    over: dict[torch.device, Any]


class DeviceCopies:
    """The device of tensors that lie on accelerators; of those in the CPU's memory among them, too."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned: Pinned | None = None

    def hold(self, memory: torch.Tensor) -> None:
        """Pin what is copied into from here on."""
        if self._pinned is None:
            self._pinned = Pinned(memory)

    def release(self) -> None:
        """It is unmapped after this; nothing is being copied."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def begin(self, now: Sequence[Copy], later: Sequence[Copy]) -> DeviceTicket:
        """Queue `now` on the current streams; `later` beside them, behind all that is queued there by now."""
        _copy(now)
        over: dict[torch.device, Any] = {}
        for device in dict.fromkeys(one.source.device for one in (*now, *later)):
            ours = [one for one in later if one.source.device == device]
            if device.type != "cuda":
                _copy(ours)
                continue
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _copy(ours)
                over[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                over[device].record(stream)
        return DeviceTicket((*now, *later), over)

    def complete(self, ticket: DeviceTicket, came: Callable[[int], None]) -> None:
        """Until the devices have made them; then all of it is there at once. It cannot tell who wrote."""
        for event in ticket.over.values():
            event.synchronize()

    def fence(self, ticket: DeviceTicket) -> None:
        """What is queued on the current streams from here on waits for them; this thread does not."""
        for device, event in ticket.over.items():
            torch.cuda.current_stream(device).wait_event(event)


def _copy(copies: Sequence[Copy]) -> None:
    private.copy_all([one.target for one in copies], [one.source for one in copies], wait=False)


class Pinned:
    """Memory that a device may write to while the CPU goes on; as long as this is open.

    Where CUDA does not take it, copies are right all the same, and hold up the thread that queues them.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._is_pinned = _succeeded("pin", _cudart().cudaHostRegister(*_place(memory), 0))

    def close(self) -> None:
        """Nothing is being copied into it any more."""
        if self._is_pinned:
            _succeeded("unpin", _cudart().cudaHostUnregister(self._memory.data_ptr()))


def _place(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.numel() * memory.element_size()


def _succeeded(what: str, error: Any) -> bool:
    if int(error) == 0:
        return True
    logger.warning("cannot %s the memory of versions (CUDA error %d): copies wait", what, int(error))
    return False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
