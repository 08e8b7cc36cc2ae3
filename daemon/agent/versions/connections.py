"""Connections over which other agents are given records and tensors, and asked what their twins have."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.agent.versions.deltas import missing
from ckptless.daemon.agent.versions.store import Version, header_of
from ckptless.daemon.protocol.errors import BadVersionError, CkptlessError, ProtocolError
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import SendRate
from ckptless.daemon.transport.link import Link
from ckptless.daemon.transport.tasks import end_all

# So long a holder is waited for that says nothing; one that takes its time says so every few seconds.
ANSWER_DEADLINE_S = 15.0

Peer: TypeAlias = Link[p.AgentMessage]
Dial: TypeAlias = Callable[[NodeInfo], Awaitable[Peer]]
OnLost: TypeAlias = Callable[[int, str], None]


@dataclass(frozen=True)
class Network:
    """`sources`: addresses of this node, of each interface that is used; none: as the kernel likes.

    `send_rate`: bytes per second that all transfers of tensors together may send, 0 for no limit.
    """

    sources: tuple[str, ...] = ()
    send_rate: float = 0


ANY_NETWORK = Network()


def is_silence(error: Exception) -> bool:
    """Whether it is an interface's or network's doing: who hangs up, or refuses, has been reached."""
    return isinstance(error, OSError) and not isinstance(error, ConnectionError)


class Connection(ABC):
    """One connection to another agent, dialled once; `on_lost(node, why)` when it is gone, or never came."""

    def __init__(self, info: NodeInfo, on_lost: OnLost) -> None:
        self._info, self._on_lost = info, on_lost
        # Whether it has ended since nothing came or went, as where an interface is dead.
        self.is_silent = False
        self._link: Peer | None = None
        self._closed = False

    async def run(self, dial: Dial) -> None:
        """Serve the connection until it ends."""
        why = ""
        try:
            self._link = await dial(self._info)
            await self._talk(self._link)
        except (OSError, TimeoutError, CkptlessError) as error:
            why = str(error) or type(error).__name__
            self.is_silent = is_silence(error)
        finally:
            if self._link is not None:
                self._link.close()
        if not self._closed:
            self._on_lost(self._info.node, why)

    @abstractmethod
    async def _talk(self, link: Peer) -> None:
        """Send what is to be sent, and hear the answers. Raises ConnectionError, CkptlessError."""

    def close(self) -> None:
        """End it: it is wanted no more."""
        self._closed = True
        if self._link is not None:
            self._link.close()


class SmallConnection(Connection):
    """Carries records to hold, and questions to a twin; answers go to `on_answer(node, answer)`.

    Records are answered at once, or the other end is given up. A twin answers when it has got that far.
    """

    def __init__(
        self, info: NodeInfo, on_answer: Callable[[int, p.Held | p.TwinsCompared], None], on_lost: OnLost
    ) -> None:
        super().__init__(info, on_lost)
        self._on_answer = on_answer
        self._early: list[p.PutRecord | p.CompareTwins] = []
        self._unanswered = 0
        self._limit: asyncio.Timeout | None = None

    def send(self, message: p.PutRecord | p.CompareTwins) -> None:
        """Soon: what is sent before the connection stands is kept."""
        if self._limit is None or self._link is None:
            self._early.append(message)
            return
        self._link.send(message)
        if isinstance(message, p.PutRecord):
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
                for message in self._early:
                    self.send(message)
                await self._hear(link)
        except TimeoutError:
            raise _silent() from None

    async def _hear(self, link: Peer) -> None:
        while True:
            message = await link.receive()
            if not isinstance(message, p.Held | p.TwinsCompared):
                raise ProtocolError(f"{type(message).__name__} is no answer to a record or a twin")
            if isinstance(message, p.Held):
                self._unanswered = max(0, self._unanswered - 1)
                self._wait_anew()
            self._on_answer(self._info.node, message)


class TensorConnection(Connection):
    """Gives tensors, one version after the other; each is offered first, since the holder may have it."""

    def __init__(
        self,
        info: NodeInfo,
        on_held: Callable[[int, Version], None],
        on_lost: OnLost,
        is_sound: Callable[[Version], Awaitable[bool]],
        pace: SendRate,
    ) -> None:
        super().__init__(info, on_lost)
        self._on_held, self._is_sound, self._pace = on_held, is_sound, pace
        self._queue: asyncio.Queue[Version] = asyncio.Queue()
        self._answers: asyncio.Queue[p.AgentMessage] = asyncio.Queue()

    def send(self, version: Version) -> None:
        """After those before it."""
        self._queue.put_nowait(version)

    def forget(self) -> None:
        """Drop what was to be sent: it is wanted no more."""
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
            await end_all([giving])

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
        """Offer a version, and send what is wanted of it; the last answer."""
        try:
            view = version.region.view(version.at.offset, version.at.nbytes)
        except ValueError:
            return "stale"  # its memory has been given back, as nobody will restore that step any more
        with view:
            try:
                header = header_of(version.region, version.at)
            except BadVersionError:
                return "unsound"
            head = bytes(view[: header.header_nbytes])
            link.send(p.OfferTensors(generation=version.generation, header=head))
            answer = await self._next_answer()
            if answer.answer == "wanted":
                link.send(p.PutTensors())
                for start, end in missing(header, answer.have):
                    with view[header.header_nbytes + start : header.header_nbytes + end] as part:
                        await link.send_bulk(part, self._pace)
                answer = await self._next_answer()
        if answer.answer == "held":
            self._on_held(self._info.node, version)
        elif answer.answer == "wanted":
            raise ProtocolError("it wants what it has been sent")
        return answer.answer

    async def _next_answer(self) -> p.TensorsAnswer:
        """The next one that is not "later". Raises TimeoutError where none comes, ProtocolError."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    answer = await self._answers.get()
            except TimeoutError:
                raise _silent() from None
            if not isinstance(answer, p.TensorsAnswer):
                raise ProtocolError(f"{type(answer).__name__} is no answer to tensors")
            if answer.answer != "later":
                return answer


def _silent() -> TimeoutError:
    return TimeoutError(f"it has not answered for {ANSWER_DEADLINE_S:.0f} s")
