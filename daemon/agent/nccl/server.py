"""The edge of an agent's NCCL roots: one listening port, to which the ranks of any communicator come."""

import asyncio
import logging
from collections.abc import Callable

from ckptless.daemon.agent.nccl.ids import StaleError, admitted
from ckptless.daemon.agent.nccl.root import Answer, Dropped, Roots
from ckptless.daemon.agent.nccl.wire import (
    MAGIC_NBYTES,
    OPENING_NBYTES,
    UnknownLayoutError,
    decode_check_in,
    decode_opening,
    encode_message,
)
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.transport.listener import serve
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

# A rank sends at once when it has connected, and listens before that.
READ_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 20.0
RETRY_S = 0.1
# Of these the oldest gives way: a rank is through in no time, and whoever stays does not mean well.
MAX_CONNECTIONS = 512
MAX_ANSWERING = 128
# No more than twice this is kept of what somebody sends.
READ_NBYTES = 1024
# Events of one kind are told once in so many seconds.
TELL_EVERY_S = 5.0


def _ignore(*_: object) -> None:
    """Do nothing: nobody listens."""


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
        self._key = b""
        self._has_key = asyncio.Event()
        self._generation = 0
        self._roots = Roots()
        self._server: asyncio.Server | None = None
        self._ranks: dict[asyncio.Task[None], str] = {}  # and from where each came, the oldest first
        self._answers: dict[asyncio.Task[None], int] = {}
        self._answering = asyncio.Semaphore(MAX_ANSWERING)
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[str, tuple[float, int]] = {}

    async def start(self, host: str) -> int:
        """Listen at `host`, one numeric address, and return the port. Raises OSError, UsageError."""
        self._server, port = await serve(
            host, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(READ_NBYTES), self._connected)
        )
        return port

    def learn_key(self, key: bytes) -> None:
        """The job's key. Who came before it was known has waited."""
        self._key = key
        self._has_key.set()

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
        await end_all([*self._ranks, *self._answers])
        await server.wait_closed()

    # -------------------------------------------------------------------------------------- ranks

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear somebody who wants to check in, then hang up without a word."""

        def hang_up(task: asyncio.Task[None]) -> None:
            self._ranks.pop(task, None)
            writer.transport.abort()

        peer = str(writer.get_extra_info("peername"))
        task = asyncio.create_task(self._hear(peer, reader))
        self._ranks[task] = peer
        task.add_done_callback(hang_up)
        if len(self._ranks) > MAX_CONNECTIONS:
            oldest = next(iter(self._ranks))
            oldest.cancel()
            self._refuse(self._ranks.pop(oldest), "there are too many at once")

    async def _hear(self, peer: str, reader: asyncio.StreamReader) -> None:
        try:
            await self._check_in(reader)
        except TimeoutError:
            self._refuse(peer, f"no check-in came in {READ_DEADLINE_S:.0f} s")
        except StaleError as error:
            self._refuse(peer, str(error), "nccl-stale")
        except UnknownLayoutError as error:
            self._refuse(peer, str(error), "nccl-unknown")
            self.on_unknown(str(error))
        except ProtocolError as error:
            self._refuse(peer, str(error))
        except (OSError, EOFError) as error:
            logger.debug("%s hung up: %s", peer, error)

    async def _check_in(self, reader: asyncio.StreamReader) -> None:
        """Take what a rank says. Raises TimeoutError, ProtocolError; EOFError, OSError where it hangs up."""
        async with asyncio.timeout(READ_DEADLINE_S):
            head = await reader.readexactly(MAGIC_NBYTES)
            await self._has_key.wait()
            magic = int.from_bytes(head, "little")
            generation = admitted(self._key, magic, self._generation)  # or nothing more of it is looked at
            opening = decode_opening(head + await reader.readexactly(OPENING_NBYTES - MAGIC_NBYTES))
            message = decode_check_in(await reader.readexactly(opening.nbytes))
        answers = self._roots.check_in(magic, generation, message, asyncio.get_running_loop().time())
        self._set_timer()
        for answer in answers:
            task = asyncio.create_task(self._answer(answer))
            self._answers[task] = generation
            task.add_done_callback(self._answers.pop)

    def _refuse(self, peer: str, why: str, kind: str = "nccl-refused") -> None:
        self.refused += 1
        self._tell(kind, f"hung up on {peer}: {why}")

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
