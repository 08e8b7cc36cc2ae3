"""The reason why Slurm ends a job, as far as it can be told from what Slurm says of it.

At the begin of a preemption's grace time Slurm signals the steps, not the batch script, and the job is
RUNNING as before: only PreemptTime tells. A job that ends is COMPLETING, whatever its end will be called.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The facts that Slurm tells of one job that may be about to end.

    Times are seconds since the Unix epoch, None where Slurm has none.
    """

    state: str
    reason: str = ""
    restarts: int = 0
    preempt_s: float | None = None
    end_s: float | None = None

    @property
    def in_grace(self) -> bool:
        """Whether it is preempted, and Slurm leaves it its nodes until its grace time is over."""
        return self.state == "RUNNING" and self.preempt_s is not None


def why_signalled(ending: Ending, signal: str, restarts: int) -> str:
    """Say why a job got a signal; `restarts`: how often Slurm had started it again when it began."""
    if ending.preempt_s is not None:
        return "preempted by Slurm"
    if ending.restarts > restarts:
        return "put back into Slurm's queue (scontrol requeue)"
    if ending.state == "TIMEOUT" or ending.reason == "TimeLimit":
        return "Slurm's time limit for the job"
    if ending.state == "DEADLINE" or ending.reason == "DeadLine":
        return "Slurm's deadline for the job"
    if ending.state == "RUNNING":
        return f"{signal} from the user (scancel --signal or sbatch --signal)"
    if ending.state in ("COMPLETING", "CANCELLED"):
        return "cancelled (scancel)"
    return f"Slurm has ended the job ({ending.state})"
