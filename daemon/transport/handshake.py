"""Proves who is at the other end of a connection, and makes frames it cannot forge; sans I/O.

Each end opens with who it says it is, a nonce, and a credential (`credentials.py`), out of which both get a
secret. Each proves that it knows the key made of both secrets, and both derive a frame key per direction:

    dialler  -> {protocol, job, node, nonce, credential}
    acceptor -> {protocol, job, node, nonce, credential}, proof    HMAC(key, "acceptor" + both openings)
    dialler  -> proof                                              HMAC(key, "dialler" + both openings)

A frame is its length (u32), 16 bytes of HMAC-SHA256(frame key, counter + body), and the body. The counter
makes a replayed, dropped or reordered frame a forged one.
"""

import functools
import hashlib
import hmac
import secrets
import struct
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from ckptless.daemon.protocol.codec import PROTOCOL, check_protocol, undecodable
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.protocol.limits import (
    Key,
    LinkName,
    NodeOrNone,
    Protocol,
)

T = TypeVar("T")

GREETING_LIMIT = 4096
NONCE_BYTES = 16
MAC_BYTES = 16
KEY_BYTES = 32

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
_HEAD = struct.Struct(f"<I{MAC_BYTES}s")
_COUNTER = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first message of each end."""

    protocol: Protocol
    job: LinkName
    node: NodeOrNone
    nonce: Key
    credential: Annotated[bytes, Meta(max_length=GREETING_LIMIT)] = b""

    def context(self, dialler: "Opening | None" = None) -> bytes:
        """Return what the credential is bound to; the acceptor's also to the opening that it answers."""
        fields = (self.protocol, self.job, self.node, self.nonce, dialler.nonce if dialler else b"")
        return msgspec.msgpack.encode(fields)


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptor's opening and proof."""

    opening: Opening
    proof: Key


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dialler's proof."""

    proof: Key


def encode(greeting: "Opening | Answer | Proof") -> bytes:
    """Return the message with its length before it."""
    body = msgspec.msgpack.encode(greeting)
    return _LENGTH.pack(len(body)) + body


def parse_length(head: bytes) -> int:
    """Return the length of the greeting that follows. Raises ProtocolError over the limit."""
    length = int(_LENGTH.unpack(head)[0])
    if length > GREETING_LIMIT:
        raise ProtocolError(f"a greeting of {length} bytes")
    return length


def decode(body: bytes, kind: type[T]) -> T:
    """Raises ProtocolError; MismatchError where it is one of another protocol."""
    try:
        found: T = decoder(cast(Any, kind)).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(body, error, "a greeting") from error
    return found


@functools.cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """One for all connections of a kind: making it takes as long as the rest of a handshake's arithmetic."""
    return msgspec.msgpack.Decoder(kind)


def new_key() -> bytes:
    """A fresh random key."""
    return secrets.token_bytes(KEY_BYTES)


def opening(job: str, node: int) -> Opening:
    """Return the first words of this end, still without a credential."""
    return Opening(PROTOCOL, job, node, secrets.token_bytes(NONCE_BYTES))


def join_secrets(dialler: bytes, acceptor: bytes) -> bytes:
    """The connection's key, from the secrets of both ends."""
    return hmac.new(dialler, b"ckptless connection" + acceptor, hashlib.sha256).digest()


def _mac(key: bytes, role: bytes, dialler: Opening, acceptor: Opening) -> bytes:
    text = role + msgspec.msgpack.encode(dialler) + msgspec.msgpack.encode(acceptor)
    return hmac.new(key, text, hashlib.sha256).digest()


def check_opening(theirs: Opening) -> None:
    """Raises ProtocolError for another version or a short nonce."""
    check_protocol(theirs.protocol, "the other end")
    if len(theirs.nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce of {len(theirs.nonce)} bytes")


def prove(key: bytes, role: bytes, dialler: Opening, acceptor: Opening) -> bytes:
    """Proof of `role` (b"dialler" or b"acceptor") for this pair of openings."""
    return _mac(key, role, dialler, acceptor)


def verify(key: bytes, role: bytes, proof: bytes, pair: tuple[Opening, Opening]) -> None:
    """Raises PeerError where the other end does not hold the key."""
    if not hmac.compare_digest(proof, _mac(key, role, *pair)):
        raise PeerError("the other end does not hold the key")


class Sealer:
    """Frames of one direction of one connection."""

    def __init__(self, key: bytes, sender: bytes, pair: tuple[Opening, Opening]) -> None:
        self._key = _mac(key, b"frames of the " + sender, *pair)
        self._counter = 0

    def _sign(self, body: bytes) -> bytes:
        text = _COUNTER.pack(self._counter) + body
        self._counter += 1
        return hmac.new(self._key, text, hashlib.sha256).digest()[:MAC_BYTES]

    def mask(self, salt: bytes, data: bytes) -> bytes:
        """Up to 32 bytes made unreadable, or readable again; a salt is used once."""
        stream = hmac.new(self._key, b"mask" + salt, hashlib.sha256).digest()
        if len(data) > len(stream):
            raise ProtocolError(f"{len(data)} bytes to mask, of at most {len(stream)}")
        return bytes(a ^ b for a, b in zip(data, stream, strict=False))

    def seal(self, body: bytes) -> bytes:
        """Head of the next frame; the body follows it."""
        return _HEAD.pack(len(body), self._sign(body))

    @staticmethod
    def parse_head(head: bytes, limit: int) -> tuple[int, bytes]:
        """(length, mac) out of a frame's head. Raises ProtocolError over the limit."""
        length, mac = _HEAD.unpack(head)
        if length > limit:
            raise ProtocolError(f"a frame of {length} bytes; the limit here is {limit}")
        return int(length), bytes(mac)

    def open(self, mac: bytes, body: bytes) -> bytes:
        """The body, if it is the next frame of the other end. Raises ProtocolError."""
        if not hmac.compare_digest(mac, self._sign(body)):
            raise ProtocolError("a frame that the other end did not send, or not now")
        return body
