"""Draws recoveries as stacked bars, one a recovery, one colour a phase. The only module with matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from ckptless.daemon.protocol.errors import UsageError
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
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(recoveries)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{recovery.generation}: {recovery.rung}" for recovery in recoveries]
    rows = range(len(recoveries))
    left = [0.0] * len(recoveries)
    for colour, phase in enumerate(PHASES):
        widths = [recovery.phases.get(phase, 0.0) * 1000 for recovery in recoveries]
        axes.barh(rows, widths, left=left, height=0.6, label=phase, color=colormaps["tab10"](colour))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in enumerate(left):
        axes.text(end, row, f" {end:.0f} ms", va="center", fontsize="small")
    axes.set_yticks(rows, names, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds since the first sign of the fault")
    axes.set_ylabel("generation: rung")
    axes.set_title(title, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False, fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file}: the picture cannot be written: {error.strerror}") from error
