"""What other agents ask of this one: to hold their records and tensors, and to give what is held here."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

from ckptless.daemon.agent.versions.claims import Claims
from ckptless.daemon.agent.versions.deltas import Base, base_of, missing
from ckptless.daemon.agent.versions.holders import Peer
from ckptless.daemon.agent.versions.soundness import Soundness, header_of
from ckptless.daemon.agent.versions.vault import Held, Vault
from ckptless.daemon.agent.versions.verifier import Told, Verifier, WholeVersion
from ckptless.daemon.api import version
from ckptless.daemon.api.errors import BadVersionError, CkptlessError, MismatchError, PeerError, ProtocolError
from ckptless.daemon.api.messages import TensorsAt
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bucket import TokenBucket
from ckptless.daemon.peers.bulk import Pace
from ckptless.daemon.peers.credentials import Credentials
from ckptless.daemon.peers.link import Link

logger = logging.getLogger(__name__)

CATCH_UP_DEADLINE_S = 10.0
# How often an agent that has offered something hears that its answer takes time; see ANSWER_DEADLINE_S.
LATER_S = 3.0
# Events of connections that have not proved who they are.
REFUSALS_PER_S, REFUSALS_AT_ONCE = 1 / 60, 5


async def receive_tensors(
    link: Peer, vault: Vault, told: Told, put: Callable[[TensorsAt], None], base: Base | None = None
) -> None:
    """Receive a version into the vault, verify it, and `put` it. Raises BadVersionError and OSError.

    What `base` has of it is not sent. With BadVersionError all of it has been received, and the connection
    can be used further.
    """
    with vault.room(told.shard, told.nbytes) as (region, offset):
        with region.view(offset, told.nbytes) as view:
            try:
                verifier = Verifier(view, WholeVersion(told))
                if base is not None:
                    await base.copy(view)
                spans = missing(base.header, base.runs) if base is not None else [(0, told.nbytes)]
                for start, end in spans:
                    with view[start:end] as part:
                        await link.receive_bulk(part, _beyond(start, verifier.feed))
                fault = await verifier.fault()
                if fault is not None:
                    raise fault
            except BaseException:
                version.invalidate(view)
                raise
        put(TensorsAt(region=region.number, offset=offset, nbytes=told.nbytes, digest=told.digest))


def _beyond(start: int, feed: Callable[[int], None]) -> Callable[[int], None]:
    return lambda came: feed(start + came)


async def _no_store(_link: Peer, _join: p.StoreJoin) -> None:
    raise ProtocolError("no key-value store is here")


class Serving:
    """Owned by the agent's event loop. `accepting`: not while this node's agent is frozen."""

    def __init__(self, node: int, origin: version.Origin, vault: Vault, pace: Pace) -> None:
        self._me, self._origin, self._vault, self._pace = node, origin, vault, pace
        self.soundness = Soundness(origin, vault)
        self._generation = 0
        self._followed = asyncio.Condition()
        self._claims = Claims()
        self._refusals = TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE)
        # What each connection has been told of in the answer to its last offer.
        self._bases: dict[Peer, Base] = {}
        self.accepting = True
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self.on_compare: Callable[[Peer, p.CompareTwins], None] = lambda _link, _message: None
        self.on_save_ask: Callable[[p.SaveAsk], p.SaveReply] = lambda _ask: p.SaveReply(newest=None)
        self.on_store: Callable[[Peer, p.StoreJoin], Awaitable[None]] = _no_store
        self.on_who_holds: Callable[[p.WhoHolds], p.HeldBy] = lambda _ask: p.HeldBy(tensors=(), records=())

    def follow(self, generation: int) -> Coroutine[Any, Any, None]:
        """A new generation: what belongs to another is not taken any more. To be awaited soon."""
        self._generation, self.accepting = generation, True
        self.soundness.generation = generation
        return self._announce()

    async def _announce(self) -> None:
        async with self._followed:
            self._followed.notify_all()

    async def serve(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], vouch: Credentials
    ) -> None:
        """One connection of another agent, to its end."""
        try:
            link: Peer = await Link.accept(streams, self._node_in, vouch, p.AgentMessage)
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
            self._claims.release(link)
            self._bases.pop(link, None)
            link.close()

    def _node_in(self, job: str) -> int:
        if job != self._origin.job:
            raise PeerError(f"this is an agent of job {self._origin.job}, not of {job}")
        return self._me

    async def _answer(self, link: Peer, message: p.AgentMessage) -> None:
        if not isinstance(message, p.PutTensors):
            self._claims.release(link)
        match message:
            case p.PutRecord():
                await self._hold_record(link, message)
            case p.OfferTensors():
                await self._consider(link, message)
            case p.PutTensors():
                self._claims.begin(link)
                await self._hold_tensors(link, message)
                # It may have no more to say, and another who has the same waits for the end of this.
                self._claims.release(link)
            case p.GetChunks():
                await self._give_chunks(link, message)
            case p.CompareTwins():
                self.on_compare(link, message)
            case p.StoreJoin():
                await self.on_store(link, message)
            case p.GetRecord() | p.GetTensors() | p.SaveAsk() | p.WhoHolds():
                link.send(self._reply(message))
            case _:
                raise ProtocolError(f"{type(message).__name__} is no request")

    def _reply(self, question: p.GetRecord | p.GetTensors | p.SaveAsk | p.WhoHolds) -> p.AgentMessage:
        """To what is answered at once."""
        match question:
            case p.GetRecord():
                held = self._vault.record(question.rank, question.step) or Held(b"", "")
                return p.RecordReply(record=held.record, digest=held.digest, shard=held.shard)
            case p.GetTensors():
                return self._describe_tensors(question)
            case p.SaveAsk():
                return self.on_save_ask(question)
            case p.WhoHolds():
                return self.on_who_holds(question)

    # -------------------------------------------------------------------------------------- hold

    async def _hold_record(self, link: Peer, message: p.PutRecord) -> None:
        taken = await self._takes(message.generation, f"the record of rank {message.rank}")
        if taken:
            held = Held(message.record, message.digest, message.shard)
            self._vault.put_record(message.rank, message.step, held)
        link.send(p.Held(generation=message.generation, rank=message.rank, step=message.step, held=taken))

    async def _consider(self, link: Peer, offer: p.OfferTensors) -> None:
        saying = asyncio.create_task(_say_later(link, offer))
        try:
            await self._decide(link, offer)
        finally:
            saying.cancel()

    async def _decide(self, link: Peer, offer: p.OfferTensors) -> None:
        what = (offer.shard, offer.step, offer.digest)
        answer = await self._answer_to(offer)
        while answer == "wanted" and self._claims.taken(what):
            # Another node is giving it: then it is here, or it is wanted from this one.
            await self._claims.turn(what)
            answer = await self._answer_to(offer)
        base = self._base_of(offer) if answer == "wanted" else None
        self._bases.pop(link, None)
        if base is not None:
            self._bases[link] = base
        if answer == "wanted":
            self._claims.claim(what, link)
        have = base.runs if base is not None else ()
        link.send(p.TensorsAnswer(shard=offer.shard, step=offer.step, answer=answer, have=have))

    def _base_of(self, offer: p.OfferTensors) -> Base | None:
        """Raises BadVersionError where its header is none."""
        if not offer.header:
            return None
        header = version.decode(offer.header, offer.digest)
        header.check(self._origin, offer.shard, offer.step, offer.generation)
        if header.total_nbytes != offer.nbytes:
            raise BadVersionError(f"{offer.nbytes} bytes; the header says {header.total_nbytes}")
        return base_of(self._vault, offer, header)

    async def _answer_to(self, offer: p.OfferTensors) -> Literal["held", "wanted", "stale"]:
        if not await self._takes(offer.generation, f"the tensors of shard {offer.shard}"):
            return "stale"
        found = self._vault.tensors(offer.shard, offer.step)
        if found is None or (found[0].digest, found[0].nbytes) != (offer.digest, offer.nbytes):
            return "wanted"
        return "held" if await self.soundness.holds(offer.shard, offer.step) else "wanted"

    async def _hold_tensors(self, link: Peer, message: p.PutTensors) -> None:
        shard, step = message.shard, message.step

        def put(at: TensorsAt) -> None:
            answer: Literal["held", "stale"] = "stale"
            # The generation may have ended while they came.
            if self._present(message.generation):
                self._vault.put_tensors(shard, step, at)
                answer = "held"
            elif message.generation != self._generation:
                self._refuse(f"the tensors of shard {shard}", message.generation)
            link.send(p.TensorsAnswer(shard=shard, step=step, answer=answer))

        told = Told(self._origin, shard, step, message.generation, message.nbytes, message.digest)
        base = self._bases.pop(link, None)
        if base is not None and base.header.digest != message.digest:
            raise ProtocolError("other tensors than those that were offered")
        try:
            await receive_tensors(link, self._vault, told, put, base)
        except BadVersionError as error:
            if base is not None:
                # So that it is not taken again, if that was it.
                await self.soundness.holds(shard, base.step)
            self.on_event("refused-version", f"from node-{link.node}: {error}")
            link.send(p.TensorsAnswer(shard=shard, step=step, answer="unsound"))

    def _present(self, generation: int) -> bool:
        return generation == self._generation and self.accepting

    async def _takes(self, generation: int, what: str) -> bool:
        """Whether it may be held: nothing of an old generation, and nothing while this agent is frozen."""
        if generation > self._generation:
            # The sender heard of the new generation before this agent did.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_DEADLINE_S), self._followed:
                    await self._followed.wait_for(lambda: generation <= self._generation)
        if generation != self._generation:
            self._refuse(what, generation)
            return False
        return self.accepting

    def _refuse(self, what: str, generation: int) -> None:
        self.on_event("stale-record", f"{what}, generation {generation}, here {self._generation}")

    # -------------------------------------------------------------------------------------- give

    def _describe_tensors(self, wanted: p.GetTensors) -> p.TensorsReply:
        found = self._vault.tensors(wanted.shard, wanted.step)
        if found is None or not self.soundness.seems(wanted.shard, wanted.step):
            return p.TensorsReply(nbytes=0, digest="")
        at, region = found
        header = header_of(region, at)
        with region.view(at.offset, header.header_nbytes) as view:
            return p.TensorsReply(nbytes=at.nbytes, digest=at.digest, header=bytes(view))

    async def _give_chunks(self, link: Peer, wanted: p.GetChunks) -> None:
        start, end = wanted.start, wanted.start + wanted.nbytes
        if wanted.verify:
            await self.soundness.holds_chunks(wanted.shard, wanted.step, start, end)
        found = self._vault.tensors(wanted.shard, wanted.step)
        same = found is not None and found[0].digest == wanted.digest
        if found is None or not same or not self.soundness.seems(wanted.shard, wanted.step):
            link.send(p.ChunksReply(nbytes=0))
            return
        at, region = found
        payload_at = at.offset + header_of(region, at).header_nbytes
        if payload_at + end > at.offset + at.nbytes:
            raise ProtocolError(f"bytes {start} to {end} are asked for of a version of {at.nbytes}")
        link.send(p.ChunksReply(nbytes=wanted.nbytes))
        with region.view(payload_at + start, wanted.nbytes) as view:
            await link.send_bulk(view, self._pace)


async def _say_later(link: Peer, offer: p.OfferTensors) -> None:
    """Until it is cancelled, with the answer: it may take as long as another node's transfer."""
    while True:
        await asyncio.sleep(LATER_S)
        link.send(p.TensorsAnswer(shard=offer.shard, step=offer.step, answer="later"))
