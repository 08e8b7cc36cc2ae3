"""Gets a version's chunks over all ways to all its holders at once: each is verified, none is waited for."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckptless.daemon.agent.versions.connections import Peer, is_silence
from ckptless.daemon.agent.versions.integrity import ArrivalCheck
from ckptless.daemon.agent.versions.shares import AHEAD, Piece, Shares
from ckptless.daemon.agent.versions.store import Incoming, VersionStore
from ckptless.daemon.agent.versions.ways import Way, Ways
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import CkptlessError, PeerError
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import PATIENCE_S
from ckptless.daemon.transport.tasks import end_all

# How often whoever has nothing to do looks for one that is slow.
LOOK_S = 0.25


# Whose tensors, the shard, the step, and the newest generation that they may be of.
Wanted: TypeAlias = tuple[version.Origin, int, int, int]


class _Coming:
    """The version that the first holder to answer has: the others give their `shares` of the same."""

    def __init__(self, place: Incoming, shares: Shares) -> None:
        self.place, self.header, self.shares = place, place.header, shares
        self.moved = asyncio.Event()

    def wake(self) -> None:
        """Something has been done, or is open again."""
        self.moved.set()
        self.moved = asyncio.Event()


class TensorsFetch:
    """One fetch of one version. Owned by the agent's event loop. A source is a way, known by its number.

    `cut`: the one that the shard is of.
    """

    def __init__(self, wanted: Wanted, ways: Ways, tell: Callable[[str, str], None], cut: int) -> None:
        self._wanted, self._ways, self._tell, self._cut = wanted, ways, tell, cut
        _, self._shard, self._step, _ = wanted
        self._what = f"the tensors of step {self._step}, shard {self._shard}"
        self._coming: _Coming | None = None
        self._links: dict[int, Peer] = {}
        self._asked_of = 0
        # Of each source's own version: twins write the same, each with its rank in the header.
        self._digests: dict[int, str] = {}
        self._slow: set[int] = set()
        self._tried: list[str] = []
        # Who holds another version of the same than the one that was fetched.
        self.others: list[NodeInfo] = []

    async def run(self, infos: Sequence[NodeInfo], store: VersionStore) -> None:
        """Fetch until all of it is in the store, verified. Raises PeerError, OSError."""
        ways = [way for info in infos for way in self._ways.to(info)]
        with contextlib.ExitStack() as room:
            await self._draw_over(ways, lambda header: room.enter_context(store.incoming(header)))
            store.put_tensors(self._shard, self._step, self._check_complete().place.finish())

    async def fill(self, ways: Sequence[Way], place: Incoming, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch these parts of the payload of a version whose header is known. Raises PeerError, OSError."""
        chunk_nbytes = place.header.chunk_nbytes
        # All of it comes from one holder: the ways are to be done at the same time, to the last chunk.
        self._coming = _Coming(place, Shares(spans, chunk_nbytes, len(ways), chunk_nbytes))
        self._digests = dict.fromkeys(range(len(ways)), place.header.digest)
        await self._draw_over(ways, lambda _header: place)
        self._check_complete()

    async def _draw_over(self, ways: Sequence[Way], place: Callable[[version.Header], Incoming]) -> None:
        self._asked_of = len(ways)
        tasks = [asyncio.create_task(self._source(number, way, place)) for number, way in enumerate(ways)]
        try:
            await self._until_complete(set(tasks))
        finally:
            await end_all(tasks)

    async def _until_complete(self, tasks: set[asyncio.Task[None]]) -> None:
        while tasks and not (self._coming is not None and self._coming.shares.complete):
            # no deadline: each has its own: PATIENCE_S without an answer, or without a byte
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what is no fault of a source is raised here

    def _check_complete(self) -> _Coming:
        """Raises PeerError where something is missing."""
        if self._coming is None or not self._coming.shares.complete:
            raise PeerError(f"nobody could give {self._what} ({'; '.join(self._tried) or 'nobody has it'})")
        return self._coming

    # -------------------------------------------------------------------------------- one source

    async def _source(self, number: int, way: Way, place: Callable[[version.Header], Incoming]) -> None:
        """All that comes over one way; what is wrong with it is told, and left to the others."""
        try:
            link = self._links[number] = await self._ways.dial(way)
            try:
                coming = await self._meet(number, way, link, place)
                if coming is not None:
                    await self._draw(number, link, coming)
            finally:
                link.close()
        except (OSError, TimeoutError, CkptlessError) as error:
            self._failed(number, way, error)
        finally:
            if self._coming is not None:
                self._coming.shares.back(number)
                self._coming.wake()

    def _failed(self, number: int, way: Way, error: Exception) -> None:
        is_slow = number in self._slow
        why = "it is much slower than others" if is_slow else str(error) or type(error).__name__
        self._tried.append(f"{way.info.name}: {why}")
        if not ((is_slow or is_silence(error)) and self._ways.lose(way, why)):
            self._tell("source-failed", f"{self._what} from {self._tried[-1]}")

    async def _meet(
        self, number: int, way: Way, link: Peer, place: Callable[[version.Header], Incoming]
    ) -> _Coming | None:
        """Learn what it holds: the first one's version is what all are asked for. None: it has a twin's."""
        if number in self._digests:
            return self._coming  # it is who has offered it
        link.send(p.GetTensors(cut=self._cut, shard=self._shard, step=self._step))
        reply = await _answer(link)
        if not isinstance(reply, p.TensorsReply) or not reply.header:
            raise PeerError("it does not hold them soundly")
        header = version.decode(reply.header)
        header.check(*self._wanted)
        self._digests[number] = header.digest
        if self._coming is None:
            shares = Shares([(0, header.nbytes)], header.chunk_nbytes, self._asked_of)
            self._coming = _Coming(place(header), shares)
        if not header.is_like(self._coming.header):
            if way.info not in self.others:
                self.others.append(way.info)
            if header.is_twin_of(self._coming.header):
                # Bytes that are each rank's own differ, which is no fault: those are in the records.
                return None
            raise PeerError("it holds another version of them than others do")
        return self._coming

    async def _draw(self, number: int, link: Peer, coming: _Coming) -> None:
        """Piece after piece, each verified while it comes."""
        shares, asked = coming.shares, deque[Piece]()
        while not shares.complete:
            while len(asked) < AHEAD and (piece := shares.ask(number, _now())) is not None:
                self._ask(number, link, piece, asked)
            if not asked:
                await self._idle(number, coming)
            elif (again := await self._receive(number, link, coming, asked.popleft())) is not None:
                self._ask(number, link, again, asked)

    def _ask(self, number: int, link: Peer, piece: Piece, asked: deque[Piece]) -> None:
        asked.append(piece)
        link.send(
            p.GetChunks(
                shard=self._shard,
                step=self._step,
                digest=self._digests[number],
                start=piece.start,
                nbytes=piece.nbytes,
                verify=piece.verify,
            )
        )

    async def _receive(self, number: int, link: Peer, coming: _Coming, piece: Piece) -> Piece | None:
        """A sound piece is done; or else what to ask of the same holder again, which then reads its own."""
        began = _now()
        reply = await _answer(link)
        if not isinstance(reply, p.ChunksReply) or reply.nbytes != piece.nbytes:
            raise PeerError("it does not hold them any more")
        with coming.place.payload(piece.start, piece.end) as view:
            check = ArrivalCheck(view, coming.header, piece.start)
            await link.receive_bulk(view, check.feed)
            fault = await check.fault()
        coming.shares.came(number, piece, _now(), began)
        if fault is None:
            coming.shares.done(number, piece)
            coming.wake()
            return None
        if piece.verify:
            raise fault
        self._tell("refused-version", f"from node-{link.node}: {fault}")
        return coming.shares.again(number, piece, _now())

    async def _idle(self, number: int, coming: _Coming) -> None:
        """Wait until there is something to do again; a slow source is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await coming.moved.wait()
        slow = coming.shares.slow(number, _now())
        if slow is not None and slow in self._links:
            self._slow.add(slow)
            self._links[slow].close()


async def _answer(link: Peer) -> p.AgentMessage:
    async with asyncio.timeout(PATIENCE_S):
        return await link.receive()


def _now() -> float:
    return asyncio.get_running_loop().time()
