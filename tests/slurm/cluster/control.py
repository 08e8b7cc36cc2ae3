"""How the PID 1 of a machine is asked about its services: one line of JSON to a Unix socket, one line back.

The socket lies in the machine's own /run and is reached from outside through /proc/PID/root: its path is
short whatever the cluster's directory, and it is gone when the machine is.

    {"do": "status"}                                 -> {"units": {NAME: what `machine.Unit` has}}
    {"do": "start", "name": NAME}                    -> {"pid": PID}
    {"do": "signal", "name": NAME, "signal": NUMBER} -> {"pid": PID or null}
    {"do": "stop", "name": NAME, "signal": NUMBER}   -> the same; it is not started again
    anything else, an unknown name                   -> {"error": SENTENCE}
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from .plan import ClusterError
from .supervise import Supervisor

SOCKET = Path("/run/init.socket")
ANSWER_S = 5.0
ASK_S = 1.0
LONGEST = 65536

Message = dict[str, Any]


def listen() -> socket.socket:
    """The socket of this machine, for root only."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(SOCKET))
    SOCKET.chmod(0o600)
    server.listen(16)
    return server


def answer_one(server: socket.socket, supervisor: Supervisor) -> None:
    """Take one connection and answer it; whoever does not ask within a second is left."""
    connection, _ = server.accept()
    with connection:
        connection.settimeout(ASK_S)
        try:
            request = json.loads(_line(connection))
            reply = _handle(supervisor, request)
        except ClusterError as error:
            reply = {"error": str(error)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            reply = {"error": f"bad request: {error!r}"}
        try:
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except OSError as error:
            print(f"nobody waits for the answer: {error}", flush=True)


def _handle(supervisor: Supervisor, request: Message) -> Message:
    if request["do"] == "status":
        return {
            "units": {
                name: {
                    "pid": unit.pid,
                    "wanted": unit.wanted,
                    "starts": unit.starts,
                    "started_s": unit.started_s,
                    "last_exit": unit.last_exit,
                }
                for name, unit in supervisor.units.items()
            }
        }
    name = request["name"]
    if request["do"] == "start":
        return {"pid": supervisor.start(name)}
    if request["do"] not in ("stop", "signal"):
        raise ClusterError(f"PID 1 does not know how to {request['do']!r}")
    pid = supervisor.stopping(name) if request["do"] == "stop" else supervisor.pid(name)
    if pid is not None:
        os.kill(pid, int(request["signal"]))  # not reaped yet, so it is no other process
    return {"pid": pid}


def ask(pid: int, request: Message) -> Message:
    """What the machine whose PID 1 is `pid` here answers. Raises ClusterError: it refuses, or is silent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(f"/proc/{pid}/root{SOCKET}")
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = json.loads(_line(connection))
        except (OSError, ValueError) as error:
            raise ClusterError(f"PID 1 of the machine (pid {pid}) does not answer: {error}") from error
    if "error" in reply:
        raise ClusterError(reply["error"])
    return dict(reply)


def _line(connection: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        more = connection.recv(4096)
        if not more or len(text) > LONGEST:
            raise ValueError(f"no line of JSON but {text[:80]!r}")
        text += more
    return text
