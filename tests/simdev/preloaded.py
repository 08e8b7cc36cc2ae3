"""Imported by the process that test children are forked from: the device is installed, and not used yet."""

import torch

from tests.simdev.device import install

install()
torch.ones(1, device="meta") + 1  # the meta kernels that are Python are imported by the first use
