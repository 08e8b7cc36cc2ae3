"""`ckptctl jobs`: every job the ledgers know of, and what befell it."""

import time
from typing import Any, NamedTuple

import click

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job, watched
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.records import JobRecord


class Befell(NamedTuple):
    """The faults of a job, and what they took from it.

    `faults`: causes, without drills and without what followed from others. `without_steps_s`: seconds from a
    fault to the next step, in all; `longest_s`: of the longest recovery. `step`: the newest that was told.
    """

    faults: int
    drills: int
    nodes_lost: int
    recoveries: int
    without_steps_s: float
    longest_s: float
    step: int | None


@click.command()
@click.option("--history", is_flag=True, help="Also what befell each: faults, lost nodes, recoveries.")
@of_job
@watched
def jobs(asked: Asked, history: bool) -> None:
    """List the jobs, the newest last.

    One line a job: how it stands, its ranks, nodes and spares at the start, when it started and how long it
    ran. With JOB only that one's runs.

    \b
    Example:
        ckptctl jobs --json | jq -r '.jobs[] | select(.state == "failed").job'
        ckptctl jobs --history
    """
    found = view.all_jobs(asked)
    told = {name: _befell(source.job(name)) for name, (_, source) in found.items()} if history else {}
    records = [job for job, _ in found.values()]
    if asked.as_json:
        more: dict[str, Any] = (
            {"history": {name: one._asdict() for name, one in told.items()}} if history else {}
        )
        render.show_json(jobs=records, **more)
    elif not found:
        click.echo("no job yet", err=True)
    elif history:
        rows = [(*_row(job)[:2], *_history_row(job, told[job.job])) for job in records]
        render.show_table(_HISTORY, rows, words=("job", "state", "started"))
    else:
        render.show_table(_COLUMNS, map(_row, records), words=("job", "state", "started", "reason"))


_COLUMNS = ("job", "state", "ranks", "nodes", "spares", "started", "ran", "exit", "reason")
_HISTORY = (
    "job", "state", "started", "ran", "step", "faults", "drills", "nodes lost", "recoveries", "without steps",
    "longest",
)  # fmt: skip


def _row(job: JobRecord) -> tuple[object, ...]:
    return (
        job.job,
        job.state,
        job.world_size,
        job.nodes,
        job.spares,
        render.clock(job.started_s),
        _ran(job),
        job.exit_code,
        job.reason,
    )


def _history_row(job: JobRecord, told: Befell) -> tuple[object, ...]:
    return (
        render.clock(job.started_s),
        _ran(job),
        told.step,
        told.faults,
        told.drills,
        told.nodes_lost,
        told.recoveries,
        render.span(told.without_steps_s),
        render.span(told.longest_s),
    )


def _ran(job: JobRecord) -> str:
    return render.span((time.time() if job.ended_s is None else job.ended_s) - job.started_s)


def _befell(found: Snapshot) -> Befell:
    causes = [group.fault for group in view.causes(found)]
    took_s = [view.total_s(recovery) for recovery in found.recoveries]
    return Befell(
        faults=sum(fault.source != "drill" for fault in causes),
        drills=sum(fault.source == "drill" for fault in causes),
        nodes_lost=len(found.lost),
        recoveries=sum(recovery.outcome == "recovered" for recovery in found.recoveries),
        without_steps_s=sum(took_s),
        longest_s=max(took_s, default=0.0),
        step=max((slot.step for slot in found.slots if slot.step is not None), default=None),
    )
