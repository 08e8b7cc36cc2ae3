"""Probes of others run in threads: they hang, raise and return what they like, and nothing else stops."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.health import looking as module
from ckptless.daemon.ckptlessd.health.answers import MOST_FINDINGS
from ckptless.daemon.ckptlessd.health.looking import Looking
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.protocol.health import MAX_CODE, MAX_EVIDENCE, MAX_WHERE, ProbeState
from ckptless.daemon.protocol.limits import TEXT_LIMIT

DEADLINE_S = 60.0
FOUND = Finding(code="clock", where="here", evidence="it is late")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "CLOSE_S", DEADLINE_S)


@pytest.fixture
def _short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for nobody, almost."""
    monkeypatch.setattr(module, "CLOSE_S", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


class Fake:
    """Answers with whatever `answer` is, or does what that does; no two calls may be under way at a time."""

    interval_s = 0.01

    def __init__(self, answer: Any = (), missing: Any = "", deadline_s: float = DEADLINE_S) -> None:
        self.answer, self.lack, self.deadline_s = answer, missing, deadline_s
        self.calls: list[str] = []
        self.overlap = False
        self._busy = threading.Lock()

    def missing(self) -> str:
        return self._call("missing", self.lack)  # type: ignore[no-any-return]

    def look(self) -> Sequence[Finding]:
        return self._call("look", self.answer)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._call("close", None)

    def _call(self, name: str, answer: Any) -> Any:
        self.calls.append(name)
        if not self._busy.acquire(blocking=False):
            self.overlap = True
            return None
        try:
            return answer() if callable(answer) else answer
        finally:
            self._busy.release()


class Heard:
    """All that was told, by the names of the probes."""

    def __init__(self) -> None:
        self.all: list[tuple[str, list[Finding]]] = []

    def __call__(self, name: str, findings: Sequence[Finding]) -> None:
        self.all.append((name, list(findings)))

    def of(self, name: str) -> list[list[Finding]]:
        return [found for one, found in self.all if one == name]

    def codes(self, name: str) -> list[str]:
        return [found.code for look in self.of(name) for found in look]


@asynccontextmanager
async def running(**probes: Any) -> AsyncIterator[tuple[Looking, Heard]]:
    """Looks as long as the block goes on; then it is cancelled, and ends in bounded time."""
    heard = Heard()
    looking = Looking(probes, heard)
    task = asyncio.create_task(looking.run())
    try:
        yield looking, heard
    finally:
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=DEADLINE_S)
        assert done


def state(looking: Looking, name: str) -> ProbeState:
    return next(one for one in looking.states() if one.name == name)


def ended(*fakes: Fake) -> bool:
    """Closed once, as the last call, and none beside another."""
    return all(
        fake.calls.count("close") == 1
        and fake.calls[-1] == "close"
        and fake.calls.count("missing") == 1
        and fake.calls[0] == "missing"
        and not fake.overlap
        for fake in fakes
    )


def join_all() -> None:
    """Wait for the threads of all probes."""
    for thread in threading.enumerate():
        if thread.name.startswith("probe "):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


# --------------------------------------------------------------------------- one that is well


def test_what_is_found_is_told_in_every_look() -> None:
    fake, other = Fake([FOUND]), Fake(())

    async def body() -> None:
        async with running(a=fake, b=other) as (looking, heard):
            await until(lambda: len(heard.of("a")) >= 3 and len(heard.of("b")) >= 3)
            assert heard.of("a")[:3] == [[FOUND]] * 3
            assert heard.of("b")[:3] == [[]] * 3
            one = state(looking, "a")
            assert (one.state, one.text) == ("looks", "")
            assert one.looks >= 3
            assert one.age_s is not None
            assert 0 <= one.age_s < DEADLINE_S
            assert 0 <= one.cost_s < DEADLINE_S
        assert ended(fake, other)

    asyncio.run(body())
    join_all()


def test_before_the_first_look() -> None:
    looking = Looking({"a": Fake(), "b": Fake()}, Heard())
    assert looking.states() == (ProbeState(name="a", state="looks"), ProbeState(name="b", state="looks"))


def test_without_a_probe_it_ends() -> None:
    asyncio.run(asyncio.wait_for(Looking({}, Heard()).run(), DEADLINE_S))


def test_there_is_some_time_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_INTERVAL_S", 0.1)
    begun: list[float] = []

    def look() -> tuple[Finding, ...]:
        begun.append(time.monotonic())
        return ()

    fake = Fake(look)
    fake.interval_s = 0.0

    async def body() -> None:
        async with running(a=fake):
            await until(lambda: len(begun) >= 4)

    asyncio.run(body())
    assert min(later - earlier for earlier, later in pairwise(begun)) >= 0.09


# ------------------------------------------------------------------------------- one that raises


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raising(error: BaseException) -> Callable[[], object]:
    def raise_it() -> object:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (StopIteration(7), "StopIteration: 7"),
        (asyncio.CancelledError(), "CancelledError: "),
        (Unspeakable(), "Unspeakable"),
        (ValueError("two\nlines\x1b"), r"ValueError: two\nlines\x1b"),
        (ValueError("x" * 10_000_000), ("ValueError: " + "x" * MAX_EVIDENCE)[:MAX_EVIDENCE]),
    ],
)
def test_a_probe_that_raises_is_told_and_looks_again(
    error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake, other = Fake(raising(error)), Fake([FOUND])
    failed = Finding(code="probe-failed", evidence=words)

    async def body() -> None:
        async with running(a=fake, b=other) as (looking, heard):
            await until(lambda: len(heard.of("a")) >= 3 and len(heard.of("b")) >= 3)
            assert heard.of("a")[:3] == [[failed]] * 3
            one = state(looking, "a")
            assert (one.state, one.text, one.looks, one.age_s) == ("failed", words, 0, None)
            fake.answer = [FOUND]
            await until(lambda: heard.of("a")[-1] == [FOUND])
            assert state(looking, "a").state == "looks"
            assert heard.codes("b")[:3] == ["clock"] * 3
        assert ended(fake, other)

    asyncio.run(body())
    assert [one.getMessage() for one in caplog.records] == [f"health: a fails: {words}"]


class Stranger:
    code, where, evidence = "clock", "", ""


class Lazy(list[Finding]):
    def __iter__(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, f"it must return up to {MOST_FINDINGS} findings, and returned NoneType"),
        (7, f"it must return up to {MOST_FINDINGS} findings, and returned int"),
        ("", f"it must return up to {MOST_FINDINGS} findings, and returned str"),
        ("xid-79", f"it must return up to {MOST_FINDINGS} findings, and returned str"),
        ({}, f"it must return up to {MOST_FINDINGS} findings, and returned dict"),
        ((FOUND for _ in range(1)), f"it must return up to {MOST_FINDINGS} findings, and returned generator"),
        ([FOUND] * 2000, f"it must return up to {MOST_FINDINGS} findings, and returned list"),
        ([1, 2, 3], "it returned a int, which is no finding"),
        ([FOUND, None], "it returned a NoneType, which is no finding"),
        (["xid-79"], "it returned a str, which is no finding"),
        ([Stranger()], "it returned a Stranger, which is no finding"),
        ([Finding(code=7)], "it returned a Finding, which is no finding"),  # type: ignore[arg-type]
        ([Finding(code="clock", where=None)], "it returned a Finding, which is no finding"),  # type: ignore[arg-type]
        ([Finding(code="clock", evidence=b"x")], "it returned a Finding, which is no finding"),  # type: ignore[arg-type]
        ([Finding(code="")], "'' is no code: use letters, digits and hyphens"),
        ([Finding(code="-")], "'-' is no code: use letters, digits and hyphens"),
        ([Finding(code="a b")], "'a b' is no code: use letters, digits and hyphens"),
        ([Finding(code="a\n")], r"'a\n' is no code: use letters, digits and hyphens"),
        ([Finding(code="\u00e4")], "'\u00e4' is no code: use letters, digits and hyphens"),
        ([Finding(code="\x1b" * 500)], f"{chr(27) * MAX_CODE!r} is no code: use letters, digits and hyphens"),
        (Lazy(), "RuntimeError: not now"),
    ],
)
def test_what_is_no_answer_is_a_failure(answer: Any, words: str) -> None:
    fake, other = Fake(lambda: answer), Fake([FOUND])

    async def body() -> None:
        async with running(a=fake, b=other) as (_, heard):
            await until(lambda: len(heard.of("a")) >= 2)
            assert heard.of("a")[:2] == [[Finding(code="probe-failed", evidence=words)]] * 2
            seen = len(heard.of("b"))
            await until(lambda: len(heard.of("b")) >= seen + 2)

    asyncio.run(body())


def test_what_is_shown_is_clean_and_short() -> None:
    fake = Fake(
        [
            Finding(code="xid-1234", where="a\nb", evidence="\x1b[31m\x07\udcff"),
            Finding(code="x" * 200, where="w" * 10_000, evidence="\n" * 10_000_000),
            *[Finding(code="my-own2")] * (MOST_FINDINGS - 2),
        ]
    )

    async def body() -> None:
        async with running(a=fake) as (_, heard):
            await until(lambda: bool(heard.of("a")))
            first, second, *rest = heard.of("a")[0]
            assert first == Finding(code="xid-1234", where=r"a\nb", evidence=r"\x1b[31m\x07\udcff")
            assert (len(second.code), len(second.where), len(second.evidence)) == (
                *(MAX_CODE, MAX_WHERE, MAX_EVIDENCE),
            )
            assert second.evidence.isprintable()
            assert len(rest) == MOST_FINDINGS - 2

    asyncio.run(body())


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_node_without_threads_to_give_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake([FOUND])

    async def body() -> None:
        async with running(a=fake) as (_, heard):
            await until(lambda: bool(heard.of("a")))
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                await until(
                    lambda: len(heard.of("a")) >= 2 and heard.of("a")[-1] == heard.of("a")[-2] != [FOUND]
                )
            assert heard.of("a")[-1] == [Finding(code="probe-failed", evidence="can't start new thread")]
            await until(lambda: heard.of("a")[-1] == [FOUND])
        assert ended(fake)

    asyncio.run(body())


# -------------------------------------------------------------------------------- one that hangs


class Hanging(Fake):
    """Its looks hang until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        super().__init__(self.hang, deadline_s=0.2)

    def hang(self) -> list[Finding]:
        assert self.release.wait(DEADLINE_S)
        return [FOUND]


def test_a_probe_that_hangs_is_told_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    fake, other = Hanging(), Fake([FOUND])

    async def body() -> None:
        async with running(a=fake, b=other) as (looking, heard):
            await until(lambda: len(heard.of("a")) >= 3)
            assert heard.codes("a")[:3] == ["probe-hangs"] * 3
            assert fake.calls == ["missing", "look"]
            assert heard.of("a")[0][0].evidence == "it goes on since 0 s"
            one = state(looking, "a")
            assert (one.state, one.text[:17], one.looks) == ("hangs", "it goes on since ", 0)
            seen = len(heard.of("b"))
            await until(lambda: len(heard.of("b")) >= seen + 3)
            fake.release.set()
            await until(lambda: len([look for look in heard.of("a") if look == [FOUND]]) >= 2)
            assert (state(looking, "a").state, state(looking, "a").text) == ("looks", "")
            assert fake.calls.count("look") >= 2
        assert ended(fake, other)

    asyncio.run(body())
    assert [one.getMessage() for one in caplog.records] == ["health: a has not ended in 0.2 s"]


def test_a_probe_that_hangs_and_then_raises() -> None:
    fake = Hanging()
    fake.answer = lambda: fake.release.wait(DEADLINE_S) and raising(ValueError("late"))()

    async def body() -> None:
        async with running(a=fake) as (looking, heard):
            await until(lambda: "probe-hangs" in heard.codes("a"))
            fake.release.set()
            await until(lambda: heard.codes("a")[-1] == "probe-failed")
            assert state(looking, "a").state == "failed"

    asyncio.run(body())


@pytest.mark.usefixtures("_short_of_time")
def test_a_probe_that_hangs_does_not_hold_up_the_end_and_is_closed_after_it() -> None:
    fake, other = Hanging(), Fake([FOUND])

    async def body() -> None:
        async with running(a=fake, b=other) as (_, heard):
            await until(lambda: "probe-hangs" in heard.codes("a"))
        # It ended though the look has not; and nothing is told of it any more.
        told = len(heard.all)
        assert fake.calls == ["missing", "look"]
        await until(lambda: ended(other))
        fake.release.set()
        await until(lambda: ended(fake))
        assert len(heard.all) == told

    asyncio.run(body())


@pytest.mark.parametrize("call", ["look", "missing"])
def test_a_call_under_way_at_the_end_is_waited_for_before_the_close(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Hanging()
    fake.deadline_s = DEADLINE_S
    if call == "missing":
        fake.lack = fake.hang

    async def body() -> None:
        async with running(a=fake) as (_, heard):
            await until(lambda: fake.calls[-1:] == [call])
            asyncio.get_running_loop().call_later(0.3, fake.release.set)
        assert fake.release.is_set()
        assert ended(fake)
        assert heard.all == []

    asyncio.run(body())
    join_all()
    assert caplog.records == []


@pytest.mark.usefixtures("_short_of_time")
def test_what_comes_of_a_look_after_the_end_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    fake = Hanging()
    fake.answer = lambda: fake.release.wait(DEADLINE_S) and raising(ValueError("late"))()
    fake.deadline_s = DEADLINE_S

    async def body() -> None:
        async with running(a=fake) as (_, heard):
            await until(lambda: fake.calls[-1:] == ["look"])
        fake.release.set()
        await until(lambda: ended(fake))
        await asyncio.to_thread(join_all)
        await asyncio.sleep(0)
        assert heard.all == []

    asyncio.run(body())
    gc.collect()
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.usefixtures("_short_of_time")
def test_a_look_that_ends_after_the_loop_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    fake = Hanging()

    async def body() -> None:
        async with running(a=fake):
            await until(lambda: fake.calls[-1:] == ["look"])

    asyncio.run(body())
    assert fake.calls == ["missing", "look"]
    fake.release.set()
    join_all()
    assert ended(fake)
    assert caplog.records == []


# ------------------------------------------------------------------------- missing, and the close


@pytest.mark.parametrize(
    ("lack", "words", "told"),
    [
        ("there is no GPU", "there is no GPU", False),
        ("two\nlines", r"two\nlines", False),
        ("x" * 10_000_000, "x" * MAX_EVIDENCE, False),
        (raising(ValueError("no idea")), "ValueError: no idea", True),
        (raising(SystemExit(2)), "SystemExit: 2", True),
        (lambda: None, "it must say in words what is missing, and returned a NoneType", True),
        (lambda: True, "it must say in words what is missing, and returned a bool", True),
    ],
)
def test_a_probe_that_cannot_look_here(lack: Any, words: str, told: bool) -> None:
    fake, other = Fake([FOUND], missing=lack), Fake([FOUND])
    assert len(words) <= TEXT_LIMIT

    async def body() -> None:
        async with running(a=fake, b=other) as (looking, heard):
            await until(lambda: ended(fake) and len(heard.of("b")) >= 2)
            assert fake.calls == ["missing", "close"]
            assert heard.of("a") == ([[Finding(code="probe-failed", evidence=words)]] if told else [])
            assert (state(looking, "a").state, state(looking, "a").text) == ("off", words)
        assert ended(fake, other)

    asyncio.run(body())


def test_a_close_that_raises_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fake, other = Fake(), Fake()
    fake.close = raising(SystemExit("close"))  # type: ignore[method-assign,assignment]

    async def body() -> None:
        async with running(a=fake, b=other) as (_, heard):
            await until(lambda: len(heard.of("a")) >= 1 and len(heard.of("b")) >= 1)
        assert ended(other)

    asyncio.run(body())
    gc.collect()
    assert caplog.records == []


@pytest.mark.usefixtures("_short_of_time")
def test_a_close_that_hangs_does_not_hold_up_the_end() -> None:
    release = threading.Event()
    fake, other = Fake(), Fake()
    fake.close = lambda: release.wait(DEADLINE_S)  # type: ignore[method-assign,assignment]

    async def body() -> None:
        async with running(a=fake, b=other) as (_, heard):
            await until(lambda: len(heard.of("a")) >= 1 and len(heard.of("b")) >= 1)
        assert not release.is_set()
        assert "probe-hangs" not in heard.codes("a")
        await until(lambda: ended(other))

    asyncio.run(body())
    release.set()


def test_being_cancelled_twice_closes_once() -> None:
    fake = Hanging()
    fake.deadline_s = DEADLINE_S

    async def body() -> None:
        task = asyncio.create_task(Looking({"a": fake}, Heard()).run())
        await until(lambda: fake.calls[-1:] == ["look"])
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=DEADLINE_S)
        assert done
        fake.release.set()
        await until(lambda: ended(fake))

    asyncio.run(body())
