"""`ckptctl events`: the story of a job, line by line, and as it goes on."""

import time
from pathlib import Path

import click
import msgspec

from ckptless.daemon.api.errors import LedgerError
from ckptless.daemon.api.records import EventRecord
from ckptless.daemon.ckptctl import render, view
from ckptless.daemon.ckptctl.options import Asked, common
from ckptless.daemon.ledger.paths import ledger_files
from ckptless.daemon.ledger.store import Ledger

_POLL_S = 0.5

_COLOURS = {"info": None, "warning": "yellow", "error": "red"}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as events come, until Ctrl-C.")
@common
def events(asked: Asked, follow: bool) -> None:
    """Tell a job's story: one line an event, the oldest first.

    With -f what is there and then each event as the ledgers get it; a ledger that appears later is followed
    too. With -f and --json each event is a JSON object on a line of its own.

    \b
    Example:
        ckptctl events -f
        ckptctl events --job 4711 --json | jq -r '.events[] | select(.level == "error").text'
    """
    # The snapshot is only to find the job: the lines come from the feed, which knows where it stopped.
    job, found = view.job_of(asked, events=not follow)
    if follow:
        _follow(EventFeed(asked.state_dir, job.job), as_json=asked.as_json)
    elif asked.as_json:
        render.show_json(events=found.events)
    else:
        for event in found.events:
            _show(event)


class EventFeed:
    """New events of a job, over all ledgers of a state directory, each once.

    The directory is looked up once: `latest` may come to mean another run. Ledgers are opened anew at every
    poll, so that one that is away for a while, or made later, is no special case.
    """

    def __init__(self, state_dir: Path, job: str) -> None:
        self._state_dir = state_dir.resolve()
        self._job = job
        self._last: dict[Path, int] = {}
        self._seen: set[str] = set()
        self._unreadable: set[Path] = set()

    def poll(self) -> tuple[EventRecord, ...]:
        """What the ledgers got since the last poll, by time. An unreadable one is told of on stderr, once."""
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


def _follow(feed: EventFeed, *, as_json: bool) -> None:
    try:
        while True:
            for event in feed.poll():
                if as_json:
                    click.echo(msgspec.json.encode(event).decode())
                else:
                    _show(event)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return  # the way to end it, not a failure


def _show(event: EventRecord) -> None:
    generation = "" if event.generation is None else f"gen {event.generation}"
    line = (
        f"{render.clock(event.at_s)}  node {event.node:<3} {generation:<7} {event.level:<7} {event.kind:<16}"
    )
    click.secho(render.harmless(f"{line}  {event.text}"), fg=_COLOURS[event.level])
