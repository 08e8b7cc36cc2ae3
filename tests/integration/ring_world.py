"""The agent's part of rings in a process of its own, and what tests of it look at."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ckptless.daemon.protocol.model import RingState

DEADLINE_S = 60.0


class Agent:
    """An agent, which keeps rings only, in a process of its own."""

    def __init__(self, tmp: Path, lease_s: float = 30.0) -> None:
        self.socket = str(tmp / "agent.sock")
        command = [sys.executable, str(Path(__file__).parent / "ring_agent.py"), self.socket, str(lease_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.events: list[tuple[str, str]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.expect("ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.events.append(tuple(json.loads(line)))
                self._news.notify_all()

    def expect(self, kind: str) -> str:
        with self._news:
            assert self._news.wait_for(lambda: any(k == kind for k, _ in self.events), DEADLINE_S), (
                self.events
            )
            return next(text for k, text in self.events if k == kind)

    def told(self) -> tuple[RingState, ...]:
        """Return what its rings say of themselves."""
        assert self._process.stdin is not None
        before = sum(kind == "told" for kind, _ in self.events)
        self._process.stdin.write(b"told\n")
        self._process.stdin.flush()
        until(lambda: sum(kind == "told" for kind, _ in self.events) > before)
        text = next(text for kind, text in reversed(self.events) if kind == "told")
        return msgspec.json.decode(text, type=tuple[RingState, ...])

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if status == 0:
            # Nothing is left open in it.
            assert self.events[-1] == ("left", "0")


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def children(pid: int | None = None) -> list[int]:
    pid = pid or os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def links(pid: int) -> list[str]:
    """Return what a process has open, but what it closes meanwhile."""
    found = []
    for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def producers() -> list[int]:
    return [pid for pid in children() if Path(f"/proc/{pid}/comm").read_text() == "ckptless-data\n"]


@contextlib.contextmanager
def one_agent(folder: Path) -> Iterator[Agent]:
    """An agent; after it this process has no child and no descriptor more than before."""
    before = open_fds()
    made = Agent(folder)
    yield made
    for pid in set(children()) - {made.pid}:
        # Of a test that failed: whatever was forked from here holds open what ends the agent.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    made.close()
    assert children() == []
    assert open_fds() == before
