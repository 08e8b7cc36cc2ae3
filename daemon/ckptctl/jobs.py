"""`ckptctl jobs`: every job the ledgers know of."""

import time

import click

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job
from ckptless.daemon.protocol.records import JobRecord


@click.command()
@of_job
def jobs(asked: Asked) -> None:
    """List the jobs, the newest last.

    One line a job: how it stands, its ranks, nodes and spares at the start, when it started and how long it
    ran. With JOB only that one's runs.

    \b
    Example:
        ckptctl jobs --json | jq -r '.jobs[] | select(.state == "failed").job'
    """
    found = view.all_jobs(asked)
    if asked.as_json:
        render.show_json(jobs=found)
    elif not found:
        click.echo("no job yet", err=True)
    else:
        render.show_table(_COLUMNS, map(_row, found), words=("job", "state", "started", "reason"))


_COLUMNS = ("job", "state", "ranks", "nodes", "spares", "started", "ran", "exit", "reason")


def _row(job: JobRecord) -> tuple[object, ...]:
    ended_s = time.time() if job.ended_s is None else job.ended_s
    return (
        job.job,
        job.state,
        job.world_size,
        job.nodes,
        job.spares,
        render.clock(job.started_s),
        render.span(ended_s - job.started_s),
        job.exit_code,
        job.reason,
    )
