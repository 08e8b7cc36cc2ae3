"""The places that `ckptctl` reads: the daemon of this node, over its Unix socket, or ledgers, as files.

The daemon tells everybody of their own jobs, and root of all. The files are their owner's: those of a local
run belong to whoever started it, the daemon's ledger is root's, and needed where no daemon runs.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click
from msgspec.structs import replace

from ckptless.daemon.ckptctl.shared.ask import ask
from ckptless.daemon.ckptctl.shared.options import Asked
from ckptless.daemon.ledger.merge import Snapshot, merge, read_all
from ckptless.daemon.ledger.paths import LEDGER, default_state_dir, ledger_files
from ckptless.daemon.protocol.errors import LedgerError, PeerError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.records import EventRecord, Record
from ckptless.daemon.protocol.requests import TABLES, Page, Read, RowCursor, Table
from ckptless.daemon.settings.site import load_settings

# A file is read to its end at once.
_ALL = 1 << 62

# Answers one Read. Raises LedgerError, PeerError.
AskPage: TypeAlias = Callable[[Read], Page]


@dataclass(frozen=True)
class LedgerSource:
    """One place to read. Reading raises LedgerError, PeerError.

    `name` says which it is, behind "no job 7 in". `jobs` has all jobs, at least; `job(name)` all that is
    known of one.
    """

    name: str
    jobs: Snapshot
    job: Callable[[str], Snapshot]
    feed: Callable[[str], "Feed"]


class Feed:
    """New events of one job, each once.

    `places` are those to ask at the time of a poll, by name: ledgers are opened anew each time, so that one
    that is away for a while, or made later, is no special case.
    """

    def __init__(self, places: Callable[[], Mapping[str, AskPage]], job: str) -> None:
        self._places = places
        self._question = Read(protocol=PROTOCOL, job=job, tables=("event",))
        self._after: dict[str, RowCursor] = {}
        self._seen: set[str] = set()
        self._away: set[str] = set()

    def poll(self) -> tuple[EventRecord, ...]:
        """Return what has come since the last poll, by time. An unreadable place is told once, on stderr."""
        fresh: dict[str, EventRecord] = {}
        for name, page_of in self._places().items():
            try:
                for event in self._news(name, page_of):
                    if event.event not in self._seen:
                        fresh.setdefault(event.event, event)
            except (LedgerError, PeerError) as error:
                if name not in self._away:
                    waits = "; waiting for it" if isinstance(error, PeerError) else ""
                    click.echo(f"ckptctl: warning: {error}{waits}", err=True)
                self._away.add(name)
            else:
                self._away.discard(name)
        self._seen.update(fresh)
        return tuple(sorted(fresh.values(), key=lambda event: (event.at_s, event.event)))

    def _news(self, name: str, page_of: AskPage) -> Iterator[EventRecord]:
        more = True
        while more:
            after = self._after.get(name, RowCursor(table="event"))
            page = page_of(replace(self._question, after=after))
            self._after[name], more = page.next, page.more
            yield from (record for record in page.records if isinstance(record, EventRecord))


def sources(asked: Asked, events: bool | Collection[str]) -> list[LedgerSource]:
    """Return where to read, nearest first. `events`: whether, or of which kinds, events are wanted.

    Raises LedgerError, PeerError where there is no such place.
    """
    if asked.socket is not None:
        return [_daemon(asked.socket, events)]
    if asked.chosen_state_dir:
        return [_files(asked.state_dir, events)]
    own = default_state_dir()
    found = [_files(own, events)] if own.exists() else []
    settings = load_settings().daemon
    try:
        found.append(_daemon(settings.socket, events))
    except PeerError as error:
        system = Path(settings.state_dir)
        if os.access(system / LEDGER, os.R_OK):
            click.echo(f"ckptctl: warning: {error}; reading {system / LEDGER} as it was left", err=True)
            found.append(_files(system, events))
        elif not found:
            text = f"{error}; ask on a node of the job, or give --state-dir for a local run"
            raise PeerError(text) from error
    return found


def _files(state_dir: Path, events: bool | Collection[str]) -> LedgerSource:
    """The ledgers of a state directory, read at once. Those that cannot be read are told of on stderr."""
    # Looked up once: `latest` may come to mean another run.
    folder = state_dir.resolve()
    found = read_all(state_dir, events=events)
    if not found.sources:
        if found.problems:
            raise LedgerError("; ".join(problem.why for problem in found.problems))
        raise LedgerError(f"there is no ledger in {state_dir}: give the right --state-dir")
    for problem in found.problems:
        click.echo(f"ckptctl: warning: {problem.why}", err=True)
    places = lambda: {str(path): partial(_page_of_file, path) for path in ledger_files(folder)}  # noqa: E731
    return LedgerSource(f"the ledgers in {state_dir}", found, found.of_job, partial(Feed, places))


def _page_of_file(path: Path, question: Read) -> Page:
    from ckptless.daemon.ledger.store import Ledger  # slow to load: see merge.read_all

    with Ledger.open_readonly(path) as ledger:
        return ledger.page(question, None, _ALL, _ALL)


def _daemon(socket: str, events: bool | Collection[str]) -> LedgerSource:
    """The daemon that listens at `socket`, which knows who asks. Raises PeerError where there is none."""
    page_of: AskPage = lambda question: ask(socket, question, Page)  # noqa: E731
    tables: tuple[Table, ...] = TABLES if events else TABLES[:-1]
    kinds = () if isinstance(events, bool) else tuple(sorted(events))

    def read(question: Read) -> Snapshot:
        """All pages of an answer."""
        found: list[Record] = []
        more = True
        while more:
            page = page_of(question)
            found += page.records
            question, more = replace(question, after=page.next), page.more
        return merge([found])

    return LedgerSource(
        f"the daemon at {socket}",
        read(Read(protocol=PROTOCOL, tables=("job",))),
        lambda job: read(Read(protocol=PROTOCOL, job=job, tables=tables, kinds=kinds)),
        partial(Feed, lambda: {socket: page_of}),
    )
