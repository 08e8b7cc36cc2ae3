"""The digest of bytes that are still coming, computed in a thread while the rest comes."""

import asyncio
from types import TracebackType
from typing import Self

import xxhash

# What is hashed at one go: enough that the way into the thread costs little; and not so much that the caches
# have lost it, or that a transfer that is given up has to wait for it.
STEP_MIN_NBYTES, STEP_MAX_NBYTES = 4 << 20, 16 << 20


class Verifier:
    """`vault.digest` of a view; to be used in `async with`, as long as which the view has to live."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._hash = xxhash.xxh3_128()
        # Up to where the steps so far go, of which the newest may still run.
        self._begun = 0
        self._step: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread reads the view until it is through with its step.
        if self._step is not None:
            await asyncio.wait([self._step])

    def feed(self, nbytes: int) -> None:
        """So many bytes of the view, from its begin, are there by now."""
        if nbytes - self._begun >= STEP_MIN_NBYTES and (self._step is None or self._step.done()):
            self._hash_on(nbytes)

    async def hexdigest(self) -> str:
        """Of all of the view, which is there by now."""
        while True:
            if self._step is not None:
                # A thread cannot be cancelled, and is waited for on the way out.
                await asyncio.shield(self._step)
            if self._begun == len(self._view):
                return self._hash.hexdigest()
            self._hash_on(len(self._view))

    def _hash_on(self, upto: int) -> None:
        if self._step is not None:
            self._step.result()
        end = min(upto, self._begun + STEP_MAX_NBYTES)
        part = self._view[self._begun : end]
        self._begun = end
        self._step = asyncio.get_running_loop().run_in_executor(None, _update, self._hash, part)


def _update(running: xxhash.xxh3_128, part: memoryview) -> None:
    with part:
        running.update(part)
