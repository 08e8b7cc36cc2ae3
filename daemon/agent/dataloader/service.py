"""The batches of this node's loaders: rings, the connections of readers and producers, and the memory."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

from ckptless.daemon.agent.dataloader import actions as r
from ckptless.daemon.agent.dataloader.limits import free_memory, limited
from ckptless.daemon.agent.dataloader.memory import EntryMemory
from ckptless.daemon.agent.dataloader.node import RingNode, RingProducer, RingReader, kill
from ckptless.daemon.agent.dataloader.ring import Ring
from ckptless.daemon.agent.dataloader.state import ring_state, rings_told
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.api import ring as m
from ckptless.daemon.api.codec import check_protocol
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.model import RingState
from ckptless.daemon.options import DataSettings

logger = logging.getLogger(__name__)

# So long a rank may take for one step before another one is to start the producer.
LEASE_S = 30.0


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
        self._rings: dict[tuple[str, str], RingNode] = {}
        self._readers: dict[RankLink, tuple[RingNode, int]] = {}
        self._producers: dict[RankLink, RingNode] = {}
        self._leases = 0
        # A lease as producers know it, which is of one ring, to that ring and its own number of it.
        self._leased: dict[int, tuple[RingNode, int]] = {}
        self._looking: set[asyncio.Task[None]] = set()
        # Of each loader the last ring that was closed, as it was then.
        self._closed: dict[str, RingState] = {}

    def told(self) -> tuple[RingState, ...]:
        """See rings_told."""
        return rings_told(self._rings.values(), self._closed.values())

    # ------------------------------------------------------------------------------------- hear

    def says(self, link: RankLink, message: m.FromRing) -> None:
        """A reader's or a producer's message. Raises ProtocolError, and the connection is to be closed."""
        if isinstance(message, m.RingOpen):
            self._open(link, message)
        elif isinstance(message, m.ProducerHello):
            self._welcome(link, message)
        elif isinstance(message, m.RingMade | m.RingAtEnd | m.RingFailed):
            self._hear_producer(link, message)
        elif link in self._readers:
            self._hear_reader(link, message)
        else:
            raise ProtocolError(f"{type(message).__name__} of a process that has not opened a ring")

    def hung_up(self, link: RankLink) -> None:
        """A connection is gone; it may be none of a ring's."""
        if (found := self._readers.pop(link, None)) is not None:
            node, reader = found
            del node.readers[reader]
            if node.producer is not None and node.producer.starter == reader:
                # It ends with its parent; a new one must not run beside it.
                kill(node.producer)
            self._do(node, node.ring.gone(reader))
        elif (at := self._producers.pop(link, None)) is not None and at.producer is not None:
            at.producer.hung_up = True
            asyncio.get_running_loop().remove_reader(at.producer.pidfd)
            if at.producer.looking is None:
                self._producer_gone(at, at.producer)

    def forget(self, readers: Iterable[int]) -> None:
        """Nobody will come back under these slots' numbers."""
        for node in list(self._rings.values()):
            for reader in readers:
                if reader not in node.readers:
                    self._do(node, node.ring.forget(reader))
            self._drop_if_idle(node)

    async def close(self) -> None:
        """End the producers, and give all memory back."""
        for node in list(self._rings.values()):
            self._drop(node)
        producers = [node.producer for node in self._producers.values() if node.producer is not None]
        for producer in producers:
            producer.link.close()
        # no deadline: the producers have been hung up on, which ends them
        await asyncio.gather(*self._looking)

    # ----------------------------------------------------------------------------------- readers

    def _open(self, link: RankLink, message: m.RingOpen) -> None:
        check_protocol(message.protocol, "a reader of batches")
        if link in self._readers or link in self._producers:
            raise ProtocolError("a second RingOpen")
        key = (message.loader, message.manifest)
        self._drop_stale(message)
        node = self._rings.get(key)
        if node is None:
            found = limited(message.window, message.budget_nbytes, self._limits, free_memory())
            for why in found.reasons:
                self._on_event("ring-limited", f"loader {message.loader!r}: {why}")
            ring = Ring(found.window, found.budget_nbytes)
            node = self._rings[key] = RingNode(message.loader, message.manifest, ring, found)
        if (former := node.readers.get(message.reader)) is not None:
            former.link.close()
        node.readers[message.reader] = RingReader(link)
        self._readers[link] = (node, message.reader)
        self._do(node, node.ring.open(message.reader))

    def _drop_stale(self, message: m.RingOpen) -> None:
        """Batches of other data than this manifest's are never used."""
        for (loader, manifest), node in list(self._rings.items()):
            if loader == message.loader and manifest != message.manifest and not node.readers:
                self._on_event(
                    "ring-stale",
                    f"{len(node.ready)} batches of loader {loader!r} are not used: they are of manifest "
                    f"{manifest[:8]}, and it has {message.manifest[:8]} now",
                )
                self._drop(node)

    def _hear_reader(self, link: RankLink, message: m.RingSeek | m.RingTook | m.RingDone) -> None:
        node, reader = self._readers[link]
        known, now_s = node.readers[reader], asyncio.get_running_loop().time()
        match message:
            case m.RingSeek():
                known.number = message.number
                node.waits[reader].begin(now_s, message.stream)
                self._do(node, node.ring.seek(reader, message.stream, message.seq, message.position))
            case m.RingTook():
                if message.number == known.number:
                    node.waits[reader].add(now_s, message.count, message.waits, message.waited_s)
                    self._do(node, node.ring.took(reader, message.seq, message.done))
            case m.RingDone():
                del self._readers[link]
                del node.readers[reader]
                if node.producer is not None and node.producer.starter == reader:
                    kill(node.producer)
                self._do(node, node.ring.gone(reader))
                self._do(node, node.ring.forget(reader))
                self._drop_if_idle(node)
                # It waits for that: else something sent to it meanwhile could fail, and its word not be read.
                link.close()
        self._on_news()

    def _drop_if_idle(self, node: RingNode) -> None:
        if node.ring.idle:
            self._drop(node)

    def _drop(self, node: RingNode) -> None:
        node.dropped = True
        node.todo.clear()
        self._closed[node.loader] = ring_state(node, closed=True)
        if self._rings.get((node.loader, node.manifest)) is node:
            del self._rings[(node.loader, node.manifest)]
        if node.timer is not None:
            node.timer.cancel()
        if node.producer is not None:
            kill(node.producer)
        for memory in node.ready.values():
            memory.close()
        node.ready.clear()
        self._on_event(
            "ring-closed", f"loader {node.loader!r}: {node.made} batches were made, {node.given} given out"
        )

    # ---------------------------------------------------------------------------------- producers

    def _welcome(self, link: RankLink, message: m.ProducerHello) -> None:
        check_protocol(message.protocol, "a producer of batches")
        if link in self._readers or link in self._producers:
            raise ProtocolError("a second hello")
        node, lease = self._leased.pop(message.lease, (None, 0))
        if node is None or node.dropped or node.starter is None or node.producer is not None:
            # Somebody else has it by now.
            link.close()
            return
        welcome, actions = node.ring.producer_up(lease)
        if not welcome:
            link.close()
            return
        if node.timer is not None:
            node.timer.cancel()
        node.producer = RingProducer(link, node.starter[0], os.pidfd_open(link.pid))
        self._producers[link] = node
        # What it has forked in turn may keep the connection open beyond its death.
        asyncio.get_running_loop().add_reader(node.producer.pidfd, link.close)
        self._do(node, actions)

    def _producer_gone(self, node: RingNode, producer: RingProducer) -> None:
        """It has ended, and all that it has said has been looked at."""
        node.producer = None
        os.close(producer.pidfd)
        for memory in producer.memory:
            memory.close()
        if producer.starter in node.readers:
            self._on_event("ring-producer", f"the process that makes batches of {node.loader!r} has ended")
        self._do(node, node.ring.producer_gone())

    def _hear_producer(self, link: RankLink, message: m.RingMade | m.RingAtEnd | m.RingFailed) -> None:
        node = self._producers.get(link)
        if node is None or node.producer is None:
            raise ProtocolError(f"{type(message).__name__} of a process that is no producer")
        node.producer.said.append(message)
        if node.producer.looking is None:
            # One after the other: what comes is in the order in which it was asked for.
            task = node.producer.looking = asyncio.create_task(self._look(node, node.producer))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, node: RingNode, producer: RingProducer) -> None:
        try:
            while producer.said:
                await self._look_at(node, producer, producer.said.popleft())
        except (ProtocolError, OSError) as error:
            self._on_event("ring-refused", f"a producer of {node.loader!r}: {error}")
            kill(producer)
            producer.said.clear()
        producer.looking = None
        if producer.hung_up:
            self._producer_gone(node, producer)

    async def _look_at(
        self, node: RingNode, producer: RingProducer, message: m.RingMade | m.RingAtEnd | m.RingFailed
    ) -> None:
        if node.ring.wants(message.stream, message.seq) is None or not producer.memory:
            raise ProtocolError(f"batch {message.seq} of stream {message.stream} was not asked for now")
        memory = producer.memory[0]
        if isinstance(message, m.RingMade):
            check = memory.seal
            await asyncio.to_thread(check, node.manifest, message.nbytes, message.position)
        producer.memory.popleft()
        ring = node.ring
        if node.dropped or not ring.wants(message.stream, message.seq):
            memory.close()
            self._do(node, ring.unwanted())
        elif isinstance(message, m.RingMade):
            node.made += 1
            node.ready[(message.stream, message.seq)] = memory
            self._do(node, ring.made(message.stream, message.seq, message.nbytes, message.position))
        else:
            memory.close()
            if isinstance(message, m.RingAtEnd):
                self._do(node, ring.at_end(message.stream, message.seq))
            else:
                self._on_event("ring-broken", f"batch {message.seq} of {node.loader!r} could not be made")
                self._do(node, ring.failed(message.stream, message.seq, message.text))

    # ---------------------------------------------------------------------------------------- do

    def _do(self, node: RingNode, actions: list[r.Action]) -> None:
        """In order, also where a connection that breaks over one of them brings more."""
        if node.dropped:
            return
        node.todo.extend(actions)
        if node.busy:
            return
        node.busy = True
        try:
            while node.todo:
                self._act(node, node.todo.popleft())
        finally:
            node.busy = False

    def _act(self, node: RingNode, action: r.Action) -> None:
        match action:
            case r.Give() | r.GiveEnd() | r.GiveUp():
                self._give(node, action)
            case r.Grant():
                self._grant(node, action)
            case r.Make():
                self._make(node, action)
            case r.Free():
                node.ready.pop((action.stream, action.seq)).close()
            case r.Tell():
                self._on_event(action.kind, f"loader {node.loader!r}: {action.text}")

    def _give(self, node: RingNode, action: r.Give | r.GiveEnd | r.GiveUp) -> None:
        reader = node.readers.get(action.reader)
        if reader is None:
            return
        number, seq = reader.number, action.seq
        match action:
            case r.Give():
                memory = node.ready[(action.stream, seq)]
                nbytes = os.fstat(memory.fd).st_size
                node.given += 1
                reader.link.send(m.RingEntry(number=number, seq=seq, nbytes=nbytes), memory.fd)
            case r.GiveEnd():
                reader.link.send(m.RingEnd(number=number, seq=seq))
            case r.GiveUp():
                reader.link.send(m.RingBroken(number=number, seq=seq, text=action.text[: m.TEXT_LIMIT]))

    def _grant(self, node: RingNode, grant: r.Grant) -> None:
        reader = node.readers.get(grant.reader)
        if reader is None:
            return
        self._leases += 1
        lease = self._leases
        node.starter = (grant.reader, lease)
        self._leased = {key: found for key, found in self._leased.items() if found[0] is not node}
        self._leased[lease] = (node, grant.lease)
        if node.timer is not None:
            node.timer.cancel()
        node.timer = asyncio.get_running_loop().call_later(self._lease_s, self._late, node, grant.lease)
        reader.link.send(m.RingLease(lease=lease))

    def _late(self, node: RingNode, lease: int) -> None:
        self._do(node, node.ring.lease_late(lease))

    def _make(self, node: RingNode, make: r.Make) -> None:
        producer = node.producer
        if producer is None or producer.hung_up:
            return
        try:
            memory = EntryMemory(make.stream, make.seq)
        except OSError as error:
            self._on_event("ring-memory", f"no memory for a batch of {node.loader!r}: {error}")
            kill(producer)
            return
        producer.memory.append(memory)
        message = m.RingMake(
            stream=make.stream, history=make.history, seq=make.seq, base=make.base, position=make.position
        )
        producer.link.send(message, memory.fd)
