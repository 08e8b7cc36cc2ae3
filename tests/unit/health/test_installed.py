"""Probes of installed packages: whatever they do in their processes, the daemon goes on and none is left."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.health import installed, installed_main
from ckptless.daemon.ckptlessd.health.answers import ProbeError
from ckptless.daemon.ckptlessd.health.installed import InstalledProbe
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[3]


class Good:
    """Its looks count, so it is seen whether the same object looks again."""

    interval_s, deadline_s = 7.0, 60.0

    def __init__(self) -> None:
        self.looks = 0

    def missing(self) -> str:
        return ""

    def look(self) -> Any:
        self.looks += 1
        return [Finding(code="good", where="here", evidence=str(self.looks))]

    def close(self) -> None:
        if note := os.environ.get("NOTE"):
            Path(note).write_text("closed")


class Quick(Good):
    deadline_s = 0.3


def hold() -> None:
    """Never come back, nor give the interpreter to another thread."""
    while True:
        ctypes.PyDLL(None).pause()


class Holds(Quick):
    def look(self) -> Any:
        hold()


class HoldsAsItIsLoaded(Quick):
    def __init__(self) -> None:
        hold()


class Stops(Quick):
    def look(self) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)


class Raises(Good):
    def look(self) -> Any:
        raise ValueError("two\nlines")


class RaisesFirst(Good):
    def missing(self) -> str:
        raise OSError(5, "Input/output error")


class Lacks(Good):
    def missing(self) -> str:
        return "there is no\nGPU"


class Nonsense(Good):
    def look(self) -> Any:
        return [7]


class Prints(Good):
    def look(self) -> Any:
        for out in (sys.stdout, sys.stderr):
            for _ in range(50):
                out.write("x" * (1 << 20))
        return super().look()


class Exits(Good):
    def look(self) -> Any:
        os._exit(3)


class Breaks(Good):
    def look(self) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


class Disconnects(Good):
    def look(self) -> Any:
        os.closerange(3, 256)
        hold()


class Garbles(Good):
    def look(self) -> Any:
        for one in range(3, 64):
            try:
                os.write(one, b"\xff\xfe not JSON\n")
            except OSError:
                continue
        hold()


class Floods(Good):
    def look(self) -> Any:
        for one in range(3, 64):
            try:
                while True:
                    os.write(one, bytes(1 << 20))
            except OSError:
                continue


class Surrogates(Good):
    def look(self) -> Any:
        return [Finding(code="bad", evidence=b"\xff\x1b".decode(errors="surrogateescape"))]


class Spawns(Good):
    """What it starts it never ends: a program, and a fork that has all its descriptors."""

    def look(self) -> Any:
        program = subprocess.Popen(["sleep", "1000"])
        fork = os.fork()
        if not fork:
            time.sleep(1000)
            os._exit(0)
        return [Finding(code="pids", evidence=f"{program.pid} {fork}")]


def children() -> set[str]:
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


def descriptors() -> set[str]:
    folder = Path("/proc/self/fd")
    return {f"{one.name} {one.readlink()}" for one in folder.iterdir() if one.is_symlink()}


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = descriptors(), children()
    yield
    assert (descriptors(), children()) == before


def probe(kind: type) -> InstalledProbe:
    return InstalledProbe(f"{__name__}:{kind.__name__}")


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def fails(one: InstalledProbe, looks: int = 2) -> Sequence[str]:
    said = []
    for _ in range(looks):
        with pytest.raises(ProbeError) as caught:
            one.look()
        said.append(str(caught.value))
    return said


def test_one_process_looks_again_and_again_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTE", str(tmp_path / "note"))
    one = probe(Good)
    is_a_probe: Probe = one
    assert is_a_probe.missing() == ""
    assert (one.interval_s, one.deadline_s) == (7.0, 60.0)
    found = [one.look() for _ in range(3)]
    assert found == [[Finding(code="good", where="here", evidence=str(looks))] for looks in (1, 2, 3)]
    one.close()
    assert (tmp_path / "note").read_text() == "closed"


@pytest.mark.parametrize("kind", [Holds, Stops])
def test_one_that_holds_its_interpreter_is_ended_after_its_deadline(kind: type) -> None:
    one = probe(kind)
    assert one.missing() == ""
    assert fails(one) == ["it has not answered in 0.3 s, and is ended"] * 2
    one.close()


def test_one_that_hangs_as_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "START_S", 0.5)
    one = probe(HoldsAsItIsLoaded)
    with pytest.raises(ProbeError, match=r"it has not answered in 0\.5 s, and is ended"):
        one.missing()
    one.close()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Raises, r"ValueError: two\nlines"),
        (Nonsense, "it returned a int, which is no finding"),
        (Exits, "its process has ended, exit code 3"),
        (Breaks, "its process has ended, signal 11"),
        (Disconnects, "its process has closed the connection"),
        (Floods, "it has found more than can be told"),
    ],
)
def test_what_it_does_wrong_is_told_of_every_look(kind: type, words: str) -> None:
    one = probe(kind)
    assert one.missing() == ""
    assert fails(one) == [words] * 2
    one.close()


def test_what_is_no_answer() -> None:
    one = probe(Garbles)
    assert one.missing() == ""
    assert all(said.startswith("it says something else than what it has found: ") for said in fails(one))
    one.close()


def test_what_is_missing_or_raised_at_first() -> None:
    lacks, raises = probe(Lacks), probe(RaisesFirst)
    assert lacks.missing() == r"there is no\nGPU"
    with pytest.raises(ProbeError, match=r"OSError: \[Errno 5\] Input/output error"):
        raises.missing()
    lacks.close()
    raises.close()


def test_what_it_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    one = probe(Prints)
    assert one.missing() == ""
    assert len(one.look()) == 1
    one.close()
    assert capfd.readouterr() == ("", "")


def test_bytes_that_are_no_text() -> None:
    one = probe(Surrogates)
    assert one.missing() == ""
    assert one.look() == [Finding(code="bad", evidence=r"\udcff\x1b")]
    one.close()


def test_what_it_has_started_ends_with_it() -> None:
    one = probe(Spawns)
    assert one.missing() == ""
    pids = [int(pid) for _ in range(2) for pid in one.look()[0].evidence.split()]
    assert len({*pids}) == 4
    assert all(map(lives, pids))
    one.close()
    until(lambda: not any(map(lives, pids)))


def test_the_kernel_ends_one_that_nobody_is_there_to_end() -> None:
    """As after a daemon that was killed while a probe held its interpreter."""
    link, theirs = socket.socketpair()
    code = f"import {installed_main.__name__} as module; module.SPARE_S = 0.2; module.main()"
    argv = [sys.executable, "-c", code, f"{__name__}:Holds", str(theirs.fileno())]
    process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),))
    theirs.close()
    assert link.recv(1 << 16).endswith(installed_main.END)
    link.send(installed_main.ASK)
    link.close()
    assert process.wait(DEADLINE_S) == -signal.SIGALRM


def test_it_belongs_to_one_thread_after_the_other() -> None:
    """A look's thread ends before the next one's begins, and its process lives on."""
    one = probe(Good)
    said: list[object] = [one.missing()]
    for _ in range(2):
        thread = threading.Thread(target=lambda: said.append(one.look()[0].evidence))
        thread.start()
        thread.join(DEADLINE_S)
    assert said == ["", "1", "2"]
    one.close()
