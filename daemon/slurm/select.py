"""Chooses the backend that speaks to Slurm here, and says why: `auto`, `commands` or `pyslurm`."""

import logging
from pathlib import Path
from typing import Literal

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.daemon.slurm.adapter import DEADLINE_S, Node
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import SlurmError
from ckptless.daemon.slurm.pyslurm_backend import Pyslurm, UnfitError

Choice = Literal["auto", "commands", "pyslurm"]

_log = logging.getLogger(__name__)


async def select(choice: Choice, folder: Path | None = None, *, deadline_s: float = DEADLINE_S) -> Commands:
    """The backend for `choice`, for the caller to close; Slurm's commands are in `folder`, None for the PATH.

    `auto` takes pyslurm if it can be imported and knows the same nodes as Slurm's commands, else the
    commands; also while slurmctld is away, since then nobody can tell. `pyslurm` insists: UsageError if it
    cannot be imported.
    """
    commands = Commands(folder)
    if choice == "commands":
        _log.info("Slurm is asked through its commands, as configured")
        return commands
    pyslurm = Pyslurm(folder)
    try:
        what = await _fitness(pyslurm, commands, choice, Deadline(deadline_s))
    except (SlurmError, ProtocolError) as error:
        await pyslurm.aclose()
        if choice == "pyslurm":
            raise UsageError(f"pyslurm cannot be used ({error}): set the slurm backend to auto") from error
        _log.info("Slurm is asked through its commands: %s", error)
        return commands
    except BaseException:
        await pyslurm.aclose()
        raise
    _log.info("Slurm is asked through %s", what)
    return pyslurm


async def _fitness(pyslurm: Pyslurm, commands: Commands, choice: str, deadline: Deadline) -> str:
    """Return what pyslurm calls itself. SlurmError if it cannot be used."""
    what = await pyslurm.hello(deadline_s=deadline.left_s)
    if choice == "auto":
        # pyslurm is compiled against one release's structures, and reads nonsense out of another's.
        theirs = {_gist(node) for node in await commands.nodes(deadline_s=deadline.left_s)}
        ours = {_gist(node) for node in await pyslurm.nodes(deadline_s=deadline.left_s)}
        if theirs != ours:
            raise UnfitError(
                f"{what} does not match this Slurm: it reads {len(ours ^ theirs)} nodes differently"
            )
    return what


def _gist(node: Node) -> tuple[object, ...]:
    """Return what does not change from one moment to the next."""
    return node.name, node.address, node.cpus, node.version
