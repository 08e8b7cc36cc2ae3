"""`ckptctl goodput`: where the time of a job's GPUs went, each second in one class; of one job or of many."""

import time
from dataclasses import asdict
from pathlib import Path

import click

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, as_png, of_job, watched
from ckptless.daemon.ckptctl.shared.source import LedgerSource, sources
from ckptless.daemon.ckptlessd.planning.goodput import CLASSES, KINDS, Account, History, of_run, of_runs
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.protocol.records import JobRecord

_DAY_S, _HOUR_S = 86400.0, 3600.0


@click.command()
@click.option("--all", "every", is_flag=True, help="Of all jobs that are known here, a line each.")
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Of those that ended in the last N days, or go on.",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0, min_open=True),
    metavar="COST",
    help="What a GPU costs for an hour, in any currency: show what each class has cost.",
)
@as_png("classes of each job")
@of_job
@watched
def goodput(asked: Asked, every: bool, days: float | None, price: float | None, png: Path | None) -> None:
    """Show where the time of a job's GPUs went: training, or what else.

    Every second of every slot (a GPU: that of a rank, or of a spare) is in exactly one class, so that they
    add up to the time that the job had its slots. Of a Slurm job that was requeued all runs count, and what
    it waited between them. Goodput is the part of it that is training: steps done for the first time.

    \b
    Example:
        ckptctl goodput                    the newest job
        ckptctl goodput 4711 --price 2.5   and what it has cost
        ckptctl goodput --days 7           all jobs of a week
    """
    found = _many(asked, days) if every or days is not None else _one(asked)
    if not found:
        when = "" if days is None else f" that ended in the last {days:g} days, or goes on"
        raise CkptlessError(f"there is no job{when}")
    whole = Account()
    for account in found.values():
        whole.add(account)
    if png is not None:
        _draw(png, found)
    if asked.as_json:
        jobs = [{"job": job, **_shown(account, price)} for job, account in found.items()]
        render.show_json(jobs=jobs, all=_shown(whole, price), classes=CLASSES)
    elif png is None:
        if len(found) > 1 or every or days is not None:
            _show_jobs(found, whole, price)
        _show_classes(whole, price)
        _warn(whole)


def _one(asked: Asked) -> dict[str, Account]:
    """Return the account of the job asked for: of a Slurm job's number all of its runs together."""
    job, _, source = view.job_of(asked, events=KINDS)
    name = _slurm_job(job.job)
    if asked.job not in (None, name):
        return {job.job: _account(job, source)}
    return {
        name: of_runs(
            [(one, _account(one, source)) for one in source.jobs.jobs if _slurm_job(one.job) == name]
        )
    }


def _many(asked: Asked, days: float | None) -> dict[str, Account]:
    """Return the account of every job, runs of one Slurm job together."""
    if asked.job is not None:
        raise UsageError(f"--all and --days are of all jobs, and {asked.job} is one: give one of them")
    since_s = time.time() - days * _DAY_S if days is not None else 0.0
    jobs: dict[str, dict[str, tuple[JobRecord, Account]]] = {}
    for source in sources(asked, KINDS):
        for job in source.jobs.jobs:
            if (job.ended_s or time.time()) >= since_s:
                runs = jobs.setdefault(_slurm_job(job.job), {})
                runs.setdefault(job.job, (job, _account(job, source)))
    return {name: of_runs(runs.values()) for name, runs in jobs.items()}


def _slurm_job(run: str) -> str:
    """Return the number of the Slurm job that a run belongs to, or the name of a local run."""
    number = run.partition(".")[0]
    return number if number.isdecimal() else run


def _account(job: JobRecord, source: LedgerSource) -> Account:
    found = source.job(job.job)
    job = next((one for one in found.jobs), job)
    history = History(job, found.nodes, found.slots, found.generations, found.recoveries, found.events)
    return of_run(history, time.time())


def _shown(account: Account, price: float | None) -> dict[str, object]:
    cost = {"cost": _cost(account, price)} if price is not None else {}
    return {**asdict(account), "total_s": account.total_s, "goodput": account.goodput, **cost}


def _cost(account: Account, price: float) -> float:
    """Return what the slots have cost: none are held in the queue."""
    return (account.total_s - account.seconds["queue"]) / _HOUR_S * price


def _show_jobs(found: dict[str, Account], whole: Account, price: float | None) -> None:
    rows = [
        (name, one.slots, render.span(one.wall_s), *_figures(one, whole, price))
        for name, one in found.items()
    ]
    columns = ("job", "slots", "took", "slot hours", "of all", "goodput", *(("cost",) if price else ()))
    render.show_table(columns, rows, words=("job",))
    click.echo()


def _figures(one: Account, whole: Account, price: float | None) -> tuple[str, ...]:
    share = one.total_s / whole.total_s if whole.total_s else 0.0
    good = "" if one.goodput is None else f"{100 * one.goodput:.2f} %"
    cost = (f"{_cost(one, price):.2f}",) if price else ()
    return (f"{one.total_s / _HOUR_S:.2f}", f"{100 * share:.1f} %", good, *cost)


def _show_classes(account: Account, price: float | None) -> None:
    total_s = account.total_s
    # Of a short job hours would be all zeros.
    unit, unit_s = ("hours", _HOUR_S) if total_s >= _HOUR_S else ("seconds", 1.0)
    rows = [
        (
            name,
            f"{seconds / unit_s:.2f}",
            f"{100 * seconds / total_s:.2f} %",
            *((f"{seconds / _HOUR_S * price:.2f}" if name != "queue" else "",) if price else ()),
            CLASSES[name],
        )
        for name, seconds in account.seconds.items()
        if seconds
    ]
    cost = ("cost",) if price else ()
    render.show_table(("class", f"slot {unit}", "share", *cost, "what"), rows, words=("class", "what"))
    if account.goodput is None:
        return
    trained_s, spare_s = account.seconds["training"], account.seconds["spare"]
    ranks = f", {100 * trained_s / (total_s - spare_s):.2f} % without spares" if spare_s < total_s else ""
    hours = f"{trained_s / unit_s:.2f} of {total_s / unit_s:.2f} slot {unit}"
    whole = f"{account.slots} slots, {render.span(account.wall_s)}"
    least = "at least " if account.seconds["untold"] else ""
    click.echo(f"goodput {least}{100 * account.goodput:.2f} %{ranks}: {hours}; {whole}")


def _warn(account: Account) -> None:
    if account.untold:
        click.echo(
            f"of {account.untold} slots it is not known how they spent their time (untold): a script without "
            "ckptless.run tells of no steps, and of a large job only the leading node's daemon hears all",
            err=True,
        )


def _draw(file: Path, found: dict[str, Account]) -> None:
    from ckptless.daemon.ckptctl.shared.picture import draw_accounts  # matplotlib: slow to load, and an extra

    draw_accounts(file, found)
    click.echo(f"wrote {file}", err=True)
