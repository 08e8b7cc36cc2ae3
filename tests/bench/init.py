"""How ranks find each other through the store: `python -m tests.bench.init`; ours beside torch's TCPStore.

Simulated ranks, 8 to a node (store.py), make their groups, cold; then one node is lost, its ranks are on a
spare, and all come together again. Under torch they do so in the same TCPStore, as new clients. The patterns:

    default   Gloo as torch uses it: the keys of all, one by one
    v2        the keys of all, asked for in batches of 128
    lazy      Gloo as our agents give it to unchanged scripts: its neighbours' in a ring
    ckptless  ckptless.run's own groups: as v2, and whether the rank before was started alike

Real ranks (init_ranks.py), as many as a machine of two cores bears, make a group of Gloo and sum up once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import Run, cpu_s, finish, grouped, load, quantile, ratios, table
from .init_ranks import names_from_files
from .store import PER_NODE, Child, Clients, Stores
from .store_requests import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATTERNS = ("default", "v2", "lazy", "ckptless")
VALUE_NBYTES = 170
# It has neighbours in the ring of ranks, where there are more than two nodes.
LOST = 2
RANKS_DEADLINE_S = 900.0


def replaced(ranks: int, pattern: str) -> dict[str, Any]:
    """Come together, lose a node of so many ranks, and form the next generation.

    Of the busiest survivor: what one of its ranks asks it, what it asks of the home of the keys; of the home,
    what it is asked, and how many connections it has.
    """
    nodes = ranks // PER_NODE
    stores = Stores(nodes, PER_NODE, spares=1)

    def form(generation: int) -> float:
        stores.follow()
        clients = Clients(stores.ports, VALUE_NBYTES)
        try:
            where = f"ckptless/{generation}/0//0" if pattern == "ckptless" else f"{PREFIX}0"
            return clients.exchange(pattern, where)
        finally:
            clients.close()

    try:
        _, began = stores.counts()
        cold_s = form(1)
        before, between = stores.counts()
        stores.replace(min(LOST, nodes - 1), nodes)
        again_s = form(2)
        after, ended = stores.counts()
    finally:
        stores.close()
    survivors = [node for node in stores.with_ranks if node != nodes]
    asked_by_ranks = [after[node]["local"] - before[node]["local"] for node in survivors]
    return {
        "cold_s": cold_s,
        "again_s": again_s,
        "cold_cpu_s": between - began,
        "again_cpu_s": ended - between,
        "of_a_rank": -(-max(asked_by_ranks) // PER_NODE),
        "asks": max(after[node]["asks"] for node in survivors),
        "asked": max(count["asked"] for count in after.values()),
        "connected": max(count["connected"] for count in after.values()),
    }


def tcp_store(ranks: int, pattern: str) -> dict[str, Any]:
    """The same of torch's store, which stays."""
    store = Child("torchs")
    port = int(store.hear())
    found = {}
    try:
        for number, name in enumerate(("cold", "again")):
            before = cpu_s(store.process.pid)
            clients = Clients([port] * ranks, VALUE_NBYTES)
            try:
                found[f"{name}_s"] = clients.exchange(pattern, f"{PREFIX}{number}")
            finally:
                clients.close()
            found[f"{name}_cpu_s"] = cpu_s(store.process.pid) - before
    finally:
        store.close()
    return found


SYSTEMS = {"TCPStore": tcp_store, "ckptless": replaced}


def exchanges(sizes: Iterable[int], turns: int, default_up_to: dict[str, int]) -> list[dict[str, Any]]:
    """All sizes and patterns, the systems in turn; of the one by one up to so many ranks."""
    found = []
    for ranks, pattern, turn in itertools.product(sizes, PATTERNS, range(turns)):
        for system, measure in SYSTEMS.items():
            if pattern == "ckptless" and system == "TCPStore":
                continue  # it asks as v2 does, and nobody else asks like that
            if pattern == "default" and ranks > default_up_to[system]:
                continue
            told = measure(ranks, pattern)
            run = {"kind": "store", "system": system, "ranks": ranks, "pattern": pattern, "turn": turn}
            found.append({**run, **told, "load": load()})
            sys.stderr.write(f"{json.dumps(found[-1])}\n")
    return found


def real(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Real ranks, cold: in a process that may have a mount namespace of its own."""
    command = [sys.executable, "-m", "tests.bench.init_ranks", "--ranks", str(ranks), "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=RANKS_DEADLINE_S)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------- the tables

ASKED = {
    "default": "one by one",
    "v2": "128 at a time",
    "lazy": "lazy",
    "ckptless": "`ckptless.run`'s groups",
}
AS_TORCH, AS_OURS = ("TCPStore", "default"), ("ckptless", "lazy")


def store_rows(runs: Sequence[Run]) -> Iterator[tuple[object, ...]]:
    """A row for each size, pattern and system."""
    ones_of = grouped([run for run in runs if run["kind"] == "store"], "ranks", "pattern", "system")
    for (ranks, pattern, system), ones in ones_of.items():
        theirs = ones_of.get((ranks, pattern, "TCPStore"), [])
        cells: list[str] = []
        for when in ("cold", "again"):
            took = [one[f"{when}_s"] * 1e3 for one in ones]
            of = [one[f"{when}_s"] * 1e3 for one in theirs]
            cells += [f"{statistics.median(took):.0f}", f"{quantile(took, 0.99):.0f}"]
            cells.append(ratios(took, of) if system != "TCPStore" and theirs else "")
            cells.append(f"{statistics.median(one[f'{when}_cpu_s'] for one in ones):.2f}")
        asked = max(one["asked"] for one in ones) if system == "ckptless" else ""
        at_load = f"{statistics.median(one['load'] for one in ones):.0f}"
        yield (ranks, ASKED[pattern], system, len(ones), *cells, asked, at_load)


def told(runs: Sequence[Run]) -> str:
    """Two tables."""
    columns = (
        *("ranks", "asked for", "store", "n"),
        *("cold, median ms", "p99 ms", "of TCPStore's", "CPU s"),
        *("after a fault, median ms", "p99 ms", "of TCPStore's", "CPU s"),
        *("the home is asked", "load"),
    )
    parts = [table(columns, store_rows(runs))]
    ones_of = grouped([run for run in runs if run["kind"] == "ranks"], "ranks", "way")
    rows = [
        (
            ranks,
            way,
            len(ones),
            f"{statistics.median(one['s'] for one in ones) * 1e3:.0f}",
            f"{quantile([one['s'] for one in ones], 0.99) * 1e3:.0f}",
            ratios([one["s"] for one in ones], [one["s"] for one in ones_of[ranks, "torch's default"]]),
            f"{statistics.median(one['cpu_s'] for one in ones):.1f}",
            f"{statistics.median(one['load'] for one in ones):.0f}",
        )
        for (ranks, way), ones in ones_of.items()
    ]
    heads = ("ranks", "store", "n", "median ms", "p99 ms", "of torch's default", "CPU s of all ranks", "load")
    return "\n\n".join([*parts, table(heads, rows)])


def draw(axes: Axes, runs: Sequence[Run]) -> None:
    """Seconds over ranks, of each store and pattern: a line cold, and a broken one after a fault."""
    stores = [run for run in runs if run["kind"] == "store"]
    for (system, pattern), ones in grouped(stores, "system", "pattern").items():
        colour = {"default": "tab:red", "v2": "tab:orange", "lazy": "tab:green", "ckptless": "tab:blue"}[
            pattern
        ]
        by_ranks = grouped(ones, "ranks")
        sizes = [ranks for (ranks,) in by_ranks]
        for when, style in (("cold", "-"), ("again", ":")):
            took = [statistics.median(one[f"{when}_s"] for one in found) for found in by_ranks.values()]
            label = f"{system}, {ASKED[pattern].replace('`', '')}" if when == "cold" else None
            marker = "o" if system == "ckptless" else "x"
            axes.plot(sizes, took, style, marker=marker, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds until all have what they ask for\n(dotted: after a node was replaced)")
    axes.legend(fontsize="small")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--default-up-to", type=int, nargs=2, default=[256, 64], metavar=("TORCH", "OURS"))
    parser.add_argument("--real", type=int, nargs="*", default=[16, 64], help="ranks that are processes")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    # torch's store looks up the name of every client.
    sys.stderr.write(f"{names_from_files('tests.bench.init')}\n")
    runs = exchanges(args.ranks, args.turns, dict(zip(SYSTEMS, args.default_up_to, strict=True)))
    for ranks in args.real:
        runs += real(ranks, args.turns)
    finish(runs, args.json, told)


if __name__ == "__main__":
    main()
