"""Ranks' output: every byte in the log, whole prefixed lines on the console, an agent that never blocks."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks.console import MAX_LINE_BYTES, ConsoleOutput, RankOutput, rank_log_path

DEADLINE_S = 20.0


class Rig:
    """One rank's output, from the write end of its pipe to a console that is a file."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[tuple[str, str]] = []
        self.log = rank_log_path(tmp_path, 3)
        self.console_path = tmp_path / "console"
        fd = os.open(self.console_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.console = ConsoleOutput(fd, self.on_event)
        os.close(fd)
        reader, self.writer = os.pipe()
        os.set_blocking(reader, False)
        self.output = RankOutput(reader, self.log, "[rank 3] ", self.console, self.on_event)

    def on_event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    async def write(self, data: bytes) -> None:
        """Write like a rank and let the agent see it."""
        os.write(self.writer, data)
        await asyncio.sleep(0.02)

    async def end(self, deadline_s: float = DEADLINE_S) -> None:
        os.close(self.writer)
        await self.output.finish(deadline_s)

    def on_console(self) -> bytes:
        return self.console_path.read_bytes()


def run(tmp_path: Path, body: Callable[[Rig], Awaitable[None]]) -> Rig:
    async def main() -> Rig:
        rig = Rig(tmp_path)
        async with asyncio.timeout(DEADLINE_S):
            await body(rig)
        rig.console.close()
        return rig

    return asyncio.run(main())


def test_log_has_every_byte_and_console_whole_prefixed_lines(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        await rig.write(b"one\ntw")
        assert rig.log.read_bytes() == b"one\ntw", "the log does not wait for a line's end"
        assert rig.on_console() == b"[rank 3] one\n"
        await rig.write(b"o\n\nlast")
        await rig.end()

    rig = run(tmp_path, body)
    assert rig.log.read_bytes() == b"one\ntwo\n\nlast"
    assert rig.on_console() == b"[rank 3] one\n[rank 3] two\n[rank 3] \n[rank 3] last\n"
    assert rig.events == []


def test_a_log_is_continued_not_overwritten(tmp_path: Path) -> None:
    rank_log_path(tmp_path, 3).write_bytes(b"before\n")

    async def body(rig: Rig) -> None:
        await rig.write(b"after\n")
        await rig.end()

    assert run(tmp_path, body).log.read_bytes() == b"before\nafter\n"


def test_an_endless_line_is_cut_on_the_console_only(tmp_path: Path) -> None:
    size = 3 * MAX_LINE_BYTES + 10

    async def body(rig: Rig) -> None:
        left = b"x" * size
        while left:
            await rig.write(left[:50_000])
            left = left[50_000:]
        await rig.end()

    rig = run(tmp_path, body)
    assert rig.log.stat().st_size == size
    lines = rig.on_console().splitlines()
    assert [len(line) - len(b"[rank 3] ") for line in lines] == [MAX_LINE_BYTES] * 3 + [10]


def test_output_follows_a_spare_that_gets_a_rank(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        await rig.write(b"warm\n")
        rig.output.redirect(rank_log_path(tmp_path, 0), "[rank 0] ", rig.console)
        await rig.write(b"training\n")
        rig.output.redirect(rank_log_path(tmp_path, 0), "[rank 0] ", None)
        await rig.write(b"quietly\n")
        await rig.end()
        rig.output.redirect(rank_log_path(tmp_path, 9), "[rank 9] ", None)

    rig = run(tmp_path, body)
    assert rig.log.read_bytes() == b"warm\n"
    assert rank_log_path(tmp_path, 0).read_bytes() == b"training\nquietly\n"
    assert rig.on_console() == b"[rank 3] warm\n[rank 0] training\n"
    assert not rank_log_path(tmp_path, 9).exists()


def test_a_rank_whose_log_cannot_be_opened_writes_on_into_the_spares(tmp_path: Path) -> None:
    rank_log_path(tmp_path, 0).mkdir()

    async def body(rig: Rig) -> None:
        rig.output.redirect(rank_log_path(tmp_path, 0), "[rank 0] ", rig.console)
        await rig.write(b"training\n")
        await rig.end()

    rig = run(tmp_path, body)
    assert rig.log.read_bytes() == b"training\n"
    assert rig.on_console() == b"[rank 0] training\n"
    ((kind, text),) = rig.events
    assert kind == "log-failed"
    assert text.endswith(f"Is a directory: '{rank_log_path(tmp_path, 0)}'; the output goes on into {rig.log}")


def test_what_a_killed_process_wrote_is_kept_while_another_holds_the_pipe(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        # More than one read, less than the pipe holds, all written before the agent looks again.
        code = (
            "import os, signal; os.write(1, b'y' * 60000 + b'\\nend'); os.kill(os.getpid(), signal.SIGKILL)"
        )
        dead = subprocess.run([sys.executable, "-c", code], stdout=rig.writer, timeout=DEADLINE_S)  # noqa: ASYNC221
        assert dead.returncode == -signal.SIGKILL
        # rig.writer stays open: the pipe does not end.
        await rig.output.finish(0.05)
        os.close(rig.writer)

    rig = run(tmp_path, body)
    assert rig.log.read_bytes() == b"y" * 60000 + b"\nend"
    assert rig.on_console().endswith(b"\n[rank 3] end\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_the_rank_goes_on(tmp_path: Path) -> None:
    rank_log_path(tmp_path, 3).symlink_to("/dev/full")

    async def body(rig: Rig) -> None:
        await rig.write(b"one\n")
        await rig.write(b"two\n")
        await rig.end()

    rig = run(tmp_path, body)
    assert [kind for kind, _ in rig.events] == ["log-failed"]
    assert rig.on_console() == b"[rank 3] one\n[rank 3] two\n"


def test_a_console_that_nobody_reads_costs_lines_not_time(tmp_path: Path) -> None:
    async def body() -> bytes:
        reader, writer = os.pipe()
        console = ConsoleOutput(writer, lambda kind, text: None, backlog_bytes=200_000)
        assert os.get_blocking(writer), "the console's own flags are the caller's"
        for number in range(40_000):
            console.write(b"line %05d\n" % number)
        assert not await console.flush(0.05)
        got = bytearray()
        os.set_blocking(reader, False)
        async with asyncio.timeout(DEADLINE_S):
            while b"left out" not in got:
                try:
                    got += os.read(reader, 65536)
                except BlockingIOError:
                    await asyncio.sleep(0.001)
        assert await console.flush(DEADLINE_S)
        console.write(b"and on\n")
        got += os.read(reader, 65536)
        console.close()
        os.close(writer)
        os.close(reader)
        return bytes(got)

    *lines, notice, last = asyncio.run(body()).decode().splitlines()
    assert lines == [f"line {number:05d}" for number in range(len(lines))], "what came is whole and in order"
    assert notice.startswith(f"[ckptless] {40_000 - len(lines)} lines left out")
    assert last == "and on"


def test_a_console_whose_reader_is_gone_is_told_once(tmp_path: Path) -> None:
    events: list[str] = []

    async def body() -> None:
        reader, writer = os.pipe()
        console = ConsoleOutput(writer, lambda kind, text: events.append(kind))
        os.close(reader)
        console.write(b"one\n")
        console.write(b"two\n")
        assert await console.flush(1.0)
        console.close()
        os.close(writer)

    asyncio.run(body())
    assert events == ["console-lost"]
