"""Pure: what the control plane knows, as rows for the ledger."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.faults import Fault, NodeView
from ckptless.daemon.ckptlessd.recovery.timeline import Timeline
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import (
    EventRecord,
    FaultRecord,
    GenerationRecord,
    HoldingRecord,
    JobRecord,
    JobState,
    NodeRecord,
    NodeState,
    Record,
    RecoveryRecord,
    SlotRecord,
)

# So many nodes are called by their names in a row, and of so many ranks it is said where they are.
NAMED = 8
TOLD = 16


def job(  # all that a row says
    spec: m.JobSpec,
    state: JobState,
    started_s: float,
    outcome: m.Outcome | None = None,
    now: float = 0.0,
    *,
    ranks: int | None = None,
) -> JobRecord:
    """The job's row; with an outcome, how it ended. `ranks`: how many it has now, unless as at first."""
    return JobRecord(
        job=spec.job,
        command=spec.command,
        world_size=spec.world_size if ranks is None else ranks,
        nodes=spec.nodes,
        spares=spec.spares,
        state=state,
        started_s=started_s,
        ended_s=now if outcome is not None else None,
        exit_code=outcome.exit_code if outcome is not None else None,
        reason=outcome.reason if outcome is not None else None,
    )


def forming(spec: m.JobSpec, started_s: float, waits_for: Sequence[int]) -> JobRecord:
    """The row of a job that has no generation yet, with the nodes that it still waits for."""
    names = [name_in(spec, node) for node in waits_for[:NAMED]]
    more = f" and {len(waits_for) - NAMED} more" if len(waits_for) > NAMED else ""
    reason = f"waiting for {', '.join(names)}{more}" if names else None
    return structs.replace(job(spec, "forming", started_s), reason=reason)


def name_in(spec: m.JobSpec, node: int) -> str:
    """Return the launcher's name for a node."""
    return spec.names[node] if node < len(spec.names) else f"node-{node}"


def generation(assignment: m.Assignment, now: float) -> GenerationRecord:
    """The row of an agreed generation."""
    return GenerationRecord(
        job=assignment.job,
        generation=assignment.generation,
        places=tuple((place.node, place.slot) for place in assignment.places),
        restore_step=assignment.restore_step,
        rung=assignment.rung,
        faults=assignment.faults,
        leader=assignment.leader,
        agreed_s=now,
    )


def fault(assignment: m.Assignment, fault: Fault, now: float) -> FaultRecord:
    """The row of a fault; `seen_s` is when its source first saw it."""
    finding = fault.finding
    return FaultRecord(
        fault=fault.id,
        job=assignment.job,
        kind=finding.kind,
        node=finding.node,
        slot=finding.slot,
        rank=finding.rank,
        generation=assignment.generation,
        detail=finding.detail,
        seen_s=now - finding.age_s,
        source=finding.source,
    )


def recovery(assignment: m.Assignment, timeline: Timeline, outcome: str | None) -> RecoveryRecord:
    """The row of a recovery that leads to `assignment`, as far as it came."""
    return RecoveryRecord(
        job=assignment.job,
        generation=assignment.generation,
        rung=assignment.rung,
        faults=assignment.faults,
        restore_step=assignment.restore_step,
        started_s=timeline.started_s,
        phases=timeline.phases(),
        outcome=outcome,
    )


def failed_recovery(assignment: m.Assignment, timeline: Timeline, faults: Sequence[Fault]) -> RecoveryRecord:
    """The row of a recovery that found no answer: the generation after `assignment` never came."""
    return RecoveryRecord(
        job=assignment.job,
        generation=assignment.generation + 1,
        rung="stop",
        faults=tuple(fault.id for fault in faults),
        restore_step=None,
        started_s=timeline.started_s,
        phases=timeline.phases(),
        outcome="failed",
    )


def event(event_id: str, job: str, node: int, line: Line, when: tuple[float, int | None]) -> EventRecord:
    """A line of the story, with its time and generation."""
    at_s, in_generation = when
    return EventRecord(
        event=event_id,
        job=job,
        node=node,
        at_s=at_s,
        level=line.level,
        kind=line.kind,
        generation=in_generation,
        text=line.text,
        about=line.about,
    )


def describe(assignment: m.Assignment) -> str:
    """A generation in one line."""
    ranks = ", ".join(f"{r} on node-{p.node}/{p.slot}" for r, p in enumerate(assignment.places[:TOLD]))
    more = f", and {len(assignment.places) - TOLD} more" if len(assignment.places) > TOLD else ""
    start = "from the start" if assignment.restore_step is None else f"from step {assignment.restore_step}"
    flaps = ", ".join(f"node-{place.node}/{place.slot}" for place in assignment.flapping[:TOLD])
    why = f"; flapping: {flaps}" if flaps else ""
    return f"generation {assignment.generation} ({assignment.rung}), {start}: rank {ranks}{more}{why}"


def snapshot(
    whose: tuple[m.JobSpec, int],
    nodes: Mapping[int, NodeView],
    assignment: m.Assignment | None,
    reachable: Iterable[int],
    now: float,
) -> list[Record]:
    """The nodes and slots as this daemon sees them now; `whose`: the job, and this daemon's node.

    Slots of other nodes are as of when they were told of: their own daemons, and who leads, know better.
    """
    spec, me = whose
    rows: list[Record] = []
    up = set(reachable)
    for node, view in sorted(nodes.items()):
        if view.hello is None:
            continue
        state: NodeState = "lost" if view.lost is not None else "up" if node in up else "daemon-away"
        rows.append(
            NodeRecord(
                job=spec.job,
                node=node,
                name=view.hello.info.name,
                address=view.hello.info.address,
                state=state,
                daemon_pid=view.state.daemon_pid if view.state is not None else None,
                agent_pid=view.hello.pid,
                updated_s=now,
                domain=spec.domains[node] if node < len(spec.domains) else "",
            )
        )
        # Of a lost node's slots the last word stands.
        slots = view.state.slots if view.state is not None and view.lost is None else ()
        as_of = now if node == me else view.told_s
        rows += [_slot(spec.job, node, slot, assignment, as_of) for slot in slots]
    return rows


def holding(job: str, node: int, held: tuple[m.Copies, int, float]) -> HoldingRecord:
    """The row of what a node holds: `held` as in NodeView."""
    copies, seq, told_s = held
    return HoldingRecord(
        job=job,
        node=node,
        tensors=copies.tensors,
        records=copies.records,
        nbytes=copies.nbytes,
        rings=copies.rings,
        seq=seq,
        updated_s=told_s,
    )


def _slot(
    job: str, node: int, slot: m.SlotState, assignment: m.Assignment | None, as_of: float
) -> SlotRecord:
    place = m.Place(node=node, slot=slot.slot)
    return SlotRecord(
        job=job,
        node=node,
        slot=slot.slot,
        rank=assignment.rank_at(place) if assignment is not None else None,
        generation=slot.generation,
        pid=slot.pid,
        phase=slot.phase,
        step=slot.step,
        loss=slot.loss,
        updated_s=as_of,
        every=slot.every,
        share=slot.share,
        pace=slot.pace,
        spent=slot.spent,
    )
