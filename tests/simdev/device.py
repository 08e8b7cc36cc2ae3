"""Make the simulated accelerator torch's device "simdev": in a test process, `install()` before all else."""

import torch
from torch.utils import backend_registration

from ckptless.pytorch_hooks.torch_private.names import version
from tests.simdev import api
from tests.simdev.build import compiler, load_extension

__all__ = ["install", "load_extension", "missing"]


def missing() -> str | None:
    """Return why this machine cannot have the device, if it cannot."""
    if version() < (2, 10):
        return "the simulated device is written for the headers of torch 2.10 and newer"
    return None if compiler() else "the simulated device is built by g++, which is not there"


def install() -> None:
    """Register the device with torch, which then has `torch.simdev`. The second time, do nothing."""
    if hasattr(torch, "simdev"):
        return
    load_extension()
    backend_registration.rename_privateuse1_backend("simdev")
    torch._register_device_module("simdev", api)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
