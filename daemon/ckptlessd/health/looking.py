"""Runs the probes: each look in a thread of its own, so that one that hangs holds up nothing else."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckptless.daemon.ckptlessd.health.answers import ProbeError, checked, in_words, words
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.protocol.health import ProbeState
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

# The least time between two looks of any probe, whatever it says.
LEAST_INTERVAL_S = 1.0
# The daemon waits so long for probes that are closed, and for looks that are under way then.
CLOSE_S = 2.0
_Answer = TypeVar("_Answer")
# Takes what a probe has found in one look.
Hear = Callable[[str, Sequence[Finding]], None]


@dataclass
class _Watched:
    """One probe, as it is known here."""

    name: str
    probe: Probe
    missing: str = ""
    trouble: str = ""
    # What the log has of it, since it has looked the last time.
    told: set[str] = field(default_factory=set)
    hangs: bool = False
    looked_s: float | None = None
    cost_s: float = 0.0
    looks: int = 0
    thread: threading.Thread | None = None


class Looking:
    """Owned by the event loop; each probe belongs to the thread of its look, and to nobody in between.

    A probe that hangs keeps its thread until it comes to an end, and is not asked anything meanwhile, nor
    closed. Such a thread is no reason for the daemon not to end.
    """

    def __init__(self, probes: Mapping[str, Probe], hear: Hear) -> None:
        self._watched = [_Watched(name, probe) for name, probe in probes.items()]
        self._hear = hear

    async def run(self) -> None:
        """Look until cancelled."""
        tasks = [asyncio.create_task(self._watch(one)) for one in self._watched]
        try:
            # no deadline: a daemon's life
            await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)

    def states(self) -> tuple[ProbeState, ...]:
        """Return how every probe does."""
        return tuple(_state(one, time.monotonic()) for one in self._watched)

    async def _watch(self, one: _Watched) -> None:
        try:
            one.missing = await self._aside(one, lambda: words(one.probe.missing()))
            if one.missing:
                logger.info("health: %s does not look here: %s", one.name, one.missing)
                return
            while True:
                await self._look(one)
                await asyncio.sleep(max(LEAST_INTERVAL_S, one.probe.interval_s))
        except ProbeError as error:
            one.missing = str(error)
            self._failed(one, one.missing)
        finally:
            await self._close(one)

    async def _look(self, one: _Watched) -> None:
        begun_s = time.monotonic()
        try:
            fine = await self._aside(one, lambda: checked(one.probe.look()))
        except ProbeError as error:
            self._failed(one, str(error))
            return
        one.looked_s, one.trouble, one.looks = time.monotonic(), "", one.looks + 1
        one.told.clear()
        one.cost_s = one.looked_s - begun_s
        self._hear(one.name, fine)

    async def _aside(self, one: _Watched, call: Callable[[], _Answer]) -> _Answer:
        """Call it in a thread of its own. Raises ProbeError where it does so, or after it has hung."""
        ended = _begin(one, call)
        begun_s = time.monotonic()
        try:
            done, _ = await asyncio.wait({ended}, timeout=one.probe.deadline_s)
            while not done:
                if not one.hangs:
                    _warn(one, f"has not ended in {one.probe.deadline_s:g} s")
                one.hangs, one.trouble = True, f"it goes on since {time.monotonic() - begun_s:.0f} s"
                self._hear(one.name, (Finding(code="probe-hangs", evidence=one.trouble),))
                # It may hang for ever, and then this probe is over.
                done, _ = await asyncio.wait({ended}, timeout=max(LEAST_INTERVAL_S, one.probe.deadline_s))
            one.hangs = False
            # no deadline: it has ended
            return await ended
        finally:
            ended.cancel()  # nobody asks any more what comes of it

    async def _close(self, one: _Watched) -> None:
        """Have it closed, once no look is under way; wait only a little for that."""
        last = one.thread

        def close() -> None:
            if last is not None:
                last.join()  # no deadline: it may hang for ever, and this thread with it
            one.probe.close()

        with contextlib.suppress(ProbeError, TimeoutError):
            await asyncio.wait_for(_begin(one, close), CLOSE_S)

    def _failed(self, one: _Watched, why: str) -> None:
        _warn(one, f"fails: {why}")
        one.trouble = why
        self._hear(one.name, (Finding(code="probe-failed", evidence=why),))


def _warn(one: _Watched, words: str) -> None:
    """Log it, once until it looks again."""
    if words not in one.told:
        one.told.add(words)
        logger.warning("health: %s %s", one.name, words)


def _begin(one: _Watched, call: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
    """Call it in a thread of its own, and return what is to come of it. Raises ProbeError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_Answer] = loop.create_future()
    thread = threading.Thread(target=_call, args=(call, loop, ended), name=f"probe {one.name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the node has no more threads to give
        raise ProbeError(str(error)) from None
    one.thread = thread
    return ended


def _call(
    call: Callable[[], _Answer], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[_Answer]
) -> None:
    """In the thread: call, and hand on what came of it."""
    try:
        found = call()
        tell = partial(ended.set_result, found)
    except ProbeError as error:
        tell = partial(ended.set_exception, error)
    except BaseException as error:  # noqa: BLE001  (somebody else's code, which may call sys.exit, too)
        tell = partial(ended.set_exception, ProbeError(in_words(error)))
    with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile
        loop.call_soon_threadsafe(lambda: None if ended.done() else tell())


def _state(one: _Watched, now_s: float) -> ProbeState:
    return ProbeState(
        name=one.name,
        state="off" if one.missing else "hangs" if one.hangs else "failed" if one.trouble else "looks",
        text=one.missing or one.trouble,
        looks=one.looks,
        age_s=None if one.looked_s is None else max(0.0, now_s - one.looked_s),
        cost_s=one.cost_s,
    )
