"""A munged of the test's own: own key, own socket, ended with the test."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 20.0
STRANGER = 65534  # "nobody": a uid that is neither root nor ours


def require(reason: str) -> None:
    """Skip for `reason`; where the whole suite is wanted, fail."""
    if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class Munged:
    """A running munged."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "munge.sock"
        self._log = folder / "munged.out"
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        binary = shutil.which("munged") or "/usr/sbin/munged"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    binary,
                    "--foreground",
                    f"--key-file={key}",
                    f"--socket={self.socket}",
                    f"--pid-file={folder / 'munged.pid'}",
                    f"--seed-file={folder / 'munged.seed'}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Until it takes connections."""
        deadline_s = time.monotonic() + START_S
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.socket)) == 0:
                    return
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.01)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While it hangs."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running() -> Iterator[Munged]:
    """A munged in a folder that every user may enter, as its clients must."""
    if shutil.which("munged") is None and not Path("/usr/sbin/munged").exists():
        require("munged is not installed (Debian: munge)")
    with tempfile.TemporaryDirectory(prefix="munged-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        munged = Munged(folder)
        try:
            munged.wait_ready()
            yield munged
        finally:
            munged.end()


def as_uid(uid: int, work: Callable[[], bytes]) -> bytes:
    """Return what `work` returns in a child process of another user (needs root)."""
    if os.geteuid() != 0:
        require("not root: cannot act as another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, work())
            status = 0
        finally:
            os._exit(status)  # nothing of pytest runs in the child
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return data
