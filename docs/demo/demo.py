"""Trains a small GPT on 4 nodes and a spare, all on this machine, and kills parts of it while it runs.

Then the same training runs undisturbed, and every loss of every rank is compared, bit for bit. Exit code 0:
all are equal. 1: a loss differs, a recovery is missing, or a run failed; the reason is printed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from compare import Comparison
from faults import Fault, plan
from losses import Losses
from options import NODES, parse, parser
from screen import Screen

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptctl.shared.view import total_s
from ckptless.daemon.ledger.merge import read_all
from ckptless.daemon.protocol.records import SlotRecord

SCRIPT = Path(__file__).resolve().with_name("train_gpt.py")
JOB = "demo"
POLL_S = 0.03
LEDGER_POLL_S = 0.1
END_DEADLINE_S = 30.0


# ------------------------------------------------------------------------------------------- killing


def strike(fault: Fault, state_dir: Path) -> bool:
    """Kill what the ledger says is there. False where the ledger does not know the newest processes yet."""
    found = read_all(state_dir, events=False)
    if not found.generations:
        return False
    generation = found.generations[-1]
    node, slot = generation.places[fault.rank]
    ranks = [s for s in found.slots if s.node == node and s.rank is not None]
    agent = next(n for n in found.nodes if n.node == node)
    if any(s.generation != generation.generation or not _is_rank(s, agent.agent_pid) for s in ranks):
        return False
    victims = {f"rank {s.rank}": s.pid for s in ranks if fault.kind == "node" or s.slot == slot}
    if fault.kind == "node":
        home = state_dir / agent.name
        if not (
            _runs(agent.daemon_pid, home / "daemon.json") and _runs(agent.agent_pid, home / "agent.json")
        ):
            return False
        # The daemon first, so that nobody is left on the node to say goodbye.
        victims = {"daemon": agent.daemon_pid, "agent": agent.agent_pid, **victims}
    fault.generation, fault.killed_at = generation.generation, time.time()
    for pid in victims.values():
        with suppress(ProcessLookupError):  # an agent's ranks end with it
            os.kill(pid or 0, signal.SIGKILL)
    fault.brief = f"{'node of rank' if fault.kind == 'node' else 'rank'} {fault.rank} killed"
    names = ", ".join(f"{name} (pid {pid})" for name, pid in victims.items())
    fault.what = f"{agent.name}: {names}" if fault.kind == "node" else names
    return True


def _command_line(pid: int | None) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() if pid else b""
    except OSError:
        return b""


def _runs(pid: int | None, config: Path) -> bool:
    """Whether this process is the daemon or agent that was started with this configuration."""
    return os.fsencode(config) in _command_line(pid).split(b"\0")


def _is_rank(slot: SlotRecord, agent: int | None) -> bool:
    """Whether the process in a slot is there and is a child of the slot's agent."""
    if b"ckptless.daemon.agent.ranks.zygote" not in _command_line(slot.pid):
        return False
    with suppress(OSError):
        return f"\nPPid:\t{agent}\n" in Path(f"/proc/{slot.pid}/status").read_text()
    return False


# ------------------------------------------------------------------------------------------- running


class Training:
    """One run of the training script, from the launcher's start to its end."""

    def __init__(self, folder: Path, args: argparse.Namespace, faults: list[Fault], screen: Screen) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.state_dir = folder, folder / "state"
        self.losses, self.faults = Losses(folder, NODES), faults
        self._args, self._screen = args, screen
        self._read_at = 0.0
        self.wall_s = 0.0

    def run(self, title: str) -> int:
        """Follow it to its end; the launcher's exit code. However this ends, no process is left."""
        began = time.monotonic()
        with (self.folder / "launcher.log").open("wb") as log:
            launcher = subprocess.Popen(self._command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                with self._screen.run(title, self._args.steps):
                    while launcher.poll() is None:
                        self._look()
                        time.sleep(POLL_S)
                    self._look()
                    self._look_for_recovery()
            finally:
                _end(launcher)
        self.wall_s = time.monotonic() - began
        return launcher.returncode

    def _command(self) -> list[str]:
        launcher = [
            sys.executable,
            "-m",
            "ckptless.daemon.launch.main",
            "--local",
            "--tee",
            "none",
            "--job",
            JOB,
        ]
        launcher += [
            "--nodes",
            str(NODES),
            "--spares",
            str(self._args.spares),
            "--state-dir",
            str(self.state_dir),
        ]
        script = ["--steps", str(self._args.steps), "--seed", str(self._args.seed), "--out", str(self.folder)]
        return [*launcher, str(SCRIPT), *script]

    def _look(self) -> None:
        self.losses.poll()
        newest = self.losses.newest
        if newest is None:
            return
        self._screen.step(self.losses.shown or newest, self._args.steps)
        if any(fault.killed_at and fault.recovery is None for fault in self.faults):
            if time.monotonic() - self._read_at > LEDGER_POLL_S:
                self._look_for_recovery()
            return
        due = next((fault for fault in self.faults if not fault.killed_at), None)
        if due is not None and newest.step >= due.step:
            # Anywhere in a step, not always right behind a commit.
            time.sleep(due.delay * self.losses.step_s())
            if strike(due, self.state_dir):
                self._screen.say(f"  KILLED {due.what} in step {newest.step + 1}", "bold red")

    def _look_for_recovery(self) -> None:
        self._read_at = time.monotonic()
        for recovery in read_all(self.state_dir, events=False).recoveries:
            for fault in self.faults:
                open_ = fault.killed_at and fault.recovery is None and recovery.generation > fault.generation
                if open_ and recovery.outcome == "recovered":
                    fault.recovery = recovery
                    text = f"recovered in {total_s(recovery):.2f} s ({recovery.rung}), on from step"
                    self._screen.say(f"  {text} {recovery.restore_step}", "bold green")


def _end(launcher: "subprocess.Popen[bytes]") -> None:
    """The launcher ends all that it started; if it cannot be asked, the kernel does."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


# -------------------------------------------------------------------------------------------- report


def report(faulty: Training, clean: Training, steps: int, screen: Screen) -> bool:
    """Print what the comparison gave; whether all is as it should be."""
    screen.say("\nWhere the time of each recovery went (ckptctl timeline; milliseconds)", "bold")
    ckptctl(["--state-dir", str(faulty.state_dir), "timeline"], standalone_mode=False)
    screen.say("\nSeen from outside, by the clock in the loss files", "bold")
    for fault in faulty.faults:
        stall = f"{fault.stall_s(faulty.losses):.2f} s from the kill until every rank had done a new step"
        screen.say(f"  {fault.what or fault.kind + ' (never struck)'}\n    {stall}")
    screen.say(f"  a step takes {faulty.losses.step_s():.2f} s (median)")

    compared = Comparison.of(faulty.losses, clean.losses, steps)
    recovered = sum(fault.recovery is not None for fault in faulty.faults)
    good = compared.good and recovered == len(faulty.faults)
    screen.say("\nThe same training without faults", "bold")
    for line in compared.lines(NODES, steps):
        screen.say(line)
    screen.say(f"  faults recovered from:      {recovered} of {len(faulty.faults)}")
    screen.say(
        f"  wall time:                  {faulty.wall_s:.0f} s with faults, {clean.wall_s:.0f} s without"
    )
    return good


# ---------------------------------------------------------------------------------------------- main


def main() -> int:
    about = "Kill parts of a training run, and show that it goes on with the same bits."
    args, screen = parse(parser(about, "kill,node", seed=1)), Screen()
    spares = args.spares
    where = f"{NODES} nodes and {spares} {'spare' if spares == 1 else 'spares'} on this machine"
    screen.say(f"A GPT on Python's standard library: {where}, {args.steps} steps, seed {args.seed}")
    faulty = Training(args.out / "with-faults", args, plan(args.kinds, args.steps, args.seed, NODES), screen)
    clean = Training(args.out / "without-faults", args, [], screen)
    for training, title in ((faulty, "With faults"), (clean, "Without faults")):
        code = training.run(title)
        if code != 0:
            log = training.folder / "launcher.log"
            screen.say(f"the launcher ended with exit code {code}; the end of {log}:", "bold red")
            screen.say("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
            return 1
    good = report(faulty, clean, args.steps, screen)
    if not args.no_picture:
        from picture import draw_run  # matplotlib: slow to load, and not wanted with --no-picture

        draw_run(args.out / "demo.png", faulty.losses, clean.losses, faulty.faults)
        screen.say(f"\n  picture: {args.out / 'demo.png'}")
    screen.say(
        "\nEqual in every bit." if good else "\nNOT as it should be.", "bold green" if good else "bold red"
    )
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
