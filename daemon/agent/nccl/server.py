"""The edge of an agent's NCCL roots: one listening port, to which the ranks of any communicator come."""

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from functools import partial

from ckptless.daemon.agent.nccl.ids import StaleError, admitted
from ckptless.daemon.agent.nccl.root import Answer, Dropped, Roots
from ckptless.daemon.agent.nccl.wire import CheckIn, CheckInReader, UnknownLayoutError, encode_message
from ckptless.daemon.api.errors import ProtocolError, UsageError
from ckptless.daemon.peers.listener import serve

logger = logging.getLogger(__name__)

# A rank sends at once when it has connected, and listens before that.
READ_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 20.0
RETRY_S = 0.1
# Of these the oldest gives way: a rank is through in no time, and whoever stays does not mean well.
MAX_CONNECTIONS = 512
MAX_ANSWERING = 128
# Events of one kind are told once in so many seconds.
TELL_EVERY_S = 5.0


def _ignore(*_: object) -> None:
    """Nobody listens."""


class NcclServer:
    """Owned by the event loop that `start` ran in.

    `on_event(kind, text)`: something for the ledger. `on_unknown(text)`: a rank of this job, in this
    generation, speaks a layout that is not known: its NCCL needs roots of its own. Who does not prove by its
    magic to be of the job is cut off, and no address that it names is connected to.
    """

    def __init__(self) -> None:
        self.on_event: Callable[[str, str], None] = _ignore
        self.on_unknown: Callable[[str], None] = _ignore
        self.refused = 0
        self._key: bytes | None = None
        self._generation = 0
        self._roots = Roots()
        self._server: asyncio.Server | None = None
        self._ranks: dict[_Rank, None] = {}
        self._answers: dict[asyncio.Task[None], int] = {}
        self._answering = asyncio.Semaphore(MAX_ANSWERING)
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[str, tuple[float, int]] = {}

    async def start(self, host: str) -> int:
        """Listen at `host`, one numeric address, and return the port. Raises OSError, UsageError."""
        try:
            ipaddress.ip_address(host)
        except ValueError as error:
            raise UsageError(f"NCCL's roots listen at a numeric address, not at {host!r}") from error
        self._server, port = await serve(host, lambda: _Rank(self._heard))
        return port

    def learn_key(self, key: bytes) -> None:
        """The job's key. Who came before it was known has waited."""
        self._key = key
        for rank in list(self._ranks):
            self._heard(rank)

    def follow(self, generation: int) -> None:
        """A new generation: nobody of an older one is answered any more."""
        self._generation = generation
        for task, of in list(self._answers.items()):
            if of < generation:
                task.cancel()
        self._tell_dropped(self._roots.follow(generation))
        self._set_timer()

    async def close(self) -> None:
        """Stop listening, hang up on everybody. Harmless when not started or closed already."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        if self._timer is not None:
            self._timer.cancel()
        lost = [rank.lost for rank in self._ranks]
        for rank in list(self._ranks):
            rank.hang_up()
        for task in list(self._answers):
            task.cancel()
        await asyncio.gather(*self._answers, *lost, return_exceptions=True)
        await server.wait_closed()

    # -------------------------------------------------------------------------------------- ranks

    def _heard(self, rank: "_Rank") -> None:
        """Somebody came, said something, or went: look at what there is of it."""
        if rank.lost.done():
            self._ranks.pop(rank, None)
            return
        if self._server is None:
            rank.hang_up()
            return
        if rank not in self._ranks:
            self._ranks[rank] = None
            if len(self._ranks) > MAX_CONNECTIONS:
                self._refuse(next(iter(self._ranks)), "there are too many at once")
        if rank.late:
            self._refuse(rank, f"no check-in came in {READ_DEADLINE_S:.0f} s")
        elif self._key is not None and rank.magic is not None:
            self._judge(rank, rank.magic, self._key)

    def _judge(self, rank: "_Rank", magic: int, key: bytes) -> None:
        try:
            generation = admitted(key, magic, self._generation)
        except ProtocolError as error:
            kind = "nccl-stale" if isinstance(error, StaleError) else "nccl-refused"
            self._refuse(rank, str(error), kind)
            return
        if isinstance(rank.error, UnknownLayoutError):
            self._refuse(rank, str(rank.error), "nccl-unknown")
            self.on_unknown(str(rank.error))
        elif rank.error is not None:
            self._refuse(rank, str(rank.error))
        elif rank.message is not None:
            self._take(rank, magic, generation, rank.message)

    def _take(self, rank: "_Rank", magic: int, generation: int, message: CheckIn) -> None:
        try:
            answers = self._roots.check_in(magic, generation, message, asyncio.get_running_loop().time())
        except ProtocolError as error:
            self._refuse(rank, str(error))
            return
        self._set_timer()
        self._ranks.pop(rank, None)
        rank.hang_up()
        for answer in answers:
            task = asyncio.create_task(self._answer(answer))
            self._answers[task] = generation
            task.add_done_callback(partial(self._answers.pop))

    def _refuse(self, rank: "_Rank", why: str, kind: str = "nccl-refused") -> None:
        self.refused += 1
        self._ranks.pop(rank, None)
        self._tell(kind, f"hung up on {rank.peer}: {why}")
        rank.hang_up()

    # ------------------------------------------------------------------------------------ answers

    async def _answer(self, answer: Answer) -> None:
        """Tell a rank who is next. It listens already, so that trying again is for lost packets only."""
        host = answer.to.host + (f"%{answer.to.scope}" if answer.to.scope else "")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_DEADLINE_S
        async with self._answering:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        _, writer = await asyncio.open_connection(host, answer.to.port)
                        try:
                            writer.write(encode_message(answer.magic, answer.connect))
                            await writer.drain()
                        finally:
                            writer.close()
                        return
                except OSError as error:
                    if loop.time() + RETRY_S >= deadline:
                        text = f"rank {answer.rank} listens at {host}:{answer.to.port} no more: {error}"
                        self._tell("nccl-unanswered", text)
                        return
                await asyncio.sleep(RETRY_S)

    # --------------------------------------------------------------------------------------- time

    def _set_timer(self) -> None:
        due = self._roots.due()
        if due is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._tell_dropped(self._roots.expire(asyncio.get_running_loop().time()))
        self._set_timer()

    def _tell_dropped(self, dropped: list[Dropped]) -> None:
        for root in dropped:
            missing = ", ".join(map(str, root.missing[:8])) + (" ..." if len(root.missing) > 8 else "")
            self._tell(
                "nccl-incomplete",
                f"root {root.root} of {root.ranks} ranks, generation {root.generation}, "
                f"still waited for ranks {missing}",
            )

    def _tell(self, kind: str, text: str) -> None:
        """An event, but not one for each connection of somebody who comes all the time."""
        logger.debug("%s: %s", kind, text)
        now = asyncio.get_running_loop().time()
        at, unsaid = self._told.get(kind, (-TELL_EVERY_S, 0))
        if now - at < TELL_EVERY_S:
            self._told[kind] = (at, unsaid + 1)
            return
        self._told[kind] = (now, 0)
        self.on_event(kind, text + (f" (and {unsaid} more before)" if unsaid else ""))


class _Rank(asyncio.Protocol):
    """One connection of somebody who wants to check in; `on_change` is told of whatever it does."""

    def __init__(self, on_change: "Callable[[_Rank], None]") -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.message: CheckIn | None = None
        self.error: ProtocolError | None = None
        self.late = False
        self.peer = "nobody"
        self._on_change = on_change
        self._reader = CheckInReader()

    @property
    def magic(self) -> int | None:
        """What it says first."""
        return self._reader.magic

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str(transport.get_extra_info("peername"))
        self._deadline = asyncio.get_running_loop().call_later(READ_DEADLINE_S, self._be_late)
        self._on_change(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.message = self._reader.feed(data) or self.message
        except ProtocolError as error:
            self.error = error
            # It is read no further, also where it is not refused before the job's key is known.
            self._transport.pause_reading()
        self._on_change(self)

    def eof_received(self) -> bool:
        """A rank hangs up when it has sent; the connection is kept while its check-in waits for the key."""
        return self.message is not None

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self.lost.set_result(None)
        self._on_change(self)

    def _be_late(self) -> None:
        self.late = True
        self._on_change(self)

    def hang_up(self) -> None:
        """Close without a word."""
        self._transport.abort()
