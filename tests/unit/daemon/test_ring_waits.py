"""How long readers of a ring wait, and what is told of a ring."""

from ckptless.daemon.agent.dataloader.limits import RingLimits
from ckptless.daemon.agent.dataloader.node import RingNode
from ckptless.daemon.agent.dataloader.service import MOST_TOLD, RingService
from ckptless.daemon.agent.dataloader.waits import WORDS, Waits
from ckptless.daemon.protocol.model import ReaderState, StreamState


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
    node = RingNode(("train", "ab" * 16), RingLimits(2, 1000, ()))
    ring = node.ring
    for slot in (0, 1):
        ring.open(slot)
        node.waits[slot].begin(0.0, slot)
        ring.seek(slot, slot, 0, b"0")
    assert ring.producer_up(1)[0]
    for stream, seq in ((0, 0), (1, 0), (0, 1)):
        ring.made(stream, seq, 100, b"%d" % (seq + 1))
    ring.took(0, 0, 0)
    node.waits[0].add(2.0, 1, 1, 1.0)
    found = node.told()
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
    assert node.told().readers[0].starved
    ring.gone(0)
    assert not node.told().readers[0].starved
    assert node.told().streams[0] == StreamState(stream=0, ready=2, ahead=0)
    closed = node.told(closed=True)
    assert (closed.nbytes, closed.streams, len(closed.readers), closed.closed) == (0, (), 2, True)


def test_a_script_with_many_loaders_does_not_make_a_report_long() -> None:
    service = RingService(lambda _kind, _text: None)
    for loader in ("l0", "l1", "l1", "l2"):
        node = RingNode((loader, "ab" * 16), RingLimits(2, 9, ()))
        service._rings[(loader, "ab" * 16)] = node
        if loader != "l0":
            service._drop(node)
    service._rings[("l1", "cd" * 16)] = RingNode(("l1", "cd" * 16), RingLimits(2, 9, ()))
    assert [(ring.loader, ring.closed) for ring in service.told()] == [
        ("l0", False),
        ("l1", False),
        ("l2", True),
    ]
    for number in range(2 * MOST_TOLD):
        service._rings[(f"n{number}", "ab" * 16)] = RingNode(("n", "ab" * 16), RingLimits(2, 9, ()))
    assert len(service.told()) == MOST_TOLD
