"""Measures what a commit with every step costs: `bench_step.py [--times 20 100] [--spare] [--apart]`.

An FSDP2 model on two nodes of local mode, each of which holds the other's shard, in one run for each of
the `--times`: its step takes so many times as long as one memcpy of a rank's state, by more or less of
the same computation for one update. Steps with a commit and without take turns, some in a row, and every
other row of commits is copied beside the training (`overlap`). In some rows no step is committed, and for
each rank a process on the last core moves the same bytes instead, with nothing of ours
(`bare_traffic.py`): what the step loses by that it loses on this machine to whoever protects it. The
first step in a row pays for what the row before has left to do, and does not count. Neighbouring rows are
compared, and the median over all these pairs is told for each kind, with its quartiles. So is the CPU
time of a rank and its agent: what is more of it with a commit, by what a rank takes without. Other load
on the machine changes that by less.

Where training takes all cores that there are, as here with two ranks on two cores, it is not only the
copy that holds it up: digests, sockets and verification take their time from it, too. On a machine with
cores to spare they do not: with `--spare` the ranks keep to the first core, and the others are free. But
Gloo's threads work there, and a collective waits for them: with `--apart` each rank trains its shard by
itself, without a collective, as a device with a network of its own would not wait for the host's cores
either. How long commit() itself holds up a rank is told, too: that is the copy, and the wait for the one
before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDTH, LAYERS = 1024, 4
RANKS = 2
IN_A_ROW = 4
DEADLINE_S = 900
# What a row of steps does: no commit; commits copied in order; beside the next step; and the bare bytes.
NONE, IN_ORDER, BESIDE, BARE = "none", "in order", "beside", "bare"
KINDS = (IN_ORDER, BESIDE, BARE)
TURNS = (IN_ORDER, NONE, BESIDE, NONE, BARE, NONE)


# ----------------------------------------------------------------------------------- what is trained


def main_train(out: Path, times: float, rows: int, *, spare: bool, apart: bool) -> None:
    """The training script: writes what it has measured."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    import ckptless

    class Apart(nn.Module):
        """Of the weight only the rank's own part is used."""

        def __init__(self, mesh: Any) -> None:
            super().__init__()
            weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
            self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight: Any = self.weight
            part: torch.Tensor = weight.to_local()
            return (x @ part.T).repeat(1, RANKS)

    def build(run: Any) -> Any:
        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (run.world_size,))
        layers = (Apart(mesh) if apart else nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        model: Any = nn.Sequential(*layers)
        if not apart:
            fully_shard(model, mesh=mesh)
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))

    def train(run: Any) -> None:
        state = run.keep(lambda: build(run))
        nbytes = 3 * 4 * WIDTH * WIDTH * LAYERS // run.world_size
        traffic = bare_traffic(nbytes)
        batch = torch.randn(32, WIDTH)
        held_up_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        fenced_s: list[float] = []
        fence = run._versions.fence

        def timed_fence() -> None:
            start = time.perf_counter()
            fence()
            fenced_s.append(time.perf_counter() - start)

        run._versions.fence = timed_fence

        def step(repeats: int) -> None:
            for _ in range(repeats):
                state.model(batch).pow(2).mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()

        def timed(repeats: int, kind: str) -> float:
            start = time.perf_counter()
            step(repeats)
            stepped = time.perf_counter()
            if kind == BARE:
                os.write(traffic.stdin.fileno(), b"m")
            elif kind != NONE:
                run._copying._policy.wanted = "on" if kind == BESIDE else "off"
                run.commit()
            if kind != NONE:
                held_up_s[kind].append(time.perf_counter() - stepped)
            return time.perf_counter() - start

        # Copies beside the training come after some that are compared.
        for _ in range(4):
            step(1)
            run.commit()
        if spare:
            # The threads that copy and digest are there by now, and stay free to go where there is room.
            torch.set_num_threads(1)
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        copy_s = memcpy_s(nbytes)
        # The same on all ranks, as collectives are in it.
        few, many = (min(timed(n, NONE) for _ in range(3)) for n in (2, 6))
        wanted = torch.tensor(1 + (times * copy_s - few) / max(1e-4, (many - few) / 4))
        torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
        repeats = max(1, round(wanted.item()))
        found: list[tuple[str, list[float], float]] = []
        for row in range(-len(TURNS), rows):
            kind = TURNS[row % len(TURNS)]
            timed(repeats, kind)
            before = cpu_s()
            took = [timed(repeats, kind) for _ in range(IN_A_ROW - 1)]
            found.append((kind, took, cpu_s() - before))
        traffic.communicate(timeout=DEADLINE_S)
        if run.rank == 0:
            told = {"nbytes": nbytes, "memcpy_s": copy_s, "rows": found[len(TURNS) :]}
            told["waited_s"] = run.waited_s
            told["commit_s"] = {kind: statistics.median(held_up_s[kind]) for kind in KINDS}
            # Where nothing is copied beside, there is no wait worth the name.
            told["fence_s"] = statistics.median(sorted(fenced_s)[-len(held_up_s[BESIDE]) :])
            out.write_text(json.dumps(told))

    def bare_traffic(nbytes: int) -> Any:
        script = Path(__file__).with_name("bare_traffic.py")
        made = subprocess.Popen(
            [sys.executable, str(script), str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert made.stdout is not None
        assert made.stdout.readline() == b"ready\n"
        return made

    def cpu_s() -> float:
        """Of this rank, and of its agent, which is its parent."""
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        agent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return time.process_time() + agent_s

    def memcpy_s(nbytes: int) -> float:
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
        took: list[float] = []
        for _ in range(9):
            start = time.perf_counter()
            target.copy_(source)
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    ckptless.run(train, overlap="on")


# ------------------------------------------------------------------------------------------ measuring


def measure(times: float, rows: int, flags: list[str]) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as scratch:
        out = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--local", "--tee", "none"]
        command += ["--nodes", str(RANKS), "--replicas", "1"]
        command += ["--state-dir", f"{scratch}/state", __file__]
        command += ["--train", str(out), "--times", str(times), "--rows", str(rows)]
        command += flags
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    measured = [(kind, statistics.median(took), cpu) for kind, took, cpu in found["rows"]]
    without = statistics.median(took for kind, took, _ in measured if kind == NONE)
    return {
        "wanted_times": times,
        "ranks": RANKS,
        "shard_mb": found["nbytes"] / 1e6,
        "memcpy_ms": found["memcpy_s"] * 1e3,
        "step_ms": without * 1e3,
        "times_memcpy": without / found["memcpy_s"],
        "commits": {kind: _costs(measured, kind, found["commit_s"][kind]) for kind in KINDS},
        "fence_ms": found["fence_s"] * 1e3,
        "waited_s": found["waited_s"],
        "load": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }


def _costs(rows: list[tuple[str, float, float]], kind: str, commit_s: float) -> dict[str, Any]:
    """Of neighbours: with such commits by without."""
    pairs = [pair for pair in pairwise(rows) if kind in (pair[0][0], pair[1][0])]
    both = [(one, other) if one[0] == kind else (other, one) for one, other in pairs]
    ratios = [with_it[1] / without[1] for with_it, without in both]
    return {
        "commit_ms": commit_s * 1e3,
        "overhead": statistics.median(ratios) - 1,
        "quartiles": [q - 1 for q in statistics.quantiles(ratios, n=4)],
        "cpu_overhead": statistics.median(with_it[2] / without[2] for with_it, without in both) - 1,
        "pairs": len(ratios),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=float, nargs="+", default=[20, 100], help="step to memcpy")
    parser.add_argument("--rows", type=int, default=40, help="of four steps each, by turns")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--spare", action="store_true", help="keep the ranks to one core")
    parser.add_argument("--apart", action="store_true", help="without collectives")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        main_train(args.train, args.times[0], args.rows, spare=args.spare, apart=args.apart)
        return
    flags = ["--spare"] * args.spare + ["--apart"] * args.apart
    found = [measure(times, args.rows, flags) for times in args.times]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for one in found:
        sys.stdout.write(
            f"{one['ranks']} rank(s), shard {one['shard_mb']:.0f} MB, step {one['step_ms']:.0f} ms = "
            f"{one['times_memcpy']:.0f} x memcpy; load {one['load']:.1f}, {one['cpus']} cores; "
            f"an update waits {one['fence_ms']:.1f} ms for copies beside it\n"
        )
        for kind, costs in one["commits"].items():
            low, _, high = costs["quartiles"]
            what = "the bare bytes" if kind == BARE else f"commits copied {kind}"
            sys.stdout.write(
                f"  {what}: step {100 * costs['overhead']:+.1f} % "
                f"({100 * low:+.1f} to {100 * high:+.1f}), {costs['pairs']} pairs; in commit() "
                f"{costs['commit_ms']:.1f} ms = {costs['commit_ms'] / one['memcpy_ms']:.2f} x memcpy; "
                f"CPU time {100 * costs['cpu_overhead']:+.1f} %\n"
            )


if __name__ == "__main__":
    main()
