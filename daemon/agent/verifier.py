"""The digest of bytes that are still coming, computed in a thread while the rest comes."""

import asyncio
from types import TracebackType
from typing import Self

import xxhash

# As much as is hashed at one go: enough that the way into the thread costs little, and so little that the
# caches still hold it.
STEP_NBYTES = 4 << 20


class Verifier:
    """`vault.digest` of a view; to be used in `async with`, as long as which the view has to live."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._hash = xxhash.xxh3_128()
        self._come = self._begun = 0
        self._running: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread reads the view until it is through with its step.
        self._come = self._begun
        while self._running is not None:
            await asyncio.wait([self._running])

    def feed(self, nbytes: int) -> None:
        """So many bytes of the view, from its begin, are there by now."""
        self._come = nbytes
        if self._running is None and self._come - self._begun >= STEP_NBYTES:
            self._go_on()

    async def hexdigest(self) -> str:
        """Of all of the view, which is there by now."""
        self._come = len(self._view)
        while self._running is not None or self._begun < self._come:
            if self._running is None:
                self._go_on()
            assert self._running is not None
            await asyncio.shield(self._running)
        return self._hash.hexdigest()

    def _go_on(self) -> None:
        end = min(self._come, self._begun + STEP_NBYTES)
        part = self._view[self._begun : end]
        self._begun = end
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(None, _update, self._hash, part)
        self._running.add_done_callback(self._through)

    def _through(self, _done: asyncio.Future[None]) -> None:
        self._running = None
        if self._come - self._begun >= STEP_NBYTES:
            self._go_on()


def _update(running: xxhash.xxh3_128, part: memoryview) -> None:
    with part:
        running.update(part)
