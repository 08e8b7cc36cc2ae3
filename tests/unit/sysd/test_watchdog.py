"""The watchdog: WATCHDOG=1 while everything gets on, and silence as soon as anything does not."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.systemd import LOOKS, Judge, Notifier, Watchdog, Watched, period_s

PERIOD_S = 0.4
LOOK_S = PERIOD_S / LOOKS


class Listener:
    """systemd's end."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """Return what came since the last call."""
        lines: list[str] = []
        with suppress(BlockingIOError):
            while True:
                lines += self.socket.recv(4096).decode().split("\n")
        return lines


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    with listener.socket:
        yield listener


class Counter:
    """A part that gets on by itself, until it is told to hang."""

    def __init__(self) -> None:
        self.value = 0
        self.hangs = False

    async def go_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S / 10)
            self.value += not self.hangs


def run(systemd: Listener, parts: Sequence[Watched], story: Callable[[], object], *counters: Counter) -> None:
    """Run the watchdog (and counters) beside `story`, an async function."""

    async def main() -> None:
        tasks = [asyncio.create_task(counter.go_on()) for counter in counters]
        tasks.append(asyncio.create_task(Watchdog(Notifier(systemd.address), PERIOD_S, parts).run()))
        try:
            async with asyncio.timeout(30):
                await story()  # type: ignore[misc]
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


async def signs(systemd: Listener, count: int) -> None:
    """Wait for `count` signs of life; `run` bounds the wait."""
    while count > 0:
        await asyncio.sleep(LOOK_S / 4)
        count -= systemd.heard().count("WATCHDOG=1")


async def told(systemd: Listener, line: str) -> list[str]:
    """Wait for `line`; all that came with it, in order."""
    heard: list[str] = []
    while line not in heard:
        await asyncio.sleep(LOOK_S / 4)
        heard += systemd.heard()
    return heard


def test_signs_of_life(systemd: Listener) -> None:
    tick = Counter()

    async def story() -> None:
        start_s = time.monotonic()
        await signs(systemd, 5)
        # Not faster than it looks.
        assert time.monotonic() - start_s >= 4 * LOOK_S

    run(systemd, [Watched("tick", lambda: tick.value)], story, tick)


def test_a_part_that_hangs_silences_it(systemd: Listener) -> None:
    tick, ledger = Counter(), Counter()

    async def story() -> None:
        await signs(systemd, 2)
        ledger.hangs = True
        assert (await told(systemd, "STATUS=no progress: ledger"))[-1] != "WATCHDOG=1"
        await asyncio.sleep(4 * PERIOD_S)
        assert systemd.heard() == []
        ledger.hangs = False
        await signs(systemd, 2)

    parts = [Watched("tick", lambda: tick.value), Watched("ledger", lambda: ledger.value)]
    run(systemd, parts, story, tick, ledger)


def test_it_says_what_hangs_once(systemd: Listener, caplog: pytest.LogCaptureFixture) -> None:
    tick = Counter()
    tick.hangs = True

    async def story() -> None:
        assert await told(systemd, "STATUS=no progress: tick") == ["STATUS=no progress: tick"]
        await asyncio.sleep(4 * LOOK_S)
        assert systemd.heard() == []

    run(systemd, [Watched("tick", lambda: tick.value)], story, tick)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_stuck_loop_is_silent(systemd: Listener) -> None:
    tick = Counter()

    async def story() -> None:
        await signs(systemd, 2)
        systemd.heard()
        time.sleep(3 * PERIOD_S)  # noqa: ASYNC251  # this is the stuck loop
        assert systemd.heard() == []
        await signs(systemd, 1)

    run(systemd, [Watched("tick", lambda: tick.value)], story, tick)


def test_a_loop_without_its_selector_is_silent(systemd: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers still run, but no descriptor is ever ready: a daemon that is deaf."""
    tick = Counter()

    async def story() -> None:
        await signs(systemd, 2)
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def deaf(timeout: float | None) -> list[object]:
            time.sleep(0.001)
            return []

        monkeypatch.setattr(selector, "select", deaf)
        await asyncio.sleep(LOOK_S)
        systemd.heard()
        before = tick.value
        await asyncio.sleep(3 * PERIOD_S)
        assert tick.value > before
        assert systemd.heard() == []
        monkeypatch.setattr(selector, "select", select)
        await signs(systemd, 1)

    run(systemd, [Watched("tick", lambda: tick.value)], story, tick)


def test_an_idle_part_is_poked(systemd: Listener) -> None:
    pokes: list[float] = []

    async def story() -> None:
        await signs(systemd, 4)

    run(systemd, [Watched("ledger", lambda: len(pokes), lambda: pokes.append(0.0))], story)
    assert len(pokes) >= 5


def test_no_descriptor_is_left(systemd: Listener) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        test_an_idle_part_is_poked(systemd)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_judge() -> None:
    judge = Judge()
    assert judge.stuck({"a": 1, "b": 1}) is None
    assert judge.stuck({"a": 2, "b": 1}) == ("b",)
    assert judge.stuck({"a": 3, "b": 9}) == ()
    assert judge.stuck({"a": 3, "b": 8}) == ("a", "b")
    assert judge.stuck({"a": 4, "b": 9, "c": 5}) == ("c",)
    assert judge.stuck({"a": 5, "b": 10, "c": 6}) == ()


def test_judge_does_not_share_what_it_is_given() -> None:
    judge, counts = Judge(), {"a": 1}
    judge.stuck(counts)
    counts["a"] = 2
    assert judge.stuck(counts) == ()


@pytest.mark.parametrize(
    ("environment", "expected_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "15000000"}, 15.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_period(environment: dict[str, str], expected_s: float | None) -> None:
    assert period_s(environment) == expected_s
    assert environment == {}
