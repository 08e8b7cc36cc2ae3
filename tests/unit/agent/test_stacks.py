"""The stacks of a process that does not get on: read from what it, py-spy and the kernel say of real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.agent.core.stillness import (
    OVER_S,
    SPINS_ASKED,
    SPINS_RAN_S,
    SPINS_S,
    Activity,
    Watched,
)
from ckptless.daemon.agent.ranks import stacks
from ckptless.daemon.agent.ranks.activity import activity
from ckptless.daemon.agent.ranks.stacks import Frame, kernels_view, main_thread, native, place, spot
from ckptless.daemon.protocol.messages import STACKS_SIGNAL

DEADLINE_S = 30.0
WRITTEN = f"""Thread 0x00007f6d5dffb6c0 (most recent call first):
  File "{os.__file__}", line 81 in _worker
  File "/home/me/other.py", line 1 in helper

Current thread 0x00007f6d87c45b80 (most recent call first):
  File "{os.__file__}", line 327 in wait
  File "/home/me/my train.py", line 32 in in_the_way
  File "/home/me/my train.py", line 47 in train
"""
SPIED = f"""Process 8831: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 8831 (idle): "MainThread"
    wait ({os.__file__}:327)
    in_the_way (/home/me/my train.py:32)
    train (/home/me/my train.py:47)
Thread 8865 (idle): "Thread-1 (<lambda>)"
    helper (/home/me/other.py:1)
"""
CALLS = (
    Frame(os.__file__, 327, "wait"),
    Frame("/home/me/my train.py", 32, "in_the_way"),
    Frame("/home/me/my train.py", 47, "train"),
)


@pytest.mark.parametrize("text", [WRITTEN, SPIED])
def test_the_main_thread_s_calls_and_its_place_in_the_script(text: str) -> None:
    assert main_thread(text) == CALLS
    assert place(main_thread(text)) == "in_the_way (my train.py, line 32)"


def test_where_all_is_a_library_it_is_the_innermost_call() -> None:
    of_library = WRITTEN.split("\n\n")[0].replace("/home/me/other.py", os.__file__)
    assert place(main_thread(of_library)) == "_worker (os.py, line 81)"


@pytest.mark.parametrize("text", ["", "garbage\n  File x", "py-spy cannot: Error: Permission Denied"])
def test_of_what_nobody_can_read_there_is_no_place(text: str) -> None:
    assert place(main_thread(text)) == ""
    assert not spot(main_thread(text))


def test_the_innermost_call_s_line_is_no_other_place() -> None:
    inner, *outer = CALLS
    assert spot(CALLS) == spot((inner._replace(line=330), *outer))
    assert spot(CALLS) != spot((inner._replace(function="get"), *outer))
    assert spot(CALLS) != spot((inner, outer[0]._replace(line=33), outer[1]))
    assert spot(CALLS) != spot(CALLS[1:])


# ------------------------------------------------------------------------------- one that spins


def watched(
    looks: int, *, ran_s: float = OVER_S, asked: int = 0, places: Sequence[str] = "a", blocked: bool = False
) -> Watched:
    """A process that was asked so often, `OVER_S` apart; it writes a thousand times whenever it is asked."""
    one = Watched(0.0)
    for number in range(looks):
        now, of_asking = number * OVER_S, 1000 * number
        assert one.asks_where(now) or one._there is None
        before = Activity(number * ran_s, asked=number * asked + of_asking, blocked=blocked)
        after = Activity(number * ran_s, asked=number * asked + of_asking + 1000)
        one.found(places[number % len(places)], before, after, now)
        assert not one.asks_where(now + OVER_S - 0.1)
    return one


ENOUGH = round(SPINS_S / OVER_S) + 1


def test_one_that_runs_in_one_place_and_asks_for_nothing_spins() -> None:
    assert watched(ENOUGH).how(0.0, 3.5) == "spinning"
    assert watched(ENOUGH - 1).how(0.0, 3.5) == "working"
    # As long again as it took to be late.
    assert watched(ENOUGH).how(0.0, SPINS_S + 0.1) == "working"
    assert watched(ENOUGH).how(0.0, None) == "working"


def test_one_that_had_no_time_to_run_does_not_spin() -> None:
    assert watched(ENOUGH, ran_s=SPINS_RAN_S / (ENOUGH - 1)).how(0.0, 3.5) == "spinning"
    assert watched(ENOUGH, ran_s=SPINS_RAN_S / ENOUGH).how(0.0, 3.5) == "working"


def test_one_that_reads_or_is_given_memory_does_not_spin() -> None:
    assert watched(ENOUGH, asked=int(SPINS_ASKED * OVER_S)).how(0.0, 3.5) == "spinning"
    assert watched(ENOUGH, asked=int(SPINS_ASKED * OVER_S) + 1).how(0.0, 3.5) == "working"


@pytest.mark.parametrize("more", [{"places": "ab"}, {"places": ("a", "")}, {"blocked": True}])
def test_one_that_is_elsewhere_once_or_waits_for_a_disk_does_not_spin(more: dict[str, Any]) -> None:
    one = watched(30, **more)
    assert one.how(0.0, 3.5) == "working"
    assert not one.asks_where(1e6), "it is not disturbed any more"


def test_whoever_gets_on_begins_anew() -> None:
    one = watched(ENOUGH)
    one.see(b"moved", 50.0)
    assert one.how(0.0, 3.5) == "working"
    assert one.asks_where(50.0)


def test_one_that_answers_nothing_is_deaf_all_the_same() -> None:
    assert watched(ENOUGH).how(100.0, 3.5) == "deaf"


# ---------------------------------------------------------------------- while it is being written


class Paper:
    """A page to which a process writes so much from look to look."""

    def __init__(self, *parts: str) -> None:
        self.closed, self.parts = False, [*parts]

    def new_stacks(self) -> str:
        return self.parts.pop(0) if self.parts else ""


THREAD, MAIN = WRITTEN.split("\n\n")
ENDS = f'{MAIN}  File "<frozen runpy>", line 198 in _run_module_as_main\n'


@pytest.mark.parametrize("cut", [1, 40, len(THREAD), len(THREAD) + 60, len(THREAD) + len(MAIN) - 9])
def test_what_is_written_with_pauses_is_waited_for(cut: int) -> None:
    """Its process gets no processor for a while, in the middle of it."""
    whole = f"{THREAD}\n\n{ENDS}"
    paper = Paper("", whole[:cut], "", "", whole[cut:], "", "too late")
    sent: list[int] = []
    assert asyncio.run(stacks.written_by(paper, sent.append)) == whole
    assert paper.parts == ["too late"]
    assert sent == [STACKS_SIGNAL]


def test_what_is_cut_off_by_its_writer_is_not_waited_for() -> None:
    paper = Paper(deep := f"{MAIN}  ...\n", "", "too late")
    assert asyncio.run(stacks.written_by(paper, lambda _: None)) == deep


def test_of_one_that_writes_nothing_it_is_waited_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "WRITTEN_S", 0.1)
    assert asyncio.run(stacks.written_by(Paper(), lambda _: None)) == ""
    assert asyncio.run(stacks.written_by(Paper(THREAD), lambda _: None)) == THREAD


# -------------------------------------------------------------------------------- real processes

HANG = """
import ctypes, os, signal, sys, threading, time
def hangs():
    print("hangs", flush=True)
    {how}
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
hangs()
"""


@contextmanager
def process(how: str, state: str = "S (sleeping)") -> Iterator[int]:
    code = HANG.format(how=how)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == b"hangs\n"
            # It says so a moment before.
            deadline = time.monotonic() + DEADLINE_S
            while state not in kernels_view(one.pid).partition("\n")[0]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield one.pid
        finally:
            one.kill()


def spied(pid: int, *, stopped: bool = False) -> str:
    return asyncio.run(native(pid, lambda number: os.kill(pid, number), stopped=stopped))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a busy machine takes does not matter here."""
    monkeypatch.setattr(stacks, "NATIVE_S", DEADLINE_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["ctypes.PyDLL(None).pause()", "ctypes.CDLL(None).pause()"])
def test_native_stacks_of_all_threads_whoever_holds_the_interpreter(how: str) -> None:
    with process(how) as pid:
        found = spied(pid)
    assert main_thread(found)[-1].function == "<module>", found
    assert "_ctypes" in found, "a frame that is no Python"
    assert found.count("\nThread ") == 2


@pytest.mark.usefixtures("patient")
def test_of_one_that_is_stopped_there_are_the_interpreter_s() -> None:
    with process("os.kill(os.getpid(), signal.SIGSTOP)", "T (stopped)") as pid:
        found = spied(pid, stopped=True)
        assert "(stopped)" in kernels_view(pid), "it stays stopped"
    assert [one.function for one in main_thread(found)] == ["hangs", "<module>"], found


@pytest.mark.usefixtures("patient")
def test_where_nothing_can_be_read_it_is_said_why() -> None:
    with subprocess.Popen(["sleep", "100"]) as one:
        found = spied(one.pid)
        one.kill()
    assert found.startswith("py-spy cannot: Error: "), found
    assert "\n" not in found


def test_without_py_spy_it_is_said_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PROGRAM", "no-such-spy")
    assert spied(os.getpid()) == "no-such-spy is not installed here (pip install 'ckptless[stacks]')"


def test_one_that_takes_too_long_is_ended_and_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow-spy"
    slow.write_text("#!/bin/sh\necho $$ > " + str(tmp_path / "pid") + "\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(stacks, "PROGRAM", "slow-spy")
    monkeypatch.setattr(stacks, "NATIVE_S", 1.0)
    sent: list[int] = []
    found = asyncio.run(native(os.getpid(), sent.append, stopped=False))
    assert found == "slow-spy has not ended in 1 s"
    assert sent == [signal.SIGCONT], "what it may have stopped goes on"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_what_the_kernel_says_of_each_thread() -> None:
    with process("threading.Lock().acquire() and time.sleep(100)") as pid:
        lines = [line for line in kernels_view(pid).splitlines() if line.startswith("thread ")]
    assert len(lines) == 2
    assert lines[0].startswith(f"thread {pid} (python"), lines
    assert "S (sleeping), in " in lines[0], lines
    assert ", system call " in lines[0], lines


def test_of_a_process_that_has_ended_it_says_that_nothing_could_be_read(tmp_path: Path) -> None:
    assert kernels_view(1, tmp_path).startswith("nothing could be read: ")
    (tmp_path / "1" / "task" / "1").mkdir(parents=True)
    assert kernels_view(1, tmp_path) == "thread 1 (?): ?, in ?, system call ?"


def test_what_a_process_asks_the_kernel_for_is_counted() -> None:
    spins = "exec('while True: pass')"
    reads = "exec('while True: open(os.devnull).read()')"
    grows = "exec('kept = []\\nwhile len(kept) < 10**4: kept.append(bytearray(10**5)); time.sleep(0.001)')"
    asked = {}
    for how in (spins, reads, grows):
        with process(how, "") as pid:
            deadline = time.monotonic() + DEADLINE_S
            before = now = activity(pid)
            assert before is not None
            # Until it has run for a while, on a busy machine too; one that sleeps, for as many looks.
            while now is not None and now.ran_s - before.ran_s < 0.3 and time.monotonic() < deadline:
                time.sleep(0.1)
                now = activity(pid)
            assert now is not None
            asked[how] = now.asked - before.asked
    assert asked[spins] <= SPINS_ASKED < min(asked[reads], asked[grows]), asked
