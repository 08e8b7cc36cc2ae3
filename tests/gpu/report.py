"""What ckptless costs on a device: `python -m tests.gpu.report [--gb 1 4 8] [--ranks 4 8] [--json FILE]`.

Prints tables for docs/design/measurements.md; what there is so far stands in the file, too. The device is a
GPU where there is one, else the simulated one, of which the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.gpu import kind
from tests.gpu.measure_commits import measure
from tests.gpu.measure_jobs import joining, recoveries

ON_GPU = kind.name() == "cuda"
WAYS = ("in order", "beside", "of what is frozen")
COMMITS = ["shard", "bare copy", "step", *(f"commits {way}" for way in WAYS)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one, in Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def of_commits(one: Mapping[str, float]) -> list[str]:
    """Return a row: what commits of one size cost."""
    return [
        f"{one['nbytes'] / 1e9:g} GB",
        f"{one['bare_copy_gb_per_s']:.1f} GB/s",
        f"{one['step_s']:.3f} s",
        *(f"{one[way]:+.1%}" for way in ("in_order", "beside", "frozen")),
    ]


def of_joining(one: Mapping[str, float]) -> list[str]:
    """Return a row: how long so many ranks take to come together."""
    return [f"{one['ranks']}", f"{one['rootless_s']:.3f} s", f"{one['torchrun_s']:.3f} s"]


def main(words: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="*", default=[1.0, 4.0, 8.0] if ON_GPU else [0.001])
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8] if ON_GPU else [2])
    parser.add_argument("--rounds", type=int, default=3 if ON_GPU else 1)
    parser.add_argument("--kills", type=int, default=12 if ON_GPU else 2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    told: dict[str, object] = {
        "device": torch.cuda.get_device_name() if ON_GPU else kind.name(),
        "torch": torch.__version__,
    }

    def note(name: str, found: object) -> None:
        told[name] = found
        if options.json is not None:
            options.json.write_text(json.dumps(told, indent=2) + "\n")

    if options.kills:
        recovered = recoveries(options.kills)
        note("recoveries", recovered)
        table(list(recovered), [[f"{value:.3f}" for value in recovered.values()]])
    joined: list[dict[str, float]] = []
    for ranks in options.ranks:
        joined.append(joining(ranks, options.rounds))
        note("joining", joined)
        table(["ranks", "rootless", "torchrun"], [of_joining(one) for one in joined[-1:]])
    sizes: list[dict[str, float]] = []
    for gb in options.gb:
        sizes.append(measure(int(gb * 1e9), options.step_s))
        note("sizes", sizes)
        table(COMMITS, [of_commits(one) for one in sizes[-1:]])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
