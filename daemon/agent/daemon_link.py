"""The agent's connection to its node's daemon: kept up, since the daemon may be stopped and started."""

import asyncio
import logging
from collections.abc import Callable

from ckptless.daemon.api.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.messages import FromAgent, Pong, ToAgent
from ckptless.daemon.api.peercred import peer_credentials
from ckptless.daemon.api.saving import SaveDone, SaveNow
from ckptless.daemon.api.unixpath import unix_address

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
        address = unix_address(self._name)
        try:
            while True:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(address)
                except OSError as error:
                    if not away:
                        logger.warning("no daemon at %s (%s): training goes on", self._name, error.strerror)
                        away = True
                    await asyncio.sleep(RETRY_S)
                    continue
                away = False
                self.daemon_pid, _ = peer_credentials(self._writer.get_extra_info("socket"))
                for message in self._greet():
                    self.send(message)
                await self._listen(reader)
        finally:
            self._hang_up()

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
