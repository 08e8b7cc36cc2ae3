"""Lets the ranks of a framework's script share one GPU: each is told that it has a node of its own."""

import os

import torch

# Not "cpu": frameworks then look for devices by themselves.
ON_GPU = os.environ.get("TOY_DEVICE") == "cuda"


def begin() -> None:
    """To be called before any group is made; does nothing on the CPU."""
    if not ON_GPU:
        return
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank, GROUP_WORLD_SIZE=ranks)
    # NCCL takes a GPU twice only where hosts differ.
    os.environ.setdefault("NCCL_HOSTID", f"host-of-{rank}")
    torch.use_deterministic_algorithms(True, warn_only=True)
