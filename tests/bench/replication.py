"""Copies over lines that the kernel limits, beside plain sockets: `python -m tests.bench.replication` (root).

Nodes are network namespaces of this machine with an agent's vault in each, the shipped code (vaults.py).

    line      one node gives another one a version, which verifies it, over 1 to 4 interfaces; then the same
              bytes go over plain sockets, one for each interface, into memory that is used again and again
    restore   a node that has nothing gets a version from k holders, each at a line of 1 Gbit/s, itself at one
              of 10 Gbit/s; then the same bytes come over plain sockets from as many
    limit     another flow of bytes, a plain socket's, over the same line of 1 Gbit/s: alone, beside copies,
              and beside copies with `replication.bandwidth` at a fifth of the line
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import Run, cpu_s, finish, grouped, load, quantile, ratios, table
from .nets import Nets, Star, made
from .vaults import MIB, Pair, Vault, introduce

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Above it every transfer has new processes, whose memory nobody has touched: for several there is no room.
MANY_MIB = 1024
HOLDER_MBIT, NEWCOMER_MBIT = 1000, 10_000
FLOW_S, FLOW_MBIT, FLOW_MIB = 5.0, 1000, 128
LIMITED = 0.2
BAR, BAR_BELOW_MBIT = 0.9, 10_000
# Gbit/s, interfaces: lines over which a large version goes, too.
LARGE_LINES = ((1, 1), (1, 4), (10, 1), (25, 1))


@contextlib.contextmanager
def pair(net: Nets, nbytes: int, send_rate: float = 0.0) -> Iterator[Pair]:
    """Two nodes, for as long as they are needed."""
    found = Pair(net, nbytes, send_rate)
    try:
        yield found
    finally:
        found.kill()


def turn(giver: Vault, getter: Vault, nbytes: int) -> dict[str, float]:
    """One version given, and the same bytes over plain sockets: seconds, and CPU seconds of both ends."""
    before = cpu_s(getter.pid)
    took_s, cpu = giver.ask("push")
    cpu += cpu_s(getter.pid) - before
    before = cpu_s(giver.pid)
    plain_s, plain_cpu = getter.ask("get", giver.plain, nbytes)
    plain_cpu += cpu_s(giver.pid) - before
    return {"s": took_s, "cpu_s": cpu, "plain_s": plain_s, "plain_cpu_s": plain_cpu}


def lines(rate_mbit: int, interfaces: int, mib: int, times: int) -> list[dict[str, Any]]:
    """Measure transfers over one line, but for a process's first, which makes the holder's memory."""
    nbytes, found = mib * MIB, []
    told = {"kind": "line", "rate_mbit": rate_mbit, "interfaces": interfaces, "nbytes": nbytes}
    with made(Nets(interfaces, rate_mbit)) as net, contextlib.ExitStack() as stack:
        if mib <= MANY_MIB:
            giver, getter = stack.enter_context(pair(net, nbytes)).nodes
            turn(giver, getter, nbytes)
        for _ in range(times if mib <= MANY_MIB else 2):
            if mib > MANY_MIB:
                stack.close()
                giver, getter = stack.enter_context(pair(net, nbytes)).nodes
            found.append({**told, **turn(giver, getter, nbytes), "load": load()})
    return found


def restores(most: int, mib: int, times: int) -> list[dict[str, Any]]:
    """Measure restores from 1, 2, 4 ... holders, in turn; who gets one is a new process each time."""
    nbytes, found = mib * MIB, []
    counts = [k for k in (1, 2, 4, 8) if k <= most]
    with made(Star([HOLDER_MBIT] * most + [NEWCOMER_MBIT])) as net, contextlib.ExitStack() as stack:
        holders = [started(stack, net, number, nbytes) for number in range(most)]
        with contextlib.ExitStack() as first:
            introduce([*holders, started(first, net, most, nbytes)])
        for holder in holders:
            holder.ask("hold", 1)
        for _, k in itertools.product(range(times), counts):
            with contextlib.ExitStack() as here:
                newcomer = started(here, net, most, nbytes)
                newcomer.ask("follow", [node.info for node in (*holders, newcomer)])
                before = sum(cpu_s(holder.pid) for holder in holders)
                took_s, cpu = newcomer.ask("fetch", 1, list(range(k)))
                between = sum(cpu_s(holder.pid) for holder in holders)
                sources = [where for holder in holders[:k] for where in holder.plain]
                plain_s, plain_cpu = newcomer.ask("get", sources, nbytes)
                after = sum(cpu_s(holder.pid) for holder in holders)
            seconds = {"s": took_s, "cpu_s": cpu + between - before}
            plain = {"plain_s": plain_s, "plain_cpu_s": plain_cpu + after - between}
            found.append({"kind": "restore", "k": k, "nbytes": nbytes, **seconds, **plain, "load": load()})
    return found


def started(stack: contextlib.ExitStack, net: Nets, number: int, nbytes: int) -> Vault:
    """A node's process, until the stack is left."""
    vault = Vault(net, number, nbytes)
    stack.callback(vault.kill)
    return vault


def limits(times: int) -> list[dict[str, Any]]:
    """Bytes per second of a flow: alone, beside copies, beside limited ones; in turn."""
    nbytes, found = FLOW_MIB * MIB, []
    limited = LIMITED * FLOW_MBIT * 1e6 / 8
    with (
        made(Nets(1, FLOW_MBIT)) as net,
        pair(net, nbytes) as free,
        pair(net, nbytes, limited) as slow,
        pair(net, nbytes) as other,
    ):
        ways = (("alone", None), ("copies", free), ("limited", slow))
        for _, (name, copies) in itertools.product(range(times), ways):
            found.append({"kind": "limit", "beside": name, **flow(other, copies), "load": load()})
    return found


def flow(other: Pair, copies: Pair | None) -> dict[str, float]:
    """Bytes per second of one that goes on for some seconds, beside copies one after the other."""
    giver, getter = other.nodes
    before = sum(cpu_s(node.pid) for node in other.nodes)
    if copies is not None:
        copies.begin()
    getter.tell("flow", giver.plain[0], FLOW_S)
    while copies is not None and not getter.has_answered:
        copies.took_s()
        copies.begin()
    rate = getter.hear()
    used = sum(cpu_s(node.pid) for node in other.nodes) - before
    if copies is not None:
        copies.took_s()
    return {"flow": rate, "cpu_s": used}


# ------------------------------------------------------------------------------------- the tables


def transfers(ones: Sequence[Run]) -> tuple[object, ...]:
    """Return the columns of all transfers: n, seconds, ratio, CPU, load."""
    took, plain = [one["s"] for one in ones], [one["plain_s"] for one in ones]
    per_gb = [
        statistics.median(one[name] / one["nbytes"] * 1e9 for one in ones)
        for name in ("cpu_s", "plain_cpu_s")
    ]
    return (
        len(ones),
        f"{statistics.median(took):.2f}",
        f"{quantile(took, 0.99):.2f}",
        f"{statistics.median(plain):.2f}",
        ratios(took, plain),
        f"{per_gb[0]:.2f}, plain {per_gb[1]:.2f}",
        f"{statistics.median(one['load'] for one in ones):.0f}",
    )


TRANSFERS = ("n", "median s", "p99 s", "plain sockets s", "as long as those", "CPU s a GB", "load")


def line_rows(runs: Sequence[Run]) -> Iterator[tuple[object, ...]]:
    """A row for each line and size."""
    ones_of = grouped([run for run in runs if run["kind"] == "line"], "rate_mbit", "interfaces", "nbytes")
    for (rate, interfaces, nbytes), ones in ones_of.items():
        ideal_s = nbytes * 8 / (rate * 1e6 * interfaces)
        share, plain = (ideal_s / statistics.median(one[name] for one in ones) for name in ("s", "plain_s"))
        bar = "" if rate * interfaces >= BAR_BELOW_MBIT else "kept" if share >= BAR else "missed"
        line = f"{interfaces} x {rate // 1000} Gbit/s"
        shares = (f"{share:.0%}", f"{plain:.0%}", bar)
        yield (line, f"{nbytes / MIB / 1024:.2g} GiB", *shares, *transfers(ones))


def told(runs: Sequence[Run]) -> str:
    """Three tables."""
    columns = ("lines", "shard", "of the lines", "plain sockets", f"bar of {BAR:.0%}", *TRANSFERS)
    parts = [table(columns, line_rows(runs))]
    restored = grouped([run for run in runs if run["kind"] == "restore"], "nbytes", "k")
    one_s = {n: statistics.median(one["s"] for one in ones) for (n, k), ones in restored.items() if k == 1}
    rows = []
    for (nbytes, k), ones in restored.items():
        faster = f"{one_s[nbytes] / statistics.median(one['s'] for one in ones):.2f}"
        rows.append((k, f"{nbytes / MIB / 1024:.2g} GiB", faster, *transfers(ones)))
    parts.append(table(("holders", "shard", "times as fast as one", *TRANSFERS), rows))
    flows = grouped([run for run in runs if run["kind"] == "limit"], "beside")
    alone = [one["flow"] for one in flows.get(("alone",), [])]
    names = {"alone": "nothing", "copies": "copies", "limited": f"copies, at most {LIMITED:.0%} of the line"}
    rows = [
        (
            names[beside],
            len(ones),
            f"{statistics.median(one['flow'] for one in ones) / 1e6:.0f}",
            f"{quantile([one['flow'] for one in ones], 0.01) / 1e6:.0f}",
            ratios([one["flow"] for one in ones], alone),
            f"{statistics.median(one['cpu_s'] / one['flow'] / FLOW_S * 1e9 for one in ones):.2f}",
            f"{statistics.median(one['load'] for one in ones):.0f}",
        )
        for (beside,), ones in flows.items()
    ]
    heads = (
        "beside it",
        "n",
        "the flow, MB/s",
        "the least",
        "of what it has alone",
        "CPU s a GB of it",
        "load",
    )
    parts.append(table(heads, rows))
    return "\n\n".join(parts)


def draw(axes: Axes, runs: Sequence[Run]) -> None:
    """Seconds of a restore over the number of holders, ours and plain sockets', and what the lines allow."""
    restored = grouped([run for run in runs if run["kind"] == "restore"], "k")
    counts = [k for (k,) in restored]
    for name, label in (("s", "ckptless, verified"), ("plain_s", "plain sockets")):
        took = [statistics.median(one[name] for one in ones) for ones in restored.values()]
        axes.plot(counts, took, "o-" if name == "s" else "x--", label=label)
    ideal_s = [ones[0]["nbytes"] * 8 / (k * HOLDER_MBIT * 1e6) for (k,), ones in restored.items()]
    axes.plot(counts, ideal_s, ":", color="tab:grey", label="the holders' lines, full")
    axes.set_ylim(bottom=0)
    axes.set_xticks(counts)
    axes.set_xlabel(f"holders, at {HOLDER_MBIT // 1000} Gbit/s each")
    axes.set_ylabel("seconds until all of a lost node's state is there")
    axes.legend(fontsize="small")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[1, 10, 25], help="Gbit/s of a line")
    parser.add_argument("--interfaces", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--size", type=int, default=256, help="MiB of a version")
    parser.add_argument("--large", type=int, default=0, help="MiB of a version that goes over some lines")
    parser.add_argument("--restored", type=int, default=512, help="MiB of the version that is restored")
    parser.add_argument("--holders", type=int, default=4, help="at most")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    cases = list(itertools.product([args.size], args.rates, args.interfaces))
    cases += [(args.large, *line) for line in LARGE_LINES if args.large]
    for mib, rate, count in cases:
        runs += lines(rate * 1000, count, mib, args.times)
        sys.stderr.write(f"{count} x {rate} Gbit/s, {mib} MiB: {runs[-1]}\n")
    runs += restores(args.holders, args.restored, args.times)
    runs += limits(args.times)
    finish(runs, args.json, told)


if __name__ == "__main__":
    main()
