"""Measures how long a commit of so many bytes keeps the main thread: `bench_commit.py [--mib 256] [--json]`.

In turn: one copy_ of a flat buffer into the same memory, the commit of a State of as many bytes (from asking
for it until the training goes on; its digests and its Commit are waited for in between, outside the
measurement), and the same until the Commit is sent; both once more with copies beside the training, which
does nothing here; what a survivor of a fault does to copy its newest version back (verify, unpack); and
torch.distributed.checkpoint.async_save to /dev/shm. Medians, in milliseconds; cpu_ms is the CPU time of all
threads until the Commit is sent.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.pytorch_hooks.commit.slots import SLOTS
from ckptless.pytorch_hooks.commit.versions import Versions, record_digest
from ckptless.pytorch_hooks.state import State, TensorSet, draft, read

GENERATION = 1


class Memory:
    """Stands in for the session: gives a memfd, and takes commits."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(job="bench", run="0" * 32)
        self.sent: list[m.Commit] = []
        self.fd = os.memfd_create("ckptless-bench")
        self.slot_nbytes = 0

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        self.slot_nbytes = slot_nbytes
        os.ftruncate(self.fd, slot_nbytes * slots)
        return m.Allocated(region=1), os.dup(self.fd)

    def fetch(self, _generation: int, step: int, *_unsound: object) -> tuple[m.Fetched, int]:
        newest = self.sent[-1]
        found = m.Fetched(
            step=step, record=newest.record, tensors=newest.tensors, slot_nbytes=self.slot_nbytes
        )
        return found, os.dup(self.fd)

    def send(self, message: m.Commit) -> None:
        self.sent = [message]


class Bench:
    """A State of `nbytes` bytes: layers of 4 MiB, with the two moments of each."""

    def __init__(self, nbytes: int) -> None:
        layers = max(1, nbytes // (3 * (4 << 20)))
        model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        self.state = State(model=model, optimizer=optimizer)
        self.tensors = TensorSet(self.state)
        self.memory = Memory()
        self.versions = Versions(cast("Any", self.memory))
        self.flat = torch.randint(0, 255, (self.tensors.layout.nbytes,), dtype=torch.uint8)
        self.step = 0
        self.shm = tempfile.mkdtemp(prefix="ckptless-bench-", dir="/dev/shm")

    def copy(self) -> float:
        """One memcpy into the slot that the next commit would take."""
        slots = self.versions._slots
        assert slots is not None
        slot = slots.slot(slots.next_slot)
        begin = version.header_nbytes(self.flat.numel())
        target = slot[begin : begin + self.flat.numel()]
        start = time.perf_counter()
        target.copy_(self.flat)
        return time.perf_counter() - start

    def commit(self, *, beside: bool = False) -> tuple[float, float, float]:
        """As Run._save does it: seconds until the training goes on, until the Commit is sent; CPU seconds."""
        self.step += 1
        start, used = time.perf_counter(), time.process_time()
        write = self.versions.begin if beside else self.versions.write
        written = write(self.tensors, self.step, GENERATION, 0, 0)
        record = draft(self.state, self.step, None, {}, self.tensors).finish()
        commit = m.Commit(
            generation=GENERATION,
            step=self.step,
            record=record,
            digest=record_digest(record),
            tensors=None,
            loss=None,
        )
        self.versions.send(commit, written)
        blocked = time.perf_counter() - start
        self.versions.wait()
        return blocked, time.perf_counter() - start, time.process_time() - used

    def copy_back(self) -> float:
        """The newest version into the living tensors, as Run._recover does it."""
        start = time.perf_counter()
        found = self.versions.fetch(GENERATION, self.step, 0, self.tensors)
        self.tensors.unpack(found.payload, read(found.record).layout)
        return time.perf_counter() - start

    def async_save(self) -> float:
        """Return what PyTorch's own asynchronous checkpoint takes from the training."""
        content = {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        start = time.perf_counter()
        done: Any = async_save(content, checkpoint_id=f"{self.shm}/{self.step}")
        blocked = time.perf_counter() - start
        done.result()
        shutil.rmtree(f"{self.shm}/{self.step}")
        return blocked

    def close(self) -> None:
        """Leave nothing."""
        self.versions.close()
        os.close(self.memory.fd)
        shutil.rmtree(self.shm)


def measure(mib: int, rounds: int) -> dict[str, float]:
    """Every kind once to warm up, then `rounds` times in turn."""
    bench = Bench(mib << 20)
    names = ("memcpy_ms", "commit_ms", "sent_ms", "cpu_ms", "beside_ms", "beside_sent_ms", "beside_cpu_ms")
    took: dict[str, list[float]] = {name: [] for name in (*names, "copy_back_ms", "async_save_ms")}
    try:
        for _ in range(SLOTS):
            bench.commit()
        bench.async_save()
        for _ in range(rounds):
            took["memcpy_ms"].append(bench.copy())
            for name, value in zip(names[1:], (*bench.commit(), *bench.commit(beside=True)), strict=True):
                took[name].append(value)
            took["copy_back_ms"].append(bench.copy_back())
            took["async_save_ms"].append(bench.async_save())
    finally:
        bench.close()
    found = {name: round(1e3 * statistics.median(values), 2) for name, values in took.items()}
    found["mib"] = round(bench.flat.numel() / (1 << 20), 1)
    found["to_memcpy"] = round(found["commit_ms"] / found["memcpy_ms"], 3)
    found["beside_to_memcpy"] = round(found["beside_ms"] / found["memcpy_ms"], 3)
    found["copy_back_to_memcpy"] = round(found["copy_back_ms"] / found["memcpy_ms"], 3)
    found["to_async_save"] = round(found["commit_ms"] / found["async_save_ms"], 3)
    found["load"] = round(os.getloadavg()[0], 2)
    return found


def main(run: Callable[[int, int], dict[str, float]] = measure) -> None:
    """Bars: at most 1.2 times the memcpy, and a third of async_save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each kind")
    parser.add_argument("--threads", type=int, default=1, help="torch's own; ckptless-run gives a rank 1")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        found = run(options.mib, options.rounds)
    finally:
        dist.destroy_process_group()
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:16} {value:10.3f}")


if __name__ == "__main__":
    main()
