"""Pure: which nodes of a run are lost by Slurm's word, and on which a batch script may live."""

from collections.abc import Iterable, Mapping, Sequence

from ckptless.daemon.control.faults import NodeView
from ckptless.daemon.slurm.adapter import Node


def reasons_down(nodes: Iterable[Node]) -> dict[str, str]:
    """The nodes that Slurm has down, by name, and why, in one sentence.

    DOWN alone, since it takes a node out of its jobs. A node that is drained, or will be (FAIL), keeps its
    jobs; UNKNOWN is one that a slurmctld has not heard of since it started.
    """
    return {
        node.name: f"Slurm has it down: {node.reason}" if node.reason else "Slurm has it down"
        for node in nodes
        if node.state == "DOWN"
    }


def newly_lost(names: Sequence[str], lost: Iterable[int], down: Mapping[str, str]) -> list[tuple[int, str]]:
    """(number, reason) of a run's nodes that are down and not lost yet; `names` are its nodes by number."""
    known = set(lost)
    return [(number, down[name]) for number, name in enumerate(names) if name in down and number not in known]


def is_dead(view: NodeView) -> bool:
    """Whether nothing of the job is left on the node, its batch script included, by what ckptless knows.

    One that was taken out by somebody's word lives: only its agent has ended, and the script still waits for
    the others.
    """
    return view.lost is not None and view.lost_source not in ("operator", "health")
