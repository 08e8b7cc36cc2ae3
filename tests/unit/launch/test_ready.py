"""How long a starting daemon is waited for: as long as it does something; and what is said else."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from pathlib import Path

import pytest

from ckptless.daemon.launch import nodes as module
from ckptless.daemon.launch.nodes import last_lines, wait_ready
from ckptless.daemon.protocol.errors import StartError

LISTEN = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + {0!r}); s.listen(); "


async def ready(code: str, patience_s: float, *, stopped: bool = False) -> None:
    name = f"ckptless-test-{secrets.token_hex(6)}"
    words = [sys.executable, "-c", code.replace("LISTEN", LISTEN.format(name))]
    process = await asyncio.create_subprocess_exec(*words)
    if stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.wait_for(wait_ready("node-3", process, f"@{name}", patience_s, lambda: False), 60)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_one_that_works_for_long_is_waited_for() -> None:
    busy = "import time; end = time.monotonic() + 5\nwhile time.monotonic() < end: pass\n"
    asyncio.run(ready(f"{busy}LISTEN\ntime.sleep(60)", patience_s=3.0))


def test_one_that_does_nothing_is_named() -> None:
    with pytest.raises(StartError, match=r"node-3's daemon \(process \d+, state S\) .* --start-timeout"):
        asyncio.run(ready("import time; time.sleep(60)", patience_s=2.0))


def test_one_that_works_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TIMES", 1)
    with pytest.raises(StartError, match=r"is not ready after 3 s, though it works"):
        asyncio.run(ready("while True: pass", patience_s=3.0))


def test_one_that_is_stopped_is_named() -> None:
    with pytest.raises(StartError, match="state T"):
        asyncio.run(ready("LISTEN", patience_s=1.0, stopped=True))


def test_one_that_has_ended_is_told_of_at_once() -> None:
    with pytest.raises(StartError, match="node-3's daemon did not start: it has ended with code 7"):
        asyncio.run(ready("import sys; sys.exit(7)", patience_s=1000.0))


def test_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_text("")
    assert last_lines(log) == "it said nothing"
    log.write_text("one\ntwo\nthree\nfour\n")
    assert last_lines(log) == "two / three / four"
