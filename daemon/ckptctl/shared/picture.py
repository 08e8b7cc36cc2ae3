"""Draws recoveries and steps as stacked bars, one colour a part. The only module with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptless.daemon.ckptlessd.planning.goodput import CLASSES, Account
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.model import Pace
from ckptless.daemon.protocol.records import PHASES, RecoveryRecord

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError("pictures need matplotlib: pip install 'ckptless[plot]'") from error

_MOST = 60  # bars that can still be read


def draw(file: Path, title: str, recoveries: Sequence[RecoveryRecord]) -> None:
    """Write a PNG, the first on top, of at most the last 60. Raises UsageError if it cannot be written."""
    recoveries = recoveries[-_MOST:]
    parts = {phase: [one.phases.get(phase, 0.0) for one in recoveries] for phase in PHASES}
    names = [f"{one.generation}: {one.rung}" for one in recoveries]
    axes = "milliseconds since the first sign of the fault", "generation: rung"
    _bars(file, title, names, parts, axes)


def draw_paces(file: Path, title: str, paces: Mapping[int, Pace]) -> None:
    """Write a PNG of what ranks' steps are made of, the slowest of them on top; raises as `draw` does."""
    ranks = sorted(paces, key=lambda rank: -paces[rank].own_s)[:_MOST]
    ones = [paces[rank] for rank in ranks]
    parts = {
        "compute": [max(0.0, one.own_s - one.data_s) for one in ones],
        "data": [one.data_s for one in ones],
        "waiting for others": [one.waited_s for one in ones],
        "commit": [one.commit_s for one in ones],
    }
    axes = "milliseconds of a step, median of the last ones", "rank"
    _bars(file, title, [str(rank) for rank in ranks], parts, axes)


def draw_accounts(file: Path, found: Mapping[str, Account]) -> None:
    """Write a PNG of where the time of the last 60 jobs' slots went, in percent; raises as `draw`."""
    jobs = [*found][-_MOST:]
    shares = {
        name: [100 * found[job].seconds[name] / (found[job].total_s or 1.0) for job in jobs]
        for name in CLASSES
        if any(found[job].seconds[name] for job in jobs)
    }
    axes = "percent of the time of all slots", "job"
    _bars(file, "Where the time went", jobs, shares, axes, (1, "%"))


def _bars(
    file: Path,
    title: str,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    axes: tuple[str, str],
    unit: tuple[float, str] = (1000, "ms"),
) -> None:
    """Write a PNG of one bar for each name, made of these parts, times the unit's number. UsageError."""
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(names)), layout="constrained")
    plot = figure.add_subplot()
    rows = range(len(names))
    left = [0.0] * len(names)
    for colour, (part, seconds) in enumerate(parts.items()):
        widths = [unit[0] * one for one in seconds]
        plot.barh(rows, widths, left=left, height=0.6, label=part, color=colormaps["tab20"](colour))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in enumerate(left):
        plot.text(end, row, f" {end:.0f} {unit[1]}", va="center", fontsize="small")
    plot.set_yticks(rows, names, parse_math=False)
    plot.invert_yaxis()
    plot.margins(x=0.12)
    plot.set_xlim(left=0)
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.set_title(title, parse_math=False)
    plot.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(parts), 7), frameon=False, fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file}: the picture cannot be written: {error.strerror}") from error
