"""A client's stream of torch's TCPStore protocol into typed requests. No input or output here."""

from collections.abc import Callable
from typing import Any, TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Op, Request
from ckptless.daemon.protocol.errors import ProtocolError

_HELLO = bytes([Op.VALIDATE]) + protocol.MAGIC.to_bytes(4, "little")
_U64 = 8


class _ShortError(Exception):
    """The request has not come to its end: so many bytes of the stream must be there before that can be."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Fields:
    """Reads the fields of one request out of `stream`, from `at` on. Each raises _ShortError, ProtocolError.

    A length is checked as soon as it is there: what is too large is refused before its bytes come.
    """

    def __init__(self, stream: bytes, at: int) -> None:
        self.stream, self.at = stream, at
        self._left_nbytes = protocol.MAX_REQUEST_NBYTES

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        end = self.at + nbytes
        if end > len(self.stream):
            raise _ShortError(end)
        data, self.at = self.stream[self.at : end], end
        return data

    def _text(self, limit: int, what: str, more: int = 0) -> bytes:
        """Read a text of a length that stands before it; at least `more` such follow."""
        size = int.from_bytes(self.take(_U64), "little")
        if size > limit:
            raise ProtocolError(f"a {what} of {size} bytes; the limit is {limit}")
        self._left_nbytes -= size
        if self._left_nbytes < 0:
            raise ProtocolError(f"a request of more than {protocol.MAX_REQUEST_NBYTES} bytes")
        end = self.at + size
        if end > len(self.stream):
            # So that a list in many pieces is not begun again with each of them.
            raise _ShortError(end + more * _U64)
        data, self.at = self.stream[self.at : end], end
        return data

    def key(self) -> bytes:
        return self._text(protocol.MAX_KEY_NBYTES, "key")

    def value(self) -> bytes:
        return self._text(protocol.MAX_VALUE_NBYTES, "value")

    def signed(self) -> int:
        return int.from_bytes(self.take(_U64), "little", signed=True)

    def nonce(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def _count(self) -> int:
        count = int.from_bytes(self.take(_U64), "little")
        if count > protocol.MAX_KEYS:
            raise ProtocolError(f"a request of {count} keys; the limit is {protocol.MAX_KEYS}")
        return count

    def keys(self) -> tuple[bytes, ...]:
        limit = protocol.MAX_KEY_NBYTES
        return tuple([self._text(limit, "key", left) for left in reversed(range(self._count()))])

    def items(self) -> tuple[tuple[bytes, bytes], ...]:
        key, value = protocol.MAX_KEY_NBYTES, protocol.MAX_VALUE_NBYTES
        lefts = reversed(range(self._count()))
        return tuple([(self._text(key, "key", left), self._text(value, "value", left)) for left in lefts])


_Field: TypeAlias = Callable[[_Fields], Any]

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


class StoreParser:
    """Turns one client's bytes, in whatever pieces they come, into requests.

    Holds one unfinished request (`MAX_REQUEST_NBYTES`) and one piece; copies no byte more than a few times.
    """

    def __init__(self) -> None:
        self._unread = bytearray()
        # Before so many have come there is nothing to be done.
        self._need = len(_HELLO)
        self._greeted = self._broken = False

    def feed(self, data: bytes) -> list[Request]:
        """Take the next piece; return the requests that it completes.

        Raises ProtocolError at the first byte that breaks the protocol or its limits, and at every call
        after that. The requests before that byte in the same piece are dropped: such a client is cut off.
        """
        if self._broken:
            raise ProtocolError("the stream is broken already")
        if self._unread or len(data) < self._need:
            self._unread += data
            if len(self._unread) < self._need:
                return []
            data = bytes(self._unread)
        try:
            return self._read(data)
        except ProtocolError:
            self._broken = True
            self._unread = bytearray()
            raise

    def _read(self, stream: bytes) -> list[Request]:
        requests: list[Request] = []
        at = 0
        if not self._greeted:
            if not stream.startswith(_HELLO):
                raise ProtocolError("not a client of torch's TCPStore: no VALIDATE at the start")
            self._greeted, at = True, len(_HELLO)
        need = 1
        while at < len(stream):
            fields = _Fields(stream, at + 1)
            try:
                requests.append(_request(stream[at], fields))
            except _ShortError as short:
                need = short.nbytes - at
                break
            at = fields.at
        self._unread, self._need = bytearray(stream[at:]), need
        return requests


def _request(op: int, fields: _Fields) -> Request:
    if op not in _LAYOUT:
        raise ProtocolError(f"opcode {op}")
    make, layout = _LAYOUT[op]
    return make(*[field(fields) for field in layout])
