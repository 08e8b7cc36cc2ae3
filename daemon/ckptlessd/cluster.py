"""The manager that gives out nodes and says who speaks for a job: Slurm (`slurm_cluster`) or local mode."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.recovery.events import DarkState
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.messages import AgentHello, Cancel, JobEnded, JobStarted, Outcome
from ckptless.daemon.protocol.outcome import write_outcome
from ckptless.daemon.settings.config import Peer

if TYPE_CHECKING:
    from ckptless.daemon.ckptlessd.job_host import JobHost


WITNESS_FILE = "witness"
# Less than `elector.CANCEL_S`, for which the other daemons of a cancelled job wait for their leader.
EXPLAIN_S = 1.0


class Cluster(Protocol):
    """The manager that gives out nodes: Slurm (`slurm_cluster`), or the launcher in local mode."""

    async def admit(self, hello: AgentHello, uid: int) -> Roster:
        """The roster of an agent's job. Raises PeerError where `uid` may not speak for that job here."""

    async def check_owner(self, run: str, uid: int) -> None:
        """Raises PeerError unless the run's job is of `uid`, and has this node."""

    async def has_job(self, uid: int) -> bool:
        """Whether a job of this user has this node."""

    def notice(self, notice: JobStarted | JobEnded) -> None:
        """A job has begun or ended on this node."""

    def ended(self, runtime: "JobHost", outcome: Outcome) -> None:
        """A job is over."""

    def node_is_dark(self, runtime: "JobHost", node: int, reason: str, state: DarkState) -> None:
        """Note that a node of a job that this daemon leads does not answer any more; see edges.NodeIsDark."""

    def witness(self, runtime: "JobHost", nodes: Sequence[int], ours: Sequence[int]) -> None:
        """Hold `nodes` for dead from now on; call `runtime.witnessed` unless one of `ours` is held for that.

        Of two halves that ask about each other at most one is answered: each marks before it looks.
        """

    def explain(self, runtime: "JobHost", node: int, cancel: Cancel) -> None:
        """Find out why `node`'s agent was signalled, and call `runtime.explained`, within EXPLAIN_S."""

    def ask_suspended(self, runtime: "JobHost", seconds: float) -> None:
        """All is stopped here since so long: call `runtime.suspended` if it is so of the whole job."""


class LocalCluster:
    """Local mode, and hosts without Slurm: one roster, for any job of the user who started the daemon."""

    def __init__(self, me: int, peers: Sequence[Peer], state_dir: Path, *, witness: bool = True) -> None:
        """`witness`: whether a file beside the state directory is one, since all nodes have the same."""
        self._roster = Roster(me, tuple(peers))
        self._state_dir, self._witness = state_dir, witness

    async def admit(self, hello: AgentHello, uid: int) -> Roster:
        """See `Cluster`."""
        await self.check_owner(hello.spec.job, uid)
        if hello.info.node != self._roster.me:
            raise PeerError(f"the agent says that this is node {hello.info.node}, not {self._roster.me}")
        return Roster(self._roster.me, self._roster.peers, hello.spec.late)

    async def check_owner(self, run: str, uid: int) -> None:
        """See `Cluster`."""
        if uid != os.getuid():
            raise PeerError(f"uid {uid} may not use this daemon")

    async def has_job(self, uid: int) -> bool:
        """See `Cluster`."""
        return uid == os.getuid()

    def notice(self, notice: JobStarted | JobEnded) -> None:
        """See `Cluster`. Here the launcher is there from beginning to end."""

    def ended(self, runtime: "JobHost", outcome: Outcome) -> None:
        """See `Cluster`. The launcher reads it from a file."""
        write_outcome(self._state_dir, runtime.job, outcome, runtime.launch)

    def node_is_dark(self, runtime: "JobHost", node: int, reason: str, state: DarkState) -> None:
        """See `Cluster`. There is nobody to tell."""

    def witness(self, runtime: "JobHost", nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See `Cluster`. Where all nodes are on one machine the witness is a file; else there is none."""
        if not self._witness:
            return
        path = self._state_dir.parent / f"{WITNESS_FILE}-{runtime.job}-{runtime.launch}"
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            goes_on = {int(line) for line in file}.isdisjoint(ours)
            if goes_on:
                file.writelines(f"{node}\n" for node in nodes)
        if goes_on:
            runtime.witnessed(nodes)

    def explain(self, runtime: "JobHost", node: int, cancel: Cancel) -> None:
        """See `Cluster`. Here only the user signals."""
        runtime.explained(node, cancel, cancel.reason)

    def ask_suspended(self, runtime: "JobHost", seconds: float) -> None:
        """See `Cluster`. Here nobody suspends a job as a whole."""
