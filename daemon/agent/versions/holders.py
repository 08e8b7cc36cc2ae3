"""Connections over which other agents are given what they are to hold: records, and tensors."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.agent.versions.deltas import Span, missing
from ckptless.daemon.agent.versions.memory import Region
from ckptless.daemon.agent.versions.soundness import header_of
from ckptless.daemon.api.errors import BadVersionError, CkptlessError, ProtocolError
from ckptless.daemon.api.messages import NodeInfo, TensorsAt
from ckptless.daemon.api.version import Header
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace
from ckptless.daemon.peers.link import Link

# A longer one than fits into a message: a terabyte of tensors and more.
MOST_HEAD_NBYTES = 1 << 20
# So long a holder is waited for that says nothing; one that takes its time says so every few seconds.
ANSWER_DEADLINE_S = 15.0

Peer: TypeAlias = Link[p.AgentMessage]
Dial: TypeAlias = Callable[[NodeInfo], Awaitable[Peer]]


@dataclass(frozen=True)
class Network:
    """`source`: the address of this node that connections to others come from; None: as the kernel likes.

    `send_rate`: bytes per second that all transfers of tensors together may send, 0 for no limit.
    """

    source: str | None = None
    send_rate: float = 0


ANY_NETWORK = Network()


class Holder(ABC):
    """One connection to one holder, dialled once; `on_lost(node, why)` when it is gone, or never came."""

    def __init__(self, info: NodeInfo, on_lost: Callable[[int, str], None]) -> None:
        self._info, self._on_lost = info, on_lost
        self._link: Peer | None = None
        self._closed = False

    async def run(self, dial: Dial) -> None:
        """Until the connection ends."""
        why = ""
        try:
            self._link = await dial(self._info)
            await self._talk(self._link)
        except (OSError, TimeoutError, CkptlessError) as error:
            why = str(error) or type(error).__name__
        finally:
            if self._link is not None:
                self._link.close()
        if not self._closed:
            self._on_lost(self._info.node, why)

    @abstractmethod
    async def _talk(self, link: Peer) -> None:
        """Send what is to be sent, and hear the answers. Raises ConnectionError, CkptlessError."""

    def close(self) -> None:
        """It is wanted no more."""
        self._closed = True
        if self._link is not None:
            self._link.close()


class RecordHolder(Holder):
    """Gets records; what is sent before the connection stands is kept."""

    def __init__(
        self, info: NodeInfo, on_held: Callable[[int, p.Held], None], on_lost: Callable[[int, str], None]
    ) -> None:
        super().__init__(info, on_lost)
        self._on_held = on_held
        self._early: list[p.PutRecord] | None = []
        self._unanswered = 0
        self._limit: asyncio.Timeout | None = None

    def send(self, record: p.PutRecord) -> None:
        """Soon."""
        if self._early is not None:
            self._early.append(record)
        elif self._link is not None:
            self._link.send(record)
            self._unanswered += 1
            if self._unanswered == 1:
                self._wait_anew()

    def _wait_anew(self) -> None:
        """The deadline of the next answer, if one is to come."""
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(now + ANSWER_DEADLINE_S if self._unanswered else None)

    async def _talk(self, link: Peer) -> None:
        try:
            async with asyncio.timeout(None) as self._limit:
                early, self._early = self._early or (), None
                for record in early:
                    self.send(record)
                await self._hear(link)
        except TimeoutError:
            raise _silent() from None
        finally:
            self._limit = None

    async def _hear(self, link: Peer) -> None:
        while True:
            message = await link.receive()
            if not isinstance(message, p.Held):
                raise ProtocolError(f"{type(message).__name__} is no answer to a record")
            self._unanswered = max(0, self._unanswered - 1)
            self._wait_anew()
            if message.held:
                self._on_held(self._info.node, message)


@dataclass(frozen=True)
class Version:
    """A step of a shard's tensors, and where they lie."""

    generation: int
    shard: int
    step: int
    at: TensorsAt
    region: Region


class TensorHolder(Holder):
    """Gets tensors, one version after the other; each is offered first, since the holder may have it."""

    def __init__(
        self,
        info: NodeInfo,
        on_held: Callable[[int, Version], None],
        on_lost: Callable[[int, str], None],
        is_sound: Callable[[Version], Awaitable[bool]],
        pace: Pace,
    ) -> None:
        super().__init__(info, on_lost)
        self._on_held, self._is_sound, self._pace = on_held, is_sound, pace
        self._queue: asyncio.Queue[Version] = asyncio.Queue()
        self._answers: asyncio.Queue[p.AgentMessage] = asyncio.Queue()

    def send(self, version: Version) -> None:
        """After those before it."""
        self._queue.put_nowait(version)

    def forget(self) -> None:
        """What was to be sent is wanted no more."""
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _talk(self, link: Peer) -> None:
        # One task always reads: so the end of the connection is noticed while there is nothing to send.
        giving = asyncio.create_task(self._give_all(link))
        giving.add_done_callback(lambda _done: link.close())
        try:
            while True:
                self._answers.put_nowait(await link.receive())
        except ConnectionError:
            if giving.done() and not giving.cancelled():
                # no deadline: it is done
                await giving  # it was the one that ended it: what it says is the reason
            raise
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)

    async def _give_all(self, link: Peer) -> None:
        while True:
            # no deadline: a holder waits for what there is to hold; `close` cancels it
            version = await self._queue.get()
            for last in (False, True):
                if await self._give(link, version) != "unsound":
                    break
                if not await self._is_sound(version):
                    break  # it was bad before it was sent, and is not held here any more
                if last:
                    raise ProtocolError("what it is sent does not verify there, again and again")

    async def _give(self, link: Peer, version: Version) -> str:
        at = version.at
        try:
            head = _head_of(version)
        except ValueError:
            return "stale"  # its memory has been given back, as nobody will restore that step any more
        offer = p.OfferTensors(
            generation=version.generation,
            shard=version.shard,
            step=version.step,
            nbytes=at.nbytes,
            digest=at.digest,
            header=head[0] if head is not None else b"",
        )
        link.send(offer)
        answer = await self._answer_about(version)
        if answer.answer == "wanted":
            spans = missing(head[1], answer.have) if head is not None else [(0, at.nbytes)]
            if not await self._send(link, version, spans):
                return "stale"
            answer = await self._answer_about(version)
        if answer.answer == "held":
            self._on_held(self._info.node, version)
        elif answer.answer == "wanted":
            raise ProtocolError("it wants what it has been sent")
        return answer.answer

    async def _send(self, link: Peer, version: Version, spans: Sequence[Span]) -> bool:
        """Those bytes of it; False where it is not there any more."""
        at = version.at
        try:
            view = version.region.view(at.offset, at.nbytes)
        except ValueError:
            return False
        with view:
            put = p.PutTensors(
                generation=version.generation,
                shard=version.shard,
                step=version.step,
                nbytes=at.nbytes,
                digest=at.digest,
            )
            link.send(put)
            for start, end in spans:
                with view[start:end] as part:
                    await link.send_bulk(part, self._pace)
        return True

    async def _answer_about(self, version: Version) -> p.TensorsAnswer:
        """Raises TimeoutError where none comes, ProtocolError."""
        while (answer := await self._next_about(version)).answer == "later":
            pass
        return answer

    async def _next_about(self, version: Version) -> p.TensorsAnswer:
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                answer = await self._answers.get()
        except TimeoutError:
            raise _silent() from None
        if not isinstance(answer, p.TensorsAnswer):
            raise ProtocolError(f"{type(answer).__name__} is no answer to tensors")
        if (answer.shard, answer.step) != (version.shard, version.step):
            raise ProtocolError("an answer about other tensors than those that were sent")
        return answer


def _head_of(version: Version) -> tuple[bytes, Header] | None:
    """The header, packed and not, where there are chunks to choose from. Raises ValueError: it is gone."""
    region, at = version.region, version.at
    try:
        header = header_of(region, at)
    except BadVersionError:
        return None  # whoever is sent it says so
    if len(header.chunks) < 2 or header.header_nbytes > MOST_HEAD_NBYTES:
        return None
    with region.view(at.offset, header.header_nbytes) as view:
        return bytes(view), header


def _silent() -> TimeoutError:
    return TimeoutError(f"it has not answered for {ANSWER_DEADLINE_S:.0f} s")
