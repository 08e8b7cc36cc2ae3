"""The bytes of torch's TCPStore protocol: a client's stream into typed requests, answers into bytes.

No input or output here. All integers are little endian; a key or value is its length (u64) and its bytes.
A client opens with VALIDATE and a magic number; after that, every request is one opcode and its fields.
Not every request has an answer: SET, APPEND, MULTI_SET and QUEUE_PUSH have none, and WAIT and BARRIER only
have one when they end. LIST_KEYS came with torch 2.10, BARRIER with 2.12; the rest is the same from 2.8 on.
"""

import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from ckptless.daemon.api.errors import ProtocolError

MAGIC = 0x3C85F7CE

MAX_KEY_NBYTES = 64 << 10
MAX_VALUE_NBYTES = 64 << 20
MAX_KEYS = 65536
# Room for the largest request of one key (COMPARE_SET: two values). Without it, 65536 keys of 64 KiB
# would each be within their limit and 4 GiB together.
MAX_REQUEST_NBYTES = 2 * MAX_VALUE_NBYTES + MAX_KEY_NBYTES
# A small request can ask for the same large value many times.
MAX_REPLY_NBYTES = 256 << 20


class Op(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


# Agents ask each other with the same requests, so that these limits hold there, too.
Key: TypeAlias = Annotated[bytes, Meta(max_length=MAX_KEY_NBYTES)]
Bytes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_VALUE_NBYTES)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Items: TypeAlias = Annotated[tuple[tuple[Key, Bytes], ...], Meta(max_length=MAX_KEYS)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Ping(Struct, frozen=True):
    """Answer: `nonce`. Every client sends one when it has connected."""

    nonce: int


class Set(Struct, frozen=True, tag=True, array_like=True):
    """No answer."""

    key: Key
    value: Bytes


class CompareSet(Struct, frozen=True, tag=True, array_like=True):
    """Answer: a value, by the rules of `StoreState.compare_set`."""

    key: Key
    expected: Bytes
    desired: Bytes


class Get(Struct, frozen=True, tag=True, array_like=True):
    """Answer: the value, empty where there is none. Clients wait for the key first."""

    key: Key


class Add(Struct, frozen=True, tag=True, array_like=True):
    """Answer: the sum, a number."""

    key: Key
    amount: Int64


class Check(Struct, frozen=True, tag=True, array_like=True):
    """Answer: whether every key is there."""

    keys: Keys


class Wait(Struct, frozen=True, tag=True, array_like=True):
    """Answer: `STOP_WAITING`, once every key is there."""

    keys: Keys


class NumKeys(Struct, frozen=True, tag=True, array_like=True):
    """Answer: a number."""


class Delete(Struct, frozen=True, tag=True, array_like=True):
    """Answer: the number of keys deleted, 0 or 1."""

    key: Key


class Append(Struct, frozen=True, tag=True, array_like=True):
    """No answer."""

    key: Key
    value: Bytes


class MultiGet(Struct, frozen=True, tag=True, array_like=True):
    """Answer: one value per key, in the order of `keys`."""

    keys: Keys


class MultiSet(Struct, frozen=True, tag=True, array_like=True):
    """No answer."""

    items: Items


class CancelWait(Struct, frozen=True):
    """Answer: `WAIT_CANCELED`, also when the wait has ended already."""


class QueuePush(Struct, frozen=True, tag=True, array_like=True):
    """No answer."""

    key: Key
    value: Bytes


class QueuePop(Struct, frozen=True, tag=True, array_like=True):
    """Answer: the queue's length, then its first value if that is not 0."""

    key: Key


class QueueLen(Struct, frozen=True, tag=True, array_like=True):
    """Answer: a number."""

    key: Key


class ListKeys(Struct, frozen=True, tag=True, array_like=True):
    """Answer: a count, then the keys."""


class Barrier(Struct, frozen=True, tag=True, array_like=True):
    """Answer: `STOP_WAITING`, once `world_size` clients have come."""

    key: Key
    world_size: Int64


ReadRequest: TypeAlias = Ping | Get | MultiGet | Check | NumKeys | ListKeys
WriteRequest: TypeAlias = Set | MultiSet | CompareSet | Add | Append | Delete
QueueRequest: TypeAlias = QueuePush | QueuePop | QueueLen
WaitRequest: TypeAlias = Wait | Barrier | CancelWait
Request: TypeAlias = ReadRequest | WriteRequest | QueueRequest | WaitRequest


class _Fields:
    """Reads the fields of one request. A field asks for bytes by yielding how many it needs next."""

    def __init__(self) -> None:
        self._left_nbytes = MAX_REQUEST_NBYTES

    def _bytes(self, limit: int, what: str) -> Generator[int, bytes, bytes]:
        size = int.from_bytes((yield 8), "little")
        if size > limit:
            raise ProtocolError(f"a {what} of {size} bytes; the limit is {limit}")
        if size > self._left_nbytes:
            raise ProtocolError(f"a request of more than {MAX_REQUEST_NBYTES} bytes")
        self._left_nbytes -= size
        return (yield size)

    def key(self) -> Generator[int, bytes, bytes]:
        return self._bytes(MAX_KEY_NBYTES, "key")

    def value(self) -> Generator[int, bytes, bytes]:
        return self._bytes(MAX_VALUE_NBYTES, "value")

    def signed(self) -> Generator[int, bytes, int]:
        return int.from_bytes((yield 8), "little", signed=True)

    def nonce(self) -> Generator[int, bytes, int]:
        return int.from_bytes((yield 4), "little")

    def _count(self) -> Generator[int, bytes, int]:
        count = int.from_bytes((yield 8), "little")
        if count > MAX_KEYS:
            raise ProtocolError(f"a request of {count} keys; the limit is {MAX_KEYS}")
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
    Op.SET: (Set, (_Fields.key, _Fields.value)),
    Op.COMPARE_SET: (CompareSet, (_Fields.key, _Fields.value, _Fields.value)),
    Op.GET: (Get, (_Fields.key,)),
    Op.ADD: (Add, (_Fields.key, _Fields.signed)),
    Op.CHECK: (Check, (_Fields.keys,)),
    Op.WAIT: (Wait, (_Fields.keys,)),
    Op.GETNUMKEYS: (NumKeys, ()),
    Op.DELETE_KEY: (Delete, (_Fields.key,)),
    Op.APPEND: (Append, (_Fields.key, _Fields.value)),
    Op.MULTI_GET: (MultiGet, (_Fields.keys,)),
    Op.MULTI_SET: (MultiSet, (_Fields.items,)),
    Op.CANCEL_WAIT: (CancelWait, ()),
    Op.PING: (Ping, (_Fields.nonce,)),
    Op.QUEUE_PUSH: (QueuePush, (_Fields.key, _Fields.value)),
    Op.QUEUE_POP: (QueuePop, (_Fields.key,)),
    Op.QUEUE_LEN: (QueueLen, (_Fields.key,)),
    Op.LIST_KEYS: (ListKeys, ()),
    Op.BARRIER: (Barrier, (_Fields.key, _Fields.signed)),
}


class _OpByte(int):
    """How many bytes an opcode has, told apart from a field of one byte."""


_OP_BYTE = _OpByte(1)


def _read_stream() -> Generator[int | Request, bytes, None]:
    """All of one client's stream. Yields a count to be sent that many bytes, or a request (send nothing)."""
    if (yield 1) != bytes([Op.VALIDATE]) or (yield 4) != MAGIC.to_bytes(4, "little"):
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
    Op.CHECK: Check,
    Op.WAIT: Wait,
    Op.MULTI_GET: MultiGet,
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
        if not isinstance(request, Check | Wait | MultiGet) or len(request.keys) < 2:
            return
        body = len(request.keys).to_bytes(8, "little") + b"".join(_with_lengths(request.keys))
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


STOP_WAITING = b"\0"
WAIT_CANCELED = b"\1"


def encode_nonce(nonce: int) -> bytes:
    """Answer a Ping."""
    return struct.pack("<I", nonce)


def encode_number(number: int) -> bytes:
    """Answer an Add, Delete, NumKeys or QueueLen."""
    return struct.pack("<q", number)


def encode_check(there: bool) -> bytes:
    """Answer a Check."""
    return b"\0" if there else b"\1"


def encode_value(value: bytes) -> bytes:
    """Answer a Get or CompareSet."""
    return struct.pack("<Q", len(value)) + value


def encode_values(values: Sequence[bytes]) -> bytes:
    """Answer a MultiGet. Raises ProtocolError if that takes more than `MAX_REPLY_NBYTES`."""
    return b"".join(_with_lengths(values))


def encode_keys(keys: Sequence[bytes]) -> bytes:
    """Answer a ListKeys. Raises ProtocolError if that takes more than `MAX_REPLY_NBYTES`."""
    return encode_number(len(keys)) + b"".join(_with_lengths(keys))


def encode_popped(length: int, value: bytes | None) -> bytes:
    """Answer a QueuePop: the queue's length before it, and the value if there was one."""
    return encode_number(length) + (b"" if value is None else encode_value(value))


def _with_lengths(values: Sequence[bytes]) -> Iterable[bytes]:
    nbytes = sum(map(len, values)) + 8 * len(values)
    if nbytes > MAX_REPLY_NBYTES:
        raise ProtocolError(f"an answer of {nbytes} bytes; the limit is {MAX_REPLY_NBYTES}")
    for value in values:
        yield struct.pack("<Q", len(value))
        yield value
