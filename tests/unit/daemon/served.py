"""A listening server whose connections `Link` takes, without a `Listener` and its limits; and their end."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from ckptless.daemon.transport.bulk import CountingReader, Streams
from ckptless.daemon.transport.link import GREETING_BUFFER_BYTES, Link


async def serve(
    host: str, port: int, handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
) -> tuple[asyncio.Server, int]:
    """A listening server and its port (`port` 0: any). `handler` owns what it starts."""
    loop = asyncio.get_running_loop()

    def protocol() -> Streams:
        return Streams(CountingReader(GREETING_BUFFER_BYTES, loop), handler, loop)

    server = await loop.create_server(protocol, host, port, backlog=256)
    return server, int(server.sockets[0].getsockname()[1])


async def closed(link: Link[Any]) -> None:
    """Wait until the transport is gone."""
    with contextlib.suppress(ConnectionError):
        await link._writer.wait_closed()
