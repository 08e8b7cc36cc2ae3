"""Asks the daemons of this machine over their Unix sockets: one question, one answer."""

import socket
import time
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import click

from ckptless.daemon.ckptctl.shared import render
from ckptless.daemon.ckptctl.shared.options import Asked
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError, UsageError
from ckptless.daemon.protocol.health import HealthReport, WhatIsWell
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.messages import Denied
from ckptless.daemon.protocol.peercred import daemon_credentials, unix_address
from ckptless.daemon.protocol.requests import (
    Drilled,
    DrillJob,
    Evict,
    Evicted,
    Page,
    Read,
    Resized,
    ResizeJob,
)
from ckptless.daemon.protocol.saving import Save, Saved
from ckptless.daemon.settings.config import LocalConfig, load
from ckptless.daemon.settings.site import load_settings

DEADLINE_S = 10.0
A = TypeVar("A", Evicted, Drilled, Resized, Saved)
B = TypeVar("B", Evicted, Drilled, Resized, Saved, KeptList, HealthReport, Page)
_READ_NBYTES = 1 << 16
# Another daemon of this machine may know better.
_NOT_HERE = ("unknown", "elsewhere")


class NoSuchJobError(UsageError):
    """The job is not in what can be read."""

    exit_code = 4


class RefusedError(CkptlessError):
    """The daemon has said why."""


def sockets(asked: Asked) -> tuple[str, ...]:
    """Return the daemons' sockets: the one given, else the local run's and the node's own. UsageError."""
    if asked.socket is not None:
        return (asked.socket,)
    local = sorted(asked.state_dir.glob("node-*/daemon.json"))
    found = tuple(load(path, LocalConfig).socket for path in local)
    if found and asked.chosen_state_dir:
        return found
    return (*found, load_settings().daemon.socket)


def ask_any(
    names: Sequence[str],
    question: Evict | DrillJob | ResizeJob | Save,
    kind: type[A],
    deadline_s: float = DEADLINE_S,
) -> tuple[A, str]:
    """The answer of the first daemon that can say, or the best of those that cannot, and whose it is.

    Raises PeerError where none answers.
    """
    best: tuple[A, str] | None = None
    silent: PeerError | None = None
    for name in names:
        try:
            answer = ask(name, question, kind, deadline_s)
        except PeerError as error:
            silent = error
            continue
        if answer.verdict not in _NOT_HERE:
            return answer, name
        if best is None or best[0].verdict == "unknown":
            best = answer, name
    if best is None:
        raise silent or PeerError("there is no daemon to ask")
    return best


def ask(
    name: str,
    question: Evict | DrillJob | ResizeJob | Save | Read | WhatIsKept | WhatIsWell,
    kind: type[B],
    deadline_s: float = DEADLINE_S,
) -> B:
    """One daemon's answer, within `deadline_s` seconds. Raises PeerError where there is none."""
    limit = time.monotonic() + deadline_s
    decoder: Decoder[B | Denied] = Decoder(kind | Denied, CONTROL_LIMIT)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(deadline_s)
            sock.connect(unix_address(name))
            daemon_credentials(sock, name)
            sock.sendall(encode(question))
            while True:
                sock.settimeout(max(limit - time.monotonic(), 0.001))
                # no deadline: the socket has one
                data = sock.recv(_READ_NBYTES)
                for answer in decoder.feed(data):
                    if isinstance(answer, Denied):
                        raise PeerError(f"the daemon at {name} refuses: {answer.reason}")
                    return answer
                if not data:
                    raise PeerError(f"the daemon at {name} hung up without an answer")
    except ProtocolError as error:
        raise PeerError(f"the daemon at {name} is of another version: {error}") from error
    except TimeoutError as error:
        raise PeerError(f"the daemon at {name} did not answer in {deadline_s:.0f} s") from error
    except OSError as error:
        raise PeerError(f"no ckptlessd answers at {name} ({error.strerror or error})") from error


def tell(
    asked: Asked, answer: Evicted | Drilled | Resized | Saved, well: Collection[str], **document: Any
) -> None:
    """Print what a daemon has said, `document` with --json. Raises unless its verdict is one of `well`."""
    text = render.harmless(answer.text)
    if asked.as_json:
        render.show_json(**document)
    elif answer.verdict in well:
        click.echo(text)
    if answer.verdict not in well:
        raise NoSuchJobError(text) if answer.verdict == "unknown" else RefusedError(text)
