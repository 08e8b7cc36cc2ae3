"""Copies of a commit from a device that run beside the next step, on a stream of their own.

The device has an update wait for them (`fence`), and no thread does. Whoever writes before that, and by
whatever way, is found: the device adds up the tensors' bytes when the copies begin, and what has arrived is
added up again. A version of which they differ gets no header.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from ckptless.pytorch_hooks.devices.sums import DeviceSums, sums_of
from ckptless.pytorch_hooks.state import TensorCopy, private


class BesideOnDevice:
    """The copies of one commit, all from one device, queued on `stream`."""

    def __init__(self, copies: Sequence[TensorCopy], stream: torch.Stream) -> None:
        self._copies = copies
        self._sums = DeviceSums([one.source for one in copies])
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            self.arrival = private.queue_copies([c.target for c in copies], [c.source for c in copies])

    def checks(self) -> list[Callable[[], str | None]]:
        """Return what says, of each tensor, its name where it was written to before it had been copied.

        Each waits for the copies. Any thread.
        """
        return [functools.partial(self._check, index) for index in range(len(self._copies))]

    def _check(self, index: int) -> str | None:
        # no deadline: the device's own work; the end of the generation frees it
        self.arrival.wait()
        one = self._copies[index]
        return None if torch.equal(sums_of(one.target), self._sums.read()[index]) else one.name

    def fence(self) -> None:
        """Have the current stream wait for the copies. The thread that updates."""
        self.arrival.order()
