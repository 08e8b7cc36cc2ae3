"""Frames: a length (u32, little endian), then one msgpack message; sans I/O.

A frame over the edge's limit, a body that is no msgpack, an unknown tag or field: ProtocolError, and the
connection it came on must be closed, since nothing after it can be trusted.
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

from ckptless.daemon.protocol.errors import MismatchError, ProtocolError

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

# Of all messages together; each end says it first, in a field of this name. Also in slurm_ext/spank/notify.c.
PROTOCOL = 1
CONTROL_LIMIT = 16 << 20
RANK_LIMIT = 64 << 20
# To a daemon: before anybody is known to have a job here, and then.
HELLO_LIMIT, AGENT_LIMIT = 64 << 10, 1 << 20


def encode(message: object) -> bytes:
    """One frame."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def check_protocol(theirs: int, who: str) -> None:
    """Raise MismatchError where the other end speaks another protocol."""
    if theirs != PROTOCOL:
        raise MismatchError(
            f"{who} speaks protocol {theirs}, this end {PROTOCOL}: both need the same version of ckptless"
        )


def undecodable(body: bytes, error: Exception, what: str) -> ProtocolError:
    """Return why a message was not understood; of another protocol, that is why, whatever else is wrong."""
    try:
        found = msgspec.msgpack.decode(body)
        if isinstance(found, dict) and isinstance(opening := found.get("opening", found), dict):
            theirs = opening.get("protocol")
            if type(theirs) is int:
                check_protocol(theirs, "the other end")
    except MismatchError as mismatch:
        return mismatch
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return ProtocolError(f"not {what}: {error}")
    return ProtocolError(f"not {what}: {error}")


class Decoder(Generic[T]):
    """Takes bytes as they come, gives whole messages of the union type `kind`."""

    def __init__(self, kind: Any, limit: int) -> None:
        self._decode: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        # Of a frame, which may be another one once it is known who is at the other end.
        self.limit = limit
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Bytes until the frame that has begun is whole, or until its length is known."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return self.length + _LENGTH.size - len(self._buffer)

    @property
    def length(self) -> int:
        """Bytes that the frame that has begun will have; 0 where that is not known yet."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        return int(_LENGTH.unpack_from(self._buffer)[0])

    def feed(self, data: bytes) -> list[T]:
        """Messages completed by `data`, in order. Raises ProtocolError."""
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes; the limit here is {self.limit}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self.parse(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def parse(self, body: bytes) -> T:
        """One message out of a frame's body. Raises ProtocolError."""
        try:
            return self._decode.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise undecodable(body, error, "a message of this edge") from error
