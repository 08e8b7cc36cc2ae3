"""A script's loaders under an agent: where each stands, what it tells, and its end of the node's ring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.cursor import KNOWS_ALL, Cursors, Knows
from ckptless.pytorch_hooks.cursor.loader_state import begin_with_new_workers
from ckptless.pytorch_hooks.elastic.exact import Exact

if TYPE_CHECKING:
    from ckptless.pytorch_hooks.data.ring_reader import RingFeed


class Loaders:
    """All loaders of one process, by name, over all generations. Main thread only, but for `stop`."""

    def __init__(
        self,
        session: Session,
        calls: Callable[[], int] = lambda: 0,
        shared: Callable[[], Container[int]] = tuple,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        tell = partial(self._tell, "outside-state")
        self._new = partial(Cursors, calls, shared, tell, self._tell_over, goes_on)
        self._cursors = self._new()
        self._rank = self._generation = self._stopped = 0
        # The most ranks that an elastic job may have; 0 of another job.
        self._most_ranks = 0
        # Of a job that is exact.
        self.exact: Exact | None = None
        # Those that take their batches from the ring, and their ends of it.
        self._fed: dict[str, tuple[Any, RingFeed]] = {}
        # `stop` looks through them while the main thread may add one.
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch of the loader that is not named."""
        return self._cursors.epoch

    def enter(self, part: m.Assigned) -> None:
        """A generation begins; where nothing is restored in it, so do the loaders."""
        self._rank, self._generation = part.rank, part.generation
        self._most_ranks = max(part.sizes, default=0)
        self._cursors.enter()
        if part.restore_step is None:
            self._cursors = self._new()
        for _loader, feed in self._fed.values():
            feed.enter(part.generation)

    def forget(self) -> None:
        """Another number of ranks goes on: what is built for it has loaders of its own."""
        self._cursors = self._new()
        with self._lock:
            fed, self._fed = self._fed, {}
        for loader, feed in fed.values():
            loader.feed_from(None)
            feed.close()

    def batches(
        self, loader: Iterable[Any], epochs: int, name: str, knows: Knows = KNOWS_ALL
    ) -> Iterator[Any]:
        """See Run.batches, and Cursors."""
        if hasattr(loader, "on_event"):
            loader.on_event = self._tell
        if self.exact is not None:
            self.exact.deal(loader)
        if self._most_ranks:
            _check_elastic(loader, self._most_ranks)
        if begin_with_new_workers(loader):
            self._tell("workers-anew", "persistent_workers is ignored: each epoch begins with new workers")
        if hasattr(loader, "feed_from"):
            self._feed(loader, name)
        return self._cursors.batches(loader, epochs, name, knows)

    def objects(self) -> dict[int, Any]:
        """See Cursors."""
        return self._cursors.objects()

    def end_epoch(self, name: str) -> None:
        """See Run.end_epoch."""
        self._cursors.end_epoch(name)

    def _feed(self, loader: Any, name: str) -> None:
        """Have it take its batches from the ring; the one that had this name before does not any more."""
        if name in self._fed:
            former, feed = self._fed[name]
            if former is loader:
                return
            former.feed_from(None)
            feed.close()
        # Only here: a script whose loaders are others need not have what data.ring_reader imports.
        from ckptless.pytorch_hooks.data.ring_reader import RingFeed

        feed = RingFeed(self._session.agent_socket, self._session.welcome.slot, name)
        feed.enter(self._generation)
        loader.feed_from(feed)
        with self._lock:
            self._fed[name] = (loader, feed)
            feed.stop(self._stopped)

    def _tell(self, kind: str, text: str) -> None:
        self._session.send(m.Note(level="warning", kind=kind, text=f"rank {self._rank}: {text}"))

    def _tell_over(self, name: str) -> None:
        if self._rank != 0:
            return  # it is the same on all of them
        of = f'the loader "{name}"' if name else "the loader without a name"
        text = f"the loop over {of} was over before the fault, and gets no batches"
        self._session.send(m.Note(level="info", kind="loop-over", text=text))

    def passed(self) -> None:
        """A step is over that is not committed."""
        self._cursors.passed()

    def committed(self) -> dict[str, Any]:
        """All positions, for the record; batches that no recovery can ask for are given back."""
        saved = self._cursors.committed()
        for name, (loader, _feed) in self._fed.items():
            oldest = self._cursors.oldest(name)
            if oldest is not None and oldest.loader is not None:
                loader.committed(oldest.loader)
        return saved

    def restore(self, saved: Any, *, recut: bool = False) -> None:
        """Go back to committed positions, `recut`: of another number of ranks. Raises ProtocolError."""
        self._cursors.restore(saved, recut=recut)

    def stop(self, generation: int) -> None:
        """A generation is over: who waits for a batch is woken. Any thread."""
        with self._lock:
            self._stopped = max(self._stopped, generation)
            for _loader, feed in self._fed.values():
                feed.stop(generation)

    def abandon(self) -> None:
        """Leave the batches of this process, which ends, for the one that takes its place."""
        for _loader, feed in self._fed.values():
            feed.abandon()

    def close(self) -> None:
        """The job is done, and needs no batches any more."""
        for _loader, feed in self._fed.values():
            feed.close()


def _check_elastic(loader: Any, most_ranks: int) -> None:
    """Raise UsageError where a loader could not go on anywhere in an epoch with another number of ranks."""
    if not getattr(loader, "cuts_anew", False):
        raise UsageError(
            f"the job is elastic, and a {type(loader).__name__} cannot cut its batches anew for another "
            "number of ranks: take ckptless.data.MappedLoader, of a dataset and not of a DataLoader"
        )
    loader.check_replicas(most_ranks)
