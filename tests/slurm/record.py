"""Record what Slurm's commands print, for the tests of the parsers: `record.py [--rootfs ROOT]`.

Brings up a cluster (of this machine's Slurm, or of the one in ROOT, see chroot.py), makes jobs and nodes in
many states, and writes recorded/VERSION/. What differs from run to run and says nothing (kernel, load, free
memory) is replaced.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ckptless.daemon.slurm.text import JobFormat

from .cluster import requirements
from .cluster.api import Cluster
from .cluster.plan import Plan

# Of a recording everybody knows it; in use it is a new one each time.
SECRET = "separator_of_recordings"
RECORDED = Path(__file__).parent / "recorded"
DEADLINE_S = 30.0

CONF = {
    "SchedulerParameters": "permit_job_expansion,batch_sched_delay=0,sched_interval=2,bf_interval=2",
    "ReturnToService": "1",
    "PrologFlags": "",
}
NOISE = (
    (re.compile(r"OS=.*?(?=\s+RealMemory=)"), "OS=Linux 6.1.0-1-amd64 #1 SMP PREEMPT_DYNAMIC @0 "),
    (re.compile(r"CPULoad=\S+"), "CPULoad=0.10"),
    (re.compile(r"FreeMem=\S+"), "FreeMem=3000"),
)
JOBS_QUERY = ("squeue", "--noheader", "--all", "--states=all")


class Recorder:
    """One cluster, and what its commands print."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder

    def run(self, *argv: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as the adapter does."""
        env = {"LC_ALL": "C", "TZ": "UTC", "SQUEUE_FORMAT2": JobFormat(SECRET).text}
        return self._cluster.run("ctl", *argv, user=user, env=env, check=False)

    def must(self, *argv: str, user: str = "root") -> str:
        """The same, and it succeeds; what it printed."""
        done = self.run(*argv, user=user)
        if done.returncode:
            raise SystemExit(f"{' '.join(argv)}: {done.stderr}{done.stdout}")
        return done.stdout

    def save(self, name: str, text: str) -> None:
        """Write one recording."""
        for pattern, instead in NOISE:
            text = pattern.sub(instead, text)
        (self._folder / name).write_text(text)

    def submit(self, *options: str) -> str:
        """A batch job of the user tester; its number."""
        return self.must("sbatch", "--parsable", *options, "--wrap=sleep 600", user="tester").strip()

    def wait(self, job: str, state: str) -> None:
        """Until the job is in that state."""
        limit = time.monotonic() + DEADLINE_S
        while self.must("squeue", "-h", "--states=all", f"--jobs={job}", "-o", "%T").strip() != state:
            if time.monotonic() > limit:
                raise SystemExit(f"job {job} is not {state} within {DEADLINE_S:.0f} s")
            time.sleep(0.1)


def record(recorder: Recorder) -> None:
    """Make the scenes and write what is printed."""
    whole = ("--exclusive", "--ntasks-per-node=1")
    plain = recorder.submit("-N2", *whole, "--no-kill", "--job-name=train", "--comment=spares=1 run a=b")
    spoof = "x UserId=root(0) GroupId=root(0) JobState=RUNNING"
    hostile = recorder.submit("-N1", "-n1", f"--job-name=one\ntwo {spoof}", f"--comment=\n1;{spoof}\n")
    limited = recorder.submit("-N1", "-n1", "--time=1-02:03:04", "--job-name=café")
    recorder.submit("--array=1-9%2", "-N1", "-n1", f"--dependency=afterok:{plain}", "--job-name=waiting")
    array = recorder.submit("--array=0-1", "-N1", "-n1", "--job-name=tasks")
    recorder.must("salloc", "--no-shell", "-N1", "-n1", "--time=10", user="tester")
    for job in (plain, hostile, limited):
        recorder.wait(job, "RUNNING")
    recorder.wait(f"{array}_0", "RUNNING")
    cancelled = recorder.submit("-N1", "-n1", "--job-name=cancelled")
    recorder.wait(cancelled, "RUNNING")
    recorder.must("scancel", cancelled)
    recorder.must("scontrol", "requeue", limited)
    recorder.wait(limited, "PENDING")
    recorder.save("jobs.txt", recorder.must(*JOBS_QUERY))
    recorder.save("array.txt", recorder.must(*JOBS_QUERY, f"--jobs={array}"))

    drain = "reason=ckptless: a=b, State=IDLE (gpu 3)"
    update = ("scontrol", "update", "nodename=node05", "state=drain")
    recorder.must(*update, drain, "comment=c State=DOWN", "extra=e State=FAIL")
    recorder.must(
        "scontrol", "update", "nodename=node02", "state=down", "reason=first line\nsecond State=IDLE"
    )
    recorder.must("scontrol", "update", "nodename=node04", "state=down", "reason=x")
    recorder.must("scontrol", "update", "nodename=node04", "state=undrain")
    recorder.save("nodes.txt", recorder.must("scontrol", "-o", "show", "node"))
    recorder.save("ping.txt", recorder.must("scontrol", "ping"))
    recorder.save("errors.json", json.dumps(errors(recorder, plain), indent=1) + "\n")


def errors(recorder: Recorder, job: str) -> list[dict[str, object]]:
    """Return what Slurm refuses, why it could not, and how it says so."""
    refused = [
        ("not found", "root", ("squeue", "--noheader", "--all", "--states=all", "--jobs=4000")),
        ("not found", "root", ("scontrol", "-o", "show", "node", "nowhere")),
        ("not found", "root", ("scontrol", "update", "nodename=nowhere", "state=drain", "reason=x")),
        ("not found", "root", ("scontrol", "requeue", "4000")),
        ("not found", "root", ("scontrol", "update", "jobid=4000", "comment=x")),
        ("refused", "tester", ("scontrol", "update", "nodename=node01", "state=drain", "reason=x")),
        ("refused", "other", ("scontrol", "update", f"jobid={job}", "comment=x")),
        ("refused", "other", ("scontrol", "requeue", job)),
        ("refused", "other", ("scancel", job)),
        ("refused", "root", ("scontrol", "update", "nodename=node01", "state=resume")),
        ("refused", "root", ("scontrol", "update", "nodename=node01", "state=drain", "reason=")),
        ("refused", "tester", ("salloc", "--no-shell", "-N5", "--exclusive", "--immediate=1")),
    ]
    found = [said(recorder, kind, argv, user) for kind, user, argv in refused]
    recorder._cluster.stop_slurmctld()
    away = (("scontrol", "ping"), (*JOBS_QUERY,), ("scontrol", "-o", "show", "node"), ("scancel", job))
    return found + [said(recorder, "unreachable", argv, "root") for argv in away]


def said(recorder: Recorder, kind: str, argv: Sequence[str], user: str) -> dict[str, object]:
    """One command, how it ended and what it printed."""
    done = recorder.run(*argv, user=user)
    return {"kind": kind, "argv": argv, "status": done.returncode, "out": done.stdout, "err": done.stderr}


def main() -> int:
    """Record one version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rootfs", type=Path, metavar="ROOT", help="root folder with another Slurm")
    options = parser.parse_args()
    rootfs = str(options.rootfs.resolve()) if options.rootfs else ""
    version = requirements.slurm_version(rootfs).split()[-1].rpartition(".")[0]
    folder = RECORDED / version
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(nodes=5, conf=CONF, rootfs=rootfs)
        with Cluster(Path(scratch) / "cluster", plan) as cluster:
            record(Recorder(cluster, folder))
    sys.stdout.write(f"{folder.relative_to(Path(__file__).parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
