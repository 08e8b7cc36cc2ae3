"""torch's TCPStore protocol: its requests, with their limits, and answers into bytes (see `parser.py`).

No input or output here. All integers are little endian; a key or value is its length (u64) and its bytes.
A client opens with VALIDATE and a magic number; after that, every request is one opcode and its fields.
Not every request has an answer: SET, APPEND, MULTI_SET and QUEUE_PUSH have none, and WAIT and BARRIER only
have one when they end. LIST_KEYS came with torch 2.10, BARRIER with 2.12; the rest is the same from 2.8 on.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ckptless.daemon.protocol.errors import ProtocolError

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
    """Set a key; there is no answer."""

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
    """Append to the value of a key; there is no answer."""

    key: Key
    value: Bytes


class MultiGet(Struct, frozen=True, tag=True, array_like=True):
    """Answer: one value per key, in the order of `keys`."""

    keys: Keys


class MultiSet(Struct, frozen=True, tag=True, array_like=True):
    """Set several keys, as one step; there is no answer."""

    items: Items


class CancelWait(Struct, frozen=True):
    """Answer: `WAIT_CANCELED`, also when the wait has ended already."""


class QueuePush(Struct, frozen=True, tag=True, array_like=True):
    """Push onto a queue; there is no answer."""

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


Request: TypeAlias = (
    Ping
    | Get
    | MultiGet
    | Check
    | NumKeys
    | ListKeys
    | Set
    | MultiSet
    | CompareSet
    | Add
    | Append
    | Delete
    | QueuePush
    | QueuePop
    | QueueLen
    | Wait
    | Barrier
    | CancelWait
)

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
    return join_values(list(map(encode_value, values)))


def join_values(values: Sequence[bytes]) -> bytes:
    """Answer a MultiGet out of answers to a Get for each of its keys. Raises as `encode_values`."""
    nbytes = sum(map(len, values))
    if nbytes > MAX_REPLY_NBYTES:
        raise ProtocolError(f"an answer of {nbytes} bytes; the limit is {MAX_REPLY_NBYTES}")
    return b"".join(values)


def encode_keys(keys: Sequence[bytes]) -> bytes:
    """Answer a ListKeys. Raises ProtocolError if that takes more than `MAX_REPLY_NBYTES`."""
    return encode_number(len(keys)) + encode_values(keys)


def encode_popped(length: int, value: bytes | None) -> bytes:
    """Answer a QueuePop: the queue's length before it, and the value if there was one."""
    return encode_number(length) + (b"" if value is None else encode_value(value))
