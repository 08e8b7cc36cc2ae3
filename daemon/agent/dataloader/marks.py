"""What a ring knows of its readers and streams."""

from dataclasses import dataclass, field


@dataclass
class Mark:
    """A reader takes `next` next, never goes back before `done`, and was sent what is before `sent`."""

    stream: int
    next: int
    done: int
    sent: int
    alive: bool = True
    # Whether it knows already why there is nothing behind `sent`.
    told: bool = False
    # It was sent what came of another position, and gets nothing that does not follow from that.
    held: bool = False


@dataclass
class Stream:
    """`positions` are those before each batch; `history` is a new number where another one is begun."""

    history: int
    ready: dict[int, int] = field(default_factory=dict)
    positions: dict[int, bytes] = field(default_factory=dict)
    end: int | None = None
    failed: tuple[int, str] | None = None
