"""`ckptctl stragglers`: which ranks hold up the others, by how much, and with what."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from msgspec import structs

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, as_png, of_job, watched
from ckptless.daemon.ckptlessd.planning.pace import Shares, Slow, shares, slow
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.model import Pace

_KINDS = frozenset({"straggler", "straggler-over"})
_LAST_LINES = 5
# Of a large job the table has the slowest.
_ROWS = 32


@click.command()
@click.option("--all", "everybody", is_flag=True, help=f"Show every rank, not the {_ROWS} slowest.")
@as_png("ranks' steps")
@of_job
@watched
def stragglers(asked: Asked, everybody: bool, png: Path | None) -> None:
    """Show which ranks hold up the others: who arrives last at collectives, by how much, and why.

    One line a rank, the slowest first: medians over its last dozen of steps, in milliseconds. "own" is what a
    rank is busy for by itself: the step without what it waits for others and for copies of its state. "over"
    is by how much that is longer than the median of all ranks; "slow" names what makes it so, data or
    compute, where it is more than a tenth and more than ranks differ anyhow. Below, where an average rank's
    time goes, and what was told of stragglers so far.

    \b
    Example:
        ckptctl stragglers          the newest job
        ckptctl stragglers --png steps.png
    """
    job, found, _ = view.job_of(asked, events=_KINDS)
    paces = _paces(found)
    late = {one.rank: one for one in slow(paces)}
    if png is not None:
        _draw(png, job.job, paces)
    if asked.as_json:
        render.show_json(
            job=job.job,
            ranks=[
                {"rank": rank, **structs.asdict(pace), "slow": late[rank].bound if rank in late else None}
                for rank, pace in sorted(paces.items())
            ],
            shares=shares(paces),
            events=[event for event in found.events if event.kind in _KINDS],
        )
    elif not paces:
        click.echo(f"job {job.job} has told of no steps yet: it takes a dozen, and ckptless.run", err=True)
    elif png is None:
        _show(found, paces, late, None if everybody else _ROWS)


def _paces(found: Snapshot) -> dict[int, Pace]:
    """Return the paces of the present generation's ranks."""
    generation = found.generation.generation if found.generation is not None else None
    return {
        slot.rank: slot.pace
        for slot in found.slots
        if slot.rank is not None and slot.pace is not None and slot.generation == generation
    }


_COLUMNS = ("rank", "node", "name", "step", "took", "own", "over", "data", "waited", "commit", "slow")


def _show(found: Snapshot, paces: Mapping[int, Pace], late: Mapping[int, Slow], most: int | None) -> None:
    rows = [*_rows(found, paces, late)]
    render.show_table(_COLUMNS, rows[:most], words=("name", "slow"))
    if most is not None and len(rows) > most:
        click.echo(f"and {len(rows) - most} faster ones (--all)")
    if (where := shares(paces)) is not None:
        click.echo(_sentence(where))
    lines: Sequence[str] = [
        f"{render.clock(one.at_s)} {one.text}" for one in found.events if one.kind in _KINDS
    ]
    for line in lines[-_LAST_LINES:]:
        click.echo(render.harmless(line))


def _rows(
    found: Snapshot, paces: Mapping[int, Pace], late: Mapping[int, Slow]
) -> Iterator[tuple[object, ...]]:
    names = {node.node: node.name for node in found.nodes}
    places = {slot.rank: slot.node for slot in found.slots if slot.rank is not None}
    middle = sorted(one.own_s for one in paces.values())[len(paces) // 2]
    for rank, pace in sorted(paces.items(), key=lambda one: (-one[1].own_s, one[0])):
        over = f"{100 * (pace.own_s / middle - 1):+.0f} %" if middle else ""
        parts = (pace.took_s, pace.own_s), (pace.data_s, pace.waited_s, pace.commit_s)
        first, rest = (tuple(map(render.ms, ones)) for ones in parts)
        node = places[rank]
        bound = late[rank].bound if rank in late else None
        yield (rank, node, names.get(node), pace.step, *first, over, *rest, bound)


def _sentence(where: Shares) -> str:
    parts = {
        "compute": where.compute,
        "data": where.data,
        "collectives": where.network,
        "waiting for slower ranks": where.waiting,
        "commits": where.commit,
    }
    told = ", ".join(f"{100 * share:.0f} % {name}" for name, share in parts.items())
    return f"of a step of {render.ms(where.step_s)} ms, on average: {told}"


def _draw(file: Path, job: str, paces: Mapping[int, Pace]) -> None:
    if not paces:
        raise CkptlessError(f"job {job} has told of no steps yet: there is nothing to draw")
    from ckptless.daemon.ckptctl.shared.picture import draw_paces  # matplotlib: slow to load, and an extra

    draw_paces(file, f"Steps of job {job}", paces)
    click.echo(f"wrote {file}", err=True)
