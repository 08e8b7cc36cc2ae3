"""How long a node's power failure costs: `bench.py --times 8`; Slurm's timeouts are those of production."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import click

from .training import Training, make_site


def first_step_s(job: Training, generation: int) -> float:
    """Return when the last rank had made its first step of a generation (Unix time)."""
    firsts: list[float] = []
    for path in (job.home / "out").glob("loss-*.txt"):
        lines = [line.split() for line in path.read_text().splitlines()]
        firsts.append(min(float(line[3]) for line in lines if int(line[4]) >= generation))
    return max(firsts)


@click.command()
@click.option("--times", default=8, show_default=True)
def main(times: int) -> None:
    """One job of 4 nodes and a spare per failure; a node in turn loses its power."""
    took: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ckptless-bench-") as scratch:
        place = Path(scratch)
        with make_site(place / "cluster", place / "build", 5) as site:
            for number in range(times):
                site.restore()
                job = Training(site).submit()
                job.trains()
                victim = f"node{number % 4 + 1:02d}"
                start = time.time()
                site.power_off(victim)
                job.trains(2)
                took.append(first_step_s(job, 2) - start)
                load = os.getloadavg()[0]
                click.echo(f"{victim}: {took[-1]:.2f} s (load average {load:.1f})")
                job.hurry()
                job.wait(lambda: job.outcome() is not None, "its end")  # noqa: B023
                job.same_bits()
    click.echo(f"{times} power failures: median {statistics.median(took):.2f} s, most {max(took):.2f} s")


if __name__ == "__main__":
    main()
