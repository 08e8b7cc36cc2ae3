"""Batches of a node's ranks, from its ring and from other loaders: `python -m tests.bench.data`.

Eight ranks of one node read rows of 1 MiB of a local file, in order, 8 ahead, one worker for each loader
(scripts/batches.py): first all of them the same ones, as in tensor parallelism, then each its own. Systems
take turns. Then jobs of three nodes lose one of them, twice, and a spare takes its place
(scripts/train_batches.py): what the newcomer's first batch takes, and all of the recovery.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import Run, finish, grouped, load, quantile, ratios, table
from .scripts.train_batches import KILLS, NODES, SAMPLES
from .systems import SCRIPTS, python_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = 8
PYTHONS = {
    "ckptless": lambda: sys.executable,
    "DataLoader": lambda: sys.executable,
    "torchdata": lambda: python_of("torchdata"),
    "streaming": lambda: python_of("streaming"),
}
NAMES = {
    "ckptless": "ckptless",
    "DataLoader": "torch DataLoader",
    "torchdata": "torchdata 0.11 StatefulDataLoader",
    "streaming": "MosaicML streaming 0.13",
    "list": "a list in memory",
    "quick": "the ring, a transform that takes nothing",
    "slow": "the ring, a transform of 0.4 s a batch",
}
DEADLINE_S = 600.0
MIB = 1 << 20


def script(python: str, name: str, *words: object) -> str:
    """Return what a script prints. Raises CalledProcessError, TimeoutExpired."""
    command = [python, str(SCRIPTS / name), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S).stdout


def loaders(names: Sequence[str], steps: int, turns: int) -> list[dict[str, Any]]:
    """All systems, in turn."""
    found = []
    with tempfile.TemporaryDirectory(prefix="ckptless-bench-", dir="/dev/shm") as folder:
        script(python_of("streaming"), "batches.py", "write", folder)
        for shared, turn, name in itertools.product((1, 0), range(turns), names):
            told = json.loads(script(PYTHONS[name](), "batches.py", name, folder, RANKS, steps, shared))
            run = {"kind": "loader", "system": name, "shared": bool(shared), "turn": turn, "load": load()}
            found.append({**run, **told})
            sys.stderr.write(f"{json.dumps(found[-1])}\n")
    return found


def recovered(kind: str, turn: int) -> list[dict[str, Any]]:
    """Return, for each recovery, seconds until the newcomer's first batch, and in all."""
    with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as folder:
        out = Path(folder)
        rows = "".join(json.dumps({"id": n}) + "\n" for n in range(SAMPLES))
        (out / "data.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
        command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--local", "--nodes", str(NODES)]
        command += ["--nproc-per-node", "1", "--spares", str(KILLS), "--max-stall", "60", "--tee", "none"]
        command += ["--state-dir", str(out / "state"), str(SCRIPTS / "train_batches.py"), kind, str(out)]
        with (out / "console.txt").open("wb") as console:
            done = subprocess.run(command, stdout=console, stderr=console, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}:\n{(out / 'console.txt').read_text()}")
        steps: dict[int, list[list[Any]]] = {}
        for rank in range(NODES):
            lines = (out / f"steps-{rank}.txt").read_text().splitlines()
            steps[rank] = [json.loads(line) for line in lines]
        found = []
        for path in sorted(out.glob("killed-*")):
            generation, killed = json.loads(path.read_text())
            first = {rank: next(row for row in steps[rank] if row[0] > generation) for rank in steps}
            whole_s = max(row[2] for row in first.values()) - killed
            run = {"kind": "spare", "batches": kind, "turn": turn, "load": load()}
            found.append({**run, "first_s": first[1][1], "recovery_s": whole_s})
    return found


# ------------------------------------------------------------------------------------- the tables


def loader_rows(runs: Sequence[Run]) -> Iterator[tuple[object, ...]]:
    """A row for each system and what is wanted."""
    ones_of = grouped([run for run in runs if run["kind"] == "loader"], "shared", "system")
    for (shared, system), ones in ones_of.items():
        base = {one["turn"]: one for one in ones_of[shared, "DataLoader"]}
        pairs = [(one["batches_per_s"], base[one["turn"]]["batches_per_s"]) for one in ones]
        heirs = [seconds * 1e3 for one in ones for seconds in one["heirs_s"]]
        first = [one["first_s"] for one in ones]
        yield (
            NAMES[system],
            "the same" if shared else "its own",
            len(ones),
            f"{statistics.median(one['batches_nbytes'] for one in ones) / MIB:.0f}",
            f"{statistics.median(one['own_nbytes'] for one in ones) / MIB:.0f}",
            f"{statistics.median(rate for rate, _ in pairs):.0f}",
            ratios([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
            if system != "DataLoader"
            else "",
            f"{statistics.median(one['cpu_s'] for one in ones) * 1e3:.1f}",
            f"{statistics.median(first):.2f}, {quantile(first, 0.99):.2f}",
            f"{statistics.median(heirs):.0f}, {quantile(heirs, 0.99):.0f} ({len(heirs)})" if heirs else "",
            f"{statistics.median(one['load'] for one in ones):.0f}",
        )


def told(runs: Sequence[Run]) -> str:
    """Two tables."""
    columns = (
        "",
        "a rank wants",
        "n",
        "batches, MiB a node",
        "other memory, MiB",
        "batches/s and rank",
        "of DataLoader's",
        "CPU ms a batch",
        "first batch, median, p99 s",
        "after a death, median, p99 ms",
        "load",
    )
    parts = [table(columns, loader_rows(runs))]
    rows = [
        (
            NAMES[kind],
            len(ones),
            f"{statistics.median(one['first_s'] for one in ones) * 1e3:.0f}",
            f"{quantile([one['first_s'] for one in ones], 0.99) * 1e3:.0f}",
            f"{statistics.median(one['recovery_s'] for one in ones):.2f}",
            f"{quantile([one['recovery_s'] for one in ones], 0.99):.2f}",
            f"{statistics.median(one['load'] for one in ones):.0f}",
        )
        for (kind,), ones in grouped([run for run in runs if run["kind"] == "spare"], "batches").items()
    ]
    heads = ("batches", "n", "first batch, median ms", "p99 ms", "recovery, median s", "p99 s", "load")
    return "\n\n".join([*parts, table(heads, rows)])


def draw(axes: Axes, runs: Sequence[Run]) -> None:
    """Memory over batches a second, a dot for each run in which all ranks want the same."""
    loaders = [run for run in runs if run["kind"] == "loader" and run["shared"]]
    for (system,), ones in grouped(loaders, "system").items():
        rates = [one["batches_per_s"] for one in ones]
        memory = [(one["batches_nbytes"] + one["own_nbytes"]) / MIB for one in ones]
        axes.plot(rates, memory, "o", label=NAMES[system])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batches a second and rank (8 ranks that want the same)")
    axes.set_ylabel("memory of the node, MiB: batches and processes")
    axes.legend(fontsize="small")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=PYTHONS, default=list(PYTHONS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=["list", "quick", "slow"], default=["list", "slow"])
    parser.add_argument("--jobs", type=int, default=2, help="of each kind")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    runs = loaders(args.systems, args.steps, args.turns)
    for turn, kind in itertools.product(range(args.jobs), args.kinds):
        runs += recovered(kind, turn)
    finish(runs, args.json, told)


if __name__ == "__main__":
    main()
