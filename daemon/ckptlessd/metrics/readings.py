"""Pure: from what a daemon knows to the values of its metrics, each by the values of its labels."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, get_args

from ckptless.daemon.ckptlessd.metrics.catalog import METRICS, MOST_JOBS
from ckptless.daemon.ckptlessd.metrics.tally import Histogram, Tally, first_slot
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.ckptlessd.recovery.events import Stage
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol.health import HealthReport
from ckptless.daemon.protocol.messages import PROTOCOL, Pace, Phase, SlotState
from ckptless.daemon.protocol.records import HoldingRecord, Level
from ckptless.daemon.replication.protection import protection

OUTCOMES = ("recovered", "superseded", "failed", "unwatched")
# Of a job's name, which in local mode is its user's choice.
MOST_NAME = 64
Values: TypeAlias = Mapping[tuple[str, ...], float | Histogram]


class LedgerFacts(NamedTuple):
    """The state of the ledger, as far as it is known without asking its disk."""

    nbytes: int = 0
    waiting: int = 0
    lost: int = 0
    writable: bool = True


class Parts(NamedTuple):
    """Parts of a job's state that one node alone holds, and that none does."""

    alone: int = 0
    lost: int = 0


class Held(NamedTuple):
    """The holdings of a job's nodes, as its leader knows them; for `parts`."""

    holdings: tuple[HoldingRecord, ...]
    lost: frozenset[int]
    world_size: int
    nodes: int


@dataclass(frozen=True)
class Facts:
    """All that the metrics are made of, at `now` in Unix time; `health` is None where nobody looks at it."""

    jobs: Mapping[str, JobState]
    tally: Tally
    ledger: LedgerFacts
    health: HealthReport | None
    version: str
    now: float


def held(name: str, job: JobState) -> Held | None:
    """Return who holds what of a job; None where that is not known here, or nothing is to be held."""
    if not job.leads or job.stage != "running" or job.assignment is None:
        return None
    rows = (ledger_rows.holding(name, n, view.copies) for n, view in job.nodes.items() if view.copies)
    holdings = tuple(rows)
    if not any(one.records for one in holdings):
        return None
    return Held(holdings, frozenset(job.losses), len(job.assignment.places), len(job.nodes))


def parts(what: Held) -> Parts:
    """Count the parts that few hold. It takes milliseconds for hundreds of ranks, seconds for 100,000."""
    found = protection(what.holdings, what.lost, what.world_size, what.nodes).exposure
    return Parts(sum(map(len, found.one.values())), len(found.gone))


def readings(facts: Facts, known: Mapping[str, Parts], *, per_job: bool) -> dict[str, Values]:
    """Return the values of every metric, by its name. `known`: parts of jobs that are led from here."""
    open_jobs = {name: job for name, job in facts.jobs.items() if job.outcome is None}
    led = {name: job for name, job in open_jobs.items() if job.leads}
    values = {
        **_of_daemon(facts),
        **_of_health(facts.health, facts.now),
        **_of_node(facts.jobs.values(), tuple(open_jobs.values())),
        **_of_led(led, known, facts.tally),
    }
    if per_job:
        newest = sorted(led.items(), key=lambda one: -one[1].started)[:MOST_JOBS]
        named = {name[:MOST_NAME]: (job, known.get(name, Parts())) for name, job in newest}
        values |= {"ckptless_jobs_without_series": {(): float(len(led) - len(named))}, **_of_jobs(named)}
    return {one.name: values[one.name] for one in METRICS if per_job or not one.per_job}


def _of_daemon(facts: Facts) -> dict[str, Values]:
    ledger, tally = facts.ledger, facts.tally
    return {
        "ckptless_build": {(facts.version, str(PROTOCOL)): 1.0},
        "ckptless_tick_delay_seconds": {(): tally.delays},
        "ckptless_ledger_size_bytes": {(): ledger.nbytes},
        "ckptless_ledger_waiting_rows": {(): ledger.waiting},
        "ckptless_ledger_lost_rows": {(): ledger.lost},
        "ckptless_ledger_writable": {(): float(ledger.writable)},
        "ckptless_events": _all(get_args(Level), tally.events),
    }


def _of_health(report: HealthReport | None, now: float) -> dict[str, Values]:
    probes = report.probes if report is not None else ()
    standing = [one for one in report.verdicts if one.ended_s is None] if report is not None else []
    looked = [one for one in probes if one.age_s is not None]
    return {
        "ckptless_probes": _all(("looks", "off", "hangs", "failed"), Counter((one.state,) for one in probes)),
        "ckptless_probe_duration_seconds": {(one.name,): one.cost_s for one in looked},
        "ckptless_probe_last_look_timestamp_seconds": {(one.name,): now - (one.age_s or 0) for one in looked},
        "ckptless_health_findings": Counter((one.probe, one.action) for one in standing),
    }


def _of_node(known: Iterable[JobState], jobs: Sequence[JobState]) -> dict[str, Values]:
    slots = [slot for job in jobs for slot in job.nodes[job.me].slots()]
    holdings = [job.nodes[job.me].copies for job in jobs]
    leaderless = [job for job in jobs if not job.leads and not job.hears_leader]
    return {
        "ckptless_node_jobs": _all(get_args(Stage), Counter((job.stage,) for job in known)),
        "ckptless_node_slots": _all(get_args(Phase), Counter((slot.phase,) for slot in slots)),
        "ckptless_node_held_bytes": {(): sum(one[0].nbytes for one in holdings if one is not None)},
        "ckptless_node_commit_ratio": {
            (): max((share for job in jobs for share in _shares(job)), default=0.0)
        },
        "ckptless_node_jobs_without_lease": {(): sum(not job.lease.held for job in jobs)},
        "ckptless_node_jobs_without_leader": {(): len(leaderless)},
        "ckptless_node_jobs_without_vote": {(): sum(not job.agreement.able for job in jobs)},
    }


def _shares(job: JobState) -> Iterable[float]:
    """Yield those of the ranks here: what has left, as of a node that is unwell, still says its last one."""
    if job.assignment is not None:
        for rank in job.assignment.ranks_on(job.me):
            slot = job.nodes[job.me].slot(job.assignment.places[rank].slot)
            yield slot.share or 0.0 if slot is not None else 0.0


def _of_led(led: Mapping[str, JobState], known: Mapping[str, Parts], tally: Tally) -> dict[str, Values]:
    jobs, few = led.values(), [known.get(name, Parts()) for name in led]
    return {
        "ckptless_jobs": _all(get_args(Stage), Counter((job.stage,) for job in jobs)),
        "ckptless_ranks": {(): sum(map(_ranks, jobs))},
        "ckptless_spare_nodes": {(): sum(map(_spares, jobs))},
        "ckptless_lost_nodes": {(): sum(len(job.losses) for job in jobs)},
        "ckptless_stragglers": {(): sum(len(job.held_up_by) for job in jobs)},
        "ckptless_state_parts_on_one_node": {(): sum(one.alone for one in few)},
        "ckptless_state_parts_lost": {(): sum(one.lost for one in few)},
        "ckptless_steps": {(): tally.steps},
        "ckptless_faults": tally.faults,
        "ckptless_recoveries": _all(OUTCOMES, tally.outcomes),
        "ckptless_recovery_duration_seconds": tally.recoveries,
        "ckptless_recovery_phase_duration_seconds": tally.phases,
        "ckptless_jobs_ended": _all(("done", "failed", "stopped"), tally.ended),
    }


def _of_jobs(jobs: Mapping[str, tuple[JobState, Parts]]) -> dict[str, Values]:
    slots = {name: slot for name, (job, _) in jobs.items() if (slot := first_slot(job)) is not None}
    values: dict[str, Values] = {
        "training": {(name,): float(job.stage == "running") for name, (job, _) in jobs.items()},
        "generation": {(name,): job.generation for name, (job, _) in jobs.items()},
        "step": {(name,): slot.step for name, slot in slots.items() if slot.step is not None},
        "ranks": {(name,): _ranks(job) for name, (job, _) in jobs.items()},
        "spare_nodes": {(name,): _spares(job) for name, (job, _) in jobs.items()},
        "lost_nodes": {(name,): len(job.losses) for name, (job, _) in jobs.items()},
        "stragglers": {(name,): len(job.held_up_by) for name, (job, _) in jobs.items()},
        "state_parts_on_one_node": {(name,): few.alone for name, (_, few) in jobs.items()},
        "state_parts_lost": {(name,): few.lost for name, (_, few) in jobs.items()},
        "commit_ratio": {(name,): slot.share for name, slot in slots.items() if slot.share is not None},
        "step_duration_seconds": {
            (name, part): took_s for name, slot in slots.items() for part, took_s in _parts_of_step(slot)
        },
    }
    return {f"ckptless_job_{name}": found for name, found in values.items()}


def _parts_of_step(slot: SlotState) -> Iterable[tuple[str, float]]:
    pace: Pace | None = slot.pace
    if pace is None:
        return ()
    # Medians of their own: their difference may be a little below nothing.
    work_s = max(0.0, pace.own_s - pace.data_s)
    return ("work", work_s), ("data", pace.data_s), ("waiting", pace.waited_s), ("commit", pace.commit_s)


def _ranks(job: JobState) -> int:
    return len(job.assignment.places) if job.assignment is not None else 0


def _spares(job: JobState) -> int:
    """Count the nodes of the generation without a rank, but for lost ones."""
    if job.assignment is None:
        return 0
    with_ranks = job.assignment.ranks_by_node.keys()
    return len(job.assignment.members - with_ranks - job.losses.keys())


def _all(labels: Iterable[str], counted: Mapping[tuple[str, ...], int]) -> Values:
    """Return a value for each, 0 too: a series that is there from the beginning can be alerted on."""
    return {(label,): counted.get((label,), 0) for label in labels}
