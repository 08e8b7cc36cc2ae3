"""A client's stream of torch's TCPStore protocol into typed requests. No input or output here."""

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Op, Request
from ckptless.daemon.api.errors import ProtocolError


class _Fields:
    """Reads the fields of one request. A field asks for bytes by yielding how many it needs next."""

    def __init__(self) -> None:
        self._left_nbytes = protocol.MAX_REQUEST_NBYTES

    def _bytes(self, limit: int, what: str) -> Generator[int, bytes, bytes]:
        size = int.from_bytes((yield 8), "little")
        if size > limit:
            raise ProtocolError(f"a {what} of {size} bytes; the limit is {limit}")
        if size > self._left_nbytes:
            raise ProtocolError(f"a request of more than {protocol.MAX_REQUEST_NBYTES} bytes")
        self._left_nbytes -= size
        return (yield size)

    def key(self) -> Generator[int, bytes, bytes]:
        return self._bytes(protocol.MAX_KEY_NBYTES, "key")

    def value(self) -> Generator[int, bytes, bytes]:
        return self._bytes(protocol.MAX_VALUE_NBYTES, "value")

    def signed(self) -> Generator[int, bytes, int]:
        return int.from_bytes((yield 8), "little", signed=True)

    def nonce(self) -> Generator[int, bytes, int]:
        return int.from_bytes((yield 4), "little")

    def _count(self) -> Generator[int, bytes, int]:
        count = int.from_bytes((yield 8), "little")
        if count > protocol.MAX_KEYS:
            raise ProtocolError(f"a request of {count} keys; the limit is {protocol.MAX_KEYS}")
        return count

    def keys(self) -> Generator[int, bytes, tuple[bytes, ...]]:
        keys = []
        for _ in range((yield from self._count())):
            keys.append((yield from self.key()))
        return tuple(keys)

    def items(self) -> Generator[int, bytes, tuple[tuple[bytes, bytes], ...]]:
        items = []
        for _ in range((yield from self._count())):
            key = yield from self.key()
            items.append((key, (yield from self.value())))
        return tuple(items)


_Field: TypeAlias = Callable[[_Fields], Generator[int, bytes, Any]]

_LAYOUT: dict[int, tuple[Callable[..., Request], tuple[_Field, ...]]] = {
    Op.SET: (protocol.Set, (_Fields.key, _Fields.value)),
    Op.COMPARE_SET: (protocol.CompareSet, (_Fields.key, _Fields.value, _Fields.value)),
    Op.GET: (protocol.Get, (_Fields.key,)),
    Op.ADD: (protocol.Add, (_Fields.key, _Fields.signed)),
    Op.CHECK: (protocol.Check, (_Fields.keys,)),
    Op.WAIT: (protocol.Wait, (_Fields.keys,)),
    Op.GETNUMKEYS: (protocol.NumKeys, ()),
    Op.DELETE_KEY: (protocol.Delete, (_Fields.key,)),
    Op.APPEND: (protocol.Append, (_Fields.key, _Fields.value)),
    Op.MULTI_GET: (protocol.MultiGet, (_Fields.keys,)),
    Op.MULTI_SET: (protocol.MultiSet, (_Fields.items,)),
    Op.CANCEL_WAIT: (protocol.CancelWait, ()),
    Op.PING: (protocol.Ping, (_Fields.nonce,)),
    Op.QUEUE_PUSH: (protocol.QueuePush, (_Fields.key, _Fields.value)),
    Op.QUEUE_POP: (protocol.QueuePop, (_Fields.key,)),
    Op.QUEUE_LEN: (protocol.QueueLen, (_Fields.key,)),
    Op.LIST_KEYS: (protocol.ListKeys, ()),
    Op.BARRIER: (protocol.Barrier, (_Fields.key, _Fields.signed)),
}


class _OpByte(int):
    """How many bytes an opcode has, told apart from a field of one byte."""


_OP_BYTE = _OpByte(1)


def _read_stream() -> Generator[int | Request, bytes, None]:
    """All of one client's stream. Yields a count to be sent that many bytes, or a request (send nothing)."""
    if (yield 1) != bytes([Op.VALIDATE]) or (yield 4) != protocol.MAGIC.to_bytes(4, "little"):
        raise ProtocolError("not a client of torch's TCPStore: no VALIDATE at the start")
    while True:
        op = (yield _OP_BYTE)[0]
        if op not in _LAYOUT:
            raise ProtocolError(f"opcode {op}")
        make, layout = _LAYOUT[op]
        fields = _Fields()
        values = []
        for field in layout:
            values.append((yield from field(fields)))
        yield make(*values)


MAX_LISTS = 32
MAX_LIST_NBYTES = 256 << 10
_OF_KEYS: dict[int, Callable[[tuple[bytes, ...]], Request]] = {
    Op.CHECK: protocol.Check,
    Op.WAIT: protocol.Wait,
    Op.MULTI_GET: protocol.MultiGet,
}


class KeyLists:
    """Lists of keys that clients have lately asked for: all ranks of a node ask for the same.

    So a long one is taken apart once, and is one object in every request that has it.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[bytes, ...], bytes] = {}

    def find(self, stream: bytearray, at: int) -> tuple[Request, int] | None:
        """The request that begins at `at`, if it is one of a known list; and where it ends."""
        make = _OF_KEYS.get(stream[at])
        if make is not None:
            for keys, body in self._lists.items():
                if stream.startswith(body, at + 1):
                    return make(keys), at + 1 + len(body)
        return None

    def learn(self, request: Request) -> None:
        """Of a client's stream."""
        if (
            not isinstance(request, protocol.Check | protocol.Wait | protocol.MultiGet)
            or len(request.keys) < 2
        ):
            return
        body = len(request.keys).to_bytes(8, "little") + b"".join(protocol.with_lengths(request.keys))
        if len(body) <= MAX_LIST_NBYTES:
            self._lists[request.keys] = body
            if len(self._lists) > MAX_LISTS:
                del self._lists[next(iter(self._lists))]


class StoreParser:
    """Turns one client's bytes, in whatever pieces they come, into requests.

    Holds one unfinished request (`MAX_REQUEST_NBYTES`) and one piece; copies no byte more than a few times.
    `lists` may be that of other clients, too.
    """

    def __init__(self, lists: KeyLists | None = None) -> None:
        self._lists = lists or KeyLists()
        self._unread = bytearray()
        self._stream = _read_stream()
        self._need = self._advance(None, [])
        self._broken = False

    def feed(self, data: bytes) -> list[Request]:
        """Take the next piece; return the requests that it completes.

        Raises ProtocolError at the first byte that breaks the protocol or its limits, and at every call
        after that. The requests before that byte in the same piece are dropped: such a client is cut off.
        """
        if self._broken:
            raise ProtocolError("the stream is broken already")
        self._unread += data
        requests: list[Request] = []
        taken = 0
        try:
            with memoryview(self._unread) as unread:
                while len(unread) - taken >= self._need:
                    known = self._lists.find(self._unread, taken) if self._need is _OP_BYTE else None
                    if known is not None:
                        requests.append(known[0])
                        taken = known[1]
                        continue
                    piece = unread[taken : taken + self._need].tobytes()
                    taken += self._need
                    self._need = self._advance(piece, requests)
        except ProtocolError:
            self._broken = True
            self._unread = bytearray()
            raise
        # Once per piece: deleting after every field would move a piece of many requests many times.
        del self._unread[:taken]
        return requests

    def _advance(self, piece: bytes | None, requests: list[Request]) -> int:
        """Hand over `piece`, collect what it completes, return how many bytes come next."""
        step = next(self._stream) if piece is None else self._stream.send(piece)
        while not isinstance(step, int):
            self._lists.learn(step)
            requests.append(step)
            step = next(self._stream)
        return step
