"""Trains an elastic job on a Slurm cluster in namespaces of this machine, which gives nodes and gets them.

It has all 12 nodes, gives 8 of them to a job of higher priority, and grows to 8 and 12 again as they come
free; it trains all the time. Exit code 0: each sample of each epoch was seen exactly once, and no process of
the first node was replaced. 1: not so, or something failed; the reason is printed. 2: it cannot be done
here. However it ends, no process and no cluster is left.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_steps import Guest, Line, Steps, newest
from screen import Screen
from slurm_cluster import PACKAGES, STATE_DIR, Cluster, ClusterError, cluster_up, missing
from slurm_demo import save, show, stop
from slurm_job import ALIVE, JobError, SlurmJob

SCRIPT = Path(__file__).resolve().with_name("train_elastic.py")
# The nodes that it has, one after the other; of the 8 that the other job takes, half come free first.
# In this order, as Slurm 22.05 without slurmdbd takes no nodes back from a job that has drawn some in.
SIZES = (12, 4, 8, 12)
MOST, LEAST, HALF = 12, 4, 8
BATCH, SAMPLES, CONTEXT = 24, 600, 64
SCHEDULED_S = 1  # Slurm's interval
BAR_S = 5 + SCHEDULED_S
CONF = {
    "PriorityType": "priority/basic",
    "SchedulerParameters": f"permit_job_expansion,batch_sched_delay=0,sched_interval={SCHEDULED_S},"
    f"bf_interval={SCHEDULED_S}",
}
YAML = "version: 1\nmax_stall: 60s\nslurm: {backend: commands, poll: 1s}\nelastic: {give_way: true}\n"
# Not --exclusive: Slurm 22.05 would not give such a job nodes again that it has given back.
COMMAND = (
    f"sbatch --job-name=elastic --nice=1000 -N{MOST}"
    f" --ckptless=min-nodes={LEAST},step={MOST - HALF},draw-in={MOST - LEAST},scale-up-after=1 job.sh"
)
JOB = """\
#!/bin/bash
# All nodes of this cluster share one machine's cores: one thread for each rank.
export OMP_NUM_THREADS=1
ckptless-run {script} --epochs 100000 --seed {seed} --sample-s {sample_s} --out . \\
    --batch {batch} --samples {samples} --context {context}
"""
# The other job says itself how far it is, and gives up half of its nodes; it ends when it is told to.
URGENT = """\
date +%s.%N >started
srun sleep {seconds}
scontrol update jobid=$SLURM_JOB_ID numnodes={half}
date +%s.%N >halved
while [ ! -e enough ]; do sleep 0.2; done
date +%s.%N >ended
"""
SQUEUE = ("squeue", "-o", "%.5i %.16j %.7u %.10Q %.3t %.6M %.5D  %R")
POLL_S, ASK_S = 0.1, 1.0
DEADLINE_S = 120.0
GUEST = "other"


class Elastic(SlurmJob):
    """The elastic job."""

    def submit(self, args: argparse.Namespace) -> None:
        sizes = {"batch": BATCH, "samples": SAMPLES, "context": CONTEXT}
        script = shlex.quote(str(SCRIPT))
        self._submit(
            SCRIPT, JOB.format(script=script, seed=args.seed, sample_s=args.sample_s, **sizes), COMMAND
        )

    def wait(self, what: Callable[[], object], why: str) -> None:
        """Until it is so. Raises JobError: it takes too long, or the job is over."""
        limit, asked_at = time.monotonic() + DEADLINE_S, 0.0
        while not what():
            now = time.monotonic()
            if now > limit:
                raise JobError(f"not within {DEADLINE_S:.0f} s: {why}; the job's output ends:\n{self.said()}")
            if now - asked_at > ASK_S:
                asked_at = now
                self.ask()
                # Its outcome, say, may have come while Slurm was asked.
                if self.slurm("JobState") not in ALIVE and not what():
                    raise JobError(f"the job is {self.slurm('JobState')}; its output ends:\n{self.said()}")
            time.sleep(POLL_S)

    def trains_on(self, ranks: int, seconds: float) -> Line:
        """Until it has trained on so many ranks for so long; its first step with them."""

        def does(first: float = 0.0) -> bool:
            line = newest(self.folder)
            return line is not None and line.ranks == ranks and line.at >= first

        self.wait(does, f"it trains on {ranks} ranks")
        line = newest(self.folder)
        assert line is not None  # it was there just now
        self.wait(lambda: does(line.at + seconds), f"it goes on with {ranks} ranks")
        return line

    def end(self) -> None:
        """Until its epoch is over, and Slurm has its nodes back."""
        (self.folder / "end").touch()
        self.wait(self.outcome, "it ends")
        self._cluster.wait_idle()
        self.ask()

    def first_node(self) -> tuple[int | None, ...]:
        """The processes of the node with the batch script: daemon, agent and ranks."""
        found = self.ledger()
        node = next(node for node in found.nodes if node.name == self.slurm("BatchHost"))
        return node.daemon_pid, node.agent_pid, *(s.pid for s in found.slots if s.node == node.node)


# ----------------------------------------------------------------------------------------------- story


@dataclass
class Story:
    """The two jobs, when nodes came free (`freed`, Unix time), and mistakes found so far (`wrong`)."""

    job: Elastic
    guest: Guest
    freed: tuple[float, ...]
    wrong: list[str]


def run(cluster: Cluster, args: argparse.Namespace, screen: Screen) -> Story:
    """All of it, on a cluster that is up. Raises JobError, ClusterError."""
    began, job = time.monotonic(), Elastic(cluster, "elastic")

    def say(text: str) -> None:
        screen.say(f"{time.monotonic() - began:6.1f} s  {text}", "bold")

    def trains_on(ranks: int) -> None:
        line = job.trains_on(ranks, args.phase_s)
        say(f"trains on {ranks} ranks, from step {line.step} on")

    job.submit(args)
    say(f"submitted: {COMMAND}")
    trains_on(MOST)
    show(cluster, screen, "ctl", *SQUEUE)
    before = job.first_node()
    urgent = Urgent(cluster, job)
    urgent.submit(args.urgent_s)
    say(f"a job of higher priority is submitted, for {MOST - LEAST} nodes")
    started = urgent.said("started")
    say(f"it has started, {started - urgent.submitted:.1f} s after")
    show(cluster, screen, "ctl", *SQUEUE)
    trains_on(LEAST)
    halved = urgent.said("halved")
    say(f"it has given up {MOST - HALF} of its nodes")
    trains_on(HALF)
    show(cluster, screen, "ctl", *SQUEUE)
    urgent.end()
    ended = urgent.said("ended")
    say("it has ended")
    trains_on(MOST)
    show(cluster, screen, "ctl", *SQUEUE)
    wrong, after = [], job.first_node()
    if after != before or None in before:
        wrong.append(f"the first node's processes were {before}, and are {after}")
    job.end()
    say("the elastic job has ended, with its epoch")
    outcome = job.outcome()
    if outcome is None or outcome.state != "done" or job.slurm("JobState") != "COMPLETED":
        wrong.append(f"the job is {job.slurm('JobState')}; its output ends:\n{job.said()}")
    show(cluster, screen, job.slurm("BatchHost"), "ckptctl", "--state-dir", STATE_DIR, "timeline")
    return Story(job, Guest(urgent.submitted, started, ended), (halved, ended), wrong + job.left())


class Urgent:
    """The job of higher priority, another user's, of whole nodes."""

    def __init__(self, cluster: Cluster, job: Elastic) -> None:
        self._cluster, self._job, self._folder = cluster, job, cluster.shared / "urgent"
        self.submitted = 0.0

    def submit(self, seconds: int) -> None:
        self._cluster.run("ctl", "mkdir", "/shared/urgent", user=GUEST)
        script = URGENT.format(seconds=seconds, half=MOST - HALF)
        words = ("--job-name=urgent", f"-N{MOST - LEAST}", "--exclusive", "--wrap", script)
        self.submitted = time.time()
        self._cluster.run("ctl", "sbatch", *words, user=GUEST, cwd="/shared/urgent")

    def said(self, word: str) -> float:
        """When it came so far: waited for, in Unix time. Raises JobError."""
        file = self._folder / word
        self._job.wait(lambda: file.exists() and file.read_text().strip(), f"the other job has {word}")
        return float(file.read_text())

    def end(self) -> None:
        (self._folder / "enough").touch()


# ---------------------------------------------------------------------------------------------- report


def check(story: Story, steps: Steps) -> list[str]:
    """Return what is not as it should be, in sentences."""
    wrong = story.wrong + steps.wrong()
    if steps.sizes != list(SIZES):
        wrong.append(f"it had {steps.sizes} ranks, one after the other")
    host = story.job.slurm("BatchHost")
    if len(steps.processes(host)) != 1:
        wrong.append(f"these processes trained on {host}: {sorted(steps.processes(host))}")
    waited_s = story.guest.started - story.guest.submitted
    if waited_s > BAR_S:
        wrong.append(f"the job of higher priority waited {waited_s:.1f} s, more than {BAR_S} s")
    return wrong


def report(story: Story, steps: Steps, screen: Screen) -> None:
    """For people."""
    screen.say("\nSeen from outside, by the clock in the ranks' files", "bold")
    for old, new in steps.resizes():
        words = f"{old.ranks:2} -> {new.ranks:2} ranks at step {new.number:4}"
        screen.say(f"  {words}: {new.at - old.at:.2f} s from step to step, the new one included")
    waited_s = story.guest.started - story.guest.submitted
    took_s = steps.steps[-1].at - steps.steps[0].at
    lines = (
        f"the job of higher priority waited {waited_s:.1f} s from sbatch to its first line (bar: {BAR_S} s,"
        f" of which {SCHEDULED_S} s is Slurm's interval)",
        f"{len(steps.steps)} steps in {took_s:.0f} s, the longest time without one"
        f" {steps.longest_s():.2f} s; {steps.again} were cut off, and done again",
        f"{steps.epochs()} epochs of {SAMPLES} samples",
    )
    for line in lines:
        screen.say(f"  {line}")


# ------------------------------------------------------------------------------------------------ main


def demo(args: argparse.Namespace, screen: Screen) -> int:
    """The exit code. Raises JobError, ClusterError, SubprocessError (of the plugin's make)."""
    began, out = time.monotonic(), args.out / "elastic-demo"
    screen.say(f"A Slurm cluster of {MOST} nodes, which share this machine's cores")
    with cluster_up(MOST, CONF, YAML) as cluster:
        screen.say(f"  up in {time.monotonic() - began:.1f} s")
        try:
            story = run(cluster, args, screen)
        finally:
            save(cluster, out)
    steps = Steps(out / "elastic", BATCH, SAMPLES)
    report(story, steps, screen)
    wrong = check(story, steps)
    if not args.no_picture:
        from elastic_picture import draw

        cores = len(os.sched_getaffinity(0))
        note = f"(all ranks share {cores} cores, and sleep {1000 * args.sample_s:.0f} ms for each sample)"
        draw(args.out / "elastic.png", steps.steps, story.freed, story.guest, BATCH * CONTEXT, note)
        screen.say(f"\n  picture: {args.out / 'elastic.png'}")
    screen.say(f"  steps, logs, ledgers: {out}\n  all of it took {time.monotonic() - began:.0f} s")
    good = "\nEach sample was seen once in each epoch, and no process of the first node was replaced."
    screen.say(good if not wrong else "\nNOT as it should be:", "bold")
    for sentence in wrong:
        screen.say(f"  {sentence}", "bold red")
    return 1 if wrong else 0


def main() -> int:
    options = argparse.ArgumentParser(
        description="Have an elastic job give way to another, and grow again, on Slurm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--phase-s", type=float, default=10.0, help="it trains on each size so long at least"
    )
    options.add_argument(
        "--urgent-s", type=int, default=8, help="the other job runs so long on all of its nodes"
    )
    options.add_argument("--sample-s", type=float, default=0.2, help="a rank sleeps so long for each sample")
    options.add_argument("--out", type=Path, default=Path("out"), help="steps, logs and the picture go here")
    options.add_argument("--no-picture", action="store_true", help="draw nothing (needs no matplotlib)")
    args, screen = options.parse_args(), Screen()
    args.out = args.out.absolute()
    if lacks := missing():
        hint = "run it as root" if lacks == ["root"] else f"as root: apt-get install {' '.join(PACKAGES)}"
        print(f"elastic-demo takes {', '.join(lacks)}; {hint}", file=sys.stderr)
        return 2
    try:
        return demo(args, screen)
    except (ClusterError, JobError, subprocess.SubprocessError) as error:
        print(f"elastic-demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
