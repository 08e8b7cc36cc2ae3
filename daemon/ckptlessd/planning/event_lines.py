"""Pure: faults and losses as lines of the story that say who it was, and why."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptless.daemon.ckptlessd.planning.faults import SECONDARY, Fault, Finding, NodeLost, NodeView
from ckptless.daemon.protocol.limits import runs
from ckptless.daemon.protocol.messages import Assignment, Drill, Place, SlotState
from ckptless.daemon.protocol.records import DRILL, Level, Subject

# Ranks end within moments of each other; who is this much earlier than another has left it alone.
EARLY_S = 3.0
# Signals by their numbers, which are the same on every Linux that torch runs on.
SIGNALS = {
    **{1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS"},
    **{8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE"},
    **{14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS"},
}
BY_SIGTERM = -15
# Where the kind of an event is another word than that of its fault.
KINDS = {"silent-corruption": "corrupt"}
TEXT_LIMIT = 500


class Line(NamedTuple):
    """A line of the story, before it has a time."""

    level: Level
    kind: str
    text: str
    about: Subject | None = None


def fault_line(fault: Finding, nodes: Mapping[int, NodeView]) -> Line:
    """Return rank, place and what happened: "rank 3 on node02 (slot 1, pid 4711) raised ValueError: x"."""
    name = name_of(nodes, fault.node)
    code = fault.exit_code
    ended_by = SIGNALS.get(-code, f"signal {-code}") if code is not None and code < 0 else None
    about = Subject(
        node=fault.node,
        name=name,
        slot=fault.slot,
        rank=fault.rank,
        pid=fault.pid,
        signal=ended_by if fault.kind in ("died", "hung") else None,
        exit_code=code if code is not None and code >= 0 else None,
        error=one_line(fault.detail) if fault.kind in ("raised", "refused") else None,
    )
    place = [] if fault.slot is None else [f"slot {fault.slot}"]
    place += [] if fault.pid is None else [f"pid {fault.pid}"]
    who = name if fault.rank is None else f"rank {fault.rank} on {name}"
    where = f" ({', '.join(place)})" if place else ""
    # Nobody knows whose it is that there is no step.
    text = _what(fault) if fault.kind == "stall" else f"{who}{where} {_what(fault)}"
    if fault.source == "drill":
        text += " (drill)"
    return Line("warning", KINDS.get(fault.kind, fault.kind), text, about)


def cause_text(fault: Finding, nodes: Mapping[int, NodeView]) -> str:
    """The same as a part of a sentence, for a lost node as well."""
    if fault.kind == "node-lost":
        return f"{name_of(nodes, fault.node)} is lost: {one_line(fault.detail)}"
    return fault_line(fault, nodes).text


def _what(fault: Finding) -> str:
    detail = one_line(fault.detail)
    match fault.kind:
        case "raised" | "refused":
            return f"raised {detail}"
        case "died":
            return detail or "died"
        case "hung":
            return f"hung: {detail}" if detail else "hung"
        case "silent-corruption":
            return f"has other tensors than its twins: {detail}"
        case "no-state":
            return f"did not get its state: {detail}"
        case "no-memory":
            return f"did not get its device's memory: {detail}"
        case "no-room":
            return f"is refused: {detail}"
        case "stall":
            return detail
        case "broken":
            return f"says that a collective failed, and no rank is known to be the cause: {detail}"
    return f"{fault.kind}: {detail}"


def only_consequences(faults: Sequence[Fault]) -> Finding | None:
    """The first of faults of which none is a cause, to be told for all of them; None where one is."""
    if not faults or any(fault.finding.kind not in SECONDARY for fault in faults):
        return None
    return faults[0].finding


def loss_line(loss: NodeLost, view: NodeView, assignment: Assignment | None) -> Line:
    """A node is gone, or was taken out, and these ranks with it."""
    name = view.hello.info.name if view.hello is not None else f"node-{loss.node}"
    ranks = assignment.ranks_on(loss.node) if assignment is not None else ()
    had = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {runs(ranks)}" if ranks else "no rank"
    about = Subject(node=loss.node, name=name, error=one_line(loss.reason))
    who = f"node-{loss.node} ({name}, {had})"
    if loss.source in ("operator", "health"):
        return Line("warning", "evicted", f"{who} is {one_line(loss.reason)}", about)
    return Line("warning", "node-lost", f"{who} is lost: {one_line(loss.reason)} ({loss.source})", about)


def drill_text(drill: Drill) -> str:
    """Return what somebody has asked for."""
    when = f" once step {drill.step} is done" if drill.step > 0 else ""
    return f"uid {drill.uid} asks for a drill: {drill.what}{when}"


def strike_line(drill: Drill, place: Place, nodes: Mapping[int, NodeView]) -> Line:
    """A drill is done now, to the process in this slot or to the node's agent."""
    name = name_of(nodes, place.node)
    slot = None if drill.rank is None else place.slot
    where = f"on {name}" if slot is None else f"on {name}, slot {slot}"
    about = Subject(node=place.node, name=name, slot=slot, rank=drill.rank)
    return Line("warning", DRILL, f"drill of uid {drill.uid}: {drill.what} ({where})", about)


def returned_early(assignment: Assignment, nodes: Mapping[int, NodeView]) -> Line | None:
    """Ranks whose training function has returned while others still train; None where there are no such."""
    slots = {rank: nodes[place.node].slot(place.slot) for rank, place in enumerate(assignment.places)}
    done = {
        rank: slot
        for rank, slot in slots.items()
        if slot is not None and has_returned(slot, assignment.generation)
    }
    others = [rank for rank in slots if rank not in done]
    if not done or not others:
        return None
    step = max((slot.step for slot in done.values() if slot.step is not None), default=None)
    first = min(done)
    place = assignment.places[first]
    about = Subject(
        node=place.node, name=name_of(nodes, place.node), slot=place.slot, rank=first, pid=done[first].pid
    )
    text = returned_text(sorted(done), others, step)
    return Line("warning", "returned-early", text, about)


def has_returned(slot: SlotState, generation: int) -> bool:
    """Whether a rank's training function has returned in this generation."""
    ended = slot.phase == "finished" or (slot.phase == "exited" and slot.cause is None)
    return ended and slot.generation == generation


def returned_text(done: Sequence[int], others: Sequence[int], step: int | None) -> str:
    """The sentence for it; also of `ckptctl status`."""
    one = len(done) == 1
    who = f"rank {done[0]} has" if one else f"ranks {runs(done)} have"
    when = "" if step is None else f" after step {step}"
    left = f"rank {others[0]} still trains" if len(others) == 1 else f"ranks {runs(others)} still train"
    again = "it" if one else "them"
    return f"{who} returned from the training function{when}, while {left}, and may wait for {again}"


def name_of(nodes: Mapping[int, NodeView], node: int) -> str:
    """Return the node's name."""
    hello = nodes[node].hello
    return hello.info.name if hello is not None else f"node-{node}"


def one_line(text: str) -> str:
    """The first line that says something, bounded and printable: it goes to logs and terminals."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."
