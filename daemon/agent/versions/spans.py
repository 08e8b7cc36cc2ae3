"""Parts of a version that lies here: all of the chunks that they lie in are verified before one is used."""

import asyncio
from collections.abc import Callable

from ckptless.daemon.agent.versions.store import VersionStore, header_of
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, PeerError
from ckptless.daemon.protocol.peers.messages import GetSpans

# So many bytes are given at once.
SPANS_LIMIT = 256 << 20


class SoundSpans:
    """Reads parts of versions in a store, of whatever cut. Owned by the agent's event loop.

    What another number of ranks had committed does not change any more: each chunk of it is verified once in
    a generation.
    """

    def __init__(self, origin: version.Origin, store: VersionStore, tell: Callable[[str, str], None]) -> None:
        self._origin, self._store, self._tell = origin, store, tell
        self._generation = 0
        # By the version's digest.
        self._sound: dict[str, set[int]] = {}

    def follow(self, generation: int) -> None:
        """Begin a generation."""
        self._generation = generation
        self._sound.clear()

    async def read(self, wanted: GetSpans, into: memoryview) -> None:
        """Put parts of a version there, one after the other. Raises BadVersionError, PeerError."""
        store = self._store.of(wanted.cut)
        found = store.tensors(wanted.shard, wanted.step) if store is not None else None
        if store is None or found is None:
            raise BadVersionError("it is not held here")
        at, region = found
        try:
            header = header_of(region, at)
            header.check(self._origin, wanted.shard, wanted.step, self._generation)
            self._check_fits(wanted, header)
            with region.view(at.offset, at.nbytes) as slot:
                await asyncio.to_thread(self._verify_and_copy, slot, header, wanted, into)
                if store.tensors(wanted.shard, wanted.step) != found:
                    raise BadVersionError("it has been given back")
        except BadVersionError as error:
            if store.drop_tensors(wanted.shard, wanted.step, at):
                self._tell("bad-version", f"shard {wanted.shard}, step {wanted.step}: {error}")
            raise
        except ValueError:
            raise BadVersionError("it has been given back") from None

    @staticmethod
    def _check_fits(wanted: GetSpans, header: version.Header) -> None:
        if header.layout != wanted.layout:
            raise PeerError("it is not of the layout that its record names")
        if any(start + count > header.nbytes for start, count in wanted.spans):
            raise PeerError(f"it has {header.nbytes} bytes, and more are asked for")

    def _verify_and_copy(
        self, slot: memoryview, header: version.Header, wanted: GetSpans, into: memoryview
    ) -> None:
        """Read all chunks that are touched and were not read before. In a thread. Raises BadVersionError."""
        size, sound = header.chunk_nbytes, self._sound.setdefault(header.digest, set())
        for start, count in wanted.spans:
            for index in range(start // size, -(-(start + count) // size)):
                if index not in sound:
                    end = min((index + 1) * size, header.nbytes)
                    version.check_chunks(slot, header, index * size, end)
                    sound.add(index)
        _gather(slot, header, wanted, into)


def _gather(slot: memoryview, header: version.Header, wanted: GetSpans, into: memoryview) -> None:
    to = 0
    for start, count in wanted.spans:
        begin = header.header_nbytes + start
        into[to : to + count] = slot[begin : begin + count]
        to += count
