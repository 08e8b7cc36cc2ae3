"""What is still coming of a version, verified in a thread while the rest of it comes."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from ckptless.daemon.api import version
from ckptless.daemon.api.errors import BadVersionError

# What is hashed at one go: enough that the way into the thread costs little; and not so much that the caches
# have lost it, or that a transfer that is given up has to wait for it.
STEP_MIN_NBYTES, STEP_MAX_NBYTES = 4 << 20, 16 << 20


@dataclass(frozen=True)
class Told:
    """What is to come, as its sender and this agent know it; `generation` is the newest that it may be of."""

    origin: version.Origin
    shard: int
    step: int
    generation: int
    nbytes: int
    digest: str


class Checks(Protocol):
    """What bytes are checked by, in their order, in pieces of any size. Both raise BadVersionError."""

    def feed(self, data: memoryview) -> None:
        """The next ones."""

    def finish(self) -> object:
        """Those were all."""


class WholeVersion:
    """The checks of all of a version, header first."""

    def __init__(self, told: Told) -> None:
        self._told, self._checks = told, version.Verifier(told.nbytes, told.digest)
        self.feed = self._checks.feed

    def finish(self) -> None:
        """It is complete, and what was told."""
        told = self._told
        self._checks.finish().check(told.origin, told.shard, told.step, told.generation)


class Verifier:
    """Of the bytes that fill a view; in `async with`, as long as which the view has to live."""

    def __init__(self, view: memoryview, checks: Checks) -> None:
        self._view, self._checks = view, checks
        self._found: BadVersionError | None = None
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
            self._check_on(nbytes)

    async def fault(self) -> BadVersionError | None:
        """What is wrong with it, if something is: all of it is there by now."""
        while True:
            if self._step is not None:
                # A thread cannot be cancelled, and is waited for on the way out.
                await asyncio.shield(self._step)
            if self._begun == len(self._view):
                return self._found or self._end()
            self._check_on(len(self._view))

    def _end(self) -> BadVersionError | None:
        try:
            self._checks.finish()
        except BadVersionError as error:
            return error
        return None

    def _check_on(self, upto: int) -> None:
        if self._step is not None:
            self._step.result()
        end = min(upto, self._begun + STEP_MAX_NBYTES)
        part = self._view[self._begun : end]
        self._begun = end
        self._step = asyncio.get_running_loop().run_in_executor(None, self._check, part)

    def _check(self, part: memoryview) -> None:
        """In a thread."""
        with part:
            if self._found is not None:
                return
            try:
                self._checks.feed(part)
            except BadVersionError as error:
                # Its frames have views of the memory, which could not be given back as long as it is kept.
                self._found = error.with_traceback(None)
