"""What a framework's logger has written: each line once, also where the step that it is of is done again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

# So many lines back it is known what was written: of more steps than a fault takes back.
REMEMBERED = 10_000
Line = tuple[int | None, frozenset[str]]
"""A line's step, and the names of what it has."""


class Written:
    """The lines of one logger in this process, each with the newest committed step when it was written."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, Line]] = deque(maxlen=REMEMBERED)
        # What is not to be written again, and how often.
        self._known: Counter[Line] = Counter()

    def is_new(self, line: Line, step: int) -> bool:
        """Note a line that comes after a committed step; whether it is to be written."""
        if self._known[line]:
            self._known[line] -= 1
            return False
        self._lines.append((step, line))
        return True

    def go_back(self, step: int, others: Iterable[Line] | None = None) -> None:
        """The job goes on after a committed step. `others`: a process before this one has written these."""
        if others is not None:
            # Of a step of theirs nobody knows more than that it comes after this one.
            self._lines = deque(((step, line) for line in others), maxlen=REMEMBERED)
        # Those stay noted: it may be cut off again before they have come.
        self._known = Counter(line for at, line in self._lines if at >= step)


def take_back(writer: Any, step: int) -> None:
    """Have TensorBoard leave out what its files have from a step on, as torch's `purge_step` does.

    `writer` is one of torch.utils.tensorboard; of another one it stays.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return
    if isinstance(writer, SummaryWriter):
        file: Any = writer.file_writer
        file.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)), step)
