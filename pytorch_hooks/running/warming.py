"""What a spare does while it waits: its device, and what the script would have ready, are made ready.

The first operations of a process on a device take long: its context, the libraries of matrices and
convolutions, autograd's threads, what NCCL finds out about the node. A spare has that behind it when it is
needed.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.errors import DeviceLost
from ckptless.pytorch_hooks.process_groups import device_backends
from ckptless.pytorch_hooks.running.user_hooks import Hook
from ckptless.pytorch_hooks.torch_private import calls as torch_private

# The context of a large machine's device, all its libraries, and NCCL's look at the node: seconds.
DEVICE_DEADLINE_S = 60.0
# The script's: a compiler's work, at most. A spare that is needed meanwhile joins after it, and may take
# `max_stall` to join (300 s unless somebody says another).
SCRIPT_DEADLINE_S = 240.0
# What these libraries read, they read once.
_READ_ONCE = ("CUDA", "CUBLAS", "CUDNN", "NCCL", "TORCH", "PYTORCH", "NVIDIA")

Tell = Callable[[str], None]


class Warmed:
    """A process that has used its device as a spare: what its libraries were told by then."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Note that this is what they were told."""
        self._environment = _environment()

    def check(self) -> None:
        """Raise DeviceLost where the script has told them more since: other ranks' libraries have heard it.

        So do those of a process that begins anew.
        """
        now = _environment()
        changed = sorted({name for name, _value in self._environment.items() ^ now.items()})
        if changed:
            raise DeviceLost(
                f"the training function has set {', '.join(changed)} in a spare that had used its device "
                "already: set it before ckptless.run, so that spares can be made ready"
            )


def warm(slot: int, warmup: Hook | None, tell: Tell) -> Warmed | None:
    """Make the device ready that a rank in this slot works on by torchrun's rule, if any; then call `warmup`.

    Raises DeviceLost where it does not compute. None where there is no device.
    """
    began = time.monotonic()
    device = accelerator.of_slot(slot)
    if device is not None:
        accelerator.within(DEVICE_DEADLINE_S, lambda: _use(device, tell), f"{device} does not compute")
        _try(tell, "collectives", DEVICE_DEADLINE_S, lambda: _connect(device))
    if warmup is not None:
        _try(tell, "the script's warmup", SCRIPT_DEADLINE_S, warmup)
    if device is not None or warmup is not None:
        tell(f"a spare was made ready in {time.monotonic() - began:.2f} s")
    return None if device is None else Warmed()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)}


def _use(device: torch.device, tell: Tell) -> None:
    """Do once what every training does; no number is drawn. A device that others have filled is sound."""
    try:
        _compute(device)
    except torch.OutOfMemoryError as error:
        tell(f"{device} is full, and is not made ready: {error}")


def _compute(device: torch.device) -> None:
    with accelerator.current(device):
        matrix = torch.ones(64, 64, device=device, requires_grad=True)
        image = torch.ones(1, 1, 8, 8, device=device)
        mixed = matrix.to(torch.bfloat16) @ matrix.to(torch.bfloat16)
        folded = torch.nn.functional.conv2d(image, torch.ones(1, 1, 3, 3, device=device))
        torch.autograd.backward((matrix @ matrix).sum())
        host = mixed.detach().to("cpu", non_blocking=True)
        torch.accelerator.synchronize(device)
        del host, folded


def _connect(device: torch.device) -> None:
    """Have a group of one, whose making is most of what a larger one's is."""
    kind = device_backends.present()
    if kind is None or kind.make is None:
        return
    with accelerator.current(device):
        timeout = timedelta(seconds=DEVICE_DEADLINE_S)
        backend = kind.make(torch_private.HashStore(), 0, 1, timeout=timeout, name="ckptless-warm")
        backend.eager_connect_single_device(device)
        torch.accelerator.synchronize(device)
        backend.abort()


def _try(tell: Tell, what: str, deadline_s: float, call: Callable[[], object]) -> None:
    """Do what may fail: the rank does it again, and says then what is wrong."""
    try:
        accelerator.within(deadline_s, call, f"{what}: not ready")
    except DeviceLost as error:
        tell(str(error))
