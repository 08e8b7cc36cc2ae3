"""The notice to the daemon: its bytes, and what a dead, deaf or slow daemon costs."""

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from .native import Parsers

DEADLINE_S = 0.3
START_S = 0.25  # what a process may take to start
TRIES = 20
HEARD_S = 20.0
JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_UID": "5001", "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}


def unpack(frame: bytes) -> dict[str, object]:
    (length,) = struct.unpack_from("<I", frame)
    assert length == len(frame) - 4
    notice: dict[str, object] = msgspec.msgpack.decode(frame[4:])
    return notice


@pytest.mark.parametrize("number", [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1])
@pytest.mark.parametrize("spec", ["", "auto", "s" * 31, "s" * 32, "s" * 255, "s" * 256, "s" * 447])
def test_frame_is_what_the_daemon_reads(parsers: Parsers, number: int, spec: str) -> None:
    for kind in ("JobStarted", "JobEnded"):
        (answer,) = parsers.ask("frame", kind, str(number), str(number ^ 1), spec)
        notice = unpack(bytes.fromhex(answer))
        assert notice == {
            "type": kind,
            "protocol": 1,
            "job_id": number,
            "uid": number ^ 1,
            "spec": spec,
        }
        assert list(notice) == ["type", "protocol", "job_id", "uid", "spec"]


class Daemon:
    """A listening socket. Serving: takes what comes and hangs up; not serving: nobody accepts."""

    def __init__(self, path: Path, *, serve: bool) -> None:
        self.frames: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(1)
        self._thread = threading.Thread(target=self._run) if serve else None
        if self._thread:
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed under it
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    frame = b""
                    while piece := connection.recv(4096):
                        frame += piece
                    self.frames.append(frame)

    def heard(self, count: int) -> list[bytes]:
        """Return what has come, once it is so much: whoever sends it does not wait for long."""
        limit = time.monotonic() + HEARD_S
        while len(self.frames) < count and time.monotonic() < limit:
            time.sleep(0.01)
        return self.frames

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread:
            self._thread.join(timeout=10)
            assert not self._thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[Daemon]:
    it = Daemon(path, serve=True)
    yield it
    it.close()


@pytest.fixture
def deaf(path: Path) -> Iterator[Daemon]:
    it = Daemon(path, serve=False)
    yield it
    it.close()


def call(notify: Path, path: Path, *words: str, **env: str) -> tuple[float, str]:
    """Seconds it took, and what it said. It must exit 0."""
    began = time.monotonic()
    result = subprocess.run(
        [notify, "--socket", path, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == 0, result.stderr
    return time.monotonic() - began, result.stderr


def within(bound_s: float, notify: Path, path: Path) -> tuple[float, str]:
    """The same of the first call that took no longer; on a busy machine one or the other may."""
    for _ in range(TRIES):
        took_s, said = call(notify, path, **JOB, SPANK_CKPTLESS="auto")
        if took_s < bound_s:
            return took_s, said
    raise AssertionError(f"{TRIES} calls took {bound_s} s or more, the last one {took_s:.2f} s")


def test_prolog_and_epilog_tell_the_daemon(notify: Path, path: Path, daemon: Daemon) -> None:
    call(notify, path, **JOB, SPANK_CKPTLESS="max-stall=2m,spares=1")
    call(notify, path, **(JOB | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}), SPANK_CKPTLESS="auto")
    call(notify, path, "epilog", **JOB, SPANK_CKPTLESS="auto")
    assert [unpack(frame) for frame in daemon.heard(3)] == [
        {"type": kind, "protocol": 1, "job_id": 77, "uid": 5001, "spec": spec}
        for kind, spec in (
            ("JobStarted", "spares=1,max-stall=120"),
            ("JobEnded", "auto"),
            ("JobEnded", "auto"),
        )
    ]


def test_other_jobs_are_nobodys_business(notify: Path, path: Path, daemon: Daemon) -> None:
    assert call(notify, path, **JOB)[1] == ""
    assert call(notify, path, **JOB, SPANK_CKPTLESS="off")[1] == ""
    assert daemon.frames == []


@pytest.mark.parametrize("asked", ["bogus", "spares=1;reboot", "x" * 10000, "\n\x1b[2J"])
def test_what_is_no_spec_is_not_passed_on(notify: Path, path: Path, daemon: Daemon, asked: str) -> None:
    call(notify, path, **JOB, SPANK_CKPTLESS=asked)
    assert [unpack(frame)["spec"] for frame in daemon.heard(1)] == [""]


@pytest.mark.parametrize("missing", sorted(JOB))
def test_not_called_by_slurm(notify: Path, path: Path, daemon: Daemon, missing: str) -> None:
    env = {name: value for name, value in JOB.items() if name != missing}
    assert "not called by Slurm" in call(notify, path, **env, SPANK_CKPTLESS="auto")[1]
    assert daemon.frames == []


@pytest.mark.parametrize("job_id", ["", "-1", "1x", "4294967296", "99999999999999999999999"])
def test_a_job_id_that_is_none(notify: Path, path: Path, daemon: Daemon, job_id: str) -> None:
    assert (
        "not called by Slurm"
        in call(notify, path, **(JOB | {"SLURM_JOB_ID": job_id}), SPANK_CKPTLESS="auto")[1]
    )
    assert daemon.frames == []


def test_no_daemon_costs_nothing(notify: Path, path: Path) -> None:
    _, said = within(START_S, notify, path)
    assert "connect: No such file or directory" in said


def test_a_dead_daemon_costs_nothing(notify: Path, path: Path) -> None:
    Daemon(path, serve=False).close()
    _, said = within(START_S, notify, path)
    assert "connect: Connection refused" in said


def test_a_daemon_that_does_not_answer_costs_the_deadline(notify: Path, path: Path, deaf: Daemon) -> None:
    took_s, said = within(DEADLINE_S + START_S, notify, path)
    assert took_s >= DEADLINE_S
    assert "wait for the answer: Connection timed out" in said


def test_a_daemon_with_a_full_queue_costs_the_deadline(notify: Path, path: Path, deaf: Daemon) -> None:
    queue = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    with contextlib.ExitStack() as stack:
        for one in queue:
            stack.enter_context(one)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(str(path))
        _, said = within(DEADLINE_S + START_S, notify, path)
    assert "connect: Connection timed out" in said


def test_a_path_that_no_socket_can_have(notify: Path) -> None:
    _, said = call(notify, Path("/" + "x" * 200), **JOB, SPANK_CKPTLESS="auto")
    assert "File name too long" in said


def test_a_daemon_that_hangs_up_at_once(notify: Path, path: Path) -> None:
    """The frame may meet a closed socket: no SIGPIPE, no exit code."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # closed under it
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        within(START_S, notify, path)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)
