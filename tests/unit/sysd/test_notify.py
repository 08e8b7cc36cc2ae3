"""sd_notify on real Unix datagram sockets: paths, abstract names, nobody there, a reader that is full."""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.systemd import SEND_S, Notifier, inherited


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@ckptless-{os.getpid()}-notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name if name[0] == "/" else "\0" + name[1:])
        listener.settimeout(5)
        yield listener, name


def test_every_message(systemd: tuple[socket.socket, str]) -> None:
    listener, name = systemd
    notifier = Notifier(name)
    assert notifier.ready("serving 2 jobs")
    assert listener.recv(4096) == b"READY=1\nSTATUS=serving 2 jobs"
    assert notifier.ready()
    assert listener.recv(4096) == b"READY=1"
    before_us = time.monotonic_ns() // 1000
    assert notifier.reloading()
    first, second = listener.recv(4096).split(b"\n")
    assert first == b"RELOADING=1"
    assert before_us <= int(second.removeprefix(b"MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    assert notifier.status("fine")
    assert listener.recv(4096) == b"STATUS=fine"
    assert notifier.watchdog()
    assert listener.recv(4096) == b"WATCHDOG=1"
    assert notifier.stopping("jobs go on")
    assert listener.recv(4096) == b"STOPPING=1\nSTATUS=jobs go on"


def test_a_status_is_one_line(systemd: tuple[socket.socket, str]) -> None:
    listener, name = systemd
    Notifier(name).status("a job's words\nMAINPID=1\r\n" + "x" * 9000)
    (line,) = listener.recv(16384).split(b"\n")
    assert line.startswith(b"STATUS=a job's words MAINPID=1 xxx")
    assert len(line) < 500


def test_the_environment_is_taken(systemd: tuple[socket.socket, str]) -> None:
    listener, name = systemd
    environment = {"NOTIFY_SOCKET": name, "HOME": "/root"}
    assert Notifier.from_environment(environment).ready()
    assert environment == {"HOME": "/root"}
    assert listener.recv(4096) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_systemd(environment: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment)
    assert not any((notifier.ready("x"), notifier.reloading(), notifier.watchdog(), notifier.stopping()))


def test_an_address_that_is_no_unix_socket(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier("vsock:2:1")
    assert not notifier.ready()
    assert "vsock:2:1" in caplog.text


def test_nobody_there_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier(str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not notifier.watchdog()
        assert len(caplog.records) == 1
        assert "WATCHDOG=1" in caplog.text
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(str(tmp_path / "gone"))
            assert notifier.watchdog()
        assert not notifier.watchdog()
        assert len(caplog.records) == 2


def test_a_full_queue_does_not_hold_the_daemon_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "slow"))
        notifier = Notifier(str(tmp_path / "slow"))
        sent = 0
        while notifier.watchdog():
            sent += 1
            assert sent < 10_000
        start_s = time.monotonic()
        assert not notifier.watchdog()
        assert SEND_S * 0.9 < time.monotonic() - start_s < SEND_S + 2
        listener.recv(64)
        assert notifier.watchdog()


LISTENING = """
import os, socket, sys
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.ckptlessd.systemd import inherited

os.environ["LISTEN_PID"] = str(os.getpid())
try:
    found = inherited(os.environ)
except UsageError as error:
    sys.exit(f"refused: {error}")
assert not [name for name in os.environ if name.startswith("LISTEN_")]
for name, one in found.items():
    assert not os.get_inheritable(one.fileno()) and not one.getblocking()
    print(name, one.getsockname(), one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), sep="|")
"""


def activated(environment: dict[str, str], *fds: int) -> subprocess.CompletedProcess[str]:
    """Run LISTENING with `fds` as descriptors 3 and up, as systemd would."""
    moves = "; ".join(f"os.dup2({fd}, {200 + n})" for n, fd in enumerate(fds))
    moves += "; " + "; ".join(f"os.dup2({200 + n}, {3 + n})" for n in range(len(fds)))
    start = f"import os, sys; {moves}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    return subprocess.run(
        [sys.executable, "-c", start, LISTENING],
        env={**os.environ, **environment},
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_sockets_of_a_socket_unit(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as agents,
        socket.create_server(("127.0.0.1", 0)) as peers,
    ):
        agents.bind(str(tmp_path / "agents"))
        agents.listen()
        done = activated(
            {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "agents:peers"}, agents.fileno(), peers.fileno()
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"agents|{tmp_path / 'agents'}|1",
            f"peers|{peers.getsockname()}|1",
        ]
        unnamed = activated({"LISTEN_FDS": "1"}, agents.fileno())
        assert unnamed.stdout.startswith("fd3|"), unnamed.stderr


def test_a_descriptor_that_is_no_socket(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        done = activated({"LISTEN_FDS": "1"}, file.fileno())
    assert done.returncode == 1
    assert "refused: LISTEN_FDS=1, and descriptor 3 is no socket" in done.stderr


def test_sockets_for_another_process() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "PATH": "/bin"}
    assert inherited(environment) == {}
    assert environment == {"PATH": "/bin"}
