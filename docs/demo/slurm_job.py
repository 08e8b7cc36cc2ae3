"""Jobs of Slurm: what it and the nodes say of them; and the one that is struck while it trains."""

import argparse
import json
import re
import shlex
import time
from pathlib import Path

from faults import Fault
from losses import Losses
from options import NODES
from screen import Screen
from slurm_cluster import STATE_DIR, Cluster

from ckptless.daemon.ledger.merge import Snapshot, read_all
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.outcome import OUTCOME_FILE, read_outcome
from ckptless.daemon.protocol.records import RecoveryRecord

USER = "tester"
SCRIPT = Path(__file__).resolve().with_name("train_gpt.py")
POLL_S = 0.03
ASK_S = 0.5
# Without a step, or a change of the job's state, for so long: nothing will come any more.
QUIET_S = 120.0
IDLE_DEADLINE_S = 60.0
# What scontrol calls a job that is not over.
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING")
# Kill the process unless its number has become another's.
KILL = 'grep -q ckptless /proc/"$0"/cmdline && kill -KILL "$0"'

JOB = """\
#!/bin/bash
# All nodes of this cluster share one machine's cores: one thread for each rank.
export OMP_NUM_THREADS=1
ckptless-run {script} --steps {steps} --seed {seed} --out .
"""


class JobError(Exception):
    """The run cannot be made, or failed; the text says why, and what the job printed last."""


class SlurmJob:
    """A job with ckptless. All files of it are in a folder of its name, which every node sees."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.folder = cluster.shared / name
        self.number = 0
        self._cluster, self._inside = cluster, f"/shared/{name}"
        self._told = ""

    def _submit(self, script: Path, text: str, command: str) -> None:
        """`command`: sbatch and its options, with job.sh at the end. Raises JobError, ClusterError."""
        self._cluster.run("ctl", "mkdir", self._inside, user=USER)
        (self.folder / "job.sh").write_text(text)
        # A checkout that only root can read is the one thing that a cluster of its own does not mend.
        if self._cluster.run("node01", "test", "-r", str(script), user=USER, check=False).returncode:
            raise JobError(f"users other than root cannot read {script}: chmod -R a+rX the checkout")
        words = command.split()
        words.insert(1, "--parsable")
        self.number = int(self._cluster.run("ctl", *words, user=USER, cwd=self._inside).stdout)

    def ask(self) -> None:
        """Have Slurm say what it knows of the job."""
        self._told = self._cluster.run("ctl", "scontrol", "-o", "show", "job", str(self.number)).stdout

    def slurm(self, field: str) -> str:
        """A field of `scontrol show job`, as Slurm said it last."""
        found = re.search(rf"(?:^|\s){field}=(\S*)", self._told)
        return found[1] if found else ""

    def ledger(self) -> Snapshot:
        """Return what the nodes' ledgers know of this job, those of nodes without power included."""
        folder = self._cluster.shared / "ledgers"
        folder.mkdir(exist_ok=True)
        for node in self._cluster.plan.node_names:
            if not (folder / node).is_symlink():  # side by side, as read_all wants them
                (folder / node).symlink_to(self._cluster.var(node) / STATE_DIR.removeprefix("/var/"))
        return read_all(folder, events=False).of_job(str(self.number))

    def outcome(self) -> Outcome | None:
        """Return what the agents wrote down of its end, whichever start of the job it was."""
        folder = self.folder / f"ckptless-{self.number}"
        try:
            launch = json.loads((folder / OUTCOME_FILE).read_text())["launch"]
        except FileNotFoundError:
            return None
        return read_outcome(folder, str(self.number), launch)

    @property
    def outcome_file(self) -> str:
        """Where they did so, on every node."""
        return f"{self._inside}/ckptless-{self.number}/{OUTCOME_FILE}"

    def said(self) -> str:
        """The end of what the job printed."""
        file = self.folder / f"slurm-{self.number}.out"
        return "\n".join(file.read_text(errors="replace").splitlines()[-15:]) if file.exists() else ""

    def left(self) -> list[str]:
        """Jobs that Slurm still has, and processes of the user that are still there; in sentences."""
        found = []
        if left := self._cluster.run("ctl", "squeue", "-h").stdout.strip():
            found.append(f"squeue still has {left}")
        for node in self.nodes_on():
            if left := self._cluster.run(node, "pgrep", "-a", "-u", USER, check=False).stdout.strip():
                found.append(f"on {node} there is still {left}")
        return found

    def nodes_on(self) -> list[str]:
        """The nodes that have power."""
        return self._cluster.plan.node_names


class Job(SlurmJob):
    """One run of the training script: submitted, followed, struck; and how it ended."""

    def __init__(
        self, cluster: Cluster, name: str, args: argparse.Namespace, faults: list[Fault], screen: Screen
    ) -> None:
        super().__init__(cluster, name)
        self.losses, self.faults = Losses(self.folder, NODES), faults
        self.lost: list[str] = []
        self.wall_s = 0.0
        self.command = f"sbatch --ckptless=spares={args.spares} -N{NODES + args.spares} job.sh"
        self._args, self._screen = args, screen
        self._open: Fault | None = None

    # --------------------------------------------------------------------------------------- running

    def run(self, title: str) -> None:
        """From sbatch to the job's end, and until its nodes are free. Raises JobError, ClusterError."""
        text = JOB.format(script=shlex.quote(str(SCRIPT)), steps=self._args.steps, seed=self._args.seed)
        self._submit(SCRIPT, text, self.command)
        self._screen.say(f"\n{title}\n$ {self.command}", "bold")
        began = time.monotonic()
        with self._screen.run(f"Submitted batch job {self.number}", self._args.steps):
            self._follow()
        self.wall_s = time.monotonic() - began
        outcome = self.outcome()
        if outcome is None or outcome.state != "done":
            why = outcome.reason if outcome else f"Slurm calls it {self.slurm('JobState')}"
            raise JobError(f"job {self.number} failed: {why}; the end of its output:\n{self.said()}")
        for fault in self.faults:
            fault.recovery = self._recovery(fault)
        self._cluster.wait_idle(*self.nodes_on(), timeout_s=IDLE_DEADLINE_S)

    def _follow(self) -> None:
        asked_at, news_at, news = 0.0, time.monotonic(), ("", 0)
        while True:
            now = time.monotonic()
            if now - asked_at > ASK_S:
                asked_at = now
                self.ask()
            self._look()
            if self.slurm("JobState") not in ALIVE:
                return
            if news != (self.slurm("JobState"), len(self.losses.lines)):
                news, news_at = (self.slurm("JobState"), len(self.losses.lines)), now
            if now - news_at > QUIET_S:
                raise JobError(f"job {self.number} has made no step for {QUIET_S:.0f} s:\n{self.said()}")
            time.sleep(POLL_S)

    def _look(self) -> None:
        self.losses.poll()
        newest = self.losses.newest
        if newest is None:
            return
        self._screen.step(self.losses.shown or newest, self._args.steps)
        if self._open is not None:
            if self._open.is_over(self.losses):
                text = f"on in generation {newest.generation}, {self._open.stall_s(self.losses):.2f} s after"
                self._screen.say(f"  {text}", "bold green")
                self._open = None
            return
        due = next((fault for fault in self.faults if not fault.killed_at), None)
        if due is not None and newest.step >= due.step:
            # Anywhere in a step, not always right behind a commit.
            time.sleep(due.delay * self.losses.step_s())
            if self._strike(due):
                self._screen.say(f"  {due.what}, in step {newest.step + 1}", "bold red")
                self._open = due

    def _strike(self, fault: Fault) -> bool:
        """False where the ledger does not know the newest processes yet."""
        found = self.ledger()
        if not found.generations:
            return False
        generation = found.generations[-1]
        place = generation.places[fault.rank]
        slot = next((s for s in found.slots if (s.node, s.slot) == place), None)
        name = next(node.name for node in found.nodes if node.node == place[0])
        if slot is None or slot.pid is None or slot.generation != generation.generation:
            return False
        fault.generation, fault.killed_at = generation.generation, time.time()
        if fault.kind == "node":
            self._cluster.power_off(name)
            self.lost.append(name)
            fault.brief = f"{name} lost power"
            fault.what = f"POWER CUT of {name} (rank {fault.rank})"
        else:
            self._cluster.run(name, "sh", "-c", KILL, str(slot.pid))
            fault.brief = f"rank {fault.rank} killed"
            fault.what = f"KILLED rank {fault.rank} (pid {slot.pid} on {name})"
        return True

    # --------------------------------------------------------------------------------- looking at it

    def _recovery(self, fault: Fault) -> RecoveryRecord | None:
        later = [r for r in self.ledger().recoveries if fault.killed_at and r.generation > fault.generation]
        return next((r for r in later if r.outcome == "recovered"), None)

    def nodes_on(self) -> list[str]:
        """The nodes that still have power."""
        return [node for node in self._cluster.plan.node_names if node not in self.lost]

    def wrong(self) -> list[str]:
        """Return what is not as it should be, in Slurm and on the nodes, once it is over; in sentences."""
        found = []
        # Without its batch host nobody could end the job with an exit code: the daemons cancel it.
        wanted = "CANCELLED" if self.slurm("BatchHost") in self.lost else "COMPLETED"
        if self.slurm("JobState") != wanted:
            found.append(f"Slurm calls the job {self.slurm('JobState')}, not {wanted}")
        for node, state in self._cluster.node_states().items():
            if node in self.lost and not state.startswith(("down", "drain")):
                found.append(f"Slurm calls {node} {state}, not drained")
            if node in self.lost and not self.reason(node).startswith("ckptless: "):
                found.append(f"Slurm's reason for {node} is {self.reason(node)!r}, not ours")
        return found + self.left()

    def reason(self, node: str) -> str:
        """Why a node is down, in Slurm's records."""
        return self._cluster.run("ctl", "sinfo", "-h", "-R", "-n", node, "-o", "%E").stdout.strip()
