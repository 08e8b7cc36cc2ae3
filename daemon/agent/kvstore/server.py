"""The store as a node's own ranks see it: torch's clients connect here, as they would to torch's server."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.ids import ClientIds
from ckptless.daemon.agent.kvstore.parser import StoreParser
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.proxy import Cancel, Proxy
from ckptless.daemon.agent.kvstore.sock_owner import Endpoint
from ckptless.daemon.agent.kvstore.state import StoreState
from ckptless.daemon.agent.kvstore.wire import Refusal
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.transport.listener import serve

logger = logging.getLogger(__name__)

Refuses = Callable[[Endpoint, Endpoint], str | None]
"""From our end of a connection and the other one to why it is refused; None where it is not."""


def alone() -> Proxy:
    """Return the store of one node, which keeps every key."""
    home = Home(lambda _node, item: proxy.heard(item))
    proxy = Proxy(0, lambda item: home.heard(0, item))
    return proxy


class StoreServer:
    """A node's end of the job's key-value store, spoken to by `dist.TCPStore(..., is_master=False)`.

    Owned by the event loop that `start` ran in; every method belongs to that loop's thread. `requests`
    counts what clients have asked, `refused` those that were cut off because they broke the protocol or its
    limits, or because `refuses` gave a reason when they connected. torch's clients cannot be asked for a
    secret: without `refuses` (see `StoreGuard`) whoever can reach the address can use the store.
    """

    def __init__(self, refuses: Refuses | None = None) -> None:
        self.refused = 0
        self.refuses = refuses
        self.requests = 0
        self._proxy, self._rounds = alone(), StoreState()
        self._ids: NcclIds | None = None
        self.clients: set[_Client] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen at `host`, one numeric address, and return the port (the system chooses it)."""
        if self._server is not None:
            raise RuntimeError("the store is started already")
        self._server, port = await serve(host, self._make_client)
        return port

    def cut(self, ids: NcclIds | None = None, proxy: Proxy | None = None) -> int:
        """Begin a new generation: hang up on every client, and use `proxy` (None: of a node that is alone).

        Return how many were cut. A client that is blocked in a wait fails at once. Whoever connects from now
        on, even a process of the old generation, is in the new one. With `ids` NCCL's unique ids are
        computed, else they are keys as any others.
        """
        self._proxy, self._ids, self._rounds = proxy or alone(), ids, StoreState()
        return sum(client.hang_up() for client in self.clients)

    async def close(self) -> None:
        """Stop listening and hang up on every client. Harmless when not started or closed already."""
        if self._server is None:
            return
        self._server.close()
        self.cut()
        if self.clients:
            # no deadline: they have been hung up on
            await asyncio.wait([client.lost for client in self.clients])
        await self._server.wait_closed()
        self._server = None

    def _make_client(self) -> "_Client":
        # Only this node's: a root's own rank is here for the whole generation.
        ids = ClientIds(self._ids, self._rounds) if self._ids is not None else None
        return _Client(self._proxy, ids, self)


class _Client(asyncio.Protocol):
    """One connection. It keeps the store of the generation that it was made in."""

    def __init__(self, proxy: Proxy, ids: ClientIds | None, server: StoreServer) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._proxy, self._ids, self._server = proxy, ids, server
        self._parser = StoreParser()
        self._pending: deque[Request] = deque()
        # Of the wait that goes on, and whether another request is being answered.
        self._cancel_wait: Cancel | None = None
        self._busy = False
        self._writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Answers of a few bytes, each waited for: Nagle's algorithm would add 40 ms to some of them.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.clients.add(self)
        if self._server.refuses is not None:
            own, peer = (transport.get_extra_info(name) for name in ("sockname", "peername"))
            try:
                # Who has reset the connection already has no address any more.
                why = self._server.refuses(own[:2], peer[:2]) if own and peer else "it is gone already"
            except Exception:
                # asyncio logs it, and would go on with the connection: who was not judged is not let in.
                self._server.refused += 1
                self.hang_up()
                raise
            if why is not None:
                self._server.refused += 1
                logger.debug("store: hung up on %s: %s", peer, why)  # `refuses` tells of it, within limits
                self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.debug("store: a client's connection broke: %s", error)
        self._stop_waiting()
        self._pending.clear()
        self._server.clients.discard(self)
        self.lost.set_result(None)

    def hang_up(self) -> bool:
        """Close at once, without sending what is still to be sent. Return False if that was done before."""
        if self._transport.is_closing():
            return False
        self._transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        try:
            self._pending.extend(self._parser.feed(data))
        except ProtocolError as error:
            self._refuse(Refusal(str(error), hostile=True))
        else:
            self._work()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._work()

    def _work(self) -> None:
        """Serve what is pending, one after the other, for as long as the client takes its answers.

        A client that does not read holds up nobody but itself: one answer, one piece of input.
        """
        while self._pending and self._writable and not self._busy and not self._transport.is_closing():
            self._server.requests += 1
            try:
                self._serve(self._pending.popleft())
            except ProtocolError as error:
                self._refuse(Refusal(str(error), hostile=True))
        if self._transport.is_closing():
            self._pending.clear()
        elif self._pending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _serve(self, request: Request) -> None:
        left = self._ids.take(request) if self._ids is not None else request
        if isinstance(left, bytes):
            self._transport.write(left)
        elif isinstance(left, protocol.Ping):
            self._transport.write(protocol.encode_nonce(left.nonce))
        elif isinstance(left, protocol.CancelWait):
            self._stop_waiting()
            self._transport.write(protocol.WAIT_CANCELED)
        elif isinstance(left, protocol.Wait | protocol.Barrier):
            self._wait(left)
        else:
            self._ask(left)

    def _ask(self, request: Request) -> None:
        """The next request waits for the answer to this one, also where the client does not."""
        at_once = True
        self._busy = True

        def done(answer: bytes | Refusal) -> None:
            self._busy = False
            if self._transport.is_closing():
                return
            if isinstance(answer, Refusal):
                self._refuse(answer)
                return
            self._transport.write(answer)
            if not at_once:
                # Not from inside of what has brought the answer.
                asyncio.get_running_loop().call_soon(self._work)

        self._proxy.ask(request, done)
        at_once = False

    def _wait(self, request: protocol.Wait | protocol.Barrier) -> None:
        if self._cancel_wait is not None:
            raise ProtocolError("a second wait while the first goes on")
        over = False

        def done(answer: bytes | Refusal) -> None:
            nonlocal over
            over, self._cancel_wait = True, None
            if self._transport.is_closing():
                return
            if isinstance(answer, Refusal):
                self._refuse(answer)
            else:
                self._transport.write(answer)

        cancel = self._proxy.ask(request, done)
        if not over:
            self._cancel_wait = cancel

    def _stop_waiting(self) -> None:
        if self._cancel_wait is not None:
            cancel, self._cancel_wait = self._cancel_wait, None
            cancel()

    def _refuse(self, refusal: Refusal) -> None:
        peer = self._transport.get_extra_info("peername")
        logger.warning("store: hung up on %s: %s", peer, refusal.text)
        if refusal.hostile:
            self._server.refused += 1
        self.hang_up()
