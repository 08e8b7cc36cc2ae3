"""Writes the tables and the pictures of docs/performance.md from what benches have measured."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import alarms, data, hangs, init, replication, scale
from .figures import Run, quantile, table
from .systems import SYSTEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE, MEASURED = DOCS / "performance.md", DOCS / "performance.png", DOCS / "bench"
OURS = "ckptless"


def measured(part: str) -> list[Run]:
    """The runs of a bench; none where it has not been run."""
    file = MEASURED / f"{part}.json"
    runs: list[Run] = json.loads(file.read_text())["runs"] if file.exists() else []
    return runs


def name_of(system: str) -> str:
    """As people know it."""
    return SYSTEMS[system].name


def by_case(runs: Iterable[Run]) -> dict[tuple[str, str, int], dict[str, list[Run]]]:
    """Runs by size, layout and ranks, and then by system."""
    found: dict[tuple[str, str, int], dict[str, list[Run]]] = {}
    for run in runs:
        case = run["case"]
        key = (case["size"], case["layout"], case["ranks"])
        found.setdefault(key, {}).setdefault(run["system"], []).append(run)
    return found


def stalls(runs: Iterable[Run]) -> list[float]:
    """Return those of all kills."""
    return [kill["stall_s"] for run in runs for kill in run["kills"]]


def crash() -> str:
    """A table for each case."""
    parts = []
    for (size, layout, ranks), systems in by_case(measured("crash")).items():
        steps = [run["step_s"] for run in systems[OURS]]
        load = [run["load"] for runs in systems.values() for run in runs]
        head = (
            f"**{layout}, {ranks} ranks, {size}** (a step of ours {statistics.median(steps) * 1000:.0f} ms, "
        )
        columns = (
            "",
            "kills",
            "median s",
            "p99 s",
            "as long as ours",
            "back s",
            "steps redone",
            "losses that differ",
        )
        rows = list(_crash_rows(systems))
        parts.append(f"{head}load {min(load):.0f} to {max(load):.0f})\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _crash_rows(systems: Mapping[str, Sequence[Run]]) -> Iterator[tuple[object, ...]]:
    ours = statistics.median(stalls(systems[OURS]))
    for system, runs in systems.items():
        found = stalls(runs)
        stuck = sum(bool(run["stuck"]) for run in runs)
        if not found:
            yield (name_of(system), 0, "did not go on", "", "", "", "", "")
            continue
        kills = [kill for run in runs for kill in run["kills"]]
        differ, losses = sum(run["differ"] for run in runs), sum(run["losses"] for run in runs)
        median = statistics.median(found)
        yield (
            name_of(system),
            f"{len(found)}{', then stuck' if stuck else ''}",
            f"{median:.2f}",
            f"{quantile(found, 0.99):.2f}",
            "" if system == OURS else f"{median / ours:.0f}",
            f"{statistics.median(kill['back_s'] for kill in kills):.2f}",
            max(kill["redone"] for kill in kills),
            f"{differ} of {losses}" if SYSTEMS[system].same_ranks else "other batches",
        )


def fire() -> str:
    """One table."""
    rows = [
        (
            name_of(run["system"]),
            f"{run['period_s']:.0f} s",
            run["kills"],
            "stuck" if run["stuck"] else f"{run['goodput']:.1%}",
            f"{run['quiet_per_s']:.0f}",
            f"{run['load']:.0f}",
        )
        for run in measured("fire")
    ]
    return table(("", "a kill each", "kills", "goodput", "ranks' steps a second in the quiet", "load"), rows)


def peace() -> str:
    """A row for each way to protect a state, with medians over the turns."""
    runs = measured("peace")
    found: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run["times"], run["way"]), []).append(run)
    rows = []
    for (times, way), ones in found.items():
        base = {one["turn"]: one for one in found[times, ones[0]["of"]]}
        ratios = [one["step_s"] / base[one["turn"]]["step_s"] for one in ones]
        cpu = [one["job_cpu_s"] - base[one["turn"]]["job_cpu_s"] for one in ones]
        of = (
            ""
            if way == "torchrun"
            else f"{statistics.median(ratios) - 1:+.0%} ({min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%})"
        )
        rows.append(
            (
                way,
                times,
                f"{statistics.median(one['step_s'] for one in ones) * 1000:.0f}",
                of,
                "" if way == "torchrun" else ones[0]["of"],
                f"{statistics.median(cpu) * 1000:+.0f}" if of else "",
            )
        )
    return table(("", "samples times", "a step, ms", "longer by", "than", "CPU of the job, ms a step"), rows)


NAMES = {
    OURS: "ckptless",
    "requeue": "sbatch --requeue, Slurm as it is",
    "requeue-tuned": "sbatch --requeue, shortest times",
}


def dark() -> str:
    """One table."""
    runs = measured("dark")
    if not runs:
        return ""
    ours = statistics.median(next(run["stalls_s"] for run in runs if run["system"] == OURS))
    rows = [
        (
            NAMES[run["system"]],
            len(run["stalls_s"]),
            f"{statistics.median(run['stalls_s']):.2f}",
            f"{max(run['stalls_s']):.2f}",
            "" if run["system"] == OURS else f"{statistics.median(run['stalls_s']) / ours:.0f}",
            f"{run['load']:.0f}",
        )
        for run in runs
    ]
    return table(("", "nodes", "median s", "most s", "as long as ours", "load"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "crash": crash,
    "dark": dark,
    "alarms": lambda: alarms.told(measured("alarms")),
    "fire": fire,
    "peace": peace,
    "hangs": lambda: hangs.told(measured("hangs")),
    "init": lambda: init.told(measured("init")),
    "data": lambda: data.told(measured("data")),
    "scale": scale.told,
    "replication": lambda: replication.told(measured("replication")),
}


def page(text: str) -> str:
    """Return the page with its tables as measured."""
    for part, made in PARTS.items():
        text, count = re.subn(
            rf"(<!-- {part} -->\n).*?(<!-- /{part} -->)",
            lambda found, made=made: f"{found[1]}\n{made()}\n\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        assert count == 1, part
    return text


# Parts with a picture of their own.
DRAWN: Mapping[str, Callable[[Axes, Sequence[Run]], None]] = {
    "alarms": alarms.draw,
    "init": init.draw,
    "data": data.draw,
    "replication": replication.draw,
}


def draw() -> None:
    """The time without progress for each kill, as dots, of four ranks; and goodput under fire beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    systems = by_case(measured("crash"))["toy", "ddp", 4]
    names = list(reversed(systems))
    for row, system in enumerate(names):
        colour = "tab:green" if system == OURS else "tab:grey"
        found = stalls(systems[system])
        left.plot(found, [row] * len(found), "o", color=colour, alpha=0.6)
        if not found:
            left.text(1, row, "did not go on", va="center", color=colour)
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_yticks(range(len(names)), [name_of(one) for one in names])
    left.set_xlabel("seconds without a step after a SIGKILL (4 ranks, DDP; a dot each)")
    runs = [run for run in measured("fire") if not run["stuck"]]
    for row, run in enumerate(reversed(runs)):
        colour = "tab:green" if run["system"] == OURS else "tab:grey"
        right.barh(row, 100 * run["goodput"], color=colour)
    labels = [f"{name_of(run['system']).split(',')[0]}, {run['period_s']:.0f} s" for run in reversed(runs)]
    right.set_yticks(range(len(runs)), labels)
    right.set_xlim(0, 100)
    right.set_xlabel("% of the steps without faults, a kill each ...")
    figure.savefig(PICTURE, dpi=110)
    for part, drawn in DRAWN.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        drawn(figure.subplots(), measured(part))
        figure.savefig(PICTURE.with_name(f"performance-{part}.png"), dpi=110)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    draw()
