"""One authenticated connection over TCP, for asyncio: typed messages, and bulk bytes between them."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec

from ckptless.daemon.protocol.codec import CONTROL_LIMIT
from ckptless.daemon.protocol.errors import MismatchError, PeerError, ProtocolError
from ckptless.daemon.transport import handshake
from ckptless.daemon.transport.bulk import CountingReader, Pump, SendRate, Streams
from ckptless.daemon.transport.credentials import Credentials

T = TypeVar("T")

HANDSHAKE_DEADLINE_S = 5.0
READ_BUFFER_BYTES = 4 << 20
# Until the other end has proved who it is.
GREETING_BUFFER_BYTES = 16 << 10
UNPACED = SendRate()


def _nobody(_nbytes: int) -> None:
    """Is told of a transfer's progress where nobody asks."""


class GreetingCutError(PeerError):
    """Refused without a word; ordinary where the other end has not heard of the job yet."""


class Route(NamedTuple):
    """The address to connect to, and the one of this node to do it from; None: as the kernel likes.

    `node` is who has to answer there, and `Link.dial` takes nobody else: whoever listens on a port that
    another has left, or sits on the wire, may pass everything on to a sound end of the job. None: any node.
    """

    address: tuple[str, int]
    source: str | None = None
    node: int | None = None


class Link(Generic[T]):
    """A connection to the process of node `node`, whose messages are of union type `kind`.

    `send` may be called from any task of the loop; `receive` and the bulk calls by one task at a time.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any, limit: int
    ) -> None:
        self.job, self.node = "", -1
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[T] = handshake.decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        # Of a message's bytes; whoever knows that the other end has proved who it is may raise it.
        self.limit = limit
        self._pump = Pump(writer.get_extra_info("socket"))
        # What is to be sent after the transfer that is on its way, if one is.
        self._late: list[bytes] | None = None
        self._in: handshake.Sealer | None = None
        self._out: handshake.Sealer | None = None

    @classmethod
    async def dial(
        cls,
        to: "tuple[str, int] | Route",
        me: tuple[str, int],
        credentials: Credentials,
        kind: Any,
        deadline_s: float,
    ) -> Self:
        """Connect and prove who is who; `me`: (job, node). Raises OSError, TimeoutError, CkptlessError."""
        async with asyncio.timeout(deadline_s):
            route = to if isinstance(to, Route) else Route(to)
            reader, writer = await _connect(route)
            link = cls(reader, writer, kind, CONTROL_LIMIT)
            try:
                mine, secret = await _vouched(handshake.opening(*me), credentials)
                await link._greet(mine)
                answer = await link._greeted(handshake.Answer)
                theirs = answer.opening
                handshake.check_opening(theirs)
                if theirs.job != mine.job:
                    raise ProtocolError(f"asked for job {mine.job!r}, got one of {theirs.job!r}")
                theirs_secret = await credentials.accept(theirs.credential, theirs.context(mine))
                key, pair = handshake.join_secrets(secret, theirs_secret), (mine, theirs)
                handshake.verify(key, b"acceptor", answer.proof, pair)
                if route.node not in (None, theirs.node):
                    raise PeerError(f"node-{theirs.node} answers in place of node-{route.node}")
                await link._greet(handshake.Proof(handshake.prove(key, b"dialler", *pair)))
                link._arm(key, pair, dialled=True)
            except BaseException:
                link.close()
                raise
            return link

    @classmethod
    async def accept(
        cls,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        node_in: Callable[[str], int],
        credentials: Credentials,
        kind: Any,
    ) -> Self:
        """The other side of `dial`. `node_in(job)`: this end's node number, or PeerError."""
        link = cls(*streams, kind, CONTROL_LIMIT)
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                theirs = await link._opening()
                their_secret = await credentials.accept(theirs.credential, theirs.context())
                mine = handshake.opening(theirs.job, node_in(theirs.job))
                mine, secret = await _vouched(mine, credentials, theirs)
                key, pair = handshake.join_secrets(their_secret, secret), (theirs, mine)
                await link._greet(handshake.Answer(mine, handshake.prove(key, b"acceptor", *pair)))
                proof = await link._greeted(handshake.Proof)
                handshake.verify(key, b"dialler", proof.proof, pair)
                link._arm(key, pair, dialled=False)
        except BaseException:
            link.close()
            raise
        return link

    async def _opening(self) -> handshake.Opening:
        """The dialler's. One of another version is told of ours before it is refused."""
        try:
            theirs: handshake.Opening = await self._greeted(handshake.Opening)
            handshake.check_opening(theirs)
        except MismatchError:
            await self._greet(handshake.Answer(handshake.opening("", -1), b""))
            raise
        return theirs

    def _arm(self, key: bytes, pair: tuple[handshake.Opening, handshake.Opening], *, dialled: bool) -> None:
        self.job, self.node = pair[0].job, pair[1].node if dialled else pair[0].node
        roles = (b"dialler", b"acceptor") if dialled else (b"acceptor", b"dialler")
        self._out, self._in = (handshake.Sealer(key, role, pair) for role in roles)
        if isinstance(self._reader, CountingReader):
            self._reader.widen(READ_BUFFER_BYTES)
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _greet(self, message: "handshake.Opening | handshake.Answer | handshake.Proof") -> None:
        self._writer.write(handshake.encode(message))
        # no deadline: the caller's: a connection may be silent for as long as it lives
        await self._writer.drain()

    async def _greeted(self, kind: type[Any]) -> Any:
        try:
            # no deadline: HANDSHAKE_DEADLINE_S of the caller
            length = handshake.parse_length(await self._reader.readexactly(handshake.LENGTH_BYTES))
            # no deadline: HANDSHAKE_DEADLINE_S of the caller
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise GreetingCutError("the other end hung up during the greeting") from error
        return handshake.decode(body, kind)

    @property
    def own_address(self) -> str:
        """The address of this end, as the other one has it where nothing in between changes it."""
        return str(self._writer.get_extra_info("sockname")[0])

    # ------------------------------------------------------------------------------- messages

    def send(self, message: T) -> None:
        """Queue one message; the connection's own buffer takes it."""
        assert self._out is not None, "the handshake comes first"
        body = self._encoder.encode(message)
        frame = (self._out.seal(body), body)
        if self._late is None:
            self._writer.writelines(frame)
        else:
            self._late.extend(frame)

    async def drain(self) -> None:
        """Wait until the other end keeps up again."""
        # no deadline: the caller's: a connection may be silent for as long as it lives
        await self._writer.drain()

    async def receive(self) -> T:
        """The next message. Raises ProtocolError, and ConnectionError at the end of the connection."""
        assert self._in is not None, "the handshake comes first"
        self._read_on()
        try:
            # no deadline: the caller's: a connection may be silent for as long as it lives
            head = await self._reader.readexactly(handshake.HEAD_BYTES)
            length, mac = handshake.Sealer.parse_head(head, self.limit)
            # no deadline: the caller's: a connection may be silent for as long as it lives
            body = self._in.open(mac, await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the other end hung up") from error
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this edge: {error}") from error

    def mask(self, salt: bytes, data: bytes) -> bytes:
        """Up to 32 bytes to send that nobody else can read; `unmask` at the other end."""
        assert self._out is not None, "the handshake comes first"
        return self._out.mask(salt, data)

    def unmask(self, salt: bytes, data: bytes) -> bytes:
        """Return what the other end has masked. Raises ProtocolError."""
        assert self._in is not None, "the handshake comes first"
        return self._in.mask(salt, data)

    # ------------------------------------------------------------------------------------ bulk
    #
    # A transfer that ends in the middle, by whatever error or cancellation, leaves bytes on the wire that are
    # no messages: so it ends the connection too.

    async def send_bulk(self, data: memoryview, pace: SendRate = UNPACED) -> None:
        """Raw bytes right after the last message; what is sent meanwhile comes after them.

        The receiver knows how many and checks their digest. Raises OSError; ConnectionError where it ends.
        """
        assert self._late is None, "one transfer at a time"
        self._late = []
        try:
            await self._flush()
            await self._pump.send(data, pace)
            self._writer.writelines(self._late)
        except BaseException:
            self.close()
            raise
        finally:
            self._late = None

    async def _flush(self) -> None:
        """All that was written is with the kernel. Raises ConnectionError."""
        transport = self._writer.transport
        transport.set_write_buffer_limits(high=0)
        try:
            # no deadline: the caller's: a connection may be silent for as long as it lives
            await self._writer.drain()
        finally:
            transport.set_write_buffer_limits()
        if transport.is_closing():
            raise ConnectionResetError("the connection ended before a transfer")

    async def receive_bulk(self, into: memoryview, came: Callable[[int], None] = _nobody) -> None:
        """Fill `into` with what `send_bulk` sent. Raises OSError.

        `came(so many)` as they come, in the transfer's thread; not for those that came before it was asked.
        """
        reader = self._reader
        assert isinstance(reader, CountingReader), "streams of `dial` or `serve`"
        try:
            # What has come already is taken without waiting: so nothing can come in between.
            filled = 0
            while count := min(reader.unread, len(into) - filled):
                # no deadline: it is there already
                into[filled : filled + count] = await reader.readexactly(count)
                filled += count
            if filled < len(into):
                await self._receive_rest(into[filled:], lambda more: came(filled + more))
        except BaseException:
            self.close()
            raise

    async def _receive_rest(self, into: memoryview, came: Callable[[int], None]) -> None:
        """The stream has nothing left, and gets nothing while this goes past it, up to the next `receive`.

        What comes meanwhile may be the next transfer's, which would take the long way.
        """
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        if self._reader.at_eof() or transport.is_closing():
            raise ConnectionResetError("the connection ended in the middle of a transfer")
        transport.pause_reading()
        with into:
            await self._pump.receive(into, came)

    def _read_on(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.resume_reading()

    def close(self) -> None:
        """End the connection; whoever receives on it gets ConnectionError."""
        self._pump.stop()
        self._writer.close()


async def _vouched(
    opening: handshake.Opening, credentials: Credentials, dialler: handshake.Opening | None = None
) -> tuple[handshake.Opening, bytes]:
    """An opening with its credential, and the secret in that."""
    credential, secret = await credentials.offer(opening.context(dialler))
    return msgspec.structs.replace(opening, credential=credential), secret


async def _connect(route: Route) -> tuple[CountingReader, asyncio.StreamWriter]:
    """Connect as asyncio.open_connection does. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = CountingReader(READ_BUFFER_BYTES, loop)
    protocol = Streams(reader, loop=loop)
    source = None if route.source is None else (route.source, 0)
    transport, _ = await loop.create_connection(lambda: protocol, *route.address, local_addr=source)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
