"""Pure: every metric: its name, type, labels and help. docs/metrics.md is written from this table."""

from typing import Literal, NamedTuple

# A series of its own for so many jobs at most; the totals have all of them.
MOST_JOBS = 100


class Metric(NamedTuple):
    """One metric. `name` is without `_total` and `_info`, which follow from the type.

    `per_job`: it is only there where the site wants to see single jobs (`metrics.jobs`), by a label `run`: to
    Prometheus `job` means something else.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    per_job: bool = False

    @property
    def series(self) -> str:
        """The name as queries have it, but for the suffixes of a histogram."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


OF_DAEMON = (
    Metric("ckptless_build", "info", "The ckptless that runs here.", ("version", "protocol")),
    Metric(
        "ckptless_tick_delay_seconds", "histogram", "How late the daemon's turns came; one is due each 50 ms."
    ),
    Metric("ckptless_ledger_size_bytes", "gauge", "Size of the ledger on the disk, with its log."),
    Metric("ckptless_ledger_waiting_rows", "gauge", "Rows that wait for the disk."),
    Metric("ckptless_ledger_lost_rows", "counter", "Rows that the disk did not take in time."),
    Metric("ckptless_ledger_writable", "gauge", "1 while the ledger's disk takes what is written, else 0."),
    Metric("ckptless_events", "counter", "Events that this daemon has told its jobs' ledgers.", ("level",)),
)

OF_HEALTH = (
    Metric("ckptless_probes", "gauge", "Probes of this node's health, by what they do.", ("state",)),
    Metric("ckptless_probe_duration_seconds", "gauge", "How long a probe's last look took.", ("probe",)),
    Metric("ckptless_probe_last_look_timestamp_seconds", "gauge", "When a probe looked last.", ("probe",)),
    Metric(
        "ckptless_health_findings",
        "gauge",
        "What stands against this node's health, by the probe and by what is to be done.",
        ("probe", "action"),
    ),
)

OF_NODE = (
    Metric("ckptless_node_jobs", "gauge", "Jobs that have this node, by their stage.", ("stage",)),
    Metric("ckptless_node_slots", "gauge", "Slots of this node, by what their process does.", ("phase",)),
    Metric("ckptless_node_held_bytes", "gauge", "Memory that is taken here for versions and replicas."),
    Metric(
        "ckptless_node_commit_ratio",
        "gauge",
        "Part of its time that a rank here spends on commits; of the one with the largest.",
    ),
    Metric("ckptless_node_jobs_without_lease", "gauge", "Jobs of whose voters this daemon hears too few."),
    Metric("ckptless_node_jobs_without_leader", "gauge", "Jobs of which this daemon hears no leader."),
    Metric("ckptless_node_jobs_without_vote", "gauge", "Jobs in which this daemon cannot vote."),
)

# Each job has one leader, so that sum() over all nodes counts it once.
OF_LED = (
    Metric("ckptless_jobs", "gauge", "Jobs that are led from here, by their stage.", ("stage",)),
    Metric("ckptless_ranks", "gauge", "Ranks of the jobs that are led from here."),
    Metric("ckptless_spare_nodes", "gauge", "Nodes of these jobs that wait to replace one."),
    Metric("ckptless_lost_nodes", "gauge", "Nodes of these jobs that are lost."),
    Metric("ckptless_stragglers", "gauge", "Ranks of these jobs that hold up the others."),
    Metric(
        "ckptless_state_parts_on_one_node",
        "gauge",
        "Tensors of a shard, or records of a rank, that one node alone holds.",
    ),
    Metric("ckptless_state_parts_lost", "gauge", "The same that no node holds."),
    Metric("ckptless_steps", "counter", "Steps that these jobs have done, those done again as well."),
    Metric("ckptless_faults", "counter", "Faults of these jobs, and who has seen them.", ("kind", "source")),
    Metric(
        "ckptless_recoveries",
        "counter",
        "Recoveries that are over, by how: recovered, failed, superseded by the next one, or unwatched.",
        ("outcome",),
    ),
    Metric(
        "ckptless_recovery_duration_seconds",
        "histogram",
        "From the first sign of a fault to the first new step, of what has recovered.",
        ("rung",),
    ),
    Metric(
        "ckptless_recovery_phase_duration_seconds",
        "histogram",
        "The same by phase: one after the other they are the whole recovery.",
        ("rung", "phase"),
    ),
    Metric("ckptless_jobs_ended", "counter", "Jobs that have ended, by how.", ("state",)),
    Metric(
        "ckptless_jobs_without_series",
        "gauge",
        f"Jobs that are led from here beyond the {MOST_JOBS} that have series of their own.",
        per_job=True,
    ),
)

OF_JOB = tuple(
    Metric(f"ckptless_job_{name}", "gauge", text, ("run", *labels), per_job=True)
    for name, text, labels in (
        ("training", "1 while the job trains, 0 in a recovery, at its start and at its end.", ()),
        ("generation", "The job's generation; each recovery adds one.", ()),
        ("step", "The newest step of the job's rank 0.", ()),
        ("ranks", "Ranks of the job.", ()),
        ("spare_nodes", "Nodes of the job that wait to replace one.", ()),
        ("lost_nodes", "Nodes of the job that are lost.", ()),
        ("stragglers", "Ranks of the job that hold up the others.", ()),
        ("state_parts_on_one_node", "Parts of the job's state that one node alone holds.", ()),
        ("state_parts_lost", "The same that no node holds.", ()),
        ("commit_ratio", "Part of its time that rank 0 spends on commits.", ()),
        (
            "step_duration_seconds",
            "What rank 0's last steps took in the median, by part: work, data (it waits for a batch), "
            "waiting (for others), commit.",
            ("part",),
        ),
    )
)

METRICS = (*OF_DAEMON, *OF_HEALTH, *OF_NODE, *OF_LED, *OF_JOB)
# Said of the process by prometheus_client itself.
OF_PROCESS = "ckptless_process"
