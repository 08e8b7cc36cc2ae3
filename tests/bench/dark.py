"""A node loses its power in a job on Slurm: `python -m tests.bench.dark` (root), ours beside a requeue.

Slurm is real, its nodes are namespaces of this machine. From one moment on nothing leaves the node, so nobody
is told anything. Ours has a spare node in its allocation. The requeue is `sbatch --requeue` of the same
training, which loads the newest step that it has saved: as it is, and with the two times as short as a site
could bear that it waits for: until Slurm takes a silent node for down, and until it starts a job again.
A stall is from the failure to the first step that all ranks have made after it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.slurm.cluster.api import Cluster
from tests.slurm.training import BIN, USER, make_site

from .crash import BETWEEN, completions, lines, reaches
from .systems import SCRIPTS, Case, Running

CASE = Case(4, "ddp", "toy")
NODES, POLL_S, START_DEADLINE_S, DEADLINE_S, UNDER_WAY_S = 5, 0.1, 120.0, 900.0, 0.5
OURS = f"{BIN / 'ckptless-run'} {SCRIPTS / 'train_ckptless.py'}"
RANK = "MASTER_PORT=29511 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS"
REQUEUED = f"""export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
srun --kill-on-bad-exit=1 bash -c '{RANK} exec {BIN / "python"} {SCRIPTS / "train_dcp.py"}'"""


@dataclass(frozen=True)
class Way:
    """A job, and the Slurm that it runs in."""

    name: str
    options: tuple[str, ...]
    line: str
    conf: dict[str, str]


_REQUEUE = (f"--nodes={CASE.ranks}", "--requeue", "--open-mode=append")
WAYS = {
    way.name: way
    for way in (
        Way("ckptless", (f"--nodes={NODES}", "--ckptless=spares=1"), OURS, {}),
        Way("requeue", _REQUEUE, REQUEUED, {}),
        Way("requeue-tuned", _REQUEUE, REQUEUED, {"SlurmdTimeout": "10", "AuthInfo": "cred_expire=10"}),
    )
}


def wait(what: Callable[[], bool], deadline_s: float, logs: Path) -> None:
    """Raises TimeoutError, with the end of what the job has printed."""
    limit = time.monotonic() + deadline_s
    while not what():
        if time.monotonic() > limit:
            printed = [path.read_text(errors="replace")[-2000:] for path in logs.glob("slurm-*.out")]
            raise TimeoutError("\n".join(printed) or "it has printed nothing")
        time.sleep(POLL_S)


def submit(site: Cluster, way: Way) -> tuple[Running, str]:
    """Submit a job; returns where it notes its steps, and its number."""
    name = f"bench-{secrets.token_hex(3)}"
    inside, home = f"/shared/{name}", site.shared / name
    for folder in ("", "/out", "/saves"):
        site.run("ctl", "mkdir", f"{inside}{folder}", user=USER)
    (home / "job.sh").write_text(f"#!/bin/bash\n{way.line}\n")
    env = {
        "OMP_NUM_THREADS": "1",
        "BENCH_OUT": f"{inside}/out",
        "BENCH_SAVE": f"{inside}/saves",
        "BENCH_LAYOUT": CASE.layout,
        "BENCH_SIZE": CASE.size,
        "BENCH_EVERY": str(CASE.every),
    }
    done = site.run("ctl", "sbatch", "--parsable", *way.options, "job.sh", user=USER, env=env, cwd=inside)
    return Running(home / "out", CASE, home / "saves", ""), done.stdout.strip()


def measure(site: Cluster, way: Way, turn: int) -> float:
    """Return the seconds that training stood still."""
    run, job = submit(site, way)
    wait(lambda: reaches(run, BETWEEN), START_DEADLINE_S, run.out.parent)
    # The first node has the batch script.
    victim = f"node{turn % CASE.ranks + 1:02d}"
    site.power_off(victim)
    at = time.monotonic()

    def after() -> list[float]:
        # What was on its way is done by then; the next step needs every rank.
        return [when for when in completions(lines(run)) if when > at + UNDER_WAY_S]

    wait(lambda: bool(after()), DEADLINE_S, run.out.parent)
    site.run("ctl", "scancel", job, user=USER, check=False)
    return after()[0] - at


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ckptless", "requeue-tuned"])
    parser.add_argument("--times", type=int, default=2, help="of a requeue")
    parser.add_argument("--own-times", type=int, default=8, help="of ckptless")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    told = []
    for way in (WAYS[name] for name in args.ways):
        with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as scratch:
            place = Path(scratch)
            with make_site(place / "cluster", place / "build", NODES, way.conf) as site:
                stalls = []
                for turn in range(args.own_times if way.name == "ckptless" else args.times):
                    site.restore()
                    stalls.append(measure(site, way, turn))
                    sys.stderr.write(f"{way.name}: {stalls[-1]:.2f} s\n")
        load = os.getloadavg()[0]
        told.append({"system": way.name, "case": asdict(CASE), "load": load, "stalls_s": stalls})
    if args.json:
        args.json.write_text(json.dumps({"runs": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
