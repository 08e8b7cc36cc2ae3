"""`ckptctl status`: how one job stands, down to every slot."""

import time
from collections.abc import Iterator

import click
from msgspec import structs

from ckptless.daemon.ckptctl import safety as safe
from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job, watched
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.records import (
    DRILL,
    REFUSALS,
    VOTE_AGAIN,
    VOTE_LOST,
    JobRecord,
    NodeRecord,
    SlotRecord,
)

_LAST_FAULTS = 3


@click.command()
@of_job
@watched
def status(asked: Asked) -> None:
    """Show how a job stands, down to every slot.

    Its state, its nodes and slots, what could be restored now and which nodes' failure would lose what, what
    the last recovery took, nodes whose disk keeps them from voting, the last drill, the last faults (with
    the ranks whose collectives failed over them), ranks whose training function has returned while others
    train, and how often what came from an older generation or leader was refused.

    A slot without a rank is a spare; "-" marks one whose rank now lives elsewhere. The age tells how long ago
    the slot was last heard of. Of a job that is forming, the nodes that it waits for.

    \b
    Example:
        ckptctl status              the newest job
        ckptctl status --watch 1    as it goes
    """
    job, found, _ = view.job_of(asked, events=REFUSALS | {DRILL, VOTE_LOST, VOTE_AGAIN})
    if asked.as_json:
        _show_json(job, found)
    else:
        _show(job, found)


def _show_json(job: JobRecord, found: Snapshot) -> None:
    recovery = found.recoveries[-1] if found.recoveries else None
    render.show_json(
        job=job,
        generation=found.generation,
        step=_step(found),
        spares_left=view.spares_left(found),
        safety=safe.as_json(safe.safety(job, found)),
        commits=safe.commits(job, found),
        nodes=found.nodes,
        slots=found.slots,
        recovery=recovery,
        recovery_total_s=None if recovery is None else view.total_s(recovery),
        faults=[{**structs.asdict(one.fault), "noticed": one.noticed} for one in _causes(found)],
        returned_early=view.returned_early(job, found),
        refused=view.refused(found),
        voteless=view.voteless(found),
        drill=view.last_drill(found),
    )


def _show(job: JobRecord, found: Snapshot) -> None:
    click.echo(_headline(job, found))
    render.show_table(_COLUMNS, _rows(found), words=("name", "state", "phase"))
    if (safety := safe.safety(job, found)) is not None:
        for line in safe.sentences(safety):
            click.echo(render.harmless(line))
    if (commits := safe.commits(job, found)) is not None:
        click.echo(safe.said_of(commits))
    for recovery in found.recoveries[-1:]:
        took = f"{render.ms(view.total_s(recovery))} ms"
        click.echo(
            f"last recovery: generation {recovery.generation}, {render.harmless(recovery.rung)},"
            f" {took}, {render.harmless(recovery.outcome or 'still running')}"
        )
    for text in view.voteless(found):
        click.echo(render.harmless(text))
    if (drill := view.last_drill(found)) is not None:
        click.echo(render.harmless(f"last drill: {render.clock(drill.at_s)}  {drill.text}"))
    for cause in _causes(found):
        click.echo(f"fault: {_sentence(cause)}")
    if (early := view.returned_early(job, found)) is not None:
        click.echo(render.harmless(early))
    if refused := view.refused(found):
        counts = ", ".join(f"{count} {kind}" for kind, count in refused.items())
        click.echo(f"refused, of an older generation or leader: {counts} (ckptctl events)")


def _step(found: Snapshot) -> int | None:
    """The newest that was done."""
    return max((slot.step for slot in found.slots if slot.step is not None), default=None)


def _causes(found: Snapshot) -> tuple[view.FaultGroup, ...]:
    return view.causes(found)[-_LAST_FAULTS:]


_COLUMNS = ("node", "name", "state", "slot", "rank", "pid", "phase", "step", "loss", "age")


def _headline(job: JobRecord, found: Snapshot) -> str:
    parts = [f"job {job.job}: {job.state}"]
    if job.state == "forming":
        parts += [job.reason or "every node is there", f"world {job.world_size}"]
        return render.harmless(", ".join(parts))
    step, spares = _step(found), view.spares_left(found)
    parts.append(f"generation {found.generation.generation if found.generation is not None else 'none'}")
    parts.append("no step yet" if step is None else f"step {step}")
    parts.append(f"world {job.world_size}")
    parts.append(f"{spares} {'spare' if spares == 1 else 'spares'} left")
    if job.exit_code is not None:
        parts.append(f"exit code {job.exit_code}")
    if job.reason:
        parts.append(job.reason)
    return render.harmless(", ".join(parts))


def _rows(found: Snapshot) -> Iterator[tuple[object, ...]]:
    nodes = {node.node: node for node in found.nodes}
    slots: dict[int, list[SlotRecord]] = {}
    for slot in found.slots:
        slots.setdefault(slot.node, []).append(slot)
    now_s, rank_of = time.time(), view.ranks_in(found.generation)
    for number in sorted(nodes.keys() | slots.keys()):
        head = _node_cells(number, nodes.get(number))
        if number not in slots:
            yield (*head, *[None] * (len(_COLUMNS) - len(head)))
        for slot in slots.get(number, ()):
            yield (
                *head,
                slot.slot,
                rank_of(slot),
                slot.pid,
                slot.phase,
                slot.step,
                None if slot.loss is None else f"{slot.loss:.6g}",
                render.span(now_s - slot.updated_s),
            )


def _node_cells(number: int, node: NodeRecord | None) -> tuple[object, ...]:
    return (number, None, "unknown") if node is None else (number, node.name, node.state)


def _sentence(cause: view.FaultGroup) -> str:
    fault, noticed = cause
    where = f"node {fault.node}"
    if fault.slot is not None:
        where += f" slot {fault.slot}"
    if fault.rank is not None:
        where += f" rank {fault.rank}"
    source = f" ({fault.source})" if fault.source is not None else ""
    text = f"{render.clock(fault.seen_s)}  {fault.kind}{source}  {where}"
    if fault.detail:
        text += f": {fault.detail}"
    if noticed:
        text += f"; noticed by {safe.named('rank', 'ranks', noticed)}"
    return render.harmless(text)
