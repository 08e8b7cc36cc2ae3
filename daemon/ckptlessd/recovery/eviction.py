"""Pure: whether a node may be taken out of a job that runs, or a drill be done, because somebody says so."""

from collections.abc import Mapping, Sequence

from ckptless.daemon.ckptlessd.planning import resizing
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol.messages import Assignment, Drill, Place
from ckptless.daemon.protocol.requests import EvictionSource


def may_say(source: EvictionSource, uid: int, owner: int, daemon: int) -> bool:
    """Whether `uid` may take a node out of `owner`'s job; what a health check finds, only the site says."""
    return sees_all(uid, daemon) or (source == "operator" and uid == owner)


def sees_all(uid: int, daemon: int) -> bool:
    """Whether `uid` may see every user's jobs: root, and the user that the daemon runs as."""
    return uid in (0, daemon)


def find_node(word: str, names: Sequence[str]) -> int | None:
    """The number of the node that is meant: by its name, else by its number in the job, from 0."""
    if word in names:
        # One that has left and come again has the later number.
        return len(names) - 1 - names[::-1].index(word)
    if word.isascii() and word.isdecimal() and len(word) < 10 and int(word) < len(names):
        return int(word)
    return None


def cannot_say(job: JobState) -> str | None:
    """Return why this daemon is the wrong one to ask, or None."""
    if job.nodes[job.me].lost is not None:
        return "this node is out of the job itself: ask on another one"
    if not job.decides:
        return "this node hears too few of the job's others: ask on another one"
    return None


def refusal(job: JobState, node: int, *, force: bool) -> str | None:
    """Return why the node stays in the job, or None; `force` where ranks would have no place to go."""
    assignment, spec = job.assignment, job.spec
    if job.outcome is not None:
        return f"the job is over: {job.outcome.reason}"
    if assignment is None or spec is None:
        return "the job has not begun yet"
    if job.stage == "releasing":
        return "training is over, and the job about to end"
    if force:
        return None
    short = homeless_after(assignment, job.nodes, spec.slots_per_node, node)
    if short <= 0 or can_shrink(job, node):
        return None
    ranks = len(assignment.ranks_on(node))
    # A spare may be the only place for the ranks of a node that was just lost.
    known = {0: "ranks of nodes that are lost have", 1: "its rank has"}
    words = known.get(ranks, f"its {ranks} ranks have")
    return f"{words} no spare to go to ({short} too few), and the job would end; --force does it all the same"


def drill_refusal(job: JobState, drill: Drill) -> str | None:
    """Return why a drill cannot be done now, or None."""
    assignment, spec = job.assignment, job.spec
    if job.outcome is not None:
        return f"the job is over: {job.outcome.reason}"
    if assignment is None or spec is None:
        return "the job has not begun yet"
    if job.stage != "running":
        return "it does not train: it begins, ends, or recovers from a fault"
    if drill.rank is not None and drill.rank >= len(assignment.places):
        return f"there is no rank {drill.rank}, only 0 to {len(assignment.places) - 1}"
    if not spec.recovers and not drill.force:
        return "nothing answers faults with --tier 1, and the job would end; --force does it all the same"
    if drill.node is None:
        return None
    view = job.nodes[drill.node]
    if view.lost is not None or drill.node not in assignment.members:
        return f"node-{drill.node} is out of the job: {view.lost or 'it has not come yet'}"
    return refusal(job, drill.node, force=drill.force)


def can_shrink(job: JobState, node: int) -> bool:
    """Whether an elastic job has enough nodes without this one to go on with fewer."""
    spec, assignment = job.spec, job.assignment
    if spec is None or assignment is None or not spec.elastic:
        return False
    fleet = resizing.Fleet.of(spec, job.nodes, assignment)
    return len(fleet.whole - {node}) >= min(spec.sizes)


def homeless_after(
    assignment: Assignment, nodes: Mapping[int, NodeView], slots_per_node: int, node: int
) -> int:
    """Return how many ranks would have no slot with `node` lost, those of nodes lost before it included.

    0 or less: there is room for all.
    """
    gone = {number for number, view in nodes.items() if view.lost is not None} | {node}
    known = {info.node for info in assignment.nodes}
    known |= {number for number, view in nodes.items() if view.hello is not None}
    taken = {*assignment.places, *assignment.bad}
    free = sum(
        Place(node=number, slot=slot) not in taken
        for number in known - gone
        for slot in range(slots_per_node)
    )
    return sum(place.node in gone for place in assignment.places) - free
