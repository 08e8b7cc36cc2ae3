"""The batches of this node's loaders: which connection is of which ring."""

import itertools
from collections.abc import Callable, Iterable

from ckptless.daemon.agent.dataloader.limits import limited
from ckptless.daemon.agent.dataloader.node import LEASE_S, RingNode
from ckptless.daemon.agent.free_memory import free_memory
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.codec import check_protocol
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.model import RingState
from ckptless.daemon.settings.options import DataSettings

# A report has to stay small, whatever a script does.
MOST_TOLD = 32


class RingService:
    """Owned by the event loop. `on_event(kind, text)`: what went wrong; `on_news()`: `told` may be new."""

    def __init__(
        self,
        on_event: Callable[[str, str], None],
        lease_s: float = LEASE_S,
        limits: DataSettings | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_event, self._lease_s, self._on_news = on_event, lease_s, on_news
        self._limits = limits or DataSettings()
        self._leases = itertools.count(1)
        # By loader and manifest.
        self._rings: dict[tuple[str, str], RingNode] = {}
        self._readers: dict[RankLink, tuple[RingNode, int]] = {}
        self._producers: dict[RankLink, RingNode] = {}
        # Of each loader the last ring that was closed, as it was then.
        self._closed: dict[str, RingState] = {}

    def told(self) -> tuple[RingState, ...]:
        """All rings, for people; of a loader without one that which it had last. So many at most."""
        there = [node.told() for node in self._rings.values()]
        names = {ring.loader for ring in there}
        return (*there, *(ring for ring in self._closed.values() if ring.loader not in names))[:MOST_TOLD]

    def says(self, link: RankLink, message: m.FromRing) -> None:
        """A reader's or a producer's message. Raises ProtocolError, and the connection is to be closed."""
        if isinstance(message, m.RingOpen):
            self._open(link, message)
        elif isinstance(message, m.ProducerHello):
            self._welcome(link, message)
        elif isinstance(message, m.RingMade | m.RingAtEnd | m.RingFailed):
            self._hear_producer(link, message)
        elif link not in self._readers:
            raise ProtocolError(f"{type(message).__name__} of a process that has not opened a ring")
        elif isinstance(message, m.RingDone):
            self._done(link)
        else:
            node, reader = self._readers[link]
            node.hear(reader, message)
            self._on_news()

    def hung_up(self, link: RankLink) -> None:
        """A connection is gone; it may be none of a ring's."""
        if (found := self._readers.pop(link, None)) is not None:
            node, reader = found
            node.gone(reader)
        elif (made := self._producers.pop(link, None)) is not None:
            made.producer_gone()

    def forget(self, readers: Iterable[int]) -> None:
        """Drop what these readers hold: nobody will come back under these slots' numbers."""
        for node in list(self._rings.values()):
            for reader in readers:
                node.forget(reader)
            self._drop_if_idle(node)

    def close(self) -> None:
        """End the producers, and give all memory back."""
        for node in list(self._rings.values()):
            self._drop(node)

    # ----------------------------------------------------------------------------------- readers

    def _open(self, link: RankLink, message: m.RingOpen) -> None:
        check_protocol(message.protocol, "a reader of batches")
        self._check_new(link, message)
        name = (message.loader, message.manifest)
        self._drop_stale(message)
        node = self._rings.get(name)
        if node is None:
            limits = limited(message.window, message.budget_nbytes, self._limits, free_memory())
            for why in limits.reasons:
                self._on_event("ring-limited", f"loader {message.loader!r}: {why}")
            node = self._rings[name] = RingNode(name, limits, self._leases, self._on_event, self._lease_s)
        self._readers[link] = (node, message.reader)
        node.open(message.reader, link)

    def _check_new(self, link: RankLink, message: m.FromRing) -> None:
        if link in self._readers or link in self._producers:
            raise ProtocolError(f"{type(message).__name__} of a process that has said it before")

    def _drop_stale(self, message: m.RingOpen) -> None:
        """Batches of other data than this manifest's are never used."""
        for node in list(self._rings.values()):
            if node.loader == message.loader and node.manifest != message.manifest and not node.readers:
                self._on_event(
                    "ring-stale",
                    f"{node.count} batches of loader {node.loader!r} are not used: they are of manifest "
                    f"{node.manifest[:8]}, and it has {message.manifest[:8]} now",
                )
                self._drop(node)

    def _done(self, link: RankLink) -> None:
        """A reader does not need its ring any more, nor will one in its place."""
        node, reader = self._readers.pop(link)
        node.gone(reader)
        node.forget(reader)
        self._drop_if_idle(node)
        # It waits for that: else something sent to it meanwhile could fail, and its word not be read.
        link.close()
        self._on_news()

    def _drop_if_idle(self, node: RingNode) -> None:
        if node.ring.idle:
            self._drop(node)

    def _drop(self, node: RingNode) -> None:
        self._rings.pop((node.loader, node.manifest), None)
        self._closed[node.loader] = node.drop()

    # ---------------------------------------------------------------------------------- producers

    def _welcome(self, link: RankLink, message: m.ProducerHello) -> None:
        check_protocol(message.protocol, "a producer of batches")
        self._check_new(link, message)
        for node in self._rings.values():
            if node.welcome(link, message.lease):
                self._producers[link] = node
                return
        # Somebody else has it by now.
        link.close()

    def _hear_producer(self, link: RankLink, message: m.RingMade | m.RingAtEnd | m.RingFailed) -> None:
        node = self._producers.get(link)
        if node is None:
            raise ProtocolError(f"{type(message).__name__} of a process that is no producer")
        try:
            node.hear_producer(message)
        except ProtocolError as error:
            self._on_event("ring-refused", f"a producer of {node.loader!r}: {error}")
            raise
