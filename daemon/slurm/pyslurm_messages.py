"""What the daemon and its pyslurm process say to each other: lines of JSON, one answer to one request."""

import msgspec

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.slurm.adapter import Job, Node

MAX_LINE = 128 * 1024 * 1024


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call. Which fields are used depends on the method."""

    method: str
    job_id: int = 0
    name: str = ""
    state: str = ""
    text: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`error` "" is success; else it is what Slurm said, or why pyslurm cannot be used (`unfit`)."""

    error: str = ""
    unfit: bool = False
    text: str = ""
    jobs: tuple[Job, ...] = ()
    nodes: tuple[Node, ...] = ()


def encode(message: Request | Answer) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(line, type=Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a bad request to the pyslurm process: {error}") from error


def decode_answer(line: bytes) -> Answer:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(line, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a bad answer of the pyslurm process: {error}") from error
