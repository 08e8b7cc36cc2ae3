"""The facts that Slurm tells of jobs and nodes, and the limits of what may be said to it of them."""

from dataclasses import dataclass, field, replace
from typing import Any

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.slurm.hostlist import is_node_name

DEADLINE_S = 10.0
MAX_REASON = 200
MAX_JOB_ID = 2**32 - 10
MAX_DRAW_IN = 1000

# A job in one of these is over; it comes back only if somebody requeues it.
OVER = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "SPECIAL_EXIT",
        "TIMEOUT",
    )
)
HOLDS_NODES = frozenset(
    (
        "RUNNING",
        "CONFIGURING",
        "RESIZING",
        "SIGNALING",
        "STOPPED",
        "SUSPENDED",
        "STAGE_OUT",
        "COMPLETING",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as Slurm sees it. `name` and `comment` are the user's words, and may hold anything.

    `nodes` are those of the allocation at this moment. `batch_host` is "" where there is no batch script.
    Times are seconds since the Unix epoch, None where Slurm has none; `time_limit_s` None is no limit.
    """

    job_id: int
    user_id: int
    state: str
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    batch_host: str = ""
    partition: str = ""
    start_s: float | None = None
    end_s: float | None = None
    time_limit_s: float | None = None
    reason: str = ""
    name: str = ""
    comment: str = ""
    array: str = ""
    """`2_7` for a task of an array, `2_[8-9]` for its tasks that wait together as one job, else ""."""

    @property
    def running(self) -> bool:
        """Whether it has its nodes and its processes run."""
        return self.state == "RUNNING"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER

    @property
    def holds_nodes(self) -> bool:
        """Whether the job's nodes are its own: running, or on the way there or from there."""
        return self.state in HOLDS_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as Slurm sees it.

    `state` is the base state (IDLE, MIXED, ALLOCATED, DOWN, ...), `flags` what is added to it (DRAIN,
    NOT_RESPONDING, ...). `reason` is why it is drained or down, `reason_s` when that was said. `boot_s` is
    when it booted, to a second or two; None if it has not registered since it was added, or given back. Times
    are seconds since the Unix epoch.
    """

    name: str
    address: str
    state: str
    flags: frozenset[str] = field(default_factory=frozenset)
    reason: str = ""
    reason_s: float | None = None
    boot_s: float | None = None
    slurmd_start_s: float | None = None
    cpus: int = 0
    partitions: tuple[str, ...] = ()
    version: str = ""

    @property
    def down(self) -> bool:
        """Slurm runs nothing there and has ended what ran."""
        return self.state in ("DOWN", "ERROR", "UNKNOWN", "FUTURE") or "FAIL" in self.flags

    @property
    def draining(self) -> bool:
        """Whether no new job starts there; running ones go on."""
        return "DRAIN" in self.flags

    @property
    def maintained(self) -> bool:
        """Whether a reservation for its maintenance has begun; what runs there goes on."""
        return "MAINTENANCE" in self.flags

    @property
    def responding(self) -> bool:
        """Whether the node's slurmd answers, as far as Slurm knows yet."""
        return "NOT_RESPONDING" not in self.flags

    @property
    def idle(self) -> bool:
        """A job could start there now."""
        return self.state == "IDLE" and not self.flags & _KEEPS_JOBS_AWAY


_KEEPS_JOBS_AWAY = frozenset(
    (
        "DRAIN",
        "NOT_RESPONDING",
        "FAIL",
        "MAINTENANCE",
        "RESERVED",
        "COMPLETING",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWERING_UP",
        "POWER_DOWN",
        "POWER_UP",
        "POWER_DRAIN",
        "REBOOT_REQUESTED",
        "REBOOT_ISSUED",
        "PLANNED",
        "BLOCKED",
        "INVALID",
        "INVALID_REG",
    )
)


def node_of(*, reason: str, reason_s: float | None, **fields: Any) -> Node:
    """A Node whose reason is for its state: some Slurms keep that of a state that is over."""
    node = Node(**fields)
    return replace(node, reason=reason, reason_s=reason_s) if node.draining or node.down else node


def check_node(name: str) -> str:
    """Return `name`; UsageError if it is not one node's name."""
    if not is_node_name(name):
        raise UsageError(f"{name[:80]!r} is not a node's name")
    return name


def check_job(job_id: int) -> int:
    """Return `job_id`; UsageError if it cannot be one."""
    if not 0 < job_id < MAX_JOB_ID:
        raise UsageError(f"{job_id} is not a job's number")
    return job_id


def check_text(text: str, what: str = "reason") -> str:
    """Return `text`, which others will read in Slurm's answers; UsageError if it is unfit for that.

    It must not be empty, long or unprintable, nor hold quotes, which scontrol takes for its own.
    """
    if not text.strip():
        raise UsageError(f"the {what} is empty: say why in a few words")
    if len(text) > MAX_REASON:
        raise UsageError(
            f"the {what} has {len(text)} characters; Slurm gets at most {MAX_REASON}: shorten it"
        )
    if not text.isprintable() or any(quote in text for quote in "\"'`\\"):
        raise UsageError(
            f"the {what} {text[:80]!r} holds quotes, backslashes or control characters: leave them out"
        )
    return text
