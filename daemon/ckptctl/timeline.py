"""`ckptctl timeline`: where the time of every recovery went, as a table or a picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, as_png, of_job, watched
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.records import PHASES, RecoveryRecord

_ENOUGH = 3  # recoveries before a median says anything


@click.command()
@as_png("recoveries")
@of_job
@watched
def timeline(asked: Asked, png: Path | None) -> None:
    """Show every recovery of a job, phase by phase, in milliseconds.

    One line a recovery: the generation it led to, the rung that answered, the faults (those of a drill say
    so), the step restored, the phases in order and their sum. The last line is median/p99 over the recoveries
    that succeeded, once there are three.

    \b
    Example:
        ckptctl timeline
        ckptctl timeline --png recoveries.png
    """
    job, found, _ = view.job_of(asked)
    kinds = {fault.fault: fault.kind for fault in found.faults}
    sources = {fault.fault: fault.source for fault in found.faults}
    if png is not None:
        _draw(png, job.job, found.recoveries)
    if asked.as_json:
        render.show_json(
            job=job.job,
            recoveries=[
                {
                    **msgspec.to_builtins(recovery),
                    "fault_kinds": [kinds.get(fault) for fault in recovery.faults],
                    "fault_sources": [sources.get(fault) for fault in recovery.faults],
                    "total_s": view.total_s(recovery),
                }
                for recovery in found.recoveries
            ],
            summary=_summary(found.recoveries),
        )
    elif not found.recoveries:
        click.echo(f"job {job.job} has had no recovery", err=True)
    elif png is None:
        drills = {fault: " (drill)" for fault, source in sources.items() if source == "drill"}
        _show(found.recoveries, {fault: kind + drills.get(fault, "") for fault, kind in kinds.items()})


def _show(recoveries: Sequence[RecoveryRecord], kinds: dict[str, str]) -> None:
    rows = [
        (
            recovery.generation,
            recovery.rung,
            ", ".join(kinds.get(fault, fault) for fault in recovery.faults),
            "-" if recovery.restore_step is None else recovery.restore_step,
            *(render.ms(recovery.phases.get(phase)) for phase in PHASES),
            render.ms(view.total_s(recovery)),
            recovery.outcome or "running",
        )
        for recovery in recoveries
    ]
    good = _recovered(recoveries)
    if len(good) >= _ENOUGH:
        rows.append(
            (
                "",
                "median/p99",
                f"of {len(good)} recovered",
                "",
                *(_pair([r.phases[phase] for r in good if phase in r.phases]) for phase in PHASES),
                _pair([view.total_s(recovery) for recovery in good]),
                "",
            )
        )
    columns = ("generation", "rung", "faults", "step", *PHASES, "total", "outcome")
    render.show_table(columns, rows, words=("rung", "faults", "outcome"))


def _draw(file: Path, job: str, recoveries: Sequence[RecoveryRecord]) -> None:
    if not recoveries:
        raise CkptlessError(f"job {job} has had no recovery: there is nothing to draw")
    from ckptless.daemon.ckptctl.shared.picture import draw  # matplotlib: slow to load, and an extra

    draw(file, f"Recoveries of job {job}", recoveries)
    click.echo(f"wrote {file}", err=True)


def _recovered(recoveries: Sequence[RecoveryRecord]) -> list[RecoveryRecord]:
    """Return the recoveries that say how long one takes: one that was cut short does not."""
    return [recovery for recovery in recoveries if recovery.outcome == "recovered"]


def _summary(recoveries: Sequence[RecoveryRecord]) -> dict[str, float] | None:
    totals = [view.total_s(recovery) for recovery in _recovered(recoveries)]
    if len(totals) < _ENOUGH:
        return None
    return {"count": len(totals), "median_s": statistics.median(totals), "p99_s": p99(totals)}


def _pair(durations_s: Sequence[float]) -> str:
    return f"{render.ms(statistics.median(durations_s))}/{render.ms(p99(durations_s))}" if durations_s else ""


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: always a value that was measured; the greatest, below 100."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]
