"""What is copied from a device while the training goes on: when it has arrived.

The main thread queues copies and goes on; another thread waits for them.
"""

from collections.abc import Iterable

import torch


class Arrival:
    """All that is queued by now on the current streams of these devices (the CPU's need nothing)."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [_recorded(device) for device in {*devices} if device.type != "cpu"]

    @property
    def from_device(self) -> bool:
        """Whether there is a device to be waited for."""
        return bool(self._events)

    @property
    def is_there(self) -> bool:
        """Whether `wait` returns at once."""
        return all(event.query() for event in self._events)

    def together(self, other: "Arrival") -> "Arrival":
        """Return what has arrived when both have."""
        both = Arrival(())
        both._events = [*self._events, *other._events]
        return both

    def since(self, earlier: "Arrival") -> float:
        """Return the devices' own seconds between another one, of the same devices, and this one; 0 of none.

        Raises RuntimeError unless both are there.
        """
        pairs = zip(earlier._events, self._events, strict=True)
        return max((first.elapsed_time(last) / 1000 for first, last in pairs), default=0.0)

    def order(self) -> None:
        """Have the devices do what is queued on their current streams from now on only after it."""
        for event in self._events:
            event.wait(torch.accelerator.current_stream(event.device))

    def wait(self) -> None:
        """Return once the devices have done it. Raises RuntimeError where one has failed."""
        for event in self._events:
            event.synchronize()


class DeviceNumber:
    """A number that a device computes, to be read by whoever may wait for it, or sees that it is there."""

    def __init__(self, value: torch.Tensor) -> None:
        # Page-locked: torch sees to that where a copy to the CPU is not to block.
        self._copy = value.detach().to("cpu", non_blocking=True)
        self.arrival = Arrival([value.device])

    def read(self) -> float:
        """Return the number, once it is there. Raises RuntimeError where the device has failed."""
        # no deadline: the device's own work; the end of the generation frees it
        self.arrival.wait()
        return float(self._copy)


def _recorded(device: torch.device) -> torch.Event:
    # Who waits for one of the other kind keeps a core busy.
    event = torch.Event(device, blocking=True, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
