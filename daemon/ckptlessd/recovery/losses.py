"""Pure: what the leader tells of lost nodes: to the job's user once, and to the cluster's manager."""

from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning import event_lines
from ckptless.daemon.ckptlessd.recovery.events import DarkState, NodeIsDark
from ckptless.daemon.ckptlessd.recovery.job_state import JobState

# A node that nobody could reach for so long has lost more than a cable for a moment.
DARK_FOR_GOOD_S = 30.0


@dataclass
class Losses:
    """Tells of each loss once; of a dark node that it stays dark, or that it is heard again."""

    job: JobState
    _told: set[int] = field(default_factory=set)
    # Since when nodes are dark of which the cluster's manager does not know yet that they stay so.
    _dark: dict[int, float] = field(default_factory=dict)
    # Lost nodes of which was told that they are heard again.
    _returned: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """Tell of losses that a generation was planned without, and whoever led then has not told of."""
        assignment = self.job.assignment
        planned = {info.node for info in assignment.nodes} if assignment is not None else set()
        self._told = self.job.losses.keys() - planned

    def tell(self, now: float) -> None:
        """Tell of new losses, and of nodes that stay dark."""
        job = self.job
        for node in sorted(job.losses.keys() - self._told):
            loss = job.losses[node]
            self._told.add(node)
            job.announce(event_lines.loss_line(loss, job.nodes[node], job.assignment), now)
            if loss.dark and node not in job.agreement.dead:  # else it is marked already
                self._dark[node] = now
                self._say(node, loss.reason, "dark")
        for node in [node for node, since in self._dark.items() if now - since >= DARK_FOR_GOOD_S]:
            self._stays_dark(node)

    def end(self) -> None:
        """Slurm waits for what it takes to run on dark nodes, where the job has ended."""
        for node in list(self._dark):
            self._stays_dark(node)

    def heard(self, node: int, now: float) -> None:
        """The daemon of a lost node is heard: what runs there runs on, and nothing new is begun there."""
        loss = self.job.losses.get(node)
        if loss is None or node in self._returned:
            return
        self._returned.add(node)
        since = self._dark.pop(node, None)
        if loss.dark and node not in self.job.agreement.dead:
            away = f" for {now - since:.0f} s" if since is not None else ""
            text = f"nothing on it answered{away}, and it lives: see its cable, its port and its load"
            self._say(node, text, "back")
        text = f"node-{node} is heard again; lost before ({loss.reason}), it gets no rank of this job"
        self.job.note(now, "warning", "node-returned", text)

    def _stays_dark(self, node: int) -> None:
        del self._dark[node]
        self._say(node, self.job.losses[node].reason, "gone")

    def _say(self, node: int, text: str, state: DarkState) -> None:
        self.job.out.append(NodeIsDark(node, text, state))
