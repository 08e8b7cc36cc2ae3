"""What a ring has its agent do."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Give:
    """Send a reader a batch."""

    reader: int
    stream: int
    seq: int


@dataclass(frozen=True)
class GiveEnd:
    """Tell a reader that there is no batch `seq`."""

    reader: int
    seq: int


@dataclass(frozen=True)
class GiveUp:
    """Tell a reader that batch `seq` could not be made."""

    reader: int
    seq: int
    text: str


@dataclass(frozen=True)
class Grant:
    """Have this reader's process start the producer."""

    reader: int
    lease: int


@dataclass(frozen=True)
class Make:
    """Have the producer make a batch: see `RingMake`."""

    stream: int
    history: int
    seq: int
    base: int
    position: bytes


@dataclass(frozen=True)
class Free:
    """Give the memory of a batch back."""

    stream: int
    seq: int


@dataclass(frozen=True)
class Tell:
    """Something worth an event."""

    kind: str
    text: str


Action: TypeAlias = Give | GiveEnd | GiveUp | Grant | Make | Free | Tell
