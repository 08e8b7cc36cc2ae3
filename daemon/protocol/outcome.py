"""The end of a job, as a file: whoever is left of it writes it down for the launcher and for people."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.model import NO_RUN

OUTCOME_FILE = "outcome.json"


class _OutcomeFile(msgspec.Struct):
    job: str
    state: str
    exit_code: int
    reason: str
    why: str = ""
    rank: int | None = None
    node: int | None = None
    launch: str = NO_RUN


def outcome_path(directory: Path) -> Path:
    """Return the path of the outcome."""
    return directory / OUTCOME_FILE


def write_outcome(directory: Path, job: str, outcome: Outcome, launch: str = NO_RUN) -> None:
    """Write it, whole or not at all; every node of the job may do so. Raises OSError.

    What holds more than it, see `which_holds`, stays.
    """
    path = outcome_path(directory)
    with contextlib.suppress(ProtocolError):
        if which_holds((outcome, read_outcome(directory, job, launch))) is not outcome:
            return
    partial = path.with_name(f".{OUTCOME_FILE}.{os.uname().nodename}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode({"job": job, **msgspec.to_builtins(outcome), "launch": launch}))
    partial.rename(path)


def which_holds(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """Return how a job ended, of what its nodes say: the first that is not "stopped", else the first.

    A node that its user stops ends also where it cannot ask the others, which may agree on another end.
    """
    return min(filter(None, outcomes), key=lambda outcome: outcome.state == "stopped", default=None)


def read_outcome(directory: Path, job: str, launch: str = NO_RUN) -> Outcome | None:
    """The outcome of `job`; None before it ended (or for another run of any name). Raises ProtocolError."""
    try:
        data = outcome_path(directory).read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(data, type=_OutcomeFile)
        if (found.job, found.launch) != (job, launch):
            return None
        fields = msgspec.to_builtins(found)
        del fields["job"], fields["launch"]
        return msgspec.convert(fields, Outcome)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{outcome_path(directory)} is damaged: {error}") from error
