"""How soon a dark node is found, over how many are given up that live: `python -m tests.bench.alarms`.

For each `timeouts.dark`, the same 10^6 node hours (`--hours`) of a noisy network befall a simulated job of 16
nodes, whose daemons are the shipped code (`tests/sim/noise.py`). How often what happens, and for how long, is
assumed (`NOISE`); what comes of it is simulated, each incident in a job of its own. What is shorter than a
quarter of `dark` comes to nothing, as nobody is suspected before half of it: of these only every
`LOOKED_AT`-th is simulated, and must come to nothing.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from ckptless.daemon.settings.config import Timers
from tests.sim.noise import LOSSY_S, Found, Incident, Kind, Noisy

from .figures import Run, finish, load, quantile, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK_S = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
DEFAULT_DARK_S = 1.5
POWER_CUTS = 100
LOOKED_AT = 20
# As many beats as `Timeouts.derive` has it.
BEATS = 6


@dataclass(frozen=True)
class Noise:
    """How often in 10^6 node hours, and of what size: log-normal seconds, or a part of the packets, even."""

    often: int
    median_s: float = 0.0
    sigma: float = 1.0
    parts: tuple[float, float] | None = None

    def size(self, random: Random) -> float:
        """Draw one."""
        if self.parts is not None:
            return random.uniform(*self.parts)
        return self.median_s * math.exp(random.gauss(0.0, self.sigma))


NOISE: dict[Kind, Noise] = {
    "line": Noise(500, 0.5),
    "leaf": Noise(25, 1.0),
    "still": Noise(250, 0.5),
    "loss": Noise(125, parts=(0.05, 0.5)),
    "starved": Noise(100, 2.0),
}
TOLD: dict[str, str] = {
    "line": "a line is dead",
    "leaf": "the switch of four is",
    "still": "a machine stands still",
    "loss": f"packets are lost for {LOSSY_S:.0f} s",
    "starved": "no CPU",
}


def incidents(hours: float) -> Iterator[Incident]:
    """Draw the same ones each time."""
    for number in range(POWER_CUTS):
        yield Incident("power", 0.0, number)
    for kind, noise in NOISE.items():
        random = Random(kind)
        for _ in range(round(noise.often * hours / 1e6)):
            yield Incident(kind, noise.size(random), random.getrandbits(32))


def matters(what: Incident, dark_s: float) -> bool:
    """Whether anybody may be suspected for it."""
    return what.kind in ("power", "loss") or what.size >= dark_s / 4


_jobs: dict[float, Noisy] = {}


def _suffered(task: tuple[float, Incident]) -> tuple[Incident, Found]:
    # In a process that is forked for it: the job is as it was made, whatever befell it in others.
    dark_s, what = task
    return what, _jobs[dark_s].suffer(what)


def measure(dark_s: float, hours: float) -> Run:
    """All of one `dark`."""
    begun = time.monotonic()
    logging.disable()
    _jobs[dark_s] = Noisy(Timers(beat_s=round(dark_s / BEATS, 3), dark_s=dark_s))
    every = list(incidents(hours))
    tasks = [
        (dark_s, what)
        for number, what in enumerate(every)
        if matters(what, dark_s) or number % LOOKED_AT == 0
    ]
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        found = list(pool.imap_unordered(_suffered, tasks, chunksize=1))
    for what, came in found:
        assert matters(what, dark_s) or not came.lost, (what, came)
        assert what.kind != "power" or came.trains_s is not None, (what, came)
    return {
        "dark_s": dark_s,
        "hours": hours,
        # Of those for which nobody was given up, the number is enough.
        "suffered": [{**asdict(what), **asdict(came)} for what, came in found if came.lost],
        "simulated": len(found),
        "of": {kind: sum(what.kind == kind for what in every) for kind in ("power", *NOISE)},
        "wall_s": time.monotonic() - begun,
        "load": load(),
    }


def given_up(run: Run, kind: str) -> float:
    """Nodes that live, in 10^6 node hours."""
    lost = sum(int(one["lost"]) for one in run["suffered"] if one["kind"] == kind)
    return lost * 1e6 / float(run["hours"])


def _power(run: Run, what: str) -> list[float]:
    return [one[what] for one in run["suffered"] if one["kind"] == "power"]


def told(runs: Sequence[Run]) -> str:
    """A row for each `dark`."""
    columns = ("`dark` s", "found: median s", "trains again: median s", "p99 s", *TOLD.values(), "all")
    rows = []
    for run in runs:
        trains = _power(run, "trains_s")
        lost = [given_up(run, kind) for kind in TOLD]
        rows.append(
            (
                f"{run['dark_s']:g}",
                f"{statistics.median(_power(run, 'found_s')):.2f}",
                f"{statistics.median(trains):.2f}",
                f"{quantile(trains, 0.99):.2f}",
                *(f"{one:.0f}" for one in (*lost, sum(lost))),
            )
        )
    return table(columns, rows)


def draw(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw how many nodes are given up that live, over how long it takes to replace one that is dark."""
    if not runs:
        return
    trains = [statistics.median(_power(run, "trains_s")) for run in runs]
    for kind, name in TOLD.items():
        axes.plot(trains, [given_up(run, kind) or math.nan for run in runs], ".-", label=name, alpha=0.7)
    every = [sum(given_up(run, kind) for kind in TOLD) for run in runs]
    axes.plot(trains, every, "o-", color="black", label="all")
    for run, x, y in zip(runs, trains, every, strict=True):
        bold = "bold" if run["dark_s"] == DEFAULT_DARK_S else "normal"
        axes.annotate(
            f"{run['dark_s']:g}", (x, y), (3, 5), textcoords="offset points", fontweight=bold, fontsize=8
        )
    axes.set_yscale("log")
    axes.set_xlabel("seconds from a node's power loss until all train again (numbers: `dark`)")
    axes.set_ylabel("nodes given up that live,\nin 10$^6$ node hours")
    axes.legend(fontsize=7)


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1e6, help="node hours (default 10^6)")
    parser.add_argument("--dark", type=float, nargs="+", default=DARK_S, help="seconds")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    runs = []
    for dark_s in words.dark:
        runs.append(measure(dark_s, words.hours))
        print(f"dark {dark_s:g} s: {runs[-1]['wall_s']:.0f} s", flush=True)
    finish(runs, words.json, told)


if __name__ == "__main__":
    main()
