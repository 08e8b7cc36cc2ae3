"""What scripts for torchrun ask of torch.distributed is answered in ckptless.run; after a fault as before."""

from __future__ import annotations

from pathlib import Path

from .localrun import HERE, Job

SCRIPT = HERE / "asked_script.py"
NEVER = 99


def finals(home: Path, kill_step: int) -> set[str]:
    home.mkdir()
    with Job(home, ["--nodes", 2, "--tee", "none"], [SCRIPT, home, kill_step]) as job:
        job.ended(0)
        # The survivor may see it first, and goes on in its process.
        kinds = {one.kind for one in job.ledger().faults} - {"broken"}
        assert kinds == (set() if kill_step == NEVER else {"died"}), job.story()
        assert len(job.ledger().recoveries) == len(kinds), job.story()
    return {path.name + path.read_text() for path in home.glob("final-*.txt")}


def test_groups_that_a_script_makes_and_destroys_are_those_that_are_there(tmp_path: Path) -> None:
    found = finals(tmp_path / "struck", 5)
    assert len(found) == 2
    assert found == finals(tmp_path / "clean", NEVER)


def test_a_sum_before_keep_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A new process would have summed nothing there, silently."""
    with Job(tmp_path, ["--nodes", 2, "--tee", "none"], [SCRIPT, tmp_path, NEVER, "early"]) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert "UsageError: allreduce before run.keep: after a fault a new process has nobody" in str(
            row.reason
        )
        assert not [event for event in job.ledger().events if event.kind == "recovered"]
