"""What happened, in lines that a person can read when a seed fails."""

from collections.abc import Callable

LAST = 160


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Story:
    """Lines with their virtual time."""

    def __init__(self, now: Callable[[], float], prefix: str = "") -> None:
        self._now, self._prefix = now, prefix
        self.lines: list[tuple[float, str, str]] = []

    def of(self, prefix: str) -> "Story":
        """Return the same story, for those whose names get this before them."""
        other = Story(self._now, prefix)
        other.lines = self.lines
        return other

    def tell(self, who: str, text: str) -> None:
        """`who` saw or did `text`, now."""
        self.lines.append((self._now(), self._prefix + who, text))

    def render(self, last: int = LAST) -> str:
        """The last lines; 0 for all."""
        skipped = max(0, len(self.lines) - last) if last else 0
        head = [f"... {skipped} lines before"] if skipped else []
        return "\n".join(head + [f"{at:8.3f}  {who:<10} {text}" for at, who, text in self.lines[skipped:]])
