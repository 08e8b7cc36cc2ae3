"""`ckptctl data`: the batches that lie ready on each node, and how long ranks wait for theirs."""

import time
from collections.abc import Iterator
from typing import Any

import click
from msgspec import structs

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job, watched
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.limits import size_text
from ckptless.daemon.protocol.model import RingState
from ckptless.daemon.protocol.records import GenerationRecord, HoldingRecord
from ckptless.daemon.protocol.ring import STREAMS

# So much of its time a rank may wait for batches before it is worth a sentence.
BOTTLENECK = 0.1


@click.command()
@of_job
@watched
def data(asked: Asked) -> None:
    """Show a job's batches: how many lie ready on each node, and how long ranks wait for theirs.

    One line for each loader, node and replica. "ready" are batches that lie there, "ahead" those of them that
    nobody has taken yet. "waits" is how often ranks waited for one, "waited" how long in all, and "lately"
    how much of their time that was over their last 64 batches or so: near 0 % data loading holds nobody up.
    The rest is of the loader on that node: bytes and the most that they may be, batches made there, and the
    process that makes them.

    \b
    Example:
        ckptctl data                the newest job
        ckptctl data --json | jq '.rings[] | {node, lately: [.readers[].share] | max}'
    """
    job, found, _ = view.job_of(asked)
    rings = _rings(found)
    if asked.as_json:
        render.show_json(job=job, rings=rings)
        return
    if not rings:
        click.echo("no batches lie on any node: see `run.batches` and ckptless.data", err=True)
        return
    render.show_table(_COLUMNS, _rows(rings), words=("loader", "name"))
    if job.state in ENDED:
        click.echo("the job is over: this is what was told last", err=True)
    else:
        for line in _sentences(rings):
            click.echo(render.harmless(line))


_COLUMNS = (
    *("loader", "node", "name", "replica", "ready", "ahead", "waits", "waited", "lately"),
    *("bytes", "of", "made", "producer", "age"),
)


def _rings(found: Snapshot) -> list[dict[str, Any]]:
    """Return the rings, for scripts and for the table: by loader, then by node; lost nodes have none."""
    lost, newest = found.lost, found.generation
    names = {node.node: node.name for node in found.nodes}
    rings = [
        _ring(held, names.get(held.node), ring, newest)
        for held in found.holdings
        if held.node not in lost
        for ring in held.rings
    ]
    return sorted(rings, key=lambda ring: (ring["loader"], ring["node"]))


def _ring(
    held: HoldingRecord, name: str | None, ring: RingState, newest: GenerationRecord | None
) -> dict[str, Any]:
    ranks = {place: rank for rank, place in enumerate(newest.places)} if newest is not None else {}
    # Streams of one replica are its epochs, where a loader does not know how long they are.
    numbers = [one.stream for one in ring.streams] + [one.stream for one in ring.readers]
    return {
        "node": held.node,
        "name": name,
        **structs.asdict(ring),
        "streams": [{"replica": one.stream % STREAMS, **structs.asdict(one)} for one in ring.streams],
        "readers": [
            {
                "rank": ranks.get((held.node, one.slot)),
                "replica": one.stream % STREAMS,
                **structs.asdict(one),
            }
            for one in ring.readers
        ],
        "replicas": sorted({number % STREAMS for number in numbers}),
        "updated_s": held.updated_s,
        "age_s": max(0.0, time.time() - held.updated_s),
    }


def _rows(rings: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for ring in rings:
        head: tuple[object, ...] = (ring["loader"], ring["node"], ring["name"])
        tail: tuple[object, ...] = (
            size_text(ring["nbytes"]),
            size_text(ring["budget_nbytes"]),
            ring["made"],
            "closed" if ring["closed"] else ring["producer"] or "none",
            render.span(ring["age_s"]),
        )
        for replica in ring["replicas"] or [None]:
            streams = [one for one in ring["streams"] if one["replica"] == replica]
            readers = [one for one in ring["readers"] if one["replica"] == replica]
            share = max((one["share"] for one in readers if one["share"] is not None), default=None)
            yield (
                *head,
                replica,
                sum(one["ready"] for one in streams),
                sum(one["ahead"] for one in streams),
                sum(one["waits"] for one in readers),
                render.span(sum(one["waited_s"] for one in readers)),
                None if share is None else _percent(share),
                *tail,
            )
            head, tail = (None,) * len(head), (None,) * len(tail)


def _sentences(rings: list[dict[str, Any]]) -> Iterator[str]:
    """Yield sentences about what somebody should do something about."""
    for ring in rings:
        shares = [one["share"] for one in ring["readers"] if one["share"] is not None]
        if ring["closed"] or max(shares, default=0.0) < BOTTLENECK:
            continue
        where = f"{ring['loader']!r} on {ring['name'] or ring['node']}"
        yield (
            f"ranks wait for {where} {_percent(max(shares))} of their time: give the loader more workers, "
            "or its transform less to do"
        )


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.095 or not share else f"{share * 100:.1f} %"
