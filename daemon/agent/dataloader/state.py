"""What is told of a ring to people: what lies there, and how long its readers have waited for batches."""

from collections.abc import Iterable, Iterator

from ckptless.daemon.agent.dataloader.node import RingNode
from ckptless.daemon.api.model import ReaderState, RingState, StreamState

# A report has to stay small, whatever a script does.
MOST_TOLD = 32


def rings_told(nodes: Iterable[RingNode], closed: Iterable[RingState]) -> tuple[RingState, ...]:
    """All rings, for people; of a loader without one that which it had last. So many at most."""
    there = [ring_state(node) for node in nodes]
    names = {ring.loader for ring in there}
    return (*there, *(ring for ring in closed if ring.loader not in names))[:MOST_TOLD]


def ring_state(node: RingNode, *, closed: bool = False) -> RingState:
    """A ring as it is now, or was when it was closed."""
    return RingState(
        loader=node.loader,
        manifest=node.manifest,
        nbytes=0 if closed else node.ring.used_nbytes,
        budget_nbytes=node.limits.budget_nbytes,
        prefetch=node.limits.window,
        made=node.made,
        given=node.given,
        streams=() if closed else tuple(_streams(node)),
        readers=tuple(_readers(node)),
        producer=None if closed or node.producer is None else node.producer.link.pid,
        closed=closed,
    )


def _streams(node: RingNode) -> Iterator[StreamState]:
    for number, stream in sorted(node.ring.streams.items()):
        marks = [mark for mark in node.ring.marks.values() if mark.stream == number and mark.alive]
        first = min((mark.next for mark in marks), default=0)
        ahead = sum(seq >= first for seq in stream.ready) if marks else 0
        yield StreamState(stream=number, ready=len(stream.ready), ahead=ahead)


def _readers(node: RingNode) -> Iterator[ReaderState]:
    for slot, waits in sorted(node.waits.items()):
        mark = node.ring.marks.get(slot)
        yield ReaderState(
            slot=slot,
            stream=waits.stream,
            taken=waits.taken,
            waits=waits.waits,
            waited_s=waits.waited_s,
            share=waits.share,
            starved=mark is not None and mark.alive and mark.sent <= mark.next,
        )
