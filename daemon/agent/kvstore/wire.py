"""What the stores of two agents tell each other: several at once, as the body of a `StoreSaid`. Pure."""

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import Refusal, Reply
from ckptless.daemon.agent.kvstore.protocol import Key
from ckptless.daemon.api.errors import ProtocolError

Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Gather(Struct, frozen=True, tag=True, array_like=True):
    """All ranks' keys that begin so, when they are there, but for those that come from the asker's side."""

    where: Key


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
    | Gather
)
# So large a body is not made any larger; one item may be, by itself.
BODY_NBYTES = 1 << 20
# Of the largest one: an answer, with its lengths.
MAX_BODY_NBYTES = protocol.MAX_REPLY_NBYTES + (16 << 20)


class Ask(Struct, frozen=True, tag=True, array_like=True):
    """Do this with keys that you keep. Numbers are the asker's and grow."""

    number: Number
    request: Askable


class Cancel(Struct, frozen=True, tag=True, array_like=True):
    """The wait of that number is wanted no more; its answer may be on its way."""

    number: Number


class Told(Struct, frozen=True, tag=True, array_like=True):
    """The answer to an Ask."""

    number: Number
    answer: Reply | Refusal


class Drop(Struct, frozen=True, tag=True, array_like=True):
    """Forget what you remember of this key of mine, and say so."""

    key: Key


class Dropped(Struct, frozen=True, tag=True, array_like=True):
    """The answer to a Drop; also where there was nothing to forget."""

    key: Key


Item: TypeAlias = Ask | Cancel | Told | Drop | Dropped

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[tuple[Item, ...]] = msgspec.msgpack.Decoder(tuple[Item, ...])


def encode(items: Iterable[Item]) -> list[bytes]:
    """Bodies, in order, none much larger than need be."""
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


def decode(body: bytes) -> tuple[Item, ...]:
    """Raises ProtocolError."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not what stores tell each other: {error}") from error


def asks(items: Iterable[Item]) -> bool:
    """Whether one of them is to have an answer."""
    return any(isinstance(item, Ask | Drop) for item in items)
