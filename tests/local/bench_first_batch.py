"""What the first batch adds to a recovery by a spare: tests/local/bench_first_batch.py [ROUNDS] [KIND...].

A job of three nodes with a rank each loses the node of rank 1, twice, and a spare takes its place. Of each
recovery: how long the newcomer waited for its first batch, and how long it took from the kill until all ranks
had their first one. KIND: "list", batches that are in memory; "quick", the ring, with a transform that takes
nothing; "slow", the ring, with one of 50 ms a sample, 8 samples to a batch, in steps of 0.4 s, so that they
are made ahead; "starved", the same in steps that take nothing. ROUNDS jobs of each kind, in turn.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptless.daemon.ledger.merge import read_all

NODES, KILLS, SAMPLES, BATCH = 3, 2, 4000, 24
STEPS_BETWEEN = 8
SLOW_S = 0.05
STEP_S = {"slow": 0.4, "starved": 0.0}
DEADLINE_S = 900.0

# ----------------------------------------------------------------------------------------- in the job


def batches_of(kind: str, out: Path) -> Any:
    import torch

    from ckptless.data import Cache, JsonLines, MappedLoader

    def transform(row: dict[str, Any]) -> torch.Tensor:
        if kind in STEP_S:
            time.sleep(SLOW_S)
        return torch.full((4096,), float(row["id"]))

    if kind == "list":
        return [torch.full((BATCH // NODES, 4096), float(n)) for n in range(SAMPLES // BATCH)]
    source = JsonLines(out / "data.jsonl.gz", cache=Cache(out / "cache"))
    return MappedLoader(source, batch_size=BATCH, seed=1, shuffle=True, transform=transform, workers=2)


def job(kind: str, out: Path) -> None:
    import torch
    from torch import nn

    import ckptless

    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4096, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return ckptless.State(model=model, optimizer=optimizer, loader=batches_of(kind, out))

    def train(run: Any) -> None:
        state = run.keep(build)
        log = (out / f"steps-{run.rank}.txt").open("a", buffering=1)
        batches: Iterable[Any] = iter(run.batches(state.loader, epochs=1000))
        while run.step < STEPS_BETWEEN * (KILLS + 1):
            begun = time.monotonic()
            batch = next(batches)  # type: ignore[call-overload]
            there = time.monotonic()
            log.write(json.dumps([run.generation, there - begun, there]) + "\n")
            time.sleep(STEP_S.get(kind, 0.1))
            mark = out / f"killed-{run.step}"
            if run.rank == 1 and run.step and run.step % STEPS_BETWEEN == 0 and not mark.exists():
                mark.write_text(json.dumps([run.generation, time.monotonic()]))
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            # The others wait for this rank, and hear at once that it is gone.
            state.model(batch).mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            run.commit()
        if hasattr(state.loader, "close"):
            state.loader.close()

    ckptless.run(train)


# ----------------------------------------------------------------------------------------- around it


def measure(kind: str, out: Path) -> tuple[list[float], list[float]]:
    """Of each recovery: seconds that the newcomer waited for its first batch, and that all of it took."""
    import gzip

    out.mkdir()
    rows = "".join(json.dumps({"id": n}) + "\n" for n in range(SAMPLES))
    (out / "data.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--local", "--nodes", str(NODES)]
    command += ["--nproc-per-node", "1", "--spares", str(KILLS), "--max-stall", "60", "--tee", "none"]
    command += ["--state-dir", str(out / "state"), __file__, "job", kind, str(out)]
    with (out / "console.txt").open("wb") as console:
        done = subprocess.run(command, stdout=console, stderr=console, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{(out / 'console.txt').read_text()}")
    for event in read_all(out / "state").events:
        if event.kind.startswith("ring"):
            print(f"    {event.kind}: {event.text}")
    steps: dict[int, list[list[Any]]] = {}
    for rank in range(NODES):
        lines = (out / f"steps-{rank}.txt").read_text().splitlines()
        steps[rank] = [json.loads(line) for line in lines]
    waits, whole = [], []
    for path in out.glob("killed-*"):
        generation, killed = json.loads(path.read_text())
        first = {rank: next(row for row in steps[rank] if row[0] > generation) for rank in steps}
        waits.append(first[1][1])
        whole.append(max(row[2] for row in first.values()) - killed)
    return waits, whole


def main() -> None:
    if sys.argv[1:2] == ["job"]:
        job(sys.argv[2], Path(sys.argv[3]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    kinds = sys.argv[2:] or ["list", "quick", "slow"]
    print(
        f"{NODES} ranks, {rounds * KILLS} nodes lost for each kind; load {os.getloadavg()[0]:.1f}", flush=True
    )
    waits: dict[str, list[float]] = {kind: [] for kind in kinds}
    whole: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for kind in kinds:
                waited, took = measure(kind, Path(folder) / f"{kind}-{turn}")
                waits[kind] += waited
                whole[kind] += took
    for kind in kinds:
        print(
            f"{kind:6s} first batch: median {statistics.median(waits[kind]) * 1e3:6.1f} ms, "
            f"worst {max(waits[kind]) * 1e3:6.1f}; recovery: median {statistics.median(whole[kind]):.2f} s, "
            f"worst {max(whole[kind]):.2f}"
        )


if __name__ == "__main__":
    main()
