"""Where `ckptctl` reads: the daemon of this node, over its Unix socket, or ledgers, as files.

The daemon tells everybody of their own jobs, and root of all. The files are their owner's: those of a local
run belong to whoever started it, the daemon's ledger is root's, and needed where no daemon runs.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import click
from msgspec.structs import replace

from ckptless.daemon.api.errors import LedgerError, PeerError
from ckptless.daemon.api.messages import PROTOCOL
from ckptless.daemon.api.reading import TABLES, Cursor, Page, Read, Table
from ckptless.daemon.api.records import EventRecord, Record
from ckptless.daemon.ckptctl.ask import ask
from ckptless.daemon.ckptctl.options import Asked
from ckptless.daemon.ledger.merge import Snapshot, merge, read_all
from ckptless.daemon.ledger.paths import LEDGER, default_state_dir, ledger_files
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.settings import load_settings

_WITHOUT_EVENTS = TABLES[:-1]


class Feed(Protocol):
    """New events of one job, each once."""

    def poll(self) -> tuple[EventRecord, ...]:
        """What has come since the last poll, by time."""


class Source(Protocol):
    """One place to read; `name` says which, behind "no job 7 in". Reading raises LedgerError, PeerError."""

    name: str

    def jobs(self) -> Snapshot:
        """What is known of all jobs: the jobs, at least."""

    def job(self, job: str) -> Snapshot:
        """All that is known of one."""

    def feed(self, job: str) -> Feed:
        """The job's events, as they come."""


def sources(asked: Asked, events: bool | Collection[str]) -> list[Source]:
    """Return where to read, nearest first. `events`: whether, or of which kinds, events are wanted.

    Raises LedgerError, PeerError where there is no such place.
    """
    if asked.socket is not None:
        return [DaemonSource(asked.socket, events)]
    if asked.chosen_state_dir:
        return [FileSource(asked.state_dir, events)]
    own = default_state_dir()
    found: list[Source] = [FileSource(own, events)] if own.exists() else []
    settings = load_settings().daemon
    try:
        found.append(DaemonSource(settings.socket, events))
    except PeerError as error:
        system = Path(settings.state_dir)
        if os.access(system / LEDGER, os.R_OK):
            click.echo(f"ckptctl: warning: {error}; reading {system / LEDGER} as it was left", err=True)
            found.append(FileSource(system, events))
        elif not found:
            text = f"{error}; ask on a node of the job, or give --state-dir for a local run"
            raise PeerError(text) from error
    return found


# ------------------------------------------------------------------------------------------- files


class FileSource:
    """The ledgers of a state directory, read at once. Those that cannot be read are told of on stderr."""

    def __init__(self, state_dir: Path, events: bool | Collection[str]) -> None:
        self.name = f"the ledgers in {state_dir}"
        # Looked up once: `latest` may come to mean another run.
        self._state_dir = state_dir.resolve()
        self._all = read_all(state_dir, events=events)
        if not self._all.sources:
            if self._all.problems:
                raise LedgerError("; ".join(problem.why for problem in self._all.problems))
            raise LedgerError(f"there is no ledger in {state_dir}: give the right --state-dir")
        for problem in self._all.problems:
            click.echo(f"ckptctl: warning: {problem.why}", err=True)

    def jobs(self) -> Snapshot:
        """See `Source`."""
        return self._all

    def job(self, job: str) -> Snapshot:
        """See `Source`."""
        return self._all.of_job(job)

    def feed(self, job: str) -> "FileFeed":
        """See `Source`."""
        return FileFeed(self._state_dir, job)


class FileFeed:
    """New events of a job, over all ledgers of a state directory, each once.

    Ledgers are opened anew at every poll, so that one that is away for a while, or made later, is no special
    case.
    """

    def __init__(self, state_dir: Path, job: str) -> None:
        self._state_dir = state_dir
        self._job = job
        self._last: dict[Path, int] = {}
        self._seen: set[str] = set()
        self._unreadable: set[Path] = set()

    def poll(self) -> tuple[EventRecord, ...]:
        """See `Feed`. An unreadable ledger is told of on stderr, once."""
        fresh: dict[str, EventRecord] = {}
        for path in ledger_files(self._state_dir):
            try:
                with Ledger.open_readonly(path) as ledger:
                    page = ledger.events(self._job, after=self._last.get(path))
            except LedgerError as error:
                if path not in self._unreadable:
                    click.echo(f"ckptctl: warning: {error}", err=True)
                self._unreadable.add(path)
                continue
            self._unreadable.discard(path)
            self._last[path] = page.last
            for event in page.records:
                if event.event not in self._seen:
                    fresh.setdefault(event.event, event)
        self._seen.update(fresh)
        return tuple(sorted(fresh.values(), key=lambda event: (event.at_s, event.event)))


# ------------------------------------------------------------------------------------------ daemon


class DaemonSource:
    """The daemon that listens at `socket`, which knows who asks. Raises PeerError where there is none."""

    def __init__(self, socket: str, events: bool | Collection[str]) -> None:
        self.name = f"the daemon at {socket}"
        self._socket = socket
        self._events = events
        self._jobs = merge([self._read(Read(protocol=PROTOCOL, tables=("job",)))])

    def jobs(self) -> Snapshot:
        """See `Source`."""
        return self._jobs

    def job(self, job: str) -> Snapshot:
        """See `Source`."""
        tables: tuple[Table, ...] = TABLES if self._events else _WITHOUT_EVENTS
        kinds = () if isinstance(self._events, bool) else tuple(sorted(self._events))
        return merge([self._read(Read(protocol=PROTOCOL, job=job, tables=tables, kinds=kinds))])

    def _read(self, question: Read) -> list[Record]:
        """All pages of an answer."""
        found: list[Record] = []
        more, after = True, question.after
        while more:
            page = self._page(question, after)
            found += page.records
            more, after = page.more, page.next
        return found

    def _page(self, question: Read, after: Cursor | None) -> Page:
        return ask(self._socket, replace(question, after=after), Page)

    def feed(self, job: str) -> "DaemonFeed":
        """See `Source`."""
        return DaemonFeed(self._page, job)


class DaemonFeed:
    """A job's events as a daemon learns of them. While it is away (it is started again) there are none."""

    def __init__(self, page: "_AskPage", job: str) -> None:
        self._page = page
        self._question = Read(protocol=PROTOCOL, job=job, tables=("event",))
        self._after = Cursor(table="event")
        self._away = False

    def poll(self) -> tuple[EventRecord, ...]:
        """See `Feed`. That the daemon does not answer is told on stderr, once."""
        found: list[EventRecord] = []
        more = True
        while more:
            try:
                page = self._page(self._question, self._after)
            except PeerError as error:
                if not self._away:
                    click.echo(f"ckptctl: warning: {error}; waiting for it", err=True)
                self._away = True
                break
            self._away, self._after, more = False, page.next, page.more
            found += [record for record in page.records if isinstance(record, EventRecord)]
        return tuple(sorted(found, key=lambda event: (event.at_s, event.event)))


class _AskPage(Protocol):
    def __call__(self, question: Read, after: Cursor | None) -> Page:
        """One page of the answer, from `after` on."""
