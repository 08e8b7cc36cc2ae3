"""A listening port whose callers, however many come at once, do not keep the event loop to themselves."""

import asyncio
import socket
from collections.abc import Callable

# All ranks, or agents, of a job may connect in the same moment; and where it is full, the kernel drops who
# connects, whose kernel tries again a second later.
BACKLOG = 4096
# Between two looks at connections that have something to say. asyncio takes its backlog for both.
ACCEPT_AT_ONCE = 32


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at a numeric address, and does not block. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock


async def serve(host: str, make: Callable[[], asyncio.BaseProtocol]) -> tuple[asyncio.Server, int]:
    """A server at a numeric address, and its port, which the system chooses. Raises OSError."""
    sock = listen(host)
    port = int(sock.getsockname()[1])
    try:
        server = await asyncio.get_running_loop().create_server(make, sock=sock, backlog=ACCEPT_AT_ONCE)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return server, port
