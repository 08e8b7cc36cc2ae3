"""Draws what the elastic demo did: loss, number of ranks and throughput over time."""

from collections.abc import Sequence
from pathlib import Path

from elastic_steps import Guest, Step
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture import BLUE, GREEN, GREY, ORANGE, RED, say

BIN_S = 5.0


def draw(
    file: Path, steps: Sequence[Step], freed: Sequence[float], guest: Guest, tokens_a_step: int, note: str
) -> None:
    """Write a PNG. `freed`: when nodes came free, in Unix time; `note`: below the last axis."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.2, 1.4))
    start, end = steps[0].at, steps[-1].at
    seconds = [step.at - start for step in steps]
    top.plot(seconds, [step.loss for step in steps], color=BLUE, linewidth=1.1)
    top.set(ylabel="loss of the global batch")
    ranks = [step.ranks for step in steps]
    middle.fill_between(seconds, ranks, step="pre", color=GREY)
    middle.plot(seconds, ranks, drawstyle="steps-pre", color=BLUE)
    middle.set(ylabel="ranks", ylim=(0, max(ranks) * 1.25), yticks=sorted({0, *ranks}))
    bins = [0] * (int((end - start) / BIN_S) + 1)
    for second in seconds:
        bins[int(second / BIN_S)] += 1
    rates = [count * tokens_a_step / BIN_S for count in bins[:-1]]  # the last one is not a whole bin
    low.bar([number * BIN_S for number in range(len(rates))], rates, BIN_S * 0.9, align="edge", color=GREY)
    low.set(ylabel=f"tokens per second\n(bins of {BIN_S:.0f} s)", xlim=(0, end - start))
    low.set_xlabel(f"seconds since the first step\n{note}")
    for axes in panels:
        _mark(axes, [one - start for one in freed], guest, start)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    say(top, "a job of higher priority", (guest.started - start, 0.99), RED)
    for one in freed:
        say(top, "nodes come free", (one - start, 0.92), GREEN)
    figure.savefig(file, format="png", dpi=110)


def _mark(axes: Axes, freed: Sequence[float], guest: Guest, start: float) -> None:
    axes.axvspan(guest.started - start, guest.ended - start, color=ORANGE, alpha=0.25, linewidth=0, zorder=0)
    axes.axvline(guest.submitted - start, color=RED, linewidth=1.1)
    for one in freed:
        axes.axvline(one, color=GREEN, linewidth=1.1, linestyle="--")
