"""The agent's connection to its node's daemon: kept up, since the daemon may be stopped and started."""

import asyncio
import logging
from collections.abc import Callable

from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.protocol.messages import FromAgent, Pong, ToAgent
from ckptless.daemon.protocol.peercred import daemon_credentials, unix_address
from ckptless.daemon.protocol.saving import SaveDone, SaveNow

logger = logging.getLogger(__name__)

RETRY_S = 0.1
READ_NBYTES = 1 << 16


class DaemonLink:
    """`greet` gives what a daemon must hear first; `on_message` gets what it says."""

    def __init__(
        self,
        name: str,
        greet: Callable[[], list[FromAgent]],
        on_message: Callable[[ToAgent | SaveNow], None],
    ) -> None:
        self._name, self._greet, self._on_message = name, greet, on_message
        self._writer: asyncio.StreamWriter | None = None
        self.daemon_pid: int | None = None
        # Why whoever listens there is not believed, if so.
        self.stranger = ""

    @property
    def connected(self) -> bool:
        """Whether a daemon listens."""
        return self._writer is not None

    def send(self, message: FromAgent | Pong | SaveDone) -> None:
        """Tell the daemon; without one nothing is lost, since `greet` tells the whole state again."""
        if self._writer is not None:
            self._writer.write(encode(message))

    async def run(self) -> None:
        """Connect, again and again, until cancelled."""
        away = False
        try:
            while True:
                try:
                    reader = await self._connect()
                except (OSError, PeerError) as error:
                    if not away:
                        logger.warning("no daemon at %s (%s): training goes on", self._name, error)
                        away = True
                    await asyncio.sleep(RETRY_S)
                    continue
                away = False
                for message in self._greet():
                    self.send(message)
                await self._listen(reader)
                await asyncio.sleep(RETRY_S)
        finally:
            self._hang_up()

    async def _connect(self) -> asyncio.StreamReader:
        """Raises OSError, and PeerError where it is not the daemon that listens there."""
        # no deadline: a Unix socket is there or not; whoever runs this cancels it
        reader, writer = await asyncio.open_unix_connection(unix_address(self._name))
        try:
            self.daemon_pid, _ = daemon_credentials(writer.get_extra_info("socket"), self._name)
        except PeerError as error:
            self.stranger = str(error)
            writer.close()
            raise
        self._writer, self.stranger = writer, ""
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder: Decoder[ToAgent | SaveNow] = Decoder(ToAgent | SaveNow, CONTROL_LIMIT)
        try:
            while data := await reader.read(READ_NBYTES):
                for message in decoder.feed(data):
                    self._on_message(message)
            logger.warning("the daemon hung up")
        except (ProtocolError, ConnectionError) as error:
            logger.warning("the daemon: %s", error)
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self.daemon_pid = None, None

    async def flush(self, deadline_s: float) -> None:
        """Wait until what was sent is on its way."""
        if self._writer is not None:
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()
