"""Ranks of a node that take batches from a loader: `batches.py KIND FOLDER RANKS STEPS SHARED`, prints JSON.

KIND is a name of LOADERS; FOLDER has rows.bin, and of "streaming" its shards: `batches.py write FOLDER` makes
both. With SHARED 1 all ranks want the same batches, as in tensor parallelism, with 0 each its own. Where the
first batches and rows are known, it is checked that they are the right ones.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

PREFETCH = 8
ROWS, ROW_NBYTES = 512, 1 << 20
KILLS, TAKEN = 5, 3
AGENT = Path(__file__).parents[2] / "integration" / "ring_agent.py"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Rows(Dataset[torch.Tensor]):
    """The rows of a file, each with its number in its first word."""

    def __init__(self, folder: Path) -> None:
        self._rows = np.memmap(folder / "rows.bin", np.int64, "r").reshape(ROWS, -1)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._rows[index]))


@dataclass(frozen=True)
class Place:
    """Where ranks are, and what they want."""

    folder: Path
    ranks: int
    shared: bool

    def wanted(self, rank: int, begin: int = 0) -> range:
        """The rows that a rank wants."""
        return range(begin, ROWS) if self.shared else range(rank + begin * self.ranks, ROWS, self.ranks)


class Ours:
    """From the node's ring."""

    def __init__(self, place: Place, rank: int, begin: int = 0) -> None:
        from ckptless.pytorch_hooks.data.ring_reader import ReadAhead, Reader, RingName

        rows = Rows(place.folder)

        def produce(stream: int, position: Any) -> Iterator[tuple[int, torch.Tensor, int]]:
            for index in place.wanted(stream, position):
                yield position, rows[index], position + 1
                position += 1

        name, limits = RingName("train", "00" * 16), ReadAhead(window=PREFETCH, budget_nbytes=1 << 32)
        self._reader = Reader(str(place.folder / "agent.sock"), name, rank, produce, limits)
        self._reader.seek(0 if place.shared else rank, begin, begin)

    def next(self, step: int) -> torch.Tensor:
        # As with one commit in flight: what is older than the last two is not asked for again.
        self._reader.committed(step - 2)
        taken = self._reader.take()
        assert taken is not None
        batch: torch.Tensor = taken.batch
        return batch

    def close(self) -> None:
        self._reader.close()


class Theirs:
    """From torch's DataLoader; one that goes on at a position is made for what is left."""

    def __init__(self, place: Place, rank: int, begin: int = 0) -> None:
        self._batches = iter(self.made(place, rank, begin))

    def made(self, place: Place, rank: int, begin: int) -> Any:
        options = {"batch_size": None, "num_workers": 1, "prefetch_factor": PREFETCH}
        return DataLoader(Rows(place.folder), sampler=place.wanted(rank, begin), **options)  # type: ignore[arg-type]

    def next(self, _step: int) -> torch.Tensor:
        batch: torch.Tensor = next(self._batches)
        return batch

    def close(self) -> None:
        del self._batches


class Stateful(Theirs):
    """From torchdata's; one that goes on is told the state of the one before."""

    def made(self, place: Place, rank: int, begin: int) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        options = {"batch_size": None, "num_workers": 1, "prefetch_factor": PREFETCH}
        loader = StatefulDataLoader(Rows(place.folder), sampler=place.wanted(rank), **options)
        if begin:
            loader.load_state_dict(json.loads((place.folder / "state.json").read_text()))
        return loader

    @staticmethod
    def save(place: Place) -> None:
        """The state after what a killed rank had taken."""
        loader = Stateful.made(Stateful.__new__(Stateful), place, 0, 0)
        batches = iter(loader)
        for _ in range(TAKEN):
            next(batches)
        (place.folder / "state.json").write_text(json.dumps(loader.state_dict()))


class Streaming(Theirs):
    """From MosaicML's, which reads shards of its own kind; all ranks make theirs together."""

    def made(self, place: Place, rank: int, _begin: int) -> Any:
        streaming = import_streaming()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(place.ranks))
        os.environ.update(LOCAL_WORLD_SIZE=str(place.ranks), MASTER_ADDR="127.0.0.1")
        dataset = streaming.StreamingDataset(
            local=str(place.folder / "shards"),
            batch_size=1,
            shuffle=False,
            num_canonical_nodes=1,
            replication=place.ranks if place.shared else None,
        )
        collate = lambda rows: torch.from_numpy(np.array(rows[0]["row"]))  # noqa: E731
        return streaming.StreamingDataLoader(
            dataset, batch_size=1, num_workers=1, prefetch_factor=PREFETCH, collate_fn=collate
        )


LOADERS: dict[str, type[Ours | Theirs]] = {
    "ckptless": Ours,
    "DataLoader": Theirs,
    "torchdata": Stateful,
    "streaming": Streaming,
}


# What ranks share, as they are forked of a process that has it.
MODULES = {
    "ckptless": "ckptless.pytorch_hooks.data.ring_reader",
    "torchdata": "torchdata.stateful_dataloader",
}


def import_streaming() -> Any:
    """Without torchvision, of whose pictures nothing is read here: its wheels want a torch with CUDA."""
    import transformers.feature_extraction_utils  # noqa: F401 - it looks for the real one

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        sys.modules.setdefault(name, types.ModuleType(name))
    functional = sys.modules.setdefault(
        "torchvision.transforms.functional", types.ModuleType("torchvision.transforms.functional")
    )
    vars(functional).setdefault("to_tensor", None)
    vars(sys.modules["torchvision.datasets"]).setdefault("VisionDataset", type("VisionDataset", (), {}))
    import streaming  # type: ignore[import-not-found]

    return streaming


def write(folder: Path) -> None:
    """The rows, in a file and in shards."""
    streaming = import_streaming()
    draw = np.random.default_rng(1)
    with (
        (folder / "rows.bin").open("wb") as file,
        streaming.MDSWriter(out=str(folder / "shards"), columns={"row": "ndarray:int64"}) as shards,
    ):
        for number in range(ROWS):
            row = draw.integers(0, 50_000, ROW_NBYTES // 8)
            row[0] = number
            file.write(row.tobytes())
            shards.write({"row": row})


# ------------------------------------------------------------------------------------- what they use


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(one for child in children for one in tree(int(child)))]


def files_of(pid: int) -> dict[int, int]:
    """Bytes of the files that batches lie in, by inode: open or mapped in a process."""
    found: dict[int, int] = {}
    # It has ended, or has closed the file.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if any(name in str(fd.readlink()) for name in ("ckptless-batch", "/torch_")):
                    found[fd.stat().st_ino] = fd.stat().st_blocks * 512
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "ckptless-batch" in line or "/torch_" in line:
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                found.setdefault(int(line.split()[4]), end - begin)
    return found


def batches_nbytes() -> int:
    """Bytes of all batches of this process and those below it, each counted once."""
    found: dict[int, int] = {}
    for pid in tree(os.getpid()):
        found.update(files_of(pid))
    return sum(found.values())


def own_nbytes() -> int:
    """Bytes of memory besides: anonymous, of which each process counts its part."""
    found = 0
    for pid in tree(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon"))
    return found


def cpu_s() -> float:
    """CPU seconds of all of them, without those that have ended."""
    found = 0
    for pid in tree(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += int(words[11]) + int(words[12])
    return found / TICKS_PER_S


class Rank:
    """A forked process that takes batches when it is told how many, and answers with the seconds."""

    def __init__(self, make: Callable[[], Ours | Theirs], numbers: range | None) -> None:
        """`numbers`: of the rows that should come, where they are known."""
        (self._reads, says), (hears, self._writes) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(says)
            os.close(hears)
            return
        try:
            torch.set_num_threads(1)
            loader: Ours | Theirs | None = None
            done = 0
            while wanted := int(os.read(hears, 20) or b"0"):
                begun = time.perf_counter()
                loader = loader or make()
                for step in range(done, done + wanted):
                    # It is kept until there is the next one, as in a loop.
                    batch = loader.next(step)
                    assert numbers is None or int(batch[0]) == numbers[step], (int(batch[0]), step)
                    int(batch.sum())
                done += wanted
                os.write(says, b"%f" % (time.perf_counter() - begun))
            if loader is not None:
                loader.close()
        except BaseException as error:  # noqa: BLE001 - it is told, and the process ends
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(0)

    def ask(self, count: int) -> None:
        os.write(self._writes, b"%d" % count)

    def answer(self) -> float:
        return float(os.read(self._reads, 40))

    def end(self, *, kill: bool = False) -> None:
        # Not by the pipe's end: ranks that were forked later have it, too.
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        else:
            os.write(self._writes, b"0")
        os.waitpid(self.pid, 0)
        os.close(self._writes)
        os.close(self._reads)


def measure(kind: type[Ours | Theirs], place: Place, steps: int) -> dict[str, float]:
    """Measure, over all ranks, the first batch, batches a second and rank, memory, CPU time of a batch."""
    known = kind is not Streaming or place.shared
    crew = [
        Rank(lambda rank=rank: kind(place, rank), place.wanted(rank) if known else None)  # type: ignore[misc]
        for rank in range(place.ranks)
    ]
    seconds = []
    for count in (1, 4, steps):
        before = cpu_s()
        for rank in crew:
            rank.ask(count)
        seconds.append(max(rank.answer() for rank in crew))
    spent = cpu_s() - before
    # Until as much has been made ahead as ever will be.
    nbytes, grown = 0, batches_nbytes()
    while grown > nbytes * 1.01:
        nbytes = grown
        time.sleep(1.0)
        grown = batches_nbytes()
    own = own_nbytes()
    for rank in crew:
        rank.end()
    return {
        "first_s": seconds[0],
        "batches_per_s": steps / seconds[2],
        "batches_nbytes": grown,
        "own_nbytes": own,
        "cpu_s": spent / steps / place.ranks,
    }


def after_a_death(kind: type[Ours | Theirs], place: Place) -> list[float]:
    """Seconds from where a killed rank's heir makes its loader to the batch that comes next."""
    if kind is Stateful:
        Stateful.save(place)
    found = []
    for _ in range(KILLS):
        rank = Rank(lambda: kind(place, 0), place.wanted(0))
        rank.ask(TAKEN)
        rank.answer()
        rank.end(kill=True)
        begun = time.perf_counter()
        heir = kind(place, 0, TAKEN)
        batch = heir.next(TAKEN)
        found.append(time.perf_counter() - begun)
        assert int(batch[0]) == place.wanted(0)[TAKEN]
        heir.close()
    return found


def main() -> None:
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
        return
    name, folder, ranks, steps, shared = sys.argv[1:]
    kind, place = LOADERS[name], Place(Path(folder), int(ranks), bool(int(shared)))
    agent = None
    if kind is Ours:
        command = [sys.executable, str(AGENT), str(place.folder / "agent.sock"), "30"]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert agent.stdout is not None
        agent.stdout.readline()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    if kind is Streaming:
        import_streaming()
    elif name in MODULES:
        importlib.import_module(MODULES[name])
    told: dict[str, Any] = dict(measure(kind, place, int(steps)))
    told["heirs_s"] = [] if kind is Streaming else after_a_death(kind, place)
    if agent is not None:
        agent.communicate(timeout=60)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
