"""The integrity check: versions are, where they lie and while they come, verified to the last byte."""

import asyncio
from collections.abc import Callable

from ckptless.daemon.agent.versions.store import VersionStore, header_of
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.messages import TensorsAt
from ckptless.daemon.transport.bulk import in_thread

# What is hashed at one go: not so much that the sender gives up meanwhile, where some of it lay here already;
# and so much is left to the event loop.
STEP_NBYTES, LITTLE_NBYTES = 16 << 20, 1 << 20


class IntegrityCheck:
    """Looks at the tensors in a version store, and drops what is bad. Owned by the agent's event loop.

    `generation` is the newest that there is: nothing can be of a later one.
    """

    def __init__(self, origin: version.Origin, store: VersionStore) -> None:
        self._origin, self._store = origin, store
        self.generation = 0
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def seems(self, shard: int, step: int) -> bool:
        """Whether a version of a step is here, as far as its header tells."""
        found = self._store.tensors(shard, step)
        if found is None:
            return False
        at, region = found
        try:
            header_of(region, at).check(self._origin, shard, step, self.generation)
        except BadVersionError as error:
            self.drop(shard, step, at, str(error))
            return False
        return True

    async def holds(self, shard: int, step: int, start: int = 0, end: int | None = None) -> bool:
        """Whether a sound version of a step is here: every byte of it is read, in a thread.

        With `start` and `end`: those bytes of the payload, which are whole chunks.
        """
        if not self.seems(shard, step):
            return False
        found = self._store.tensors(shard, step)
        assert found is not None
        at, region = found
        header = header_of(region, at)
        upto = header.nbytes if end is None else min(end, header.nbytes)
        try:
            with region.view(at.offset, at.nbytes) as view:
                await asyncio.to_thread(version.check_chunks, view, header, start, upto)
        except BadVersionError as error:
            self.drop(shard, step, at, str(error))
            return False
        # It may have been written over meanwhile.
        return self._store.tensors(shard, step) == found

    def drop(self, shard: int, step: int, at: TensorsAt, why: str) -> None:
        """Hold what lies there no more, and tell everybody, unless something else took its place."""
        if self._store.drop_tensors(shard, step, at):
            self.on_event("bad-version", f"shard {shard}, step {step}: {why}")


class ArrivalCheck:
    """Digests the chunks that fill a view while the rest comes, in the thread that receives them."""

    def __init__(self, view: memoryview, header: version.Header, start: int = 0) -> None:
        """`view`: whole chunks of the payload, from byte `start` on."""
        self._view, self._header = view, header
        self._first = start // header.chunk_nbytes
        self._digests = version.ChunkDigests(view, header.chunk_nbytes)
        self._upto = 0
        self._given_up = False

    def feed(self, nbytes: int) -> None:
        """Note that so many bytes of the view, from its begin, are there by now."""
        self._upto = min(nbytes, self._upto + STEP_NBYTES)
        self._digests.came(self._upto)

    async def fault(self) -> BadVersionError | None:
        """The first chunk that is wrong, if one is: all of it is there by now."""
        if len(self._view) - self._upto > LITTLE_NBYTES:
            await in_thread(self._feed_rest, self._give_up)
        self._feed_rest()
        try:
            for index, digest in enumerate(self._digests.finish(), self._first):
                self._header.check_chunk(index, digest)
        except BadVersionError as error:
            return error
        return None

    def _feed_rest(self) -> None:
        while self._upto < len(self._view) and not self._given_up:
            self.feed(len(self._view))

    def _give_up(self) -> None:
        self._given_up = True
