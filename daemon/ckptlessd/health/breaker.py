"""Pure: how many nodes the word of one probe may take out of the cluster in an hour.

A probe that is wrong is wrong on all nodes at once, and each daemon knows only its own. What all of them
know is Slurm: a node is drained first, with a reason that names the probe, which harms nothing that runs.
slurmctld does one thing after the other, and notes when. A moment later each looks at all nodes that are
drained so: the first ones of an hour go on to act, and all others take back what they have done.
"""

from collections.abc import Iterable

from ckptless.daemon.slurm.adapter import Node

WINDOW_S = 3600.0
# Slurm's times are in seconds: a mark that is so old is seen, and every earlier one.
SETTLED_S = 3.0


def is_among_first(me: str, nodes: Iterable[Node], mark: str, most: int, now_s: float) -> bool:
    """Whether this node is one of the first `most` of the last hour that are drained for `mark`."""
    marked = [
        (node.reason_s or 0.0, node.name)
        for node in nodes
        if node.draining
        and node.reason.startswith(mark)
        and (node.reason_s is None or node.reason_s > now_s - WINDOW_S)
    ]
    return me in [name for _, name in sorted(marked)[:most]]
