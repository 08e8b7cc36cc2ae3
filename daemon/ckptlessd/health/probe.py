"""The contract between the daemon and a probe, which looks at one side of the node's health."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not well, as seen in one look.

    `code` is its kind, a key of `meanings`, such as "xid-79". `where` is the part of the node that it is
    about ("GPU 3", "/scratch"), "" for the node itself. `evidence` is what was read, word for word.
    """

    code: str
    where: str = ""
    evidence: str = ""


class Probe(Protocol):
    """Looks at one side of the node; found by the name of its entry point in the group `ckptless.health`.

    A probe belongs to one thread at a time. What it says of a state, it says in every look for as long as
    that lasts; what has happened, once.
    """

    interval_s: float
    """Seconds between two looks, from the end of one to the beginning of the next."""

    deadline_s: float
    """A look that takes longer counts as hung; there is no second one before it has ended."""

    def missing(self) -> str:
        """Return what this node lacks for it, in words; "" where it can look. Asked once, before any look."""
        return ""

    def look(self) -> Sequence[Finding]:
        """Return what is not well. May block, within its deadline; whatever it raises is a finding itself."""

    def close(self) -> None:
        """Give back what it holds. Called once, when no look is under way."""
        return
