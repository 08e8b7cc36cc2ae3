"""The errors between ckptless and Slurm, told apart by what a caller can do about them.

SlurmError
 +- SlurmUnreachableError   no answer: ask again later, and use what was last known
 +- SlurmRefusedError       an answer, and it is no: Slurm's own words are in the message
 +- SlurmNotFoundError      Slurm has no such job or node (finished jobs are forgotten after MinJobAge)
"""

import re

from ckptless.daemon.protocol.errors import CkptlessError


class SlurmError(CkptlessError):
    """Slurm could not be asked, or said no."""


class SlurmUnreachableError(SlurmError):
    """slurmctld, munged or Slurm's commands are away, or did not answer before the deadline."""

    exit_code = 3


class SlurmRefusedError(SlurmError):
    """Slurm understood and refused: no permission, wrong state, not configured."""

    exit_code = 5


class SlurmNotFoundError(SlurmError):
    """Slurm does not know this job or node."""


# Slurm's texts are not translated, and these have been the same from 22.05 to 26.05.
_UNREACHABLE = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "timed out on send/recv",
    "socket timed out",
    "zero bytes were transmitted or received",
    "insane message length",
    "authentication error",
    "could not establish a configuration source",
    "munge",
    "slurmctld is down",
    "in standby mode",
    "unable to establish",
)
_NOT_FOUND = ("invalid job id", "invalid node name", "not found")
# "scancel: error: ", "slurm_update error: "
_PREFIX = re.compile(r"^(?:\w+:? )?error: ", re.ASCII)


def from_message(doing: str, message: str) -> SlurmError:
    """The error for what Slurm said (`message`) while ckptless was `doing` something ("drain node03")."""
    said = " ".join(message.split())[:500] or "it gave no reason"
    lower = said.lower()
    text = f"Slurm could not {doing}: {_PREFIX.sub('', said)}"
    if any(words in lower for words in _UNREACHABLE):
        return SlurmUnreachableError(text)
    if any(words in lower for words in _NOT_FOUND):
        return SlurmNotFoundError(text)
    return SlurmRefusedError(text)
