"""`ckptctl replicas`: who holds what of a job's state."""

import time
from collections.abc import Iterator
from typing import Any

import click

from ckptless.daemon.ckptctl import safety as safe
from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job, watched
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.limits import runs, size_text
from ckptless.daemon.replication.protection import HeldCopy, Item


@click.command()
@of_job
@watched
def replicas(asked: Asked) -> None:
    """Show who holds what of a job's state: each shard, its ranks, and every node that has a copy of it.

    A shard is the tensors that ranks with the same ones have; a node holds them as "owner" (one of those
    ranks is there), as "copy" (it was sent them), or as "old": it does not come along any more. Beside them,
    how many of the ranks' own records it holds. The age tells how long ago its agent told of a change. Nodes
    that are lost hold nothing.

    \b
    Example:
        ckptctl replicas            the newest job
        ckptctl replicas --json | jq '.shards[] | {shard, nodes: [.holders[].node]}'
    """
    job, found, _ = view.job_of(asked)
    safety = safe.safety_of(job, found)
    shards = _shards(found, safety)
    if asked.as_json:
        alive = safe.safety(job, found)
        render.show_json(job=job, safety=safe.as_json(alive), shards=shards, nodes=_memory(found))
        return
    if not shards:
        click.echo("nothing is held yet", err=True)
        return
    render.show_table(_COLUMNS, _rows(shards), words=("ranks", "name", "as", "steps"))
    click.echo(_sum(found))
    if job.state in ENDED:
        click.echo("the job is over: this is what was held last", err=True)
    else:
        for line in safe.sentences(safety):
            click.echo(render.harmless(line))


_COLUMNS = ("shard", "ranks", "node", "name", "as", "steps", "bytes", "records", "age")


def _shards(found: Snapshot, safety: safe.Safety) -> list[dict[str, Any]]:
    """Return the shards, for scripts and for the table: by shard, then by node."""
    held, now_s = safety.held, time.time()
    names = {node.node: node.name for node in found.nodes}
    told = {one.node: one.updated_s for one in found.holdings}
    places = found.generation.places if found.generation is not None else ()
    shards = []
    for shard, ranks in held.ranks.items():
        owners = {places[rank][0] for rank in ranks if rank < len(places)}
        tensors = {copy.node: copy for copy in held.items[Item("tensors", shard)]}
        records: dict[int, list[tuple[int, HeldCopy]]] = {}
        for rank in ranks:
            for copy in held.items[Item("record", rank)]:
                records.setdefault(copy.node, []).append((rank, copy))
        holders = [
            {
                "node": node,
                "name": names.get(node),
                "as": _role(node, owners, tensors.get(node)),
                **_copy(tensors.get(node)),
                "records": [
                    {"rank": rank, "old": copy.old, **_copy(copy)} for rank, copy in records.get(node, ())
                ],
                "updated_s": told[node],
                "age_s": max(0.0, now_s - told[node]),
            }
            for node in sorted(tensors.keys() | records.keys())
        ]
        shards.append({"shard": shard, "ranks": ranks, "holders": holders})
    return shards


def _role(node: int, owners: set[int], copy: HeldCopy | None) -> str | None:
    """Return as what a node holds the tensors; None where it has only records."""
    if copy is None:
        return None
    return "old" if copy.old else "owner" if node in owners else "copy"


def _copy(copy: HeldCopy | None) -> dict[str, Any]:
    if copy is None:
        return {"step": None, "steps": (), "nbytes": 0}
    return {"step": copy.step, "steps": copy.steps, "nbytes": copy.nbytes}


def _memory(found: Snapshot) -> list[dict[str, Any]]:
    lost = found.lost
    living = [one for one in found.holdings if one.node not in lost]
    return [{"node": one.node, "nbytes": one.nbytes, "updated_s": one.updated_s} for one in living]


def _rows(shards: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for shard in shards:
        head: tuple[object, ...] = (shard["shard"], runs(shard["ranks"]))
        for holder in shard["holders"]:
            records = sum(not record["old"] for record in holder["records"])
            yield (
                *head,
                holder["node"],
                holder["name"],
                holder["as"] or "records",
                runs(holder["steps"]),
                size_text(holder["nbytes"]) if holder["steps"] else None,
                records or None,
                render.span(holder["age_s"]),
            )
            head = (None, None)


def _sum(found: Snapshot) -> str:
    memory = _memory(found)
    nbytes = sum(one["nbytes"] for one in memory)
    return f"memory: {size_text(nbytes)} on {len(memory)} {'node' if len(memory) == 1 else 'nodes'}"
