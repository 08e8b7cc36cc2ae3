"""`ckptctl top`: a job as it goes: nodes with trouble first, what was told last, and its goodput."""

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckptless.daemon.ckptctl import safety as safe
from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.board import SORTS, NodeLine, Rate, Sort, folded, in_order, node_lines
from ckptless.daemon.ckptctl.shared.options import Asked, of_job
from ckptless.daemon.ckptctl.shared.source import Feed
from ckptless.daemon.ckptlessd.planning.goodput import KINDS, History, of_run
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.records import EventRecord, JobRecord

_EVENTS = 6
# Nothing is done for so many times as long as a look takes.
_IDLE = 4
# Lines that are neither nodes nor events: four above the table, its head, the folded, keys, two blank ones.
_OTHERS = 9
_COLOURS = {
    "lost": "red",
    "daemon away": "yellow",
    "silent": "yellow",
    "not training": "cyan",
    "slow": "magenta",
}
_LEVELS = {"info": "", "warning": "yellow", "error": "red"}
_COLUMNS = (
    "node",
    "name",
    "ranks",
    "at",
    "trouble",
    "step",
    "behind",
    "own ms",
    "over",
    "data",
    "loss",
    "age",
)
_WORDS = ("name", "ranks", "at", "trouble")
_KEYS: dict[str, Sort] = {"t": "trouble", "n": "node", "p": "step", "o": "own"}
# Ctrl-C and Ctrl-D are keys like others while each is read as it is pressed.
_ENDS = ("q", "\x03", "\x04")


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60),
    default=1.0,
    metavar="S",
    help="Look so often. Default: 1.",
)
@click.option(
    "--sort", type=click.Choice(SORTS), default="trouble", help="What comes first. Default: trouble."
)
@click.option("--once", is_flag=True, help="Print it once, and no more.")
@of_job
def top(asked: Asked, interval_s: float, sort: Sort, once: bool) -> None:
    """Show a job as it goes: its nodes, those with trouble first, and what was told last.

    One line a node: its ranks, what they are at, the step that all of them have done, by how many steps they
    are behind, and what their slowest rank is busy for by itself in a step. Of many nodes those that find no
    room are counted in one line. Keys: q ends it; s sorts by something else; t, n, p, o sort by trouble,
    node, step, own time. Where the output is no terminal, and with --json, it is printed once.

    \b
    Example:
        ckptctl top 4711
    """
    if asked.as_json:
        job, found, _ = view.job_of(asked)
        lines = in_order(node_lines(found, job.ended_s or time.time()), sort)
        render.show_json(job=job, nodes=[asdict(one) for one in lines])
        return
    board = _Board(asked, sort)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        size = shutil.get_terminal_size((160, 60))
        Console(width=size.columns, highlight=False).print(board.page(size.lines))
        return
    # So that the terminal is left as it was.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with _one_key_at_a_time() as keyboard, Live(screen=True, auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            try:
                page = board.page(live.console.height)
            except CkptlessError as error:
                # Its daemon may come back.
                page = Text(render.harmless(str(error)), style="red")
            live.update(page, refresh=True)
            # Of a large job a look takes a while, and is the daemon's work, too.
            key = _key(keyboard, max(interval_s, _IDLE * (time.monotonic() - began_s)))
            if key in _ENDS:
                return
            if key == "s":
                board.sort = SORTS[(SORTS.index(board.sort) + 1) % len(SORTS)]
            board.sort = _KEYS.get(key, board.sort)


@dataclass
class _Board:
    """The view of one job, from look to look: the order, the rate of steps, and the events told last."""

    asked: Asked
    sort: Sort
    rate: Rate = field(default_factory=Rate)
    feed: tuple[str, Feed] | None = None
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=_EVENTS))

    def page(self, height: int) -> RenderableType:
        """Look at the job, and return all that is to be seen in so many lines. Raises CkptlessError."""
        job, found, source = view.job_of(self.asked, events=KINDS)
        if self.feed is None or self.feed[0] != job.job:
            self.feed = job.job, source.feed(job.job)
            self.events.clear()
        # no deadline: it reads what is there, and asks the daemon with one
        self.events.extend(self.feed[1].poll())
        now_s = job.ended_s or time.time()
        lines = in_order(node_lines(found, now_s), self.sort)
        shown, rest = folded(lines, max(1, height - _OTHERS - len(self.events)))
        told = [*self._told(job, found, now_s)]
        for text in told[1:]:
            text.no_wrap, text.overflow = True, "ellipsis"
        keys = Text(f"sorted by {self.sort}; q ends, s sorts otherwise", "dim")
        folds = [Text(rest)] if rest else []
        return Group(*told, _table(shown), *folds, Text(""), *map(_event, self.events), keys)

    def _told(self, job: JobRecord, found: Snapshot, now_s: float) -> Iterator[Text]:
        """Yield the lines above the table."""
        step = max((slot.step for slot in found.slots if slot.step is not None), default=0)
        a_second = self.rate.see(step, now_s)
        history = History(job, found.nodes, found.slots, found.generations, found.recoveries, found.events)
        goodput = of_run(history, now_s).goodput
        head = [
            f"job {job.job}: {job.state} for {render.span(now_s - job.started_s)}",
            f"generation {found.generation.generation if found.generation is not None else 'none'}",
            f"step {step}",
            f"{job.world_size} ranks",
            f"{view.spares_left(found)} spare slots",
        ]
        if a_second is not None and job.state not in ENDED:
            head.append(f"{a_second:.2f} steps/s")
        if goodput is not None:
            head.append(f"goodput {100 * goodput:.1f} %")
        yield Text(render.harmless(", ".join(head)), "bold")
        if (safety := safe.safety(job, found)) is not None:
            yield from (Text(render.harmless(one)) for one in safe.sentences(safety)[:2])
        if recovered := [one for one in found.recoveries if one.outcome == "recovered"]:
            last = recovered[-1]
            when = render.clock(last.started_s)
            took = f"{last.rung}, {view.total_s(last):.2f} s"
            yield Text(render.harmless(f"{len(recovered)} recoveries, the last at {when}: {took}"))


def _event(event: EventRecord) -> Text:
    text = f"{render.clock(event.at_s)[11:19]} {event.kind}: {event.text}"
    return Text(render.harmless(text), _LEVELS[event.level], no_wrap=True, overflow="ellipsis")


@contextmanager
def _one_key_at_a_time() -> Iterator[int]:
    """Read keys as they are pressed, and have the terminal as it was in the end."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setraw(keyboard, termios.TCSANOW)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _key(keyboard: int, wait_s: float) -> str:
    """Return the next key, or "" where none is pressed in this time; a terminal that is gone is as q."""
    ready, _, _ = select.select([keyboard], [], [], wait_s)
    if not ready:
        return ""
    return os.read(keyboard, 1).decode(errors="replace") or "q"


def _table(lines: Sequence[NodeLine]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="reverse")
    for name in _COLUMNS:
        justify: Literal["left", "right"] = "left" if name in _WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for one in lines:
        cells = (
            *(one.node, one.name, one.ranks, one.phase, one.trouble),
            *("" if one.step is None else one.step, one.behind or "", render.ms(one.own_s)),
            f"+{100 * one.over:.0f} %" if one.over else "",
            "" if one.data is None else f"{100 * one.data:.0f} %",
            "" if one.loss is None else f"{one.loss:.5g}",
            render.span(one.age_s),
        )
        table.add_row(
            *(Text(render.harmless(str(cell))) for cell in cells), style=_COLOURS.get(one.trouble, "")
        )
    return table
