"""Pure: which nodes of a run are lost, or to be left, by Slurm's word; on which a batch script may live."""

from collections.abc import Collection, Iterable, Sequence

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.slurm.adapter import Node


def newly_down(names: Sequence[str], lost: Collection[int], nodes: Iterable[Node]) -> list[tuple[int, str]]:
    """(number, why in one sentence) of a run's nodes that Slurm has down and that are not `lost` yet.

    `names` are the run's nodes by number. DOWN alone counts, since it takes a node out of its jobs. A node
    that is drained, or will be (FAIL), keeps its jobs; UNKNOWN is one that a slurmctld has not heard of since
    it started.
    """
    down = {node.name: node.reason for node in nodes if node.state == "DOWN"}
    return [
        (number, f"Slurm has it down: {down[name]}" if down[name] else "Slurm has it down")
        for number, name in enumerate(names)
        if name in down and number not in lost
    ]


def newly_leaving(
    names: Sequence[str], lost: Collection[int], nodes: Iterable[Node], mark: str
) -> list[tuple[int, str]]:
    """(number, why) of a run's nodes that somebody wants for themselves: drained, or under maintenance.

    Drained not for a reason that begins with `mark`. A reservation for maintenance that all nodes of the run
    are in is the one that the run itself is in.
    """
    up = {node.name: node for node in nodes if not node.down}
    here = [(number, up[name]) for number, name in enumerate(names) if name in up and number not in lost]
    in_its_own = all(node.maintained for _, node in here)
    found: list[tuple[int, str]] = []
    for number, node in here:
        if node.draining and not node.reason.startswith(mark):
            found.append((number, f"drained in Slurm: {node.reason}"))
        elif node.maintained and not in_its_own:
            found.append((number, "reserved for its maintenance from now on"))
    return found


def is_dead(view: NodeView) -> bool:
    """Whether nothing of the job is left on the node, its batch script included, by what ckptless knows.

    One that was taken out by somebody's word, or lost by a drill, lives: only its agent has ended, and the
    script still waits for the others.
    """
    return view.lost is not None and view.lost_source not in ("operator", "health", "drill")
