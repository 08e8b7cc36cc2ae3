"""Saved steps on real Slurm: of a cancelled job the newest step is saved, and another goes on from there."""

from __future__ import annotations

from ckptless.daemon.protocol import saved
from tests.local.localrun import reference

from .cluster.api import Cluster
from .training import STEPS, USER, Training

NODES = 5


def test_scancel_and_another_job_goes_on(site: Cluster) -> None:
    """scancel signals every process of the steps, and a time limit does it in the same way."""
    options = ("--save-dir", "/shared/saved")
    job = Training(site, run_options=options).submit()
    job.trains()
    site.run("ctl", "scancel", str(job.job_id), user=USER)
    job.wait(lambda: job.slurm("JobState") == "CANCELLED", "Slurm has ended it", 60.0)
    job.nothing_left()
    newest = job.newest()
    ((step, folder),) = saved.steps_in(site.shared / "saved")
    assert newest - 1 <= step <= newest + 1, job.story()
    assert saved.read_manifest(folder).world_size == 4

    site.wait_idle()
    again = Training(site, run_options=options).submit()
    again.ended()
    clean, found = reference(STEPS), again.result()
    assert set(found.losses) == {(rank, n) for rank in range(4) for n in range(step + 1, STEPS + 1)}
    wrong = {at: lines for at, lines in found.losses.items() if lines != clean.losses[at]}
    assert not wrong, f"other losses: {sorted(wrong.items())[:6]}\n{again.story()}"
    assert found.finals == clean.finals
    assert saved.steps_in(site.shared / "saved")[0][0] == STEPS
