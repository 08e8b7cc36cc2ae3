"""What is still coming of a version, verified while the rest of it comes, by the thread that receives it."""

from dataclasses import dataclass
from typing import Protocol

from ckptless.daemon.api import version
from ckptless.daemon.api.errors import BadVersionError
from ckptless.daemon.peers.bulk import in_thread

# What is hashed at one go: not so much that the sender gives up meanwhile, where some of it lay here already;
# and so much is left to the event loop.
STEP_NBYTES, LITTLE_NBYTES = 16 << 20, 1 << 20


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
    """Of the bytes that fill a view. One thread at a time."""

    def __init__(self, view: memoryview, checks: Checks) -> None:
        self._view, self._checks = view, checks
        self._found: BadVersionError | None = None
        self._upto = 0
        self._given_up = False

    def feed(self, nbytes: int) -> None:
        """So many bytes of the view, from its begin, are there by now."""
        end = min(nbytes, self._upto + STEP_NBYTES)
        with self._view[self._upto : end] as part:
            self._upto = end
            if self._found is not None:
                return
            try:
                self._checks.feed(part)
            except BadVersionError as error:
                # Its frames have views of the memory, which could not be given back as long as it is kept.
                self._found = error.with_traceback(None)

    async def fault(self) -> BadVersionError | None:
        """What is wrong with it, if something is: all of it is there by now."""
        if len(self._view) - self._upto > LITTLE_NBYTES:
            await in_thread(self._feed_rest, self._give_up)
        self._feed_rest()
        if self._found is None:
            try:
                self._checks.finish()
            except BadVersionError as error:
                return error
        return self._found

    def _feed_rest(self) -> None:
        while self._upto < len(self._view) and not self._given_up:
            self.feed(len(self._view))

    def _give_up(self) -> None:
        self._given_up = True
