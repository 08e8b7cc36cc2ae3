"""How long readers of a ring wait, and what is told of a ring."""

from ckptless.daemon.agent.dataloader.limits import RingLimits
from ckptless.daemon.agent.dataloader.node import RingNode
from ckptless.daemon.agent.dataloader.ring import Ring
from ckptless.daemon.agent.dataloader.state import MOST_TOLD, ring_state, rings_told
from ckptless.daemon.agent.dataloader.waits import WORDS, Waits
from ckptless.daemon.api.model import ReaderState, StreamState


def share(waits: Waits) -> float | None:
    return waits.share


def test_lately_is_so_many_words() -> None:
    waits = Waits()
    assert share(waits) is None
    waits.begin(100.0, 3)
    assert share(waits) is None
    waits.add(110.0, 4, 2, 5.0)
    assert share(waits) == 0.5
    for word in range(1, WORDS + 1):
        waits.add(110.0 + word, 4, 0, 0.0)
    assert share(waits) == 0.0
    assert (waits.stream, waits.taken, waits.waits, waits.waited_s) == (3, 4 * (WORDS + 1), 2, 5.0)


def test_an_epoch_that_is_another_stream_goes_on() -> None:
    waits = Waits()
    waits.begin(0.0, 1)
    waits.add(1.0, 4, 1, 1.0)
    waits.begin(1.0, 1 + (1 << 20))
    waits.add(2.0, 4, 0, 0.0)
    assert share(waits) == 0.5


def test_the_time_of_a_recovery_is_nobodys() -> None:
    waits = Waits()
    waits.begin(0.0, 0)
    waits.add(1.0, 4, 1, 1.0)
    waits.begin(500.0, 0)
    assert share(waits) is None
    waits.add(504.0, 4, 1, 1.0)
    assert (share(waits), waits.taken, waits.waits, waits.waited_s) == (0.25, 8, 2, 2.0)
    # A wait that began before its process said where it goes on.
    waits.begin(600.0, 0)
    waits.add(601.0, 1, 1, 2.0)
    assert share(waits) == 1.0


def test_a_ring_of_two_replicas() -> None:
    ring = Ring(2, 1000)
    node = RingNode("train", "ab" * 16, ring, RingLimits(2, 1000, ()))
    for slot in (0, 1):
        ring.open(slot)
        node.waits[slot].begin(0.0, slot)
        ring.seek(slot, slot, 0, b"0")
    assert ring.producer_up(1)[0]
    for stream, seq in ((0, 0), (1, 0), (0, 1)):
        ring.made(stream, seq, 100, b"%d" % (seq + 1))
    ring.took(0, 0, 0)
    node.waits[0].add(2.0, 1, 1, 1.0)
    found = ring_state(node)
    assert (found.nbytes, found.budget_nbytes, found.prefetch, found.producer) == (300, 1000, 2, None)
    assert found.streams == (
        StreamState(stream=0, ready=2, ahead=1),
        StreamState(stream=1, ready=1, ahead=1),
    )
    assert found.readers == (
        ReaderState(slot=0, stream=0, taken=1, waits=1, waited_s=1.0, share=0.5),
        ReaderState(slot=1, stream=1, taken=0, waits=0, waited_s=0.0),
    )
    # One that has taken all is starved; one that has ended is not, and its batches are nobody's.
    ring.took(0, 1, 0)
    assert ring_state(node).readers[0].starved
    ring.gone(0)
    assert not ring_state(node).readers[0].starved
    assert ring_state(node).streams[0] == StreamState(stream=0, ready=2, ahead=0)
    closed = ring_state(node, closed=True)
    assert (closed.nbytes, closed.streams, len(closed.readers), closed.closed) == (0, (), 2, True)


def test_a_script_with_many_loaders_does_not_make_a_report_long() -> None:
    nodes = [RingNode(f"l{n}", "ab" * 16, Ring(2, 9), RingLimits(2, 9, ())) for n in range(3)]
    closed = [ring_state(node, closed=True) for node in nodes[1:]]
    assert [(ring.loader, ring.closed) for ring in rings_told(nodes[:2], closed)] == [
        ("l0", False),
        ("l1", False),
        ("l2", True),
    ]
    assert len(rings_told(nodes * 20, ())) == MOST_TOLD
