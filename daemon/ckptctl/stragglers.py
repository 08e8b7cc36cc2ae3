"""`ckptctl stragglers`: which ranks hold up the others, by how much, and with what."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import click
from msgspec import structs

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, as_png, of_job, watched
from ckptless.daemon.ckptlessd.planning.pace import Shares, by_group, shares, slow
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.protocol.model import Pace
from ckptless.daemon.protocol.records import EventRecord

_KINDS = frozenset({"straggler", "straggler-over"})
_LAST_LINES = 5
# Of a large job the table has the slowest.
_ROWS = 32
_COLUMNS = ("step", "took", "own", "over", "data", "waited", "commit", "slow")
_PARTS = {
    "compute": "compute",
    "data": "data",
    "network": "the network (collectives)",
    "waiting": "waiting for slower ranks",
    "commit": "commits",
}


By = Literal["rank", "node", "domain"]


@click.command()
@click.option(
    "--by",
    type=click.Choice(["rank", "node", "domain"]),
    default="rank",
    help="What a line is of. Of a node or a failure domain (rack, switch): the medians of its ranks.",
)
@click.option("--all", "everybody", is_flag=True, help=f"Show every line, not the {_ROWS} slowest.")
@as_png("ranks' steps")
@of_job
@watched
def stragglers(asked: Asked, by: By, everybody: bool, png: Path | None) -> None:
    """Show which ranks hold up the others: who arrives last at collectives, by how much, and why.

    One line a rank, the slowest first: medians over its last dozen of steps, in milliseconds. "own" is what a
    rank is busy for by itself: the step without what it waits for others and for copies of its state. "over"
    is by how much that is longer than the median of all; "slow" names what makes it so, data or
    compute, where it is more than a tenth and more than they differ anyhow. Below, where an average rank's
    time goes and what the job is bound by, and what was told of stragglers so far.

    A slow network makes no rank late, since all wait in the collectives: then the job is bound by the
    network, and `ckptless-doctor --pairs` finds the link.

    \b
    Example:
        ckptctl stragglers                  the newest job
        ckptctl stragglers --by domain      its racks or switches
        ckptctl stragglers --png steps.png
    """
    job, found, _ = view.job_of(asked, events=_KINDS)
    paces = _paces(found)
    if png is not None:
        _draw(png, job.job, paces)
    if asked.as_json:
        where, groups = shares(paces), _groups(found, paces, by)
        late = {one.who: one.bound for one in slow(groups)}
        rows = [{by: who, **structs.asdict(pace), "slow": late.get(who)} for who, pace in groups.items()]
        bound, events = where.bound if where is not None else None, [*_told(found)]
        render.show_json(job=job.job, **{f"{by}s": rows}, shares=where, bound=bound, events=events)
    elif not paces:
        click.echo(f"job {job.job} has told of no steps yet: it takes a dozen, and ckptless.run", err=True)
    elif png is None:
        _show(found, paces, by, None if everybody else _ROWS)


def _told(found: Snapshot) -> Iterator[EventRecord]:
    return (event for event in found.events if event.kind in _KINDS)


def _paces(found: Snapshot) -> dict[int, Pace]:
    """Return the paces of the present generation's ranks."""
    generation = found.generation.generation if found.generation is not None else None
    return {
        slot.rank: slot.pace
        for slot in found.slots
        if slot.rank is not None and slot.pace is not None and slot.generation == generation
    }


def _places(found: Snapshot) -> dict[int, int]:
    return {slot.rank: slot.node for slot in found.slots if slot.rank is not None}


def _groups(found: Snapshot, paces: Mapping[int, Pace], by: By) -> Mapping[int | str, Pace]:
    """Return the paces of what a line is of, in order. Raises UsageError where no domain is known."""
    if by == "rank":
        return {**dict(sorted(paces.items()))}
    places = _places(found)
    if by == "node":
        return {**dict(sorted(by_group(paces, places).items()))}
    domains = {node.node: node.domain for node in found.nodes if node.domain}
    if not domains:
        raise UsageError("no failure domains are known of this job's nodes: see `domains` in ckptless.yaml")
    home = {rank: domains.get(node, f"node {node}") for rank, node in places.items()}
    return {**dict(sorted(by_group(paces, home).items()))}


def _show(found: Snapshot, paces: Mapping[int, Pace], by: By, most: int | None) -> None:
    groups = _groups(found, paces, by)
    late = {one.who: one.bound for one in slow(groups)}
    middle = statistics.median(one.own_s for one in groups.values())
    where: dict[int | str, tuple[object, ...]] = {}
    names = {node.node: node.name for node in found.nodes}
    if by == "rank":
        where = {rank: (node, names.get(node)) for rank, node in _places(found).items()}
    elif by == "node":
        where = {node: (name,) for node, name in names.items()}
    rows = []
    for who, pace in sorted(groups.items(), key=lambda one: -one[1].own_s):
        over = f"{100 * (pace.own_s / middle - 1):+.0f} %" if middle else ""
        parts = (pace.took_s, pace.own_s), (pace.data_s, pace.waited_s, pace.commit_s)
        first, rest = (tuple(map(render.ms, ones)) for ones in parts)
        rows.append((who, *where.get(who, ()), pace.step, *first, over, *rest, late.get(who)))
    columns = {"rank": ("rank", "node", "name"), "node": ("node", "name"), "domain": ("domain",)}[by]
    render.show_table((*columns, *_COLUMNS), rows[:most], words=("domain", "name", "slow"))
    if most is not None and len(rows) > most:
        click.echo(f"and {len(rows) - most} faster ones (--all)")
    if (shared := shares(paces)) is not None:
        click.echo(_sentence(shared))
    for one in [*_told(found)][-_LAST_LINES:]:
        click.echo(render.harmless(f"{render.clock(one.at_s)} {one.text}"))


def _sentence(where: Shares) -> str:
    told = ", ".join(f"{100 * getattr(where, part):.0f} % {name}" for part, name in _PARTS.items())
    return f"of a step of {render.ms(where.step_s)} ms, on average: {told}; bound by {_PARTS[where.bound]}"


def _draw(file: Path, job: str, paces: Mapping[int, Pace]) -> None:
    if not paces:
        raise CkptlessError(f"job {job} has told of no steps yet: there is nothing to draw")
    from ckptless.daemon.ckptctl.shared.picture import draw_paces  # matplotlib: slow to load, and an extra

    draw_paces(file, f"Steps of job {job}", paces)
    click.echo(f"wrote {file}", err=True)
