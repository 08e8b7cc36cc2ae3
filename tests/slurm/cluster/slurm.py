"""Ask the cluster's Slurm about its nodes and jobs, wait for what it says, and tell it to go on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from . import nodes
from .machine import Unit
from .plan import CONTROLLER, ClusterError

POLL_S = 0.03


class Host(Protocol):
    """What this needs of a cluster."""

    def run(
        self, machine: str, *argv: str, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine as root."""
        ...

    def service(self, machine: str, name: str) -> Unit:
        """Return what a machine knows of one of its services."""
        ...


class Slurm:
    """The controller of one cluster, asked with Slurm's own commands."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def states(self) -> dict[str, str]:
        """Node to the word of sinfo; empty while the controller does not answer."""
        if self._host.service(CONTROLLER, "slurmctld").pid is None:
            return {}  # sinfo would try for most of MessageTimeout
        done = self._host.run(CONTROLLER, *nodes.SINFO, check=False)
        return nodes.parse(done.stdout) if done.returncode == 0 else {}

    def wait(
        self,
        accepted: frozenset[str],
        names: Sequence[str],
        timeout_s: float,
        *,
        resume: Collection[str] = (),
        reported: bool = True,
    ) -> None:
        """Wait until all nodes are in one of the states.

        `reported`: and what Slurm says of them is news from their present slurmd. Those of `resume` are
        resumed if they have reported and are down or drained. Raises ClusterError: not within the time.
        """
        limit = time.monotonic() + timeout_s
        while True:
            # First, for what is asked later must be at least as new: a report may set a node down.
            silent = self._silent(names) if reported else []
            states = self.states()
            bad = nodes.not_in(accepted, states, names) + [f"{name} has not reported yet" for name in silent]
            if not bad:
                return
            if time.monotonic() > limit:
                raise ClusterError(f"not within {timeout_s:.0f} s: {', '.join(bad)}")
            for name in resume:
                if name not in silent and nodes.is_lost(states.get(name, "")):
                    self.resume(name)
            time.sleep(POLL_S)

    def resume(self, node: str) -> None:
        """Have the node used again. Raises ClusterError: Slurm refuses."""
        # "resume" leaves a node that is merely down as not responding until the next ping, "idle" does not.
        state = "idle" if self.states().get(node, "").startswith("down") else "resume"
        command = ("scontrol", "update", f"nodename={node}", f"state={state}")
        done = self._host.run(CONTROLLER, *command, check=False)
        if done.returncode:
            raise ClusterError(f"{node} cannot be resumed: {done.stderr.strip()}")

    def cancel_all(self, timeout_s: float) -> None:
        """Cancel every job, and wait until there is none. Raises ClusterError: not within the time."""
        limit, refusal = time.monotonic() + timeout_s, ""
        # %F is an array's own number: scancel refuses `5_[3-9%2]`, as %i prints it, and cancels nothing.
        while jobs := set(self._host.run(CONTROLLER, "squeue", "-h", "-o", "%F", check=False).stdout.split()):
            if time.monotonic() > limit:
                raise ClusterError(f"these jobs do not end: {', '.join(sorted(jobs))} {refusal}".rstrip())
            refusal = self._host.run(CONTROLLER, "scancel", *sorted(jobs), check=False).stderr.strip()
            time.sleep(POLL_S)

    def _silent(self, names: Sequence[str]) -> list[str]:
        command = ("scontrol", "-o", "show", "nodes")
        done = self._host.run(CONTROLLER, *command, env={"SLURM_TIME_FORMAT": "%s"}, check=False)
        reported = nodes.slurmd_starts(done.stdout)
        # Slurm knows whole seconds only.
        return [
            name
            for name in names
            if reported.get(name, 0) < int(self._host.service(name, "slurmd").started_s)
        ]
