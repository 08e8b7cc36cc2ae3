"""What goes the same way goes in few frames, none of which is long, whoever has made it."""

import zlib

import pytest

from ckptless.daemon.ckptlessd.recovery.events import Report
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bundles import MOST_NBYTES, bundles, unbundle

JOB = "4711"


def report(node: int, ranks: int) -> p.Relayed:
    """Of a frozen agent that holds copies of so many ranks."""
    held = m.Holdings(
        tensors=tuple((rank, (1, 2)) for rank in range(ranks)),
        records=tuple((rank, rank, (1, 2)) for rank in range(ranks)),
    )
    state = m.AgentState(seq=1, slots=(), frozen=1, holdings=held)
    said = p.Forwarded(job=JOB, report=Report(node, state))
    return p.Relayed(job=JOB, origin=node, to=0, serial=node, clock_ms=1, hops=8, said=said)


@pytest.mark.parametrize(("count", "ranks"), [(1, 8), (2, 8), (4000, 24), (3, 60_000)])
def test_all_arrives_in_its_order_and_no_frame_is_long(count: int, ranks: int) -> None:
    sent = [report(node, ranks) for node in range(count)]
    found = list(bundles(JOB, sent))
    arrived = [unbundle(some) if isinstance(some, p.Bundle) else (some,) for some in found]
    assert [one for some in arrived for one in some] == sent
    bodies = [one.body for one in found if isinstance(one, p.Bundle)]
    assert all(len(zlib.decompress(body)) <= MOST_NBYTES + 16 for body in bodies)
    # What alone is longer than a bundle is not put into one.
    assert len(bodies) == {1: 0, 2: 1, 4000: 2, 3: 0}[count]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no zlib", id="no zlib"),
        pytest.param(zlib.compress(bytes(3)), id="no messages"),
        pytest.param(zlib.compress(bytes(64 * MOST_NBYTES)), id="a bomb"),
        pytest.param(zlib.compress(b"\x90")[:-1], id="cut short"),
    ],
)
def test_what_is_no_bundle_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="bundle"):
        unbundle(p.Bundle(job=JOB, body=body))
