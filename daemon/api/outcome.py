"""How a job ended, as a file: whoever is left of it writes it down for the launcher and for people."""

import os
from pathlib import Path

import msgspec

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.messages import Outcome

OUTCOME_FILE = "outcome.json"


class _OutcomeFile(msgspec.Struct):
    job: str
    state: str
    exit_code: int
    reason: str
    why: str = ""
    rank: int | None = None
    node: int | None = None


def outcome_path(directory: Path) -> Path:
    """Where the outcome stands."""
    return directory / OUTCOME_FILE


def write_outcome(directory: Path, job: str, outcome: Outcome) -> None:
    """Write it, whole or not at all; every node of the job may do so. Raises OSError."""
    path = outcome_path(directory)
    partial = path.with_name(f".{OUTCOME_FILE}.{os.uname().nodename}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode({"job": job, **msgspec.to_builtins(outcome)}))
    partial.rename(path)


def read_outcome(directory: Path, job: str) -> Outcome | None:
    """The outcome of `job`; None before it ended (or for another job). Raises ProtocolError."""
    try:
        data = outcome_path(directory).read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(data, type=_OutcomeFile)
        if found.job != job:
            return None
        fields = msgspec.to_builtins(found)
        del fields["job"]
        return msgspec.convert(fields, Outcome)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{outcome_path(directory)} is damaged: {error}") from error
