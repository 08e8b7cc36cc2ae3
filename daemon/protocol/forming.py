"""Words from agents to their launcher, as files: which nodes are there, and how many late ones should be.

They lie in the folder that all of the run's nodes share, as `outcome.json` does. Those of nodes that are
there before the first generation go once training begins.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_UP, _BEGUN, _WANTED, _GIVEN = ".up-", ".begun", ".late-wanted", ".given-back"


def mark_up(directory: Path, name: str) -> None:
    """Say that a node's agent is up, and that its daemon has let it in. Raises OSError."""
    (directory / f"{_UP}{name}").touch()


def unmark_up(directory: Path, name: str) -> None:
    """Forget that a node was there: it has left, and comes again. Raises OSError."""
    (directory / f"{_UP}{name}").unlink(missing_ok=True)


def mark_begun(directory: Path) -> None:
    """Say that there is a first generation. Raises OSError."""
    (directory / _BEGUN).touch()


def nodes_up(directory: Path) -> frozenset[str]:
    """The names of the nodes whose agents are up, as far as can be seen from here."""
    return frozenset(path.name.removeprefix(_UP) for path in directory.glob(f"{_UP}*"))


def has_begun(directory: Path) -> bool:
    """Whether there is a first generation."""
    return (directory / _BEGUN).exists()


def ask_for_nodes(directory: Path, count: int) -> None:
    """Say that so many late nodes should be there, those that have come among them. Raises OSError."""
    new = directory / f"{_WANTED}.{os.getpid()}.{socket.gethostname()}"
    new.write_text(str(count))
    new.replace(directory / _WANTED)


def nodes_asked_for(directory: Path) -> int:
    """Return how many late nodes should be there, by the newest word."""
    try:
        text = (directory / _WANTED).read_text()
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def give_back(directory: Path, nodes: Iterable[int]) -> None:
    """Say that these nodes are out of the job, and to be given back. Raises OSError."""
    new = directory / f"{_GIVEN}.{os.getpid()}.{socket.gethostname()}"
    new.write_text(" ".join(map(str, nodes)))
    new.replace(directory / _GIVEN)


def nodes_given_back(directory: Path) -> frozenset[int]:
    """Return the numbers of the nodes that are to be given back, by the newest word."""
    try:
        words = (directory / _GIVEN).read_text().split()
    except OSError:
        return frozenset()
    return frozenset(int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 10)


def forget_wanted(directory: Path) -> None:
    """Remove what an earlier run in the same folder has left. Raises OSError."""
    for name in (_WANTED, _GIVEN):
        (directory / name).unlink(missing_ok=True)
    clear(directory)


def clear(directory: Path) -> None:
    """Remove the files; what cannot be removed stays."""
    for path in (*directory.glob(f"{_UP}*"), directory / _BEGUN):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
