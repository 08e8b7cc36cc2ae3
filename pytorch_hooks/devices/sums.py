"""Sums of tensors' bytes, which tell what a device's memory held at one moment, and whether that has arrived.

The bytes are taken as 64-bit words in rows of `COLUMNS`; the sums are those of each row and of each column.
Torch adds integers modulo 2**64, on any device and in any order, so equal bytes have equal sums. A write goes
unseen only where it keeps the sums of all rows and columns; one that moves rows or single words does not.
"""

from collections.abc import Sequence

import torch

from ckptless.pytorch_hooks.devices.arrival import Arrival

COLUMNS = 512
# Smaller ones are copied in less time than the sums take to be queued.
LEAST_NBYTES = 1 << 20


def summable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on this device, and `sums_of` takes it, and that is worth it."""
    nbytes = tensor.numel() * tensor.element_size()
    return (
        tensor.device == device
        and nbytes >= LEAST_NBYTES
        and nbytes % (8 * COLUMNS) == 0
        and tensor.is_contiguous()
        and tensor.storage_offset() * tensor.element_size() % 8 == 0
        and (tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64, torch.uint8))
    )


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums (int64, 1-D, where the tensor is) of one that is `summable`. Nothing is waited for."""
    words = tensor.detach().view(-1).view(torch.int64).view(-1, COLUMNS)
    return torch.cat((words.sum(1), words.sum(0)))


class DeviceSums:
    """The sums of tensors on one device, behind all that is queued on its current stream by now."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sums = [sums_of(tensor) for tensor in tensors]
        self._sizes = [len(one) for one in sums]
        # Page-locked: torch sees to that where a copy to the CPU is not to block.
        self._copy = torch.cat(sums).to("cpu", non_blocking=True)
        self._arrival = Arrival([tensors[0].device])

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return them (int64, on the CPU), once they are there. Raises RuntimeError if the device failed."""
        # no deadline: the device's own work; the end of the generation frees it
        self._arrival.wait()
        return torch.split(self._copy, self._sizes)
