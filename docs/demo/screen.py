"""What the demos say, and how far a run is: a progress bar on a terminal, lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from losses import Line
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    """A terminal, or whatever stdout is; stderr where stdout is kept for data."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Console(highlight=False, soft_wrap=True, stderr=stderr)
        self._bar: Progress | None = None
        self._shown = 0

    @contextmanager
    def run(self, title: str, steps: int) -> Iterator[None]:
        self.say(title, "bold")
        words = TextColumn("step {task.completed:>4.0f}/{task.total}  {task.fields[news]}", markup=False)
        self._shown = 0
        with Progress(
            BarColumn(40),
            words,
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        ) as self._bar:
            self._bar.add_task("", total=steps, news="starting")
            yield
        self._bar = None

    def step(self, line: Line, steps: int) -> None:
        news = f"loss {float.fromhex(line.loss):.4f}  generation {line.generation}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=line.step, news=news)
        part = line.step * 10 // steps
        if part != self._shown and not self._console.is_terminal:
            self.say(f"  step {line.step:4}/{steps}  {news}")
        self._shown = part

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False)
