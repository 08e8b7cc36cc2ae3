"""Jobs as a daemon knows them, by whatever has become of them; and what else its metrics are made of."""

from __future__ import annotations

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.metrics.readings import Facts, LedgerFacts
from ckptless.daemon.ckptlessd.metrics.tally import Tally
from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.planning.plan import RUNGS
from ckptless.daemon.ckptlessd.recovery.events import Stage
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.health import HealthReport, ProbeState, VerdictRecord
from ckptless.daemon.protocol.limits import Rank, Step
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Ballot, Decree, Durable
from ckptless.daemon.protocol.records import PHASES, FaultRecord, RecoveryRecord

NOW_S = 2000.0
STEP = 7
PACE = m.Pace(step=STEP, took_s=0.2, own_s=0.12, waited_s=0.05, data_s=0.02, commit_s=0.03)


def copies(*ranks: Rank, step: Step = STEP) -> m.Copies:
    """A node's copies of these ranks' state, none of which are twins."""
    return m.Copies(
        tensors=tuple((rank, (step,), 1000) for rank in ranks),
        records=tuple((rank, rank, (step,), 10) for rank in ranks),
        nbytes=1010 * len(ranks),
    )


def job(
    name: str = "4711",
    *,
    nodes: int = 3,
    slots: int = 2,
    spares: int = 1,
    leads: bool = True,
    stage: Stage = "running",
    step: int | None = STEP,
    generation: int = 1,
) -> JobState:
    """A job in its daemon on node 0; each node that trains has also copies of the next one's ranks."""
    ranks = nodes * slots
    all_nodes = range(nodes + spares)
    assignment = m.Assignment(
        job=name,
        generation=generation,
        term=1,
        leader=0,
        places=tuple(m.Place(node=rank // slots, slot=rank % slots) for rank in range(ranks)),
        nodes=tuple(m.NodeInfo(node=n, name=f"n{n}", address="127.0.0.1", agent_port=1) for n in all_nodes),
        restore_step=None,
    )
    known = Decree(index=1, voters=tuple(all_nodes), assignment=assignment)
    agreement = Agreement(0, Durable(promised=NO_BALLOT, vote=None, known=known), True, out=[])
    if leads:
        agreement.elected = True
    found = JobState(0, "s", NodeViews(tuple(all_nodes)), agreement, [], stage=stage, started=NOW_S - 60)
    found.generation, found.reign, found.leader = generation, Ballot(number=1, node=0), 0 if leads else 1
    found.reachable = set(all_nodes)
    for node in all_nodes:
        tell(found, node, slots, step if node < nodes else None)
        mine = [*range(node * slots, (node + 1) * slots)] if node < nodes else []
        held = copies(*mine, *[(rank + slots) % ranks for rank in mine])
        found.nodes[node].copies = (held, 1, NOW_S)
    return found


def tell(job: JobState, node: int, slots: int, step: int | None) -> None:
    """Have a node's agent tell of its slots; without a step they wait."""
    job.nodes[node].state = m.AgentState(
        seq=1,
        slots=tuple(
            m.SlotState(
                slot=slot,
                phase="waiting" if step is None else "restored",
                generation=job.generation,
                step=step,
                share=None if step is None else 0.01 * (slot + 1),
                pace=None if step is None else PACE,
            )
            for slot in range(slots)
        ),
    )


def recovery(outcome: str | None = "recovered", rung: str = "process", took_s: float = 0.7) -> RecoveryRecord:
    """One whose phases are all as long."""
    return RecoveryRecord(
        job="4711",
        generation=2,
        rung=rung,
        faults=(),
        restore_step=STEP,
        started_s=NOW_S,
        phases=dict.fromkeys(PHASES, took_s / len(PHASES)),
        outcome=outcome,
    )


def fault(kind: str = "died", number: int = 1) -> FaultRecord:
    return FaultRecord(
        fault=f"g1.t1.{number}",
        job="4711",
        kind=kind,
        node=0,
        slot=0,
        rank=0,
        generation=1,
        detail="secret",
        seen_s=NOW_S,
        source="process",
    )


def health(probes: int = 2, *, findings: int = 1) -> HealthReport:
    """A node with so many probes, each of which finds something."""
    names = [f"probe-{number}" for number in range(probes)]
    return HealthReport(
        node="n0",
        act="evict",
        probes=tuple(ProbeState(name=name, state="looks", looks=3, age_s=5.0, cost_s=0.25) for name in names),
        verdicts=tuple(
            VerdictRecord(
                probe=name,
                code="xid-79",
                where="GPU 0",
                action="evict",
                text="secret",
                count=1,
                first_s=1.0,
                last_s=2.0,
                begun_s=1.0,
            )
            for name in names
            for _ in range(findings)
        ),
    )


def facts(
    *jobs: tuple[str, JobState], tally: Tally | None = None, report: HealthReport | None = None
) -> Facts:
    return Facts(
        jobs=dict(jobs),
        tally=tally or Tally(),
        ledger=LedgerFacts(1 << 20, 3, 2, True),
        health=report,
        version="1.2.3",
        now=NOW_S,
    )


def lived(recoveries: int = 1) -> Tally:
    """What a daemon has counted that has led jobs through recoveries of every rung."""
    tally = Tally()
    for number in range(recoveries):
        tally.told([recovery(rung=rung) for rung in RUNGS])
        tally.told([fault(number=number), recovery("failed", "stop"), recovery("superseded")])
    return tally
