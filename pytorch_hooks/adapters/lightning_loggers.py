"""Lightning's loggers through a fault: one folder for the whole job, and each line once.

A step that is done again logs what it has logged before it was cut off. What this process has written since
is not written again; nor is what a process before it has written to the file of a CSVLogger.
"""

from __future__ import annotations

import csv
import os
from collections import Counter, deque
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

# So many lines back it is known what was written: of more steps than a fault takes back.
REMEMBERED = 10_000
Line = tuple[int | None, frozenset[str]]
"""A line's step, and the names of what it has."""


class Loggers:
    """The loggers of one Trainer, before they have begun to write."""

    def __init__(self, trainer: Any, run: Any, *, joins: bool) -> None:
        """`joins`: others have trained already."""
        self._run = run
        self._loggers = list(trainer.loggers)
        self._written: list[deque[tuple[int, Line]]] = [deque(maxlen=REMEMBERED) for _ in self._loggers]
        # What is not to be written again, and how often.
        self._known: list[Counter[Line]] = [Counter() for _ in self._loggers]
        for number, one in enumerate(self._loggers):
            chosen = getattr(one, "_version", "") is None
            if chosen:
                # As Lightning does under Slurm: the job's, not the next one that is free.
                one._version = f"version_{os.environ['TORCHELASTIC_RUN_ID']}"
            if (chosen or joins) and isinstance(one, CSVLogger) and trainer.is_global_zero:
                go_on(one)
            self._filter(number, one)

    def _filter(self, number: int, logger: Any) -> None:
        write = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            line = step, frozenset(metrics)
            if self._known[number][line]:
                self._known[number][line] -= 1
                return
            self._written[number].append((self._run.step, line))
            write(metrics=metrics, step=step)

        logger.log_metrics = log_metrics

    def go_back(self, step: int, logged: int, *, joins: bool) -> None:
        """The job goes on from a step, of which what it logs has this number."""
        for number, one in enumerate(self._loggers):
            written = self._written[number]
            self._known[number] = Counter(line for at, line in written if at >= step)
            self._written[number] = deque((w for w in written if w[0] < step), maxlen=REMEMBERED)
            if joins and isinstance(one, CSVLogger):
                self._known[number] = Counter(line for line in lines(one) if (line[0] or 0) >= logged)


def _file(logger: Any) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def lines(logger: Any) -> list[Line]:
    """Return what the file of a CSVLogger has."""
    if not _file(logger).exists():
        return []
    with _file(logger).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), frozenset(k for k, v in row.items() if v and k != "step")) for row in rows]


def go_on(logger: Any) -> None:
    """Have a CSVLogger add to its file, which it deletes where it begins."""
    file = _file(logger)
    aside = file.with_suffix(".kept")
    if aside.exists():
        # Whoever was here before was killed in between.
        aside.replace(file)
    if file.exists():
        file.replace(aside)
        writer = logger.experiment
        aside.replace(file)
        with file.open(newline="") as rows:
            writer.metrics_keys = next(csv.reader(rows), [])
