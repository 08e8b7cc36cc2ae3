"""What `run.batches` costs in each step: python tests/local/bench_batches.py [STEPS].

A small model is trained on batches of 8 x 2048 tokens, in one thread. Measured in turn, block by block in the
same run: from the end of a step to the begin of the next one, with what a commit has the loaders do, and for
comparison with the bare loop over the same loader, or over a list where that has to wait for processes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptless.data import MappedLoader
from ckptless.pytorch_hooks.cursor import Cursors
from ckptless.pytorch_hooks.data.ring_reader import RingFeed

ROWS, LENGTH = 8, 2048
WARM, BLOCK = 10, 50
AGENT = Path(__file__).parents[1] / "integration" / "ring_agent.py"


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of LENGTH tokens."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(index, index + LENGTH)}


class Model:
    """A step of some milliseconds, which throws out of the caches what was in them."""

    def __init__(self) -> None:
        self._net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
        self._optimizer = torch.optim.AdamW(self._net.parameters())

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        x = batch["tokens"].view(-1, 512)[:16].float()
        self._net(x).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


Commit = Callable[[], object]
Loop = tuple[Iterator[Any], Commit]


def bare(loader: Any) -> Loop:
    return iter(loader), lambda: None


def kept(loader: Any) -> Loop:
    """As run.batches does, and run.commit: Loaders, less the messages to the agent."""
    cursors = Cursors()

    def commit() -> None:
        cursors.committed()
        oldest = cursors.oldest("")
        if oldest is not None and oldest.loader is not None and hasattr(loader, "committed"):
            loader.committed(oldest.loader)

    return cursors.batches(loader, 1, ""), commit


def seconds(loop: Loop, model: Model, count: int) -> list[float]:
    batches, commit = loop
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        batch = next(batches)
        found.append(time.perf_counter() - begun)
        model.step(batch)
        begun = time.perf_counter()
        commit()
        found[-1] += time.perf_counter() - begun
    return found


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    torch.set_num_threads(1)
    model, tokens = Model(), Tokens()
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "agent.sock")
        agent = subprocess.Popen(
            [sys.executable, str(AGENT), socket, "30"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert agent.stdout is not None
        agent.stdout.readline()
        loader = MappedLoader(tokens, batch_size=ROWS, shuffle=True)
        feed = RingFeed(socket, 0, "")
        feed.enter(1)
        loader.feed_from(feed)
        batch = {"tokens": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
        listed = [batch] * (10 * steps)
        workers = DataLoader(tokens, batch_size=ROWS, num_workers=1)
        plain = DataLoader(tokens, batch_size=ROWS)
        loops = {
            "a list, bare": bare(listed),
            "a list": kept(listed),
            "the ring": kept(loader),
            "DataLoader, a worker, bare": bare(workers),
            "DataLoader, a worker": kept(workers),
            "DataLoader, in the process, bare": bare(plain),
            "DataLoader, in the process": kept(plain),
        }
        found: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(0, steps, BLOCK):
            for name, loop in loops.items():
                found[name] += seconds(loop, model, WARM + BLOCK)[WARM:]
        load = os.getloadavg()[0]
        print(f"{steps} steps each, batches of {ROWS * LENGTH * 8 >> 10} KiB; load {load:.1f}")
        for name, taken in found.items():
            worst = statistics.quantiles(taken, n=10)[-1]
            mean = statistics.mean(taken)
            print(
                f"{name:34s} median {statistics.median(taken) * 1e6:6.1f} us, mean {mean * 1e6:6.1f}, "
                f"9 of 10 {worst * 1e6:6.1f}"
            )
        loader.close()
        del loops
        agent.communicate(timeout=60)


if __name__ == "__main__":
    main()
