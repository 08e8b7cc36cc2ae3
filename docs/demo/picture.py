"""Draws what the demo did: both loss curves over the steps, and below them how long every step took."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import Fault
from losses import Losses
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ckptless.daemon.ckptctl.shared.view import total_s

RED, GREEN, BLUE, PALE, GREY, ORANGE = "#c0392b", "#1e8449", "#1f4e79", "#a9cfe8", "#b7c9d9", "#e59866"


@dataclass(frozen=True)
class Mark:
    """A fault and the recovery from it; `killed_at` is Unix time, `step` the one that was restored."""

    what: str
    recovered: str
    step: int
    killed_at: float
    stall_s: float


def draw_run(file: Path, faulty: Losses, clean: Losses, faults: Sequence[Fault]) -> None:
    """Losses, faults and recoveries of a run with faults, over those of one without, as a PNG."""
    marks = [
        Mark(
            what=fault.brief,
            recovered=f"recovered in {total_s(fault.recovery):.2f} s ({fault.recovery.rung})",
            step=fault.recovery.restore_step or 0,
            killed_at=fault.killed_at,
            stall_s=fault.stall_s(faulty),
        )
        for fault in faults
        if fault.recovery is not None
    ]
    draw(file, (faulty.means(), clean.means()), faulty.spans(), marks)


def draw(
    file: Path,
    curves: tuple[Sequence[float], Sequence[float]],
    spans: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
) -> None:
    """Write a PNG. `curves`: losses from step 1 on, with faults and without; `spans`: begin, end of steps."""
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    top, low = figure.subplots(2, 1, height_ratios=(3, 1.2))
    faulty, clean = curves
    steps = range(1, len(clean) + 1)
    top.plot(steps, clean, color=PALE, linewidth=7, solid_capstyle="round", label="without faults")
    top.plot(range(1, len(faulty) + 1), faulty, color=BLUE, linewidth=1.3, label="with faults")
    top.set(xlabel="step", ylabel="loss, mean of the ranks", xlim=(0, steps[-1] + 1))
    start = spans[0][0]
    for begin, end in spans:
        cut = any(begin <= mark.killed_at < end for mark in marks)
        look = {"color": ORANGE if cut else GREY, "edgecolor": "white", "linewidth": 0.4}
        low.bar(begin - start, end - begin, end - begin, align="edge", **look)
    low.set(xlabel="seconds since the first step", ylabel="step took (s)", xlim=(0, spans[-1][1] - start))
    for mark in marks:
        _mark_steps(top, mark)
        _mark_seconds(low, mark, mark.killed_at - start)
    top.legend(loc="lower left", frameon=False)
    for axes in (top, low):
        axes.margins(y=0.12)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png", dpi=110)


def _mark_steps(axes: Axes, mark: Mark) -> None:
    axes.axvline(mark.step + 0.5, color=RED, linewidth=1.1)
    for height, text, colour in ((0.99, mark.what, RED), (0.93, mark.recovered, GREEN)):
        say(axes, text, (mark.step + 0.5, height), colour)


def _mark_seconds(axes: Axes, mark: Mark, killed_s: float) -> None:
    axes.axvline(killed_s, color=RED, linewidth=1.1)
    axes.axvline(killed_s + mark.stall_s, color=GREEN, linewidth=1.1)
    say(axes, f"{mark.stall_s:.2f} s", (killed_s + mark.stall_s, 0.99), GREEN)


def say(axes: Axes, text: str, where: tuple[float, float], colour: str) -> None:
    """Text to the right of a line: `where` is (data, fraction of the height)."""
    axes.annotate(
        text,
        where,
        (5, 0),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        va="top",
        color=colour,
        fontsize="small",
    )
