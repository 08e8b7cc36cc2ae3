"""`ckptctl explain`: why a job waits, what happened to it, and what to do: the ledger in sentences."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

import click

from ckptless.daemon.ckptctl.shared import render, view
from ckptless.daemon.ckptctl.shared.options import Asked, of_job
from ckptless.daemon.ledger.event_kinds import KINDS
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.records import PHASES, TRAINS, EventRecord, JobRecord, RecoveryRecord

# How a rung has answered a fault.
_RUNGS = {
    "in-process": "the same processes, their groups made anew",
    "process": "a new process on the same node",
    "spare": "a spare in place of a node",
    "grow": "more nodes",
    "shrink": "fewer nodes",
    "stop": "nothing that could answer it",
}
# Kinds that a sentence of the story tells of already.
_TOLD = frozenset({"generation", TRAINS, "recovered", "end", "agent-up"})
_AROUND_S = 60.0


class Sentence(NamedTuple):
    """A sentence, when it was so, and the rows that it is from: "fault g1.t1.1", "generation 2", ..."""

    at_s: float
    text: str
    evidence: tuple[str, ...]


class Advice(NamedTuple):
    """A kind of warning that the job has had: how often, the last of it, what it means, what to do."""

    kind: str
    often: int
    at_s: float
    text: str
    means: str
    to_do: str


@click.command()
@click.option("--at", "at", metavar="TIME", help="Only what happened then: 03:12, or 2026-11-27T03:12:30.")
@click.option("--kind", metavar="KIND", help="Say what a kind of event means, and what to do about it.")
@of_job
def explain(asked: Asked, at: str | None, kind: str | None) -> None:
    """Say in sentences how a job stands and why, what happened to it, and what there is to do.

    Each sentence ends with the rows of the ledger that it is from. With --at only what happened within a
    minute of that time, the latest there was.

    \b
    Example:
        ckptctl explain               why is my job waiting?
        ckptctl explain 4711 --at 03:12
        ckptctl explain --kind hung
    """
    if kind is not None:
        _explain_kind(kind, as_json=asked.as_json)
        return
    job, found, _ = view.job_of(asked, events=True)
    now_s = time.time()
    around = None if at is None else _moment(at, now_s)
    story = [one for one in told(job, found) if around is None or abs(one.at_s - around) <= _AROUND_S]
    notes = advice([one for one in found.events if around is None or abs(one.at_s - around) <= _AROUND_S])
    state = stands(job, found, now_s)
    if asked.as_json:
        render.show_json(
            job=job.job,
            state=state._asdict(),
            story=[one._asdict() for one in story],
            advice=[one._asdict() for one in notes],
        )
        return
    if around is None:
        _say(state, clock=False)
    elif not story and not notes:
        click.echo(
            f"nothing is recorded of job {job.job} within a minute of {render.clock(around)}", err=True
        )
    for sentence in story:
        _say(sentence)
    for one in notes:
        often = "" if one.often == 1 else f", {one.often} times, the last at {render.clock(one.at_s)}"
        click.echo()
        click.echo(render.harmless(f"{one.kind}{often}: {one.text}"))
        click.echo(f"    {one.means}.{f' To do: {one.to_do}.' if one.to_do else ''}")


def _say(sentence: Sentence, *, clock: bool = True) -> None:
    when = f"{render.clock(sentence.at_s)}  " if clock else ""
    rows = f" [{', '.join(sentence.evidence)}]" if sentence.evidence else ""
    click.echo(render.harmless(f"{when}{sentence.text}{rows}"))


def _explain_kind(kind: str, *, as_json: bool) -> None:
    one = KINDS.get(kind)
    if one is None:
        raise UsageError(f"no event is of the kind {kind[:80]!r}: see docs/events.md, or `ckptctl events`")
    if as_json:
        render.show_json(kind=kind, **one._asdict())
        return
    click.echo(f"{kind}: {one.means}.")
    if one.to_do:
        click.echo(f"To do: {one.to_do}.")


def _moment(text: str, now_s: float) -> float:
    """Return the time that is meant; of a time of day the latest there was. Raises UsageError."""
    now = datetime.fromtimestamp(now_s)
    try:
        if len(text) > len("00:00:00"):
            return datetime.fromisoformat(text).timestamp()
        then = datetime.combine(
            now.date(), datetime.strptime(f"{text}:00"[:8], "%H:%M:%S").time()
        ).timestamp()
    except ValueError as error:
        raise UsageError(f"--at {text}: a time is 03:12, 03:12:30, or 2026-11-27T03:12:30") from error
    return then if then <= now_s else then - 86400.0


def stands(job: JobRecord, found: Snapshot, now_s: float) -> Sentence:
    """Return how the job stands, and why."""
    if job.state in ENDED:
        ran = render.span((job.ended_s or now_s) - job.started_s)
        text = f"job {job.job} is {job.state} after {ran}, exit code {job.exit_code}: {job.reason}."
        return Sentence(job.ended_s or now_s, text, (f"job {job.job}",))
    if job.state == "forming" or found.generation is None:
        waits = job.reason or "waiting for its daemons to meet and agree"
        text = f"job {job.job} has not begun, for {render.span(now_s - job.started_s)}: {waits}."
        return Sentence(job.started_s, text, (f"job {job.job}",))
    running = next((one for one in reversed(found.recoveries) if one.outcome is None), None)
    if running is not None:
        phase = next((phase for phase in PHASES if phase not in running.phases), PHASES[-1])
        ago, why = render.span(now_s - running.started_s), _causes(running, found)
        text = f"job {job.job} recovers, for {ago}, since {why}; it is at: {phase}."
        waiting = [
            one for one in found.events if one.kind == "waits-for-node" and one.at_s >= running.started_s
        ]
        text += "".join(f" {one.text}." for one in waiting[-1:])
        return Sentence(running.started_s, text, (*_evidence(running), *(one.event for one in waiting[-1:])))
    generation = found.generation
    step = max((slot.step or 0 for slot in found.slots), default=0)
    spares = view.spares_left(found)
    since_s = _trains_since(found, generation.generation)
    going = f"trains since {render.clock(since_s)}" if since_s is not None else "begins to train"
    text = f"job {job.job} {going}, {len(generation.places)} ranks, step {step}; {spares} slots are spare."
    return Sentence(since_s or generation.agreed_s, text, (f"generation {generation.generation}",))


def _trains_since(found: Snapshot, generation: int) -> float | None:
    """Return when every rank had made a step in this generation; None where that is not known."""
    for one in found.recoveries:
        if one.generation == generation and one.outcome == "recovered":
            return one.started_s + view.total_s(one)
    times = (one.at_s for one in found.events if one.kind == TRAINS and one.generation == generation)
    return next(times, None)


def told(job: JobRecord, found: Snapshot) -> list[Sentence]:
    """Return what happened, in order: the start, each recovery, nodes that went, the end."""
    return sorted(
        [*_start(job, found), *map(lambda one: _recovery(one, found), found.recoveries), *_nodes(found)]
    )


def _start(job: JobRecord, found: Snapshot) -> Iterator[Sentence]:
    yield Sentence(
        job.started_s, f"The job began, on {job.nodes} nodes and {job.spares} spares.", (f"job {job.job}",)
    )
    first = found.generations[0] if found.generations else None
    if first is not None and first.generation == 1:
        origin = next((one.text for one in found.events if one.kind == "start"), "from the beginning")
        trains_s = _trains_since(found, 1)
        took = (
            ""
            if trains_s is None
            else f"; all had made a step {trains_s - job.started_s:.1f} s after its begin"
        )
        yield Sentence(first.agreed_s, f"{len(first.places)} ranks began, {origin}{took}.", ("generation 1",))
    if job.state in ENDED and job.ended_s is not None:
        yield Sentence(job.ended_s, f"The job ended, {job.state}: {job.reason}.", (f"job {job.job}",))


def _recovery(recovery: RecoveryRecord, found: Snapshot) -> Sentence:
    why, took_s = _causes(recovery, found), view.total_s(recovery)
    step = "" if recovery.restore_step is None else f" from step {recovery.restore_step}"
    rung = _RUNGS.get(recovery.rung, recovery.rung)
    match recovery.outcome:
        case "recovered":
            longest = max(recovery.phases, key=lambda phase: recovery.phases[phase])
            part = f"most of it {longest}, {render.ms(recovery.phases[longest])} ms"
            text = f"{_begun(why)}. The job went on{step} after {took_s:.2f} s ({part}), with {rung}."
        case "superseded":
            text = f"{_begun(why)}. Before the job went on, after {took_s:.2f} s, something else came."
        case "unwatched":
            text = f"{_begun(why)}. The script ran on, with {rung}; it tells of no steps."
        case "failed":
            text = f"{_begun(why)}. There was no way to go on."
        case _:
            text = f"{_begun(why)}. The job has not gone on yet."
    return Sentence(recovery.started_s, text, _evidence(recovery))


def _causes(recovery: RecoveryRecord, found: Snapshot) -> str:
    """Return what a recovery answers, as part of a sentence: as the story had it, else as the fault has."""
    faults = [one for one in found.faults if one.fault in recovery.faults]
    lines = [
        one.text
        for one in found.events
        if one.kind in KINDS
        and one.level != "info"
        and one.generation == recovery.generation - 1
        and any(fault.kind == one.kind or (fault.kind, one.kind) == _CORRUPT for fault in faults)
    ]
    if lines:
        return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
    if faults:
        return "; ".join(f"{one.kind} on node-{one.node}: {one.detail}" for one in faults[:3])
    return "a planned change" if not recovery.faults else "a fault that is not recorded here"


_CORRUPT = ("silent-corruption", "corrupt")


def _evidence(recovery: RecoveryRecord) -> tuple[str, ...]:
    return (*(f"fault {fault}" for fault in recovery.faults), f"generation {recovery.generation}")


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def _nodes(found: Snapshot) -> Iterator[Sentence]:
    """Yield the nodes that went or were taken out without a recovery: spares."""
    kinds = ("node-lost", "evicted", "leaves", "stays", "node-returned", "fenced", "waits-for-node")
    answered = {fault for recovery in found.recoveries for fault in recovery.faults}
    nodes = {one.node for one in found.faults if one.kind == "node-lost" and one.fault in answered}
    for one in found.events:
        if one.kind in kinds and not (
            one.kind in kinds[:2] and one.about is not None and one.about.node in nodes
        ):
            yield Sentence(one.at_s, f"{_begun(one.text)}.", (one.event,))


def advice(events: Sequence[EventRecord]) -> list[Advice]:
    """Return what the job was warned of and there is something to do about, the newest last."""
    last: dict[str, tuple[int, EventRecord]] = {}
    for one in events:
        if one.level != "info" and one.kind in KINDS and one.kind not in _TOLD and KINDS[one.kind].to_do:
            last[one.kind] = last.get(one.kind, (0, one))[0] + 1, one
    found = [
        Advice(kind, count, one.at_s, one.text, KINDS[kind].means, KINDS[kind].to_do)
        for kind, (count, one) in last.items()
    ]
    return sorted(found, key=lambda one: one.at_s)
