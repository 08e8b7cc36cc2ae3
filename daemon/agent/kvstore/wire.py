"""The messages between agents and the home of a generation's keys: several at once, as one body. Pure."""

from collections.abc import Iterable
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Key
from ckptless.daemon.protocol.errors import ProtocolError

T = TypeVar("T")
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]

Askable: TypeAlias = (
    protocol.Set
    | protocol.MultiSet
    | protocol.CompareSet
    | protocol.Add
    | protocol.Append
    | protocol.Delete
    | protocol.MultiGet
    | protocol.Check
    | protocol.Wait
    | protocol.Barrier
    | protocol.NumKeys
    | protocol.ListKeys
    | protocol.QueuePush
    | protocol.QueuePop
    | protocol.QueueLen
)
# So large a body is not made any larger; one item may be, by itself.
BODY_NBYTES = 1 << 20
# Of the largest one: an answer, with its lengths.
MAX_BODY_NBYTES = protocol.MAX_REPLY_NBYTES + (16 << 20)


class Ask(Struct, frozen=True, tag=True, array_like=True):
    """Do this. Numbers are the asker's and grow."""

    number: Number
    request: Askable


class Cancel(Struct, frozen=True, tag=True, array_like=True):
    """The wait of that number is wanted no more; its answer may be on its way."""

    number: Number


class Dropped(Struct, frozen=True, tag=True, array_like=True):
    """The answer to a Drop; also where there was nothing to forget."""

    key: Key


class Reply(Struct, frozen=True, tag=True, array_like=True):
    """The request is done. `data` is what the client gets; empty for a MultiGet, whose client gets `values`.

    `values`: of the keys of a MultiGet, or of a Wait where they are small; None where there is none. Those at
    the places `keep` may be remembered until a Drop.
    """

    data: bytes = b""
    values: tuple[bytes | None, ...] = ()
    keep: tuple[int, ...] = ()


class Refusal(Struct, frozen=True, tag=True, array_like=True):
    """The request was not done, and its client is hung up on. `hostile`: because of what that asked for."""

    text: str
    hostile: bool


class Told(Struct, frozen=True, tag=True, array_like=True):
    """The answer to an Ask."""

    number: Number
    answer: Reply | Refusal


class Drop(Struct, frozen=True, tag=True, array_like=True):
    """Forget what you remember of this key, and say so."""

    key: Key


ToHome: TypeAlias = Ask | Cancel | Dropped
FromHome: TypeAlias = Told | Drop
Item: TypeAlias = ToHome | FromHome

_ENCODER = msgspec.msgpack.Encoder()
TO_HOME: msgspec.msgpack.Decoder[tuple[ToHome, ...]] = msgspec.msgpack.Decoder(tuple[ToHome, ...])
FROM_HOME: msgspec.msgpack.Decoder[tuple[FromHome, ...]] = msgspec.msgpack.Decoder(tuple[FromHome, ...])


def encode(items: Iterable[Item]) -> list[bytes]:
    """Return bodies, in order, none much larger than need be."""
    bodies: list[bytes] = []
    raw: list[msgspec.Raw] = []
    nbytes = 0
    for item in items:
        data = _ENCODER.encode(item)
        if raw and nbytes + len(data) > BODY_NBYTES:
            bodies.append(_ENCODER.encode(raw))
            raw, nbytes = [], 0
        raw.append(msgspec.Raw(data))
        nbytes += len(data)
    if raw:
        bodies.append(_ENCODER.encode(raw))
    return bodies


def decode(body: bytes, decoder: "msgspec.msgpack.Decoder[tuple[T, ...]]") -> tuple[T, ...]:
    """Return the items of a body; `decoder`: TO_HOME or FROM_HOME. Raises ProtocolError."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not what a store's agents tell each other: {error}") from error
