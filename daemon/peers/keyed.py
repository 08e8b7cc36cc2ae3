"""One end's handshake and frames, where both ends hold one key: bytes in, bytes out. Pure.

It says what `Link` says over the wire. But nothing is awaited: what comes is fed, and what is to be sent is
given back, so that a connection takes no task of its own.
"""

from collections.abc import Callable

from ckptless.daemon.api.errors import PeerError, ProtocolError
from ckptless.daemon.peers import handshake
from ckptless.daemon.peers.handshake import HEAD_BYTES, LENGTH_BYTES, Answer, Opening, Proof, Sealer


class Keyed:
    """Of the end that opens with `mine`; `theirs`: what the other has opened with, where that has dialled.

    `bind` makes, by the key, an end's secret of what it has opened with. `node` is the other end: nobody else
    is taken. `limit` is of a frame's bytes. `proved`: the other end holds the key, and what is taken from now
    on nobody else can have said.
    """

    def __init__(
        self,
        bind: Callable[[bytes], bytes],
        mine: Opening,
        node: int,
        limit: int,
        theirs: Opening | None = None,
    ) -> None:
        self.node, self.proved = node, False
        self._bind, self._mine, self._theirs, self._limit = bind, mine, theirs, limit
        self._unread = bytearray()
        # Bytes that the frame has which has begun to come.
        self._need = 0
        self._pair_key = b""
        self._in: Sealer | None = None
        self._out: Sealer | None = None

    @property
    def missing_nbytes(self) -> int:
        """So many bytes are known to come, if any."""
        return max(0, self._need - len(self._unread))

    def begin(self) -> bytes:
        """What this end says first. Raises PeerError."""
        if self._theirs is None:
            return handshake.encode(self._mine)
        pair = (self._theirs, self._mine)
        self._join(*pair)
        return handshake.encode(Answer(self._mine, handshake.prove(self._pair_key, b"acceptor", *pair)))

    def _join(self, dialler: Opening, acceptor: Opening) -> None:
        if dialler.credential or acceptor.credential:
            raise PeerError("the other end came with a credential where a key is wanted")
        secrets = self._bind(dialler.context()), self._bind(acceptor.context(dialler))
        self._pair_key = handshake.join_secrets(*secrets)

    def feed(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """What is to be sent at once, and the bodies of whole frames. Raises ProtocolError, PeerError."""
        self._unread += data
        reply = b""
        if not self.proved:
            greeting = self._greeting()
            if greeting is None:
                return b"", []
            reply = self._prove_answer(greeting) if self._theirs is None else self._take_proof(greeting)
        return reply, self._frames()

    def _frames(self) -> list[bytes]:
        assert self._in is not None
        bodies = []
        at = self._need = 0
        with memoryview(self._unread) as unread:
            while len(unread) - at >= HEAD_BYTES:
                body_at = at + HEAD_BYTES
                length, mac = Sealer.parse_head(bytes(unread[at:body_at]), self._limit)
                end = body_at + length
                if len(unread) < end:
                    self._need = end - at
                    break
                bodies.append(self._in.open(mac, bytes(unread[body_at:end])))
                at = end
        del self._unread[:at]
        return bodies

    def _greeting(self) -> bytes | None:
        if len(self._unread) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + handshake.parse_length(bytes(self._unread[:LENGTH_BYTES]))
        if len(self._unread) < end:
            return None
        greeting = bytes(self._unread[LENGTH_BYTES:end])
        del self._unread[:end]
        return greeting

    def _prove_answer(self, greeting: bytes) -> bytes:
        answer = handshake.decode(greeting, Answer)
        mine, theirs = pair = self._mine, answer.opening
        handshake.check_opening(theirs)
        if theirs.job != mine.job:
            raise ProtocolError(f"asked for job {mine.job!r}, got one of {theirs.job!r}")
        self._join(*pair)
        handshake.verify(self._pair_key, b"acceptor", answer.proof, pair)
        if theirs.node != self.node:
            raise PeerError(f"node-{theirs.node} answers in place of node-{self.node}")
        self._arm(pair, b"dialler", b"acceptor")
        return handshake.encode(Proof(handshake.prove(self._pair_key, b"dialler", *pair)))

    def _take_proof(self, greeting: bytes) -> bytes:
        assert self._theirs is not None
        pair = (self._theirs, self._mine)
        handshake.verify(self._pair_key, b"dialler", handshake.decode(greeting, Proof).proof, pair)
        self._arm(pair, b"acceptor", b"dialler")
        return b""

    def _arm(self, pair: tuple[Opening, Opening], mine: bytes, theirs: bytes) -> None:
        self._out, self._in = (Sealer(self._pair_key, role, pair) for role in (mine, theirs))
        self.proved = True

    def seal(self, body: bytes) -> bytes:
        """The next frame of this end."""
        assert self._out is not None, "the handshake comes first"
        return self._out.seal(body) + body
