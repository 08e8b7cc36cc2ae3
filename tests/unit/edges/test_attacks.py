"""A daemon under attack by other users: it goes on to answer, and its memory, ledger and log stay small."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.ckptlessd.admission import CONNECTIONS_PER_UID, MOST_CONNECTIONS
from ckptless.daemon.ckptlessd.service import RUNS_PER_JOB
from ckptless.daemon.protocol import messages as m

from . import attacked
from . import attackers as a
from .test_service import hello

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot act as other users")

# An attack that works stops the daemon for half a minute; a loaded machine does not.
ANSWER_S = 5.0
MANY_UIDS, USERS = 200_000, MOST_CONNECTIONS // CONNECTIONS_PER_UID + 1
MEMORY_NBYTES = 100 << 20


class Daemon:
    """One in a process of its own; jobs "1..." are the attacker's, all others the victim's."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.address = folder, str(folder / "run" / "d.sock")
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", attacked.__name__, str(folder), *words],
                stdin=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
            )
        self._children: list[int] = []
        limit = time.monotonic() + 60
        while not Path(self.address).exists():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < limit
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def memory_nbytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

    def attack(self, work: Callable[[], object], uid: int = a.ATTACKER) -> int:
        self._children.append(child := a.forked(uid, work))
        return child

    def answers(self, seconds: float = 4.0) -> float:
        """The longest time that another user waited for an answer meanwhile."""
        reader, writer = os.pipe()
        child = a.forked(a.VICTIM, lambda: os.write(writer, b"%f" % a.longest_answer(self.address, seconds)))
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            told = answer.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, self.log
        return float(told)

    def wait(self, child: int, seconds: float = 60.0) -> None:
        self._children.remove(child)
        limit = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < limit
            time.sleep(0.05)

    def close(self) -> None:
        """It ends at once, whatever lies in its sockets."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0, self.log
        assert "Traceback" not in self.log


@pytest.fixture
def daemon() -> Iterator[Callable[..., Daemon]]:
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> Daemon:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-")))
            folder.chmod(0o755)
            running = Daemon(folder, *words)
            stack.callback(running.close)
            return running

        yield start


Start = Callable[..., Daemon]


@pytest.mark.parametrize("kernel", ["this", "old"])
def test_descriptors_that_take_long_to_close(daemon: Start, kernel: str) -> None:
    """An old kernel has no SO_PASSRIGHTS: then they come, and are closed where nobody waits."""
    running = daemon(kernel)
    running.attack(lambda: a.pass_lingering(running.address, 20))
    running.attack(lambda: a.pass_lingering(running.address, 5))
    longest = running.answers()
    print(f"longest answer: {longest:.3f} s")
    assert longest < ANSWER_S


def test_bytes_before_a_hello(daemon: Start) -> None:
    running = daemon()
    before = running.memory_nbytes
    running.attack(lambda: a.pour(running.address, 40, 15 << 20))
    longest = running.answers(8.0)
    grown = running.memory_nbytes - before
    print(f"longest answer: {longest:.3f} s, {grown >> 20} MiB more")
    assert longest < ANSWER_S
    assert grown < MEMORY_NBYTES
    assert running.log.count(f"of uid {a.ATTACKER}") == 1, running.log


def test_connections_that_say_nothing(daemon: Start) -> None:
    running = daemon()
    running.attack(lambda: a.be_silent(running.address, 600))
    longest = running.answers(8.0)
    print(f"longest answer: {longest:.3f} s")
    assert longest < ANSWER_S
    assert running.log.count(f"of uid {a.ATTACKER}") == 1, running.log


def test_questions_of_a_user_with_many_uids(daemon: Start) -> None:
    """As subuid(5) gives them to everybody: enough to take every connection that there is."""
    running = daemon()
    for uid in range(USERS):
        running.attack(lambda: a.ask_and_stay(running.address, CONNECTIONS_PER_UID), MANY_UIDS + uid)
    longest = running.answers(8.0)
    print(f"longest answer: {longest:.3f} s")
    assert longest < ANSWER_S


def test_noise(daemon: Start) -> None:
    running = daemon()
    child = running.attack(lambda: a.make_noise(running.address, 2000))
    assert running.answers() < ANSWER_S
    running.wait(child)
    assert running.log.count(f"of uid {a.ATTACKER}") == 1, running.log


# ------------------------------------------------------------------------------ the owner of a job


def test_a_hello_of_a_monstrous_job(daemon: Start) -> None:
    running = daemon()
    before = running.memory_nbytes
    monster = msgspec.to_builtins(hello("1"))
    monster["spec"]["slots_per_node"] = 20_000_000
    child = running.attack(lambda: a.say(running.address, monster, deadline_s=5.0))
    longest = running.answers()
    print(f"longest answer: {longest:.3f} s")
    assert longest < ANSWER_S
    running.wait(child)
    assert running.memory_nbytes - before < MEMORY_NBYTES
    assert "slots_per_node" in running.log


def test_runs_without_end(daemon: Start) -> None:
    running = daemon()
    hellos = [hello(f"1.{number}") for number in range(800)]
    children = [running.attack(functools.partial(a.run_many, running.address, [one])) for one in hellos[:100]]
    children.append(running.attack(lambda: a.run_many(running.address, hellos)))
    assert running.answers() < ANSWER_S
    for child in children:
        running.wait(child)
    assert 0 < running.log.count(" agent-up: ") <= RUNS_PER_JOB, running.log


def test_events_without_end(daemon: Start) -> None:
    """Long ones, many, and such as forge a line of the log."""
    running = daemon()
    forged = "x\n12:00:00.000 ckptlessd INFO job 2: all is well\x1b[2J"
    events = [m.AgentEvent(level="info", kind="k", text=forged)] * 5000
    child = running.attack(lambda: a.say(running.address, hello("1"), *events, deadline_s=2.0))
    longest = running.answers()
    print(f"longest answer: {longest:.3f} s")
    assert longest < ANSWER_S
    running.wait(child)
    long = m.AgentEvent(level="info", kind="k", text="y" * 500_000)
    running.wait(running.attack(lambda: a.say(running.address, hello("1"), long, deadline_s=2.0)))
    log = running.log
    assert len(log) < 200_000
    assert not any(line.startswith("12:00:00.000") for line in log.splitlines())
    assert "\x1b" not in log
    assert all("job 1" in line for line in log.splitlines() if " k: " in line)
    assert "not written" in log
    ledger = sum(file.stat().st_size for file in (running.folder / "state").iterdir())
    assert ledger < 2 << 20
