"""Pure: messages that go the same way, in frames that are small, however many there are."""

import zlib
from collections.abc import Iterator, Sequence

import msgspec

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.peers import messages as p

# Of what one bundle holds: heartbeats come between two of them.
MOST_NBYTES = 1 << 20
# Reports are much alike: more work finds little more.
_LEVEL = 1
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[p.Relayed, ...])


def bundles(job: str, relayed: Sequence[p.Relayed]) -> Iterator[p.Relayed | p.Bundle]:
    """All of them in their order; what is longer than a bundle goes by itself."""
    group: list[msgspec.Raw] = []
    nbytes, last = 0, None
    for one in relayed:
        body = msgspec.Raw(_ENCODER.encode(one))
        if group and nbytes + len(body) > MOST_NBYTES:
            yield _bundle(job, group, last)
            group, nbytes = [], 0
        group.append(body)
        nbytes, last = nbytes + len(body), one
    if group:
        yield _bundle(job, group, last)


def _bundle(job: str, group: list[msgspec.Raw], last: p.Relayed | None) -> p.Relayed | p.Bundle:
    if len(group) == 1 and last is not None:
        return last
    return p.Bundle(job=job, body=zlib.compress(_ENCODER.encode(group), _LEVEL))


def unbundle(bundle: p.Bundle) -> tuple[p.Relayed, ...]:
    """What `bundles` has put together. Raises ProtocolError."""
    # Beside the messages there is the head of an array.
    limit = MOST_NBYTES + 16
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(bundle.body, limit)
        if not unpacker.eof:
            raise ProtocolError(f"a bundle of more than {limit} bytes, or cut short")
        return _DECODER.decode(body)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a bundle of messages: {error}") from error
