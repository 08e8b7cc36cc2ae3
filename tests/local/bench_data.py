"""What the ring costs and saves against DataLoaders: python tests/local/bench_data.py [RANKS] [STEPS] [KIB].

All ranks of a node want the same batches, as in tensor parallelism. Measured one after the other in the same
run, several times in turn: memory of the batches (of each that a process has open or mapped, counted once, as
the sum of PSS does), batches a second and rank, what `take` costs where the batch is there, and
how long the first batch takes after a rank was killed.
"""

import contextlib
import os
import signal
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

from ckptless.pytorch_hooks.data.producer import Made, Produce
from ckptless.pytorch_hooks.data.ring_reader import ReadAhead, Reader, RingName

PREFETCH = 8
ROUNDS = 3
KILLS = 15
AGENT = Path(__file__).parents[1] / "integration" / "ring_agent.py"
NAME = RingName("train", "00" * 16)


class Numbers(Dataset[torch.Tensor]):
    """Items of `nbytes` bytes that take some work to make."""

    def __init__(self, nbytes: int) -> None:
        self._count = nbytes // 8

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + self._count).mul_(31).remainder_(50_000)


def numbers(nbytes: int) -> Produce:
    items = Numbers(nbytes)

    def produce(_stream: int, position: int) -> Iterator[Made]:
        while True:
            yield position, items[position], position + 1
            position += 1

    return produce


class Ours:
    """A rank's batches from the ring."""

    def __init__(self, socket: str, slot: int, nbytes: int) -> None:
        limits = ReadAhead(window=PREFETCH, budget_nbytes=1 << 32)
        self.reader = Reader(socket, NAME, slot, numbers(nbytes), limits)
        self.reader.seek(0, 0, 0)

    def next(self, step: int) -> torch.Tensor:
        # As with one commit in flight: what is older than the last two is not asked for again.
        self.reader.committed(step - 2)
        taken = self.reader.take()
        assert taken is not None
        batch: torch.Tensor = taken.batch
        return batch

    def close(self) -> None:
        self.reader.close()


class Theirs:
    """A rank's batches from a DataLoader of its own."""

    def __init__(self, _socket: str, _slot: int, nbytes: int) -> None:
        loader = DataLoader(Numbers(nbytes), batch_size=None, num_workers=1, prefetch_factor=PREFETCH)
        self._batches = iter(loader)

    def next(self, _step: int) -> torch.Tensor:
        batch: torch.Tensor = next(self._batches)
        return batch

    def close(self) -> None:
        del self._batches


def files_of(pid: int) -> dict[int, int]:
    """Bytes of the files that batches lie in, by inode: open or mapped in a process or one below it."""
    found: dict[int, int] = {}
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            # Gone by now: that of this listing.
            with contextlib.suppress(FileNotFoundError):
                if any(name in str(fd.readlink()) for name in ("ckptless-batch", "/torch_")):
                    found[fd.stat().st_ino] = fd.stat().st_blocks * 512
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "ckptless-batch" in line or "/torch_" in line:
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                found.setdefault(int(line.split()[4]), end - begin)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    for child in children:
        found.update(files_of(int(child)))
    return found


def memory_of(pid: int) -> int:
    """Bytes of all batches of a process and those below it, each counted once."""
    return sum(files_of(pid).values())


class Rank:
    """A forked process that takes batches when it is told how many, and answers with the seconds."""

    def __init__(self, make: Callable[[], Any]) -> None:
        (self._reads, says), (hears, self._writes) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(says)
            os.close(hears)
            return
        try:
            os.close(self._reads)
            os.close(self._writes)
            torch.set_num_threads(1)
            loader, done = make(), 0
            while wanted := int(os.read(hears, 20) or b"0"):
                begun = time.perf_counter()
                for step in range(done, done + wanted):
                    # It is kept until there is the next one, as in a loop.
                    batch = loader.next(step)
                    int(batch[-1])
                done += wanted
                os.write(says, b"%f" % (time.perf_counter() - begun))
            loader.close()
        finally:
            os._exit(0)

    def ask(self, count: int) -> None:
        os.write(self._writes, b"%d" % count)

    def answer(self) -> float:
        return float(os.read(self._reads, 40))

    def close(self) -> None:
        # Not by the pipe's end: ranks that were forked later have it, too.
        os.write(self._writes, b"0")
        os.waitpid(self.pid, 0)
        os.close(self._writes)
        os.close(self._reads)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._writes)
        os.close(self._reads)


def measure(kind: type[Ours | Theirs], socket: str, ranks: int, steps: int, nbytes: int) -> tuple[int, float]:
    """Bytes of all batches, the prefetched ones included, and batches a second and rank."""
    crew = [Rank(lambda slot=slot: kind(socket, slot, nbytes)) for slot in range(ranks)]  # type: ignore[misc]
    for count in (4, steps):
        for rank in crew:
            rank.ask(count)
        seconds = max(rank.answer() for rank in crew)
    # Until as much has been made ahead as ever will be.
    memory, grown = 0, memory_of(os.getpid())
    while grown > memory * 1.01:
        memory = grown
        time.sleep(1.0)
        grown = memory_of(os.getpid())
    for rank in crew:
        rank.close()
    return grown, steps / seconds


def cost_of_take(socket: str, nbytes: int) -> list[float]:
    """Seconds of a take of a batch that is there, the script's own use of it left out."""
    rank, taken = Ours(socket, 0, nbytes), []
    for step in range(200):
        # A step of training: time to make the next batch.
        time.sleep(0.02)
        begun = time.perf_counter()
        rank.next(step)
        taken.append(time.perf_counter() - begun)
    rank.close()
    return taken[20:]


def after_a_death(socket: str, nbytes: int) -> list[float]:
    """Seconds from the new process's first word to its agent to its first batch."""
    found = []
    for _ in range(KILLS):
        rank = Rank(lambda: Ours(socket, 0, nbytes))
        rank.ask(5)
        rank.answer()
        rank.kill()
        begun = time.perf_counter()
        heir = Ours(socket, 0, nbytes)
        heir.reader.seek(0, 3, 3)
        heir.reader.take()
        found.append(time.perf_counter() - begun)
        heir.close()
    return found


def main() -> None:
    ranks, steps, kib = (int(word) for word in (*sys.argv[1:], *("8", "100", "1024")[len(sys.argv) - 1 :]))
    nbytes = kib << 10
    print(f"{ranks} ranks, {steps} batches of {kib} KiB, {PREFETCH} ahead; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "agent.sock")
        agent = subprocess.Popen(
            [sys.executable, str(AGENT), socket, "30"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert agent.stdout is not None
        agent.stdout.readline()
        taken, first = cost_of_take(socket, nbytes), after_a_death(socket, nbytes)
        print(f"take          median {statistics.median(taken) * 1e6:6.0f} us, worst {max(taken) * 1e6:.0f}")
        print(
            f"after a death median {statistics.median(first) * 1e3:6.1f} ms, worst {max(first) * 1e3:.1f}",
            flush=True,
        )
        found: dict[type[Ours | Theirs], list[tuple[int, float]]] = {Ours: [], Theirs: []}
        for _ in range(ROUNDS):
            for kind, results in found.items():
                results.append(measure(kind, socket, ranks, steps, nbytes))
        for kind, results in found.items():
            memory = statistics.median(one for one, _ in results) / (1 << 20)
            rate = statistics.median(one for _, one in results)
            print(f"{kind.__name__:8s} {memory:8.1f} MiB {rate:8.1f} batches/s and rank")
        agent.communicate(timeout=60)


if __name__ == "__main__":
    main()
