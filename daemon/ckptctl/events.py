"""`ckptctl events`: the story of a job, line by line, and as it goes on."""

import time

import click
import msgspec

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job
from ckptless.daemon.ckptctl.shared.source import Feed
from ckptless.daemon.protocol.records import EventRecord

_POLL_S = 0.5

_COLOURS = {"info": None, "warning": "yellow", "error": "red"}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as events come, until Ctrl-C.")
@of_job
def events(asked: Asked, follow: bool) -> None:
    """Tell a job's story: one line an event, the oldest first.

    With -f what is there and then each event as the ledgers get it; a ledger that appears later is followed
    too. With -f and --json each event is a JSON object on a line of its own.

    \b
    Example:
        ckptctl events -f
        ckptctl events 4711 --json | jq -r '.events[] | select(.level == "error").text'
    """
    # The snapshot is only to find the job: the lines come from the feed, which knows where it stopped.
    found = view.job_of(asked, events=not follow)
    if follow:
        _follow(found.source.feed(found.job.job), as_json=asked.as_json)
    elif asked.as_json:
        render.show_json(events=found.snapshot.events)
    else:
        for event in found.snapshot.events:
            _show(event)


def _follow(feed: Feed, *, as_json: bool) -> None:
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
