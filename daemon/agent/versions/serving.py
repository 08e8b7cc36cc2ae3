"""Serves other agents: holds their records and tensors, and gives what is held here."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Literal
from weakref import WeakValueDictionary

from ckptless.daemon.agent.core.replication import Replication, verdict
from ckptless.daemon.agent.versions.connections import Peer
from ckptless.daemon.agent.versions.deltas import Base, Span, base_of, missing, spans_of
from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.integrity import ArrivalCheck, IntegrityCheck
from ckptless.daemon.agent.versions.shares import LEAST_NBYTES
from ckptless.daemon.agent.versions.spans import SPANS_LIMIT, SoundSpans
from ckptless.daemon.agent.versions.store import HeldRecord, Incoming, VersionStore, digest, header_of
from ckptless.daemon.agent.versions.ways import Way, Ways
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import (
    BadVersionError,
    CkptlessError,
    MismatchError,
    PeerError,
    ProtocolError,
)
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bucket import TokenBucket
from ckptless.daemon.transport.bulk import SendRate
from ckptless.daemon.transport.credentials import Credentials
from ckptless.daemon.transport.link import Link

logger = logging.getLogger(__name__)

CATCH_UP_DEADLINE_S = 10.0
# From the answer that something is wanted until it begins to come; then others may give it.
PUT_DEADLINE_S = 15.0
# How often an agent that has offered something hears that its answer takes time; see ANSWER_DEADLINE_S.
LATER_S = 3.0
# Events of connections that have not proved who they are.
REFUSALS_PER_S, REFUSALS_AT_ONCE = 1 / 60, 5

# Of less it is not worth while to use several ways: that is one piece, and one round of greetings more.
SPREAD_NBYTES = LEAST_NBYTES

Answer = Literal["held", "wanted", "stale", "unsound"]


async def receive_payload(link: Peer, coming: Incoming, base: Base | None = None) -> None:
    """Receive a version's payload and verify it; what `base` has of it is not sent.

    Raises BadVersionError, and the connection can be used further; OSError.
    """
    header = coming.header
    with coming.payload(0, header.nbytes) as payload:
        check = ArrivalCheck(payload, header)
        if base is not None:
            await base.copy(payload)
        for start, end in missing(header, base.runs if base is not None else ()):
            with payload[start:end] as part:
                await link.receive_bulk(part, _beyond(start, check.feed))
        fault = await check.fault()
    if fault is not None:
        raise fault


async def _take_over(coming: Incoming, base: Base | None) -> list[Span]:
    """Copy what `base` has of a version, verified; where the rest lies. Raises BadVersionError."""
    header = coming.header
    if base is None:
        return missing(header, ())
    with coming.payload(0, header.nbytes) as payload:
        await base.copy(payload)
        for start, end in spans_of(header, base.runs):
            with payload[start:end] as part:
                if (fault := await ArrivalCheck(part, header, start).fault()) is not None:
                    raise fault
    return missing(header, base.runs)


def _beyond(start: int, feed: Callable[[int], None]) -> Callable[[int], None]:
    return lambda came: feed(start + came)


async def _no_store(_link: Peer, _join: p.StoreJoin) -> None:
    raise ProtocolError("no key-value store is here")


class Serving:
    """Owned by the agent's event loop."""

    def __init__(
        self,
        node: int,
        origin: version.Origin,
        store: VersionStore,
        pace: SendRate,
        core: Replication[Any],
        ways: Ways,
    ) -> None:
        self._me, self._origin, self._store, self._pace, self._core = node, origin, store, pace, core
        self._ways = ways
        self.integrity = IntegrityCheck(origin, store)
        self.spans = SoundSpans(origin, store, lambda kind, text: self.on_event(kind, text))
        self._followed = asyncio.Condition()
        # The transfer locks, by digest: the same version is not taken from two nodes at once.
        self._transfers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._refusals = TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE)
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self.on_compare: Callable[[Peer, p.CompareTwins], None] = lambda _link, _message: None
        self.on_save_ask: Callable[[p.SaveAsk], p.SaveReply] = lambda _ask: p.SaveReply(newest=None)
        self.on_store: Callable[[Peer, p.StoreJoin], Awaitable[None]] = _no_store

    def follow(self, generation: int) -> Coroutine[Any, Any, None]:
        """A new generation: what has come for it too early may be taken now. To be awaited soon."""
        self.integrity.generation = generation
        self.spans.follow(generation)
        return self._announce()

    async def _announce(self) -> None:
        async with self._followed:
            self._followed.notify_all()

    async def serve(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], credentials: Credentials
    ) -> None:
        """One connection of another agent, to its end."""
        try:
            link: Peer = await Link.accept(streams, self._node_in, credentials, p.AgentMessage)
        except MismatchError as error:
            # Anybody may say so: one event for each, and the job's own would not be written any more.
            if self._refusals.spend(1, asyncio.get_running_loop().time()):
                self.on_event("peer-refused", str(error))
            return
        except (OSError, TimeoutError, CkptlessError) as error:
            # A daemon that asks whether we live connects and hangs up: no reason for a warning.
            logger.debug("a connection that was no agent's: %s", error)
            return
        try:
            while True:
                await self._answer(link, await link.receive())
        except ConnectionError:
            logger.debug("node-%d hung up", link.node)
        except (CkptlessError, OSError) as error:
            self.on_event("peer-refused", f"node-{link.node}: {error}")
        finally:
            link.close()

    def _node_in(self, job: str) -> int:
        if job != self._origin.job:
            raise PeerError(f"this is an agent of job {self._origin.job}, not of {job}")
        return self._me

    async def _answer(self, link: Peer, message: p.AgentMessage) -> None:
        match message:
            case p.PutRecord():
                await self._hold_record(link, message)
            case p.OfferTensors():
                await self._consider(link, message)
            case p.GetChunks():
                await self._give_chunks(link, message)
            case p.GetSpans():
                await self._give_spans(link, message)
            case p.CompareTwins():
                self.on_compare(link, message)
            case p.StoreJoin():
                await self.on_store(link, message)
            case p.GetRecord(cut=cut, rank=rank, step=step):
                store = self._store.of(cut)
                held = (store.record(rank, step) if store is not None else None) or HeldRecord(b"", "")
                link.send(p.RecordReply(record=held.record, digest=held.digest, shard=held.shard))
            case p.GetTensors():
                link.send(p.TensorsReply(header=self._header(message)))
            case p.SaveAsk():
                link.send(self.on_save_ask(message))
            case _:
                raise ProtocolError(f"{type(message).__name__} is no request")

    # -------------------------------------------------------------------------------------- hold

    async def _hold_record(self, link: Peer, message: p.PutRecord) -> None:
        taken = await self._takes(message.generation, f"the record of rank {message.rank}")
        if taken:
            held = HeldRecord(message.record, message.digest, message.shard)
            self._store.put_record(message.rank, message.step, held)
            self._core.saw_commit(message.step)
        link.send(p.Held(generation=message.generation, rank=message.rank, step=message.step, held=taken))

    async def _consider(self, link: Peer, offer: p.OfferTensors) -> None:
        """Answer an offer; and take the tensors, where they are wanted."""
        try:
            header = version.decode(offer.header)
            header.check(self._origin, header.shard, header.step, offer.generation)
        except BadVersionError as error:
            self._refuse_version(link, error)
            return
        lock = self._transfers.setdefault(header.digest, asyncio.Lock())
        async with contextlib.AsyncExitStack() as stack:
            async with _saying_later(link):
                # Another node may be giving it: then it is here, or it is wanted from this one.
                await stack.enter_async_context(lock)
                answer = await self._answer_to(offer.generation, header)
                base = base_of(self._store, header) if answer == "wanted" else None
                ways = self._spread(link.node, header, base) if answer == "wanted" else ()
                if ways:
                    answer = await self._draw_tensors(ways, offer.generation, header, base)
            have = base.runs if base is not None and answer == "wanted" else ()
            link.send(p.TensorsAnswer(answer=answer, have=have))
            if answer == "wanted":
                await self._until_put(link)
                await self._hold_tensors(link, offer.generation, header, base)

    async def _until_put(self, link: Peer) -> None:
        try:
            async with asyncio.timeout(PUT_DEADLINE_S):
                message = await link.receive()
        except TimeoutError:
            raise PeerError("it has offered tensors that are wanted, and does not send them") from None
        if not isinstance(message, p.PutTensors):
            raise ProtocolError(f"{type(message).__name__} in place of tensors that are wanted")

    async def _answer_to(self, generation: int, header: version.Header) -> Answer:
        shard, step = header.shard, header.step
        if not await self._takes(generation, f"the tensors of shard {shard}"):
            return "stale"
        found = self._store.tensors(shard, step)
        if found is None or found[0].digest != header.digest:
            return "wanted"
        return "held" if await self.integrity.holds(shard, step) else "wanted"

    async def _hold_tensors(
        self, link: Peer, generation: int, header: version.Header, base: Base | None
    ) -> None:
        answer: Answer = "stale"
        with self._store.incoming(header) as coming:
            try:
                await receive_payload(link, coming, base)
            except BadVersionError as error:
                if base is not None:
                    # So that it is not taken again, if that was it.
                    await self.integrity.holds(header.shard, base.step)
                self._refuse_version(link, error)
                return
            # The generation may have ended while they came.
            if self._judge(generation, f"the tensors of shard {header.shard}"):
                self._store.put_tensors(header.shard, header.step, coming.finish())
                answer = "held"
        link.send(p.TensorsAnswer(answer=answer))

    def _spread(self, node: int, header: version.Header, base: Base | None) -> tuple[Way, ...]:
        """Return the ways over which an offered version is fetched; none where it is sent over the one."""
        info = self._core.nodes.get(node)
        ways = self._ways.to(info) if info is not None else ()
        parts = missing(header, base.runs if base is not None else ())
        much = sum(end - start for start, end in parts) > SPREAD_NBYTES
        return ways if much and len(ways) > 1 else ()

    async def _draw_tensors(
        self, ways: tuple[Way, ...], generation: int, header: version.Header, base: Base | None
    ) -> Answer:
        """Fetch what was offered, over all ways at once, and hold it."""
        wanted = (self._origin, header.shard, header.step, generation)
        with self._store.incoming(header) as coming:
            try:
                parts = await _take_over(coming, base)
                await TensorsFetch(wanted, self._ways, self.on_event, self._store.cut).fill(
                    ways, coming, parts
                )
            except (OSError, TimeoutError, CkptlessError) as error:
                self.on_event("refused-version", f"from node-{ways[0].info.node}: {error}")
                if base is not None:
                    # So that it is not taken again, if that was it.
                    await self.integrity.holds(header.shard, base.step)
                return "unsound"
            if not self._judge(generation, f"the tensors of shard {header.shard}"):
                return "stale"
            self._store.put_tensors(header.shard, header.step, coming.finish())
            return "held"

    def _refuse_version(self, link: Peer, error: BadVersionError) -> None:
        self.on_event("refused-version", f"from node-{link.node}: {error}")
        link.send(p.TensorsAnswer(answer="unsound"))

    async def _takes(self, generation: int, what: str) -> bool:
        """Return whether it may be held; wait where the sender has heard of a new generation before us."""
        core = self._core
        if verdict(generation, core.generation, accepting=core.accepting) == "early":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_DEADLINE_S), self._followed:
                    await self._followed.wait_for(lambda: generation <= core.generation)
        return self._judge(generation, what)

    def _judge(self, generation: int, what: str) -> bool:
        core = self._core
        found = verdict(generation, core.generation, accepting=core.accepting)
        if found in ("early", "stale"):
            self.on_event("stale-record", f"{what}, generation {generation}, here {core.generation}")
        return found == "take"

    # -------------------------------------------------------------------------------------- give

    def _header(self, wanted: p.GetTensors) -> bytes:
        """The header of a version that is held, as far as that tells; else nothing."""
        found = self._store.tensors(wanted.shard, wanted.step) if wanted.cut == self._store.cut else None
        if found is None or not self.integrity.seems(wanted.shard, wanted.step):
            return b""
        at, region = found
        with region.view(at.offset, header_of(region, at).header_nbytes) as view:
            return bytes(view)

    async def _give_chunks(self, link: Peer, wanted: p.GetChunks) -> None:
        start, end = wanted.start, wanted.start + wanted.nbytes
        if wanted.verify:
            await self.integrity.holds(wanted.shard, wanted.step, start, end)
        found = self._store.tensors(wanted.shard, wanted.step)
        same = found is not None and found[0].digest == wanted.digest
        if found is None or not same or not self.integrity.seems(wanted.shard, wanted.step):
            link.send(p.ChunksReply(nbytes=0))
            return
        at, region = found
        payload_at = at.offset + header_of(region, at).header_nbytes
        if payload_at + end > at.offset + at.nbytes:
            raise ProtocolError(f"bytes {start} to {end} are asked for of a version of {at.nbytes}")
        link.send(p.ChunksReply(nbytes=wanted.nbytes))
        with region.view(payload_at + start, wanted.nbytes) as view:
            await link.send_bulk(view, self._pace)

    async def _give_spans(self, link: Peer, wanted: p.GetSpans) -> None:
        nbytes = sum(count for _, count in wanted.spans)
        if nbytes > SPANS_LIMIT:
            raise ProtocolError(f"parts of {nbytes} bytes are asked for at once; the limit is {SPANS_LIMIT}")
        gathered = bytearray(nbytes)
        try:
            await self.spans.read(wanted, memoryview(gathered))
        except (BadVersionError, PeerError) as error:
            logger.debug("parts of shard %d, step %d: %s", wanted.shard, wanted.step, error)
            link.send(p.SpansReply(nbytes=0))
            return
        link.send(p.SpansReply(nbytes=nbytes, digest=await asyncio.to_thread(digest, gathered)))
        with memoryview(gathered) as view:
            await link.send_bulk(view, self._pace)


@contextlib.asynccontextmanager
async def _saying_later(link: Peer) -> AsyncIterator[None]:
    """Say again and again that the answer to an offer takes time: as long as another node's transfer."""

    async def say() -> None:
        while True:
            await asyncio.sleep(LATER_S)
            link.send(p.TensorsAnswer(answer="later"))

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()
