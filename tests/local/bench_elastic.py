"""Measures how long training stands still when its number of ranks changes: `bench_elastic.py [--turns N]`.

In each turn a job of four ranks (recut_script.py, FSDP2) is made to go on with two, and then with four again,
by `ckptctl resize`; and then one of the same model under torchrun, `--nnodes 2:4`, that saves each step with
torch.distributed.checkpoint to /dev/shm, so that it loses none, and loads it into the other number of ranks.
There each node is an agent of its own: two are ended, and started again. Its intervals are as short as they
work here, and it looks at its processes every 50 ms. Where it does not train again in time, that is told.

A stall is the time from the last step of the old size to the first new one, as rank 0 notes them, less the
median time from one step to the next. For torchrun, what it takes until it notices is in it, as for us what
ckptctl takes from the moment that the daemons have heard of it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from .localrun import HERE, Job
from .resized import ENDLESS, elastic, end, resized, steps_seen, trains

RANKS, FEWER = 4, 2
STEPS_BETWEEN = 10
DEADLINE_S = 90.0
SLEEP_S = "0.02"
# With less than three seconds of silence it takes nodes for lost that only wait for one of two busy cores.
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
BARS = {"stall_s": 1.0, "ratio": 10.0}

Step: TypeAlias = tuple[int, int, float]
"""Its number, the number of ranks, and when it was done."""


def stalls(steps: list[Step]) -> dict[str, float]:
    """Return how long each change of the number of ranks took."""
    pairs = list(itertools.pairwise(steps))
    usual = statistics.median(b[2] - a[2] for a, b in pairs if a[1] == b[1])
    found = {"shrink" if b[1] < a[1] else "grow": b[2] - a[2] - usual for a, b in pairs if a[1] != b[1]}
    assert sorted(found) == ["grow", "shrink"], found
    assert [step for step, _, _ in steps] == list(range(1, len(steps) + 1)), "a step was lost, or done again"
    return found


# ------------------------------------------------------------------------------------------- ours


def ours(home: Path) -> dict[str, float]:
    with elastic(home, "fsdp", ["--nodes", RANKS, "--min-nodes", FEWER], {"RECUT_SLEEP_S": SLEEP_S}) as job:
        trains(job, RANKS, steps=STEPS_BETWEEN)
        for nodes in (FEWER, RANKS):
            resized(job, nodes if nodes == FEWER else "max", nodes)
            trains(job, nodes, steps=STEPS_BETWEEN)
        end(job)
        return stalls(noted(job))


def noted(job: Job) -> list[Step]:
    """The steps that rank 0 has made, with the number of ranks of their generations."""
    worlds = {one.generation: len(one.places) for one in job.ledger().generations}
    # A step that was cut off, and done again, counts when it was done at last.
    seen = [one for one in steps_seen(job.home / "out") if one.rank == 0]
    last = {one.step: (one.step, worlds[one.generation], one.at_s) for one in seen}
    return [last[step] for step in sorted(last)]


# -------------------------------------------------------------------------------------- torchrun


@contextlib.contextmanager
def torchrun(home: Path, checkpoints: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Gives what starts an agent; all of them, and whatever they have started, end with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={FEWER}:{RANKS}"]
    command += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-id=bench", f"--rdzv-conf={RENDEZVOUS}", "--max-restarts=100"]
    command += ["--monitor-interval=0.05", str(HERE / "dcp_script.py"), str(ENDLESS), str(home)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RECUT_SLEEP_S": SLEEP_S}
    # With a shared store newcomers wait for an address that rank 0 tells in the first round (torch 2.13).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (home / f"agent-{len(agents)}.txt").open("wb") as log:
            agents.append(
                subprocess.Popen(
                    [*command, str(checkpoints)], stdout=log, stderr=log, env=env, start_new_session=True
                )
            )
        return agents[-1]

    try:
        yield start
    finally:
        for agent in agents:
            end_with_children(agent)


def end_with_children(agent: subprocess.Popen[bytes]) -> None:
    """As when a node is lost. torchrun's workers lead sessions of their own, so they are looked for."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    agent.wait()


class HangsError(Exception):
    """Nothing was trained for so long; the message has the logs."""


def theirs(home: Path) -> dict[str, float]:
    shared = Path(tempfile.mkdtemp(prefix="ckptless-bench-", dir="/dev/shm"))
    home.mkdir()
    try:
        with torchrun(home, shared) as start:
            agents = [start()]
            # Whoever comes first has the rendezvous, and stays.
            wait(home, lambda: listens(agents[0]))
            agents += [start() for _ in range(RANKS - 1)]
            wait(home, lambda: trained(home, RANKS))
            for agent in agents[FEWER:]:
                end_with_children(agent)
            wait(home, lambda: trained(home, FEWER))
            agents += [start() for _ in range(RANKS - FEWER)]
            wait(home, lambda: trained(home, RANKS))
        return stalls(rows(home))
    finally:
        shutil.rmtree(shared)


def listens(agent: subprocess.Popen[bytes]) -> bool:
    """Whether it has a listening socket."""
    listening = {
        line.split()[9]
        for path in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(path).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    with contextlib.suppress(OSError):
        targets = [str(fd.readlink()) for fd in Path(f"/proc/{agent.pid}/fd").iterdir()]
        return any(target[8:-1] in listening for target in targets if target.startswith("socket:["))
    return False


def rows(home: Path) -> list[Step]:
    found = [
        json.loads(line)
        for path in home.glob("steps-0.txt")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    # A step that was saved, and not noted, or the other way round, was done by both sizes: the last counts.
    last = {step: (step, world, at) for step, world, at in found}
    return [last[step] for step in sorted(last)]


def trained(home: Path, world: int) -> bool:
    """Whether the newest steps are of so many ranks."""
    found = rows(home)[-STEPS_BETWEEN:]
    return len(found) == STEPS_BETWEEN and all(row[1] == world for row in found)


def wait(home: Path, what: Callable[[], bool]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not what():
        if time.monotonic() > limit:
            logs = [f"{path}\n{path.read_text()[-3000:]}" for path in sorted(home.glob("agent-*.txt"))]
            raise HangsError("\n".join([f"not within {DEADLINE_S:.0f} s", *logs]))
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------- main


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="runs of each")
    parser.add_argument("--logs", type=int, default=0, help="show so much of the logs of a run that hangs")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {"ckptless": ours, "torchrun and DCP": theirs}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    loads: list[float] = []
    for turn in range(args.turns):
        for name, measure in kinds.items():
            with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as scratch:
                try:
                    one = measure(Path(scratch) / "run")
                    text = f"{one['shrink']:.2f}, {one['grow']:.2f} s"
                except HangsError as error:
                    one, text = {}, str(error)[-args.logs :] if args.logs else "hangs"
            found[name].append(one)
            loads.append(os.getloadavg()[0])
            sys.stderr.write(f"turn {turn + 1}, {name}: {text}, load {loads[-1]:.1f}\n")
    told = report(found, loads)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1))


def report(found: dict[str, list[dict[str, float]]], loads: list[float]) -> dict[str, Any]:
    """Print the medians, and whether they are what they should be."""
    told: dict[str, Any] = {"runs": found, "loads": loads, "cpus": os.cpu_count(), "changes": {}}
    print(f"{RANKS} ranks, {len(loads) // 2} runs of each, load {min(loads):.1f} to {max(loads):.1f}")
    for change in ("shrink", "grow"):
        medians: list[float] = []
        for name, runs in found.items():
            took = [run[change] for run in runs if run]
            medians.append(statistics.median(took) if took else float("inf"))
            low, high = min(took, default=float("nan")), max(took, default=float("nan"))
            hung = f", {len(runs) - len(took)} did not go on" if len(took) < len(runs) else ""
            print(f"{change}, {name}: median {medians[-1]:.3f} s, {low:.3f} to {high:.3f} s{hung}")
        ratio = medians[1] / medians[0]
        met = medians[0] <= BARS["stall_s"] and ratio >= BARS["ratio"]
        print(f"{change}: {ratio:.1f} times as long; the bar is {'met' if met else 'not met'}")
        told["changes"][change] = {"ckptless_s": medians[0], "torchrun_s": medians[1], "ratio": ratio}
    return told


if __name__ == "__main__":
    main()
