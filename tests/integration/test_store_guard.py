"""Real processes at the agent's store: those of the job come in, however they were started; others do not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from ckptless.daemon.agent.kvstore import guard as store_guard
from ckptless.daemon.agent.kvstore.guard import StoreGuard, descendants, descendants_by_parents
from ckptless.daemon.agent.kvstore.server import StoreServer

DEADLINE_S = 20.0
NOBODY = 65534
# Speaks the first words of torch's client (VALIDATE and the magic, PING 7), and says whether it was answered.
CLIENT = """
import os, socket, struct, sys
sock = socket.socket()
sock.settimeout(15)
sock.connect(("127.0.0.1", int(sys.argv[1])))
try:
    sock.sendall(b"\\x00" + struct.pack("<I", 0x3C85F7CE) + b"\\x0d" + struct.pack("<I", 7))
    answer = sock.recv(4)
except ConnectionError:
    answer = b""
print("in" if answer == struct.pack("<I", 7) else "out", os.getuid(), flush=True)
"""
# A rank: a process that starts the client as it is told, waits for it, and hands its words on.
RANK = """
import os, subprocess, sys
port, how, client = sys.argv[1:]
words = [sys.executable, "-c", client, port]
if how == "itself":
    sys.argv = ["-", port]
    exec(client)
elif how == "child":
    print(subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout, end="")
elif how == "shell":
    # The client is the child of a shell that is the child of a shell.
    print(subprocess.run(["sh", "-c", 'sh -c \\'"$@"; true\\' - "$@"; true', "-", *words],
                         stdout=subprocess.PIPE, text=True).stdout, end="")
elif how == "thread":
    import threading
    done = []
    def work():
        done.append(subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(done[0], end="")
"""


def run_at(
    refuses: Callable[[int], Callable[..., str | None]], words: Callable[[int], list[str]]
) -> tuple[list[str], int]:
    """Start a program at a store whose guard is made for its pid; what it said, and how many were refused."""

    async def body() -> tuple[list[str], int]:
        # Which process the guard is for is known only once it runs: it waits for a line before it connects.
        made: list[Callable[..., str | None]] = []
        server = StoreServer(lambda own, peer: made[0](own, peer))
        port = await server.start("127.0.0.1")
        waits = ["sh", "-c", 'read line && exec "$@"', "-", *words(port)]
        process = await asyncio.create_subprocess_exec(
            *waits, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            made.append(refuses(process.pid))
            async with asyncio.timeout(DEADLINE_S):
                out, _ = await process.communicate(b"\n")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await server.close()
        return out.decode().split(), server.refused

    return asyncio.run(body())


@pytest.fixture
def events() -> list[tuple[str, str]]:
    return []


@pytest.mark.parametrize("how", ["itself", "child", "shell", "thread"])
def test_a_rank_and_what_it_starts_come_in(how: str, events: list[tuple[str, str]]) -> None:
    said, refused = run_at(
        lambda pid: StoreGuard(lambda *event: events.append(event), root=pid).refuses,
        lambda port: [sys.executable, "-c", RANK, str(port), how, CLIENT],
    )
    assert (said[0], refused, events) == ("in", 0, [])


@pytest.mark.parametrize("how", ["itself", "child"])
def test_another_process_of_the_same_user_does_not(how: str, events: list[tuple[str, str]]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        said, refused = run_at(
            lambda _: StoreGuard(lambda *event: events.append(event), root=rank.pid).refuses,
            lambda port: [sys.executable, "-c", RANK, str(port), how, CLIENT],
        )
        rank.communicate(b"\n")
    assert (said[0], refused) == ("out", 1)
    ((kind, text),) = events
    assert kind == "store-refused"
    assert "none of this job's" in text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_does_not_even_as_a_child(events: list[tuple[str, str]]) -> None:
    said, refused = run_at(
        lambda pid: StoreGuard(lambda *event: events.append(event), root=pid).refuses,
        # By itself and after its imports: another user may not even read this interpreter.
        lambda port: [
            sys.executable,
            "-c",
            f"import os, socket, struct; os.setuid({NOBODY})\n{CLIENT}",
            str(port),
        ],
    )
    assert (said, refused) == (["out", str(NOBODY)], 1)
    ((_, text),) = events
    assert f"of uid {NOBODY} has connected to the store of uid 0" in text


def test_who_cannot_be_judged_does_not_come_in() -> None:
    """A guard that fails lets nobody in."""

    def fails(_own: object, _peer: object) -> str | None:
        raise RuntimeError("no idea")

    said, refused = run_at(lambda _pid: fails, lambda port: [sys.executable, "-c", CLIENT, str(port)])
    assert (said[0], refused) == ("out", 1)


def test_who_is_gone_is_refused_and_told_of(events: list[tuple[str, str]]) -> None:
    guard = StoreGuard(lambda *event: events.append(event), ask=lambda _own, _peer: None)
    why = guard.refuses(("127.0.0.1", 1), ("127.0.0.1", 2))
    assert why is not None
    assert "gone already" in why
    assert [kind for kind, _ in events] == ["store-refused"]


def test_a_stranger_cannot_flood_the_events(events: list[tuple[str, str]]) -> None:
    now = [0.0]
    guard = StoreGuard(
        lambda *event: events.append(event), ask=lambda _own, _peer: None, clock=lambda: now[0]
    )
    for _ in range(1000):
        guard.refuses(("127.0.0.1", 1), ("127.0.0.1", 2))
    assert len(events) == store_guard.TOLD_AT_ONCE
    now[0] = 61.0
    guard.refuses(("127.0.0.1", 1), ("127.0.0.1", 2))
    assert events[-1][1].endswith(f"(and {1000 - store_guard.TOLD_AT_ONCE} others before, untold)")


def test_a_kernel_that_cannot_be_asked(
    events: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_guard, "best_asker", lambda: None)
    guard = StoreGuard(lambda *event: events.append(event))
    for _ in range(3):
        assert guard.refuses(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert [kind for kind, _ in events] == ["store-unguarded"]

    def broken(_own: object, _peer: object) -> None:
        raise OSError(1, "no more")

    # What could be asked once and cannot now is no reason to let anybody in.
    assert StoreGuard(lambda *_: None, ask=broken).refuses(("127.0.0.1", 1), ("127.0.0.1", 2)) is not None


def test_both_walks_find_a_tree_through_threads() -> None:
    """A child is listed with the thread that started it."""
    program = """
import subprocess, threading
def start():
    child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $$ $!; wait"], stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), end="", flush=True)
    input()
    child.kill()
thread = threading.Thread(target=start)
thread.start()
thread.join()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        shell, sleeper = map(int, process.stdout.readline().split())
        wanted = {process.pid, shell, sleeper}
        try:
            assert set(descendants(process.pid)) == set(descendants_by_parents(process.pid)) == wanted
        finally:
            os.killpg(process.pid, 9)
