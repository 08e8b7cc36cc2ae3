"""Renders things for stdout: tables (plain where nobody looks), JSON, times, harmless text."""

import io
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click
import msgspec

from ckptless.daemon.protocol.limits import one_line

SCHEMA = 1
# A job's words must not drive a terminal.
harmless = one_line

_PLAIN_WIDTH = 10_000  # a pipe has no right edge: never fold a line


def show_json(**parts: Any) -> None:
    """Print one document: `meta`, then the parts. Fields are only ever added to it; NaN is null."""
    document = msgspec.json.encode({"meta": {"schema": SCHEMA}, **parts})
    click.echo(msgspec.json.format(document, indent=2).decode())


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, words: Sequence[str] = ()
) -> None:
    """Print a table; columns not among `words` hold numbers and stand to the right. None is left blank."""
    from rich import box, console, table, text  # slow to load, and JSON needs none of it

    terminal = sys.stdout.isatty()
    style = box.SIMPLE_HEAD if terminal else None
    grid = table.Table(
        box=style, padding=(0, 1, 0, 0) if terminal else (0, 1), pad_edge=False, show_edge=False
    )
    for name in columns:
        grid.add_column(text.Text(name), justify="left" if name in words else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(text.Text("" if cell is None else harmless(str(cell))) for cell in row))
    page = io.StringIO()
    width = None if terminal else _PLAIN_WIDTH
    console.Console(file=page, force_terminal=terminal, width=width, highlight=False).print(grid)
    click.echo("\n".join(line.rstrip() for line in page.getvalue().splitlines()))


def clock(time_s: float) -> str:
    """A time of the ledger's as local time, to the millisecond."""
    return datetime.fromtimestamp(time_s).isoformat(sep=" ", timespec="milliseconds")


def span(duration_s: float) -> str:
    """A duration as people say it: "0.4 s", "3 min", "5 h"."""
    if duration_s < 120:
        return f"{max(duration_s, 0.0):.1f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 7200 else f"{duration_s / 3600:.0f} h"


def ms(duration_s: float | None) -> str:
    """A duration in milliseconds, without the unit, to three figures or the whole; blank for None."""
    if duration_s is None:
        return ""
    return f"{duration_s * 1000:.{1 if duration_s < 0.1 else 0}f}"
