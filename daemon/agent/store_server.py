"""The agent's TCPStore server: torch's own clients connect to it, so no rank has to run a server."""

import asyncio
import ipaddress
import logging
import socket
from collections import deque
from collections.abc import Callable

from ckptless.daemon.agent import store_protocol as protocol
from ckptless.daemon.agent.nccl_ids import NcclIds
from ckptless.daemon.agent.sock_owner import Endpoint
from ckptless.daemon.agent.store_ids import ClientIds
from ckptless.daemon.agent.store_protocol import QueueRequest, ReadRequest, Request, WaitRequest, WriteRequest
from ckptless.daemon.agent.store_state import Registration, StoreState
from ckptless.daemon.api.errors import ProtocolError, UsageError

logger = logging.getLogger(__name__)

# All ranks of a job connect in the same moment.
BACKLOG = 4096

Refuses = Callable[[Endpoint, Endpoint], str | None]
"""From our end of a connection and the other one to why it is refused; None where it is not."""


class StoreServer:
    """One key-value store for all ranks of a job, spoken to by `dist.TCPStore(..., is_master=False)`.

    Owned by the event loop that `start` ran in; every method belongs to that loop's thread. `refused` counts
    the clients that were cut off because they broke the protocol or its limits, or because `refuses` gave a
    reason when they connected. torch's clients cannot be asked for a secret: without `refuses` (`StoreGuard`
    has one, for loopback addresses) who can reach the address can use the store.
    """

    def __init__(self, refuses: Refuses | None = None) -> None:
        self.refused = 0
        self._refuses = refuses
        self._state = StoreState()
        self._ids: NcclIds | None = None
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen at `host`, one numeric address, and return the port (the system chooses it)."""
        try:
            ipaddress.ip_address(host)
        except ValueError as error:
            # A name may stand for several addresses, which would get a port each.
            raise UsageError(f"the store listens at a numeric address, not at {host!r}") from error
        if self._server is not None:
            raise RuntimeError("the store is started already")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make_client, host, 0, backlog=BACKLOG)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self, ids: NcclIds | None = None) -> int:
        """Begin a new generation: hang up on every client and forget every key; return how many were cut.

        A client that is blocked in a wait fails at once. Whoever connects from now on, even a process of the
        old generation, is in the new one. With `ids` NCCL's unique ids are computed, else they are keys as
        any others.
        """
        self._state, self._ids = StoreState(), ids
        return sum(client.hang_up() for client in self._clients)

    async def close(self) -> None:
        """Stop listening and hang up on every client. Harmless when not started or closed already."""
        if self._server is None:
            return
        self._server.close()
        self.cut()
        if self._clients:
            await asyncio.wait([client.lost for client in self._clients])
        await self._server.wait_closed()
        self._server = None

    def _make_client(self) -> "_Client":
        ids = ClientIds(self._ids, self._state) if self._ids is not None else None
        return _Client(self._state, ids, self._clients, self._count_refused, self._refuses)

    def _count_refused(self) -> None:
        self.refused += 1


class _Client(asyncio.Protocol):
    """One connection. It keeps the state of the generation that it was made in."""

    def __init__(
        self,
        state: StoreState,
        ids: ClientIds | None,
        clients: "set[_Client]",
        on_refused: Callable[[], None],
        refuses: Refuses | None,
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state, self._ids, self._clients, self._on_refused = state, ids, clients, on_refused
        self._refuses = refuses
        self._parser = protocol.StoreParser()
        self._pending: deque[Request] = deque()
        self._waiting: Registration | None = None
        self._writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Answers of a few bytes, each waited for: Nagle's algorithm would add 40 ms to some of them.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients.add(self)
        if self._refuses is not None:
            own, peer = (transport.get_extra_info(name) for name in ("sockname", "peername"))
            if (why := self._refuses(own[:2], peer[:2])) is not None:
                self._refuse(ProtocolError(why))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.debug("store: a client's connection broke: %s", error)
        self._stop_waiting()
        self._pending.clear()
        self._clients.discard(self)
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
            self._work()
        except ProtocolError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        try:
            self._work()
        except ProtocolError as error:
            self._refuse(error)

    def _work(self) -> None:
        """Serve what is pending, for as long as the client takes its answers.

        A client that does not read holds up nobody but itself: one answer, one piece of input.
        """
        while self._pending and self._writable:
            self._serve(self._pending.popleft())
        if self._pending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _serve(self, request: Request) -> None:
        left = self._ids.take(request) if self._ids is not None else request
        if isinstance(left, WaitRequest):
            self._serve_wait(left)
        elif answer := left if isinstance(left, bytes) else _answer(self._state, left):
            self._transport.write(answer)

    def _serve_wait(self, request: WaitRequest) -> None:
        if isinstance(request, protocol.CancelWait):
            self._stop_waiting()
            self._transport.write(protocol.WAIT_CANCELED)
            return
        if self._waiting is not None:
            raise ProtocolError("a second wait while the first goes on")
        if isinstance(request, protocol.Wait):
            self._waiting = self._state.wait(request.keys, self._wait_ended)
        else:
            self._waiting = self._state.barrier(request.key, request.world_size, self._wait_ended)
        if self._waiting is None:
            self._transport.write(protocol.STOP_WAITING)

    def _wait_ended(self) -> None:
        self._waiting = None
        if not self._transport.is_closing():
            self._transport.write(protocol.STOP_WAITING)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._state.cancel(self._waiting)
            self._waiting = None

    def _refuse(self, error: ProtocolError) -> None:
        peer = self._transport.get_extra_info("peername")
        logger.warning("store: hung up on %s: %s", peer, error)
        self._on_refused()
        self.hang_up()


def _answer(state: StoreState, request: ReadRequest | WriteRequest | QueueRequest) -> bytes:
    """Do what `request` asks; return what the client expects back, empty if nothing."""
    if isinstance(request, WriteRequest):
        return _answer_write(state, request)
    if isinstance(request, QueueRequest):
        return _answer_queue(state, request)
    return _answer_read(state, request)


def _answer_read(state: StoreState, request: ReadRequest) -> bytes:
    match request:
        case protocol.Ping(nonce):
            return protocol.encode_nonce(nonce)
        case protocol.Get(key):
            return protocol.encode_value(state.get(key))
        case protocol.MultiGet(keys):
            return protocol.encode_values(state.multi_get(keys))
        case protocol.Check(keys):
            return protocol.encode_check(state.check(keys))
        case protocol.NumKeys():
            return protocol.encode_number(state.num_keys())
        case protocol.ListKeys():
            return protocol.encode_keys(state.list_keys())


def _answer_write(state: StoreState, request: WriteRequest) -> bytes:
    match request:
        case protocol.Set(key, value):
            state.set(key, value)
            return b""
        case protocol.MultiSet(items):
            state.multi_set(items)
            return b""
        case protocol.Append(key, value):
            state.append(key, value)
            return b""
        case protocol.CompareSet(key, expected, desired):
            return protocol.encode_value(state.compare_set(key, expected, desired))
        case protocol.Add(key, amount):
            return protocol.encode_number(state.add(key, amount))
        case protocol.Delete(key):
            return protocol.encode_number(int(state.delete(key)))


def _answer_queue(state: StoreState, request: QueueRequest) -> bytes:
    match request:
        case protocol.QueuePush(key, value):
            state.queue_push(key, value)
            return b""
        case protocol.QueuePop(key):
            return protocol.encode_popped(*state.queue_pop(key))
        case protocol.QueueLen(key):
            return protocol.encode_number(state.queue_len(key))
