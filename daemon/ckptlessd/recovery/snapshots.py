"""Pure: rows that each daemon writes of its own accord, again and again: nodes, slots, what they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.ckptlessd.recovery.events import Write
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import JobRecord, Record
from ckptless.daemon.replication.protection import FEW_NODES as FEW

REPORT_INTERVAL_S = 1.0
# Of so many nodes' reports that only tell of new steps the leader hears in a second, and writes rows.
NODES_A_SECOND = 256


@dataclass
class Snapshots:
    """Writes rows for this daemon's ledger alone: of many nodes its own, and a leader some with news."""

    job: JobState
    # Nodes of which rows are to be written, the oldest news first.
    _news: dict[int, None] = field(default_factory=dict)
    # Of each node, what was last written of what it holds.
    _written: dict[int, m.Copies] = field(default_factory=dict)
    # The job's row while there is no generation, and when it was looked at last.
    _row: JobRecord | None = None
    _row_at: float = 0.0

    def has_news(self, node: int) -> None:
        """Take note that a node's agent has told something."""
        self._news[node] = None

    def write_snapshot(self, now: float) -> None:
        """Write how the nodes are, as this daemon sees them."""
        if self.job.spec is not None:
            self.job.out.append(Write(tuple(self._snapshot(self.job.spec, now)), share=False))

    def _snapshot(self, spec: m.JobSpec, now: float) -> list[Record]:
        job = self.job
        views: Mapping[int, NodeView] = job.nodes
        if len(views) > FEW:
            news = [*self._news][:NODES_A_SECOND] if job.leads else []
            views = {node: job.nodes[node] for node in {job.me, *news}}
        self._news = {node: None for node in self._news if node not in views}
        # A daemon that ends with its job is not away.
        there = job.reachable if job.known.outcome is None else set(job.nodes)
        rows = ledger_rows.snapshot((spec, job.me), views, job.assignment, there, now)
        # What is held elsewhere only the leader is told of all the time.
        for node in sorted(views) if job.leads else (job.me,):
            held = views[node].copies
            if held is not None and held[0] != self._written.get(node):
                self._written[node] = held[0]
                rows.append(ledger_rows.holding(spec.job, node, held))
        return rows

    # ------------------------------------------------------------------------ before generation 1

    def write_job(self, now: float) -> None:
        """Write the job's own row until there is a generation, of which its leader tells.

        What this daemon has forgotten of a job it does not take for the beginning.
        """
        job = self.job
        if job.assignment is not None or job.spec is None or not job.agreement.may_vote:
            return
        outcome, loss = job.outcome, job.losses.get(job.me)
        if loss is not None and loss.source == "lease":
            outcome = m.Outcome(state="failed", exit_code=4, reason=loss.reason, why="no-quorum")
        if outcome is None and now - self._row_at < REPORT_INTERVAL_S:
            return
        self._row_at = now
        if outcome is None:
            row = ledger_rows.forming(job.spec, job.started, self.waits_for)
        elif self._row is None or self._row.ended_s is None:
            row = ledger_rows.job(job.spec, outcome.state, job.started, outcome, now)
        else:
            return
        if row != self._row:
            self._row = row
            self.job.out.append(Write((row,), share=False))

    def job_runs(self) -> None:
        """Write that the job forms no more; the leader's word of it may be lost on its way."""
        if self._row is not None:
            assert self.job.spec is not None  # it has a row
            self._row = None
            ranks = len(self.job.assignment.places) if self.job.assignment is not None else None
            row = ledger_rows.job(self.job.spec, "running", self.job.started, ranks=ranks)
            self.job.out.append(Write((row,), share=False))

    @property
    def waits_for(self) -> list[int]:
        """Before the first generation: nodes whose agents are not up, as far as this daemon knows."""
        job = self.job
        there = set() if job.leads else job.reachable | job.heartbeats
        views = sorted(job.nodes.items())
        missing = [n for n, view in views if view.hello is None and view.lost is None and not view.late]
        return [n for n in missing if n not in there]
