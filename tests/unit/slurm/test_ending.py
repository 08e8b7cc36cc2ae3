"""Why a job is signalled, by what Slurm 22.05 said in each of these cases."""

from __future__ import annotations

import pytest

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.ending import Ending, why_signalled
from ckptless.daemon.slurm.text import JobFormat

AT_S = 1_795_397_558.0
FORM = JobFormat.of_ending("separator_of_this_test")


@pytest.mark.parametrize(
    ("ending", "in_grace", "why"),
    [
        (Ending(state="RUNNING", preempt_s=AT_S), True, "preempted by Slurm"),
        # Without grace time, or at its end: as the site has it, requeued or cancelled.
        (Ending(state="COMPLETING", preempt_s=AT_S, restarts=1), False, "preempted by Slurm"),
        (Ending(state="COMPLETING", preempt_s=AT_S, end_s=AT_S), False, "preempted by Slurm"),
        (Ending(state="PREEMPTED", preempt_s=AT_S), False, "preempted by Slurm"),
        (
            Ending(state="COMPLETING", restarts=1),
            False,
            "put back into Slurm's queue (scontrol requeue)",
        ),
        (Ending(state="PENDING", restarts=1), False, "put back into Slurm's queue (scontrol requeue)"),
        (Ending(state="COMPLETING", reason="TimeLimit", end_s=AT_S), False, "Slurm's time limit for the job"),
        (Ending(state="TIMEOUT", reason="TimeLimit"), False, "Slurm's time limit for the job"),
        (Ending(state="DEADLINE"), False, "Slurm's deadline for the job"),
        (Ending(state="COMPLETING", end_s=AT_S), False, "cancelled (scancel)"),
        (Ending(state="CANCELLED"), False, "cancelled (scancel)"),
        (
            Ending(state="RUNNING"),
            False,
            "SIGTERM from the user (scancel --signal or sbatch --signal)",
        ),
        (Ending(state="NODE_FAIL"), False, "Slurm has ended the job (NODE_FAIL)"),
    ],
)
def test_why(ending: Ending, in_grace: bool, why: str) -> None:
    assert ending.in_grace is in_grace
    assert why_signalled(ending, "SIGTERM", 0) == why


def test_an_earlier_requeue_is_not_this_end() -> None:
    ending = Ending(state="COMPLETING", restarts=2, end_s=AT_S)
    assert why_signalled(ending, "SIGTERM", 2) == "cancelled (scancel)"
    assert why_signalled(ending, "SIGTERM", 1).startswith("put back")


def answer(*values: str) -> str:
    ends = [";"] * (len(values) - 1) + ["."]
    return "".join(f"{value}{FORM.secret}{end}" for value, end in zip(values, ends, strict=True)) + "\n"


def test_squeues_answer() -> None:
    said = answer("4711", "RUNNING", "None", "1", "2026-11-23T01:32:38", "NONE")
    said += answer("4712", "COMPLETING", "TimeLimit", "0", "N/A", "2026-11-23T01:32:38")
    assert FORM.read_endings(said) == {
        4711: Ending(state="RUNNING", restarts=1, preempt_s=AT_S),
        4712: Ending(state="COMPLETING", reason="TimeLimit", end_s=AT_S),
    }
    for bad in (said[:-9], answer("4711", "RUNNING"), answer("x", "RUNNING", "", "1", "N/A", "NONE")):
        with pytest.raises(ProtocolError):
            FORM.read_endings(bad)
