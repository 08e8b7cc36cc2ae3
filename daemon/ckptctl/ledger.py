"""`ckptctl ledger`: take the records of jobs along, and see whether a ledger's file is sound."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, common, of_job
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.paths import ledger_files
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.errors import LedgerError, UsageError
from ckptless.daemon.protocol.records import Record


@click.group()
def ledger() -> None:
    """Take the records of jobs along, or look whether a ledger is sound.

    \b
    Examples:
        ckptctl ledger export 4711    all that is recorded of it, as JSON lines
        ckptctl ledger check          whether the files are sound
    """


@ledger.command()
@click.option("--all", "every", is_flag=True, help="Of all jobs that are known here.")
@click.option(
    "--sqlite",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write them to a new ledger instead, which ckptctl --state-dir reads in a folder, as ledger.db.",
)
@of_job
def export(asked: Asked, every: bool, sqlite: Path | None) -> None:
    """Print all that is recorded of a job, a JSON object a line, each with the "type" of its record.

    What several ledgers have of it is put together first. Fields are only ever added to a type.

    \b
    Example:
        ckptctl ledger export 4711 > 4711.jsonl
        ckptctl ledger export --all | jq -c 'select(.type == "recovery").phases'
        mkdir old && ckptctl ledger export 4711 --sqlite old/ledger.db
    """
    if every and asked.job is not None:
        raise UsageError(f"--all is of all jobs, and {asked.job} is one: give one of them")
    names = [*view.all_jobs(asked)] if every else [asked.job]
    records = [
        row for name in names for row in _rows(view.job_of(replace(asked, job=name), events=True).snapshot)
    ]
    if sqlite is not None:
        _write(sqlite, records)
        click.echo(f"wrote {len(records)} records to {sqlite}", err=True)
        return
    encoder = msgspec.json.Encoder()
    for record in records:
        click.echo(encoder.encode(record).decode())


def _rows(found: Snapshot) -> Iterator[Record]:
    yield from found.jobs
    yield from found.nodes
    yield from found.slots
    yield from found.holdings
    yield from found.generations
    yield from found.faults
    yield from found.recoveries
    yield from found.events


def _write(file: Path, records: list[Record]) -> None:
    """Write them to a ledger that is not there yet. Raises UsageError, LedgerError."""
    if file.exists():
        raise UsageError(f"{file} is there already: name a new file")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.absolute().parent}: make it first")
    with Ledger.open(file) as made:
        made.write(records)


@ledger.command()
@common
def check(asked: Asked) -> None:
    """Read every ledger of a state directory to its end, and have SQLite look whether its file is sound.

    Exit code 1 where one is not. A daemon sets such a ledger aside by itself once it comes upon it.

    \b
    Example:
        ckptctl ledger check --state-dir /var/lib/ckptless
    """
    found = []
    paths = ledger_files(asked.state_dir)
    if not paths:
        raise LedgerError(f"there is no ledger in {asked.state_dir}: give the right --state-dir")
    for path in paths:
        try:
            with Ledger.open_readonly(path) as one:
                one.check()
                found.append({"ledger": str(path), "sound": True, "nbytes": one.used_nbytes, "why": ""})
        except LedgerError as error:
            found.append(
                {"ledger": str(path), "sound": False, "nbytes": path.stat().st_size, "why": str(error)}
            )
    if asked.as_json:
        render.show_json(ledgers=found)
    else:
        for row in found:
            click.echo(render.harmless(f"{row['ledger']}: {row['why'] or 'sound'}, {row['nbytes']} bytes"))
    if not all(row["sound"] for row in found):
        click.get_current_context().exit(1)
