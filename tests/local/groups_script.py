"""A script for torchrun, of 4 ranks: `groups_script.py OUT`; every kind of group, and what it is used for."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def total(value: float, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return float(tensor.item())


def subgroups(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    assert total(rank, halves[rank % 2]) == (2.0 if rank % 2 == 0 else 4.0)
    # Only their members make these.
    own = [0, 1] if rank < 2 else [2, 3]
    pair = dist.new_group(own, use_local_synchronization=True)
    assert total(rank, pair) == float(sum(own))
    whole = dist.new_group(timeout=timedelta(seconds=60))
    assert total(rank, whole) == 6.0
    dist.destroy_process_group(whole)


def meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert total(rank, mesh.get_group("replicate")) == float(2 * (rank % 2) + 2)
    assert total(rank, mesh.get_group("shard")) == float(4 * (rank // 2) + 1)
    assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]


def objects(rank: int, size: int) -> None:
    said: list[Any] = [{"from": 0, "text": "x" * 1000}] if rank == 0 else [None]
    dist.broadcast_object_list(said, src=0)
    assert said[0]["text"] == "x" * 1000
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(("rank", rank), gathered, dst=1)
    assert gathered is None or gathered == [("rank", number) for number in range(size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {n}" for n in range(size)] if rank == 2 else None, src=2)
    assert mine == [f"for {rank}"]


def point_to_point(rank: int, size: int) -> None:
    out, into = torch.full((1000,), float(rank)), torch.empty(1000)
    ops = [
        dist.P2POp(dist.isend, out, (rank + 1) % size),
        dist.P2POp(dist.irecv, into, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert bool((into == (rank - 1) % size).all())
    parts = list(torch.arange(4.0).chunk(size))
    got = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(got, [part + 10 * rank for part in parts])
    assert [one.item() for one in got] == [10.0 * other + rank for other in range(size)]


def main(out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert total(rank) == 6.0
    subgroups(rank)
    meshes(rank)
    objects(rank, size)
    point_to_point(rank, size)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    (out / f"rank-{rank}.json").write_text(f'"{os.environ.get("TORCH_GLOO_LAZY_INIT", "")}"')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
