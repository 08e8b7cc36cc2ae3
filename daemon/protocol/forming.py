"""The nodes of a run that are there before its first generation, as files from agents to the launcher.

They lie in the folder that all of the run's nodes share, as `outcome.json` does, and go once training begins.
"""

import contextlib
from pathlib import Path

_UP, _BEGUN = ".up-", ".begun"


def mark_up(directory: Path, name: str) -> None:
    """Say that a node's agent is up, and that its daemon has let it in. Raises OSError."""
    (directory / f"{_UP}{name}").touch()


def mark_begun(directory: Path) -> None:
    """Say that there is a first generation. Raises OSError."""
    (directory / _BEGUN).touch()


def nodes_up(directory: Path) -> frozenset[str]:
    """The names of the nodes whose agents are up, as far as can be seen from here."""
    return frozenset(path.name.removeprefix(_UP) for path in directory.glob(f"{_UP}*"))


def has_begun(directory: Path) -> bool:
    """Whether there is a first generation."""
    return (directory / _BEGUN).exists()


def clear(directory: Path) -> None:
    """Remove the files; what cannot be removed stays."""
    for path in (*directory.glob(f"{_UP}*"), directory / _BEGUN):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
