"""Frames between daemons whose bytes are not what was sent: the shipped seal must refuse each."""

import msgspec

from ckptless.daemon.protocol.codec import CONTROL_LIMIT
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.transport import handshake

from .story import Violation

KEY = b"the key of this connection, that both of its ends have joined"
WAYS = ("a flipped bit", "fewer bytes", "another length", "a second time")
_ENCODER = msgspec.msgpack.Encoder()


def tamper(message: object, twist: float) -> str:
    """Seal a message, spoil it on its way, and open it; why it is refused. Raises Violation."""
    pair = handshake.opening("job", 0), handshake.opening("job", 1)
    sealed, opened = (handshake.Sealer(KEY, b"dialler", pair) for _ in range(2))
    body = _ENCODER.encode(message)
    wire = bytearray(sealed.seal(body) + body)
    way, where = WAYS[int(twist * len(WAYS))], int(twist * 7919) % len(wire)
    following = _ENCODER.encode("the next message")
    if way == "a flipped bit":
        wire[where] ^= 1 << int(twist * 7927) % 8
    elif way == "fewer bytes":
        del wire[where]
    elif way == "another length":
        wire[0] ^= 1
    else:
        wire += bytes(wire)
    try:
        heard = _read(bytes(wire + sealed.seal(following) + following), opened)
    except ProtocolError as error:
        return f"{way}: {error}"
    raise Violation(f"{way} was not noticed: {heard}")


def _read(wire: bytes, opened: handshake.Sealer) -> list[bytes]:
    """As `peers.link` does it: a head, then so many bytes. Bytes that never come are the end of it, too."""
    heard = []
    while wire:
        if len(wire) < handshake.HEAD_BYTES:
            raise ProtocolError("the other end hung up in a head")
        length, mac = handshake.Sealer.parse_head(wire[: handshake.HEAD_BYTES], CONTROL_LIMIT)
        wire = wire[handshake.HEAD_BYTES :]
        if len(wire) < length:
            raise ProtocolError("the other end hung up in a frame")
        heard.append(opened.open(mac, wire[:length]))
        wire = wire[length:]
    return heard
