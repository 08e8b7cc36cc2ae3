"""Trains a small GPT on a Slurm cluster in namespaces of this machine, cuts a node's power, kills a rank.

Then the node is repaired, the same job runs undisturbed, and all losses are compared, bit for bit.
Exit code 0: all are equal, and Slurm says what it should. 1: not so, or a run failed; the reason is printed.
2: it cannot be done here. However it ends, no process and no cluster is left.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compare import Comparison
from faults import Fault, plan
from options import NODES, parse, parser
from screen import Screen
from slurm_cluster import PACKAGES, STATE_DIR, Cluster, ClusterError, cluster_up, missing
from slurm_job import Job, JobError

from ckptless.daemon.ckptctl.shared.view import total_s

ABOUT = "Cut the power of a node of a Slurm cluster, and show that the job goes on with the same bits."
OF_THE_JOB = ("JobState=", "BatchHost=", "NumNodes=", "ExitCode=", " NodeList=", "Comment=")


# -------------------------------------------------------------------------------------------- report


def show(cluster: Cluster, screen: Screen, machine: str, *argv: str, only: Sequence[str] = ()) -> None:
    """Print a command and what it says on a machine; `only`: lines with one of these."""
    done = cluster.run(machine, *argv, check=False)
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    kept = [line for line in lines if not only or any(part in line for part in only)]
    screen.say(f"\n[{machine}]$ {' '.join(argv)}", "bold")
    screen.say("\n".join(kept))


def show_end(cluster: Cluster, screen: Screen, job: Job) -> None:
    """Show what Slurm says of the job with faults, and ckptctl of its recoveries."""
    show(cluster, screen, "ctl", "sinfo", "-o", "%P %.5D %.6t %N")
    if job.lost:
        show(cluster, screen, "ctl", "sinfo", "-R", "-o", "%N %u %E")
    show(cluster, screen, "ctl", "squeue")
    show(cluster, screen, "ctl", "scontrol", "show", "job", str(job.number), only=OF_THE_JOB)
    if job.slurm("BatchHost") in job.lost:
        screen.say("  (its batch host is lost, and with it the exit code: the daemons have ended the job)")
    show(cluster, screen, "ctl", "cat", job.outcome_file)
    show(cluster, screen, job.nodes_on()[0], "ckptctl", "--state-dir", STATE_DIR, "timeline")


def show_comparison(screen: Screen, faulty: Job, clean: Job, compared: Comparison, steps: int) -> None:
    """For people."""
    screen.say("\nSeen from outside, by the clock in the loss files", "bold")
    for fault in faulty.faults:
        stall = f"{fault.stall_s(faulty.losses):.2f} s until every rank had done a new step"
        screen.say(f"  {fault.brief or fault.kind + ' (never struck)'}: {stall}")
    screen.say(f"  a step takes {faulty.losses.step_s():.2f} s (median)")
    screen.say("\nThe same job without faults", "bold")
    recovered = sum(fault.recovery is not None for fault in faulty.faults)
    more = [
        f"  faults recovered from:      {recovered} of {len(faulty.faults)}",
        f"  job took:                   {faulty.wall_s:.0f} s with faults, {clean.wall_s:.0f} s without",
    ]
    for line in [*compared.lines(NODES, steps), *more]:
        screen.say(line)


def as_json(args: Namespace, faulty: Job, clean: Job, compared: Comparison, wrong: list[str]) -> str:
    """For scripts; times in seconds."""

    def of(fault: Fault) -> dict[str, Any]:
        recovery = fault.recovery
        return {
            "kind": fault.kind,
            "rank": fault.rank,
            "what": fault.brief or None,
            "after_step": fault.step,
            "stall_s": round(fault.stall_s(faulty.losses), 3) if fault.is_over(faulty.losses) else None,
            "recovery_s": round(total_s(recovery), 3) if recovery else None,
            "rung": recovery.rung if recovery else None,
            "restore_step": recovery.restore_step if recovery else None,
            "phases_s": recovery.phases if recovery else None,
        }

    found = {
        "meta": {"schema": 1},
        "good": not wrong,
        "wrong": wrong,
        "seed": args.seed,
        "steps": args.steps,
        "losses": {"equal": compared.equal, "wanted": compared.wanted},
        "written_twice": {"equal": compared.again_equal, "wanted": compared.again},
        "faults": [of(fault) for fault in faulty.faults],
        "step_s": round(faulty.losses.step_s(), 3),
        "jobs": [
            {"job": job.number, "state": job.slurm("JobState"), "wall_s": round(job.wall_s, 1)}
            for job in (faulty, clean)
        ],
    }
    return json.dumps(found, indent=2)


def save(cluster: Cluster, out: Path) -> None:
    """Keep losses, logs and ledgers of both runs: the cluster is going."""
    shutil.rmtree(out, ignore_errors=True)
    with suppress(shutil.Error):  # a file of a job that still runs may go meanwhile; all others are copied
        shutil.copytree(cluster.shared, out, ignore=shutil.ignore_patterns("ledgers"))
    for node in cluster.plan.node_names:
        state = cluster.var(node) / STATE_DIR.removeprefix("/var/")
        if state.exists():
            with suppress(shutil.Error):
                shutil.copytree(state, out / "state" / node)
        (out / f"ckptlessd-{node}.log").write_text(cluster.log(node, "ckptlessd"))
    (out / "slurmctld.log").write_text(cluster.log("ctl", "slurmctld"))


# ---------------------------------------------------------------------------------------------- main


def train(cluster: Cluster, args: Namespace, screen: Screen) -> tuple[Job, Job, list[str]]:
    """Both runs, and what was wrong at the end of each. Raises JobError, ClusterError."""
    faults = plan(args.kinds, args.steps, args.seed, NODES)
    faulty = Job(cluster, "with-faults", args, faults, screen)
    faulty.run("With faults")
    wrong = faulty.wrong()
    show_end(cluster, screen, faulty)
    for node in faulty.lost:
        screen.say(f"\nPower is back on {node}; the administrator resumes it", "bold")
        cluster.boot(node)
        cluster.wait_state(node, "idle", "down", "drained")
        cluster.resume(node)
    cluster.wait_idle()
    clean = Job(cluster, "without-faults", args, [], screen)
    clean.run("Without faults")
    return faulty, clean, wrong + clean.wrong()


def demo(args: Namespace, screen: Screen) -> int:
    """The exit code. Raises JobError, ClusterError, SubprocessError (of the plugin's make)."""
    nodes, began = NODES + args.spares, time.monotonic()
    screen.say(f"A Slurm cluster of {nodes} nodes; a GPT, {args.steps} steps, seed {args.seed}")
    with cluster_up(nodes) as cluster:
        screen.say(f"  up in {time.monotonic() - began:.1f} s")
        try:
            faulty, clean, wrong = train(cluster, args, screen)
        except (ClusterError, JobError):
            save(cluster, args.out / "slurm-demo")
            raise
        save(cluster, args.out / "slurm-demo")
    compared = Comparison.of(faulty.losses, clean.losses, args.steps)
    wrong += [] if compared.good else ["not all losses are equal"]
    missed = [fault for fault in faulty.faults if fault.recovery is None]
    wrong += [f"there is no recovery: {fault.brief or fault.kind + ' (never struck)'}" for fault in missed]
    show_comparison(screen, faulty, clean, compared, args.steps)
    if not args.no_picture:
        from picture import draw_run  # matplotlib: slow to load, and not wanted with --no-picture

        draw_run(args.out / "slurm-demo.png", faulty.losses, clean.losses, faulty.faults)
        screen.say(f"\n  picture: {args.out / 'slurm-demo.png'}")
    screen.say(f"  losses, logs, ledgers: {args.out / 'slurm-demo'}")
    if args.json:
        print(as_json(args, faulty, clean, compared, wrong))
    screen.say("\nEqual in every bit." if not wrong else "\nNOT as it should be:", "bold")
    for sentence in wrong:
        screen.say(f"  {sentence}", "bold red")
    return 1 if wrong else 0


def main() -> int:
    options = parser(ABOUT, "node,kill", seed=3)
    options.add_argument("--json", action="store_true", help="the result as JSON on stdout, words on stderr")
    args = parse(options)
    screen = Screen(stderr=args.json)
    if lacks := missing():
        hint = "run it as root" if lacks == ["root"] else f"as root: apt-get install {' '.join(PACKAGES)}"
        print(f"slurm-demo takes {', '.join(lacks)}; {hint}", file=sys.stderr)
        return 2
    try:
        return demo(args, screen)
    except (ClusterError, JobError, subprocess.SubprocessError) as error:
        print(f"slurm-demo: {error}", file=sys.stderr)
        return 1


def stop(number: int, _frame: object) -> None:
    """Handle a signal: end, with the code of one that died of it."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
