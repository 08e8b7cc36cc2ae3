"""A task of `srun ckptless-run ...`: the first of a node becomes its agent, the others wait for that.

A step over several nodes is weaker than a batch script's single-node steps: Slurm ends all of it when one of
its nodes comes back from a power cycle before Slurm has noticed.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon.agent.ranks.socket_folder import rank_sockets
from ckptless.daemon.protocol.errors import StartError
from ckptless.daemon.protocol.outcome import read_outcome
from ckptless.daemon.settings.agent_config import AGENT_CONFIG, SharedConfig, encoded

logger = logging.getLogger(__name__)

AGENT_DEADLINE_S = 120.0
POLL_S = 0.2
OUTCOME_DEADLINE_S = 5.0


@dataclass
class StepRun:
    """One task of the step; `first` of its node, and `says` what has to be said once for all."""

    config: SharedConfig
    env: Mapping[str, str]
    first: bool
    says: bool
    verbose: bool = False

    def run(self) -> int:
        """Become the agent (does not return), or wait for it. The exit code. Raises StartError."""
        if self.says:
            logger.warning(
                "in a step of %d nodes: a node that is power-cycled at once ends the whole step; "
                "ckptless-run in the batch script, without srun, does not have this",
                len(self.config.spec.names),
            )
        if self.first:
            self._become_agent()
        return self._wait()

    def _become_agent(self) -> None:
        env = {**self.env, AGENT_CONFIG: encoded(self.config)}
        words = [sys.executable, "-m", "ckptless.daemon.agent.main", "--slurm"]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [*words, *(["--verbose"] if self.verbose else [])], env)

    def _wait(self) -> int:
        """Wait until the node's agent hangs up."""
        limit = time.monotonic() + AGENT_DEADLINE_S
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiter:
            while all(waiter.connect_ex(address) != 0 for address in rank_sockets(self.config.spec.job)):
                if time.monotonic() > limit:
                    raise StartError(f"the node's agent did not come up in {AGENT_DEADLINE_S:.0f} s")
                time.sleep(POLL_S)
            # no deadline: the agent's life, over which its daemon watches
            while waiter.recv(4096):
                pass
        return self._exit_code()

    def _exit_code(self) -> int:
        """The agent's own, once it can be read."""
        limit = time.monotonic() + OUTCOME_DEADLINE_S
        spec, folder = self.config.spec, Path(self.config.log_dir)
        while (outcome := read_outcome(folder, spec.job, spec.launch)) is None:
            if time.monotonic() > limit:
                return StartError.exit_code
            time.sleep(POLL_S)
        return outcome.exit_code
