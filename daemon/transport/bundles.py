"""Pure: what is done to daemons' messages on their way.

Those that go the same way go in frames that are small, however many there are; and each is looked at, whether
it speaks of this job's nodes only.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence

import msgspec

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.messages import Assignment, Prepare, Strike
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Decided, Decree, Promise, Propose
from ckptless.daemon.protocol.peers.membership import Beat, Saw, Suspect

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
    """Return the messages that `bundles` has put together. Raises ProtocolError."""
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


def check_nodes(message: p.DaemonMessage, nodes: Collection[int]) -> None:
    """Raises ProtocolError where it names a node that the job does not have."""
    stranger = next((node for node in _named(message) if node not in nodes), None)
    if stranger is not None:
        raise ProtocolError(f"{type(message).__name__} of node {stranger}, which the job does not have")


def _named(message: p.DaemonMessage) -> Iterator[int]:
    match message:
        case Suspect() | Saw() | p.Gone() | p.LeaveAsked():
            yield message.node
        case Beat():
            yield from (node for node, _, _ in message.pulses)
        case p.Forwarded():
            yield message.report.node
        case p.DrillAsked() if message.drill.node is not None:
            yield message.drill.node
        case p.Ordered(order=Strike() | Prepare() as order):
            yield from _of_order(order)
        case p.Meeting():
            yield from (report.node for report in message.reports)
            yield from (lost[0] for lost in message.standing.lost)
            yield from message.standing.apart
        case p.Agree(say=Decided() | Propose() as say):
            yield from _of_decree(say.decree)
        case p.Agree(say=Promise() as promise) if promise.vote is not None:
            yield from _of_decree(promise.vote.decree)
        case p.Relayed():
            yield message.origin
            yield from _named(message.said)
        case _:
            return


def _of_order(order: Strike | Prepare) -> Iterator[int]:
    if isinstance(order, Prepare):
        yield from _of_assignment(order.assignment)
    else:
        yield order.place.node


def _of_decree(decree: Decree) -> Iterator[int]:
    yield from decree.voters
    if decree.assignment is not None:
        yield from _of_assignment(decree.assignment)


def _of_assignment(assignment: Assignment) -> Iterator[int]:
    yield from {place.node for place in assignment.places}
    yield from (info.node for info in assignment.nodes)
