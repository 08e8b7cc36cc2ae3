"""Gets a version's chunks from all who hold it at once: each is verified, and nobody has to be waited for."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ckptless.daemon.agent.versions.holders import Peer
from ckptless.daemon.agent.versions.memory import Region
from ckptless.daemon.agent.versions.shares import AHEAD, Piece, Shares
from ckptless.daemon.agent.versions.vault import Vault
from ckptless.daemon.agent.versions.verifier import Verifier
from ckptless.daemon.api import version
from ckptless.daemon.api.errors import CkptlessError, PeerError
from ckptless.daemon.api.messages import NodeInfo, TensorsAt
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import PATIENCE_S

# How often whoever has nothing to do looks for one that is slow.
LOOK_S = 0.25

Tell = Callable[[str, str], None]


@dataclass(frozen=True)
class Wanted:
    """What is to be fetched; it may be of generation `generation` at most."""

    origin: version.Origin
    shard: int
    step: int
    generation: int

    def __str__(self) -> str:
        return f"the tensors of step {self.step}, shard {self.shard}"


@dataclass
class _Coming:
    """The version that the first holder to answer has: the others give their part of the same."""

    header: version.Header
    encoded: bytes
    region: Region
    offset: int
    slot: memoryview
    shares: Shares
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def payload_at(self) -> int:
        return self.header.header_nbytes

    def wake(self) -> None:
        """Something has been done, or is open again."""
        self.moved.set()
        self.moved = asyncio.Event()


class TensorsFetch:
    """One fetch of one version. Owned by the agent's event loop."""

    def __init__(
        self, wanted: Wanted, vault: Vault, dial: Callable[[NodeInfo], Awaitable[Peer]], tell: Tell
    ) -> None:
        self._wanted, self._vault, self._dial, self._tell = wanted, vault, dial, tell
        self._coming: _Coming | None = None
        self._links: dict[int, Peer] = {}
        self._asked_of = 0
        # Of each node's own version: twins write the same, each with its rank in the header.
        self._digests: dict[int, str] = {}
        self._given: dict[int, int] = {}
        self._slow: set[int] = set()
        self._tried: list[str] = []
        # Who holds another version of the same than the one that was fetched.
        self.others: list[NodeInfo] = []
        self._room = contextlib.ExitStack()

    async def run(self, infos: Sequence[NodeInfo]) -> TensorsAt:
        """Until all of it is in the vault's memory, verified. Raises PeerError, OSError."""
        self._asked_of = len(infos)
        tasks = [asyncio.create_task(self._source(info)) for info in infos]
        try:
            await self._until_complete(set(tasks))
            return self._finish()
        except BaseException:
            if self._coming is not None:
                version.invalidate(self._coming.slot)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._coming is not None:
                self._coming.slot.release()
            self._room.close()

    async def _until_complete(self, tasks: set[asyncio.Task[None]]) -> None:
        while tasks and not (self._coming is not None and self._coming.shares.complete):
            # no deadline: each has its own: PATIENCE_S without an answer, or without a byte
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what is no fault of a source is raised here

    def _finish(self) -> TensorsAt:
        coming = self._coming
        if coming is None or not coming.shares.complete:
            raise PeerError(f"nobody could give {self._wanted} ({'; '.join(self._tried) or 'nobody has it'})")
        coming.slot[: len(coming.encoded)] = coming.encoded
        return TensorsAt(
            region=coming.region.number,
            offset=coming.offset,
            nbytes=coming.header.total_nbytes,
            digest=coming.header.digest,
        )

    @property
    def given(self) -> dict[int, int]:
        """Bytes that each node has given."""
        return self._given

    # -------------------------------------------------------------------------------- one source

    async def _source(self, info: NodeInfo) -> None:
        """All that one holder gives; what is wrong with it is told, and left to the others."""
        try:
            link = self._links[info.node] = await self._dial(info)
            try:
                coming = await self._meet(info, link)
                if coming is not None:
                    await self._draw(info.node, link, coming)
            finally:
                link.close()
        except (OSError, TimeoutError, CkptlessError) as error:
            why = "it is much slower than others" if info.node in self._slow else str(error)
            self._tried.append(f"{info.name}: {why or type(error).__name__}")
            self._tell("source-failed", f"{self._wanted} from {self._tried[-1]}")
        finally:
            if self._coming is not None:
                self._coming.shares.back(info.node)
                self._coming.wake()

    async def _meet(self, info: NodeInfo, link: Peer) -> _Coming | None:
        """Learn what it holds: the first one's version is what all are asked for. None: it has a twin's."""
        link.send(p.GetTensors(shard=self._wanted.shard, step=self._wanted.step))
        reply = await _answer(link)
        if not isinstance(reply, p.TensorsReply) or not reply.digest:
            raise PeerError("it does not hold them soundly")
        wanted = self._wanted
        header = version.decode(reply.header, reply.digest)
        header.check(wanted.origin, wanted.shard, wanted.step, wanted.generation)
        self._digests[info.node] = header.digest
        if self._coming is None:
            region, offset = self._room.enter_context(self._vault.room(wanted.shard, header.total_nbytes))
            slot = region.view(offset, header.total_nbytes)
            version.invalidate(slot)
            shares = Shares(header.nbytes, header.chunk_nbytes, self._asked_of)
            encoded = reply.header[: header.header_nbytes]
            self._coming = _Coming(header, encoded, region, offset, slot, shares)
        if not header.is_like(self._coming.header):
            self.others.append(info)
            if header.is_twin_of(self._coming.header):
                # Bytes that are each rank's own differ, which is no fault: those are in the records.
                return None
            raise PeerError("it holds another version of them than others do")
        return self._coming

    async def _draw(self, node: int, link: Peer, coming: _Coming) -> None:
        """Piece after piece, each verified while it comes."""
        shares, asked = coming.shares, deque[Piece]()
        while not shares.complete:
            while len(asked) < AHEAD and (piece := shares.ask(node, _now())) is not None:
                self._ask(node, link, piece, asked)
            if not asked:
                await self._idle(node, coming)
            elif (again := await self._receive(node, link, coming, asked.popleft())) is not None:
                self._ask(node, link, again, asked)

    def _ask(self, node: int, link: Peer, piece: Piece, asked: deque[Piece]) -> None:
        asked.append(piece)
        link.send(
            p.GetChunks(
                shard=self._wanted.shard,
                step=self._wanted.step,
                digest=self._digests[node],
                start=piece.start,
                nbytes=piece.nbytes,
                verify=piece.verify,
            )
        )

    async def _receive(self, node: int, link: Peer, coming: _Coming, piece: Piece) -> Piece | None:
        """A sound piece is done; or else what to ask of the same holder again, which then reads its own."""
        began = _now()
        reply = await _answer(link)
        if not isinstance(reply, p.ChunksReply) or reply.nbytes != piece.nbytes:
            raise PeerError("it does not hold them any more")
        at = coming.payload_at
        with coming.slot[at + piece.start : at + piece.end] as view:
            verifier = Verifier(view, version.ChunkVerifier(coming.header, piece.start, piece.end))
            await link.receive_bulk(view, verifier.feed)
            fault = await verifier.fault()
        self._given[node] = self._given.get(node, 0) + piece.nbytes
        coming.shares.came(node, piece, _now(), began)
        if fault is None:
            coming.shares.done(node, piece)
            coming.wake()
            return None
        if piece.verify:
            raise fault
        self._tell("refused-version", f"from node-{node}: {fault}")
        return coming.shares.again(node, piece, _now())

    async def _idle(self, node: int, coming: _Coming) -> None:
        """Until there is something to do again; whoever is slow is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await coming.moved.wait()
        slow = coming.shares.slow(node, _now())
        if slow is not None and slow in self._links:
            self._slow.add(slow)
            self._links[slow].close()


async def _answer(link: Peer) -> p.AgentMessage:
    async with asyncio.timeout(PATIENCE_S):
        return await link.receive()


def _now() -> float:
    return asyncio.get_running_loop().time()
