"""Trains with a DataLoader whose workers hand tensors over by sockets: `loader_script.py READY`."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


if __name__ == "__main__":
    for number, _batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=2)):
        time.sleep(0.01)
        if number == 10:
            Path(sys.argv[1], f"ready-{os.environ['RANK']}").touch()
