"""Pure: the plan for the next generation, from the faults and what is left.

Rank to slot (a rank keeps its number and, where it can, its place; where their number changes, all are
numbered anew), the step to go on from, who gives the state, the rung. The ladder is in `_answer`; its
budgets, as a table, are `messages.Limits`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ckptless.daemon.ckptlessd.planning import resizing
from ckptless.daemon.ckptlessd.planning.event_lines import cause_text, one_line
from ckptless.daemon.ckptlessd.planning.faults import SECONDARY, Fault, Finding, NodeView
from ckptless.daemon.ckptlessd.planning.resizing import Fleet
from ckptless.daemon.ckptlessd.planning.seats import Seats, remove
from ckptless.daemon.ckptlessd.planning.sources import NoCommonStepError, Sources, state_sources
from ckptless.daemon.ckptlessd.planning.start import start_from
from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.daemon.protocol.limits import clip
from ckptless.daemon.protocol.messages import (
    Assignment,
    Former,
    JobSpec,
    NodeInfo,
    Outcome,
    Place,
    Replaced,
    Tries,
    Why,
    Wish,
)

RUNGS = ("start", "in-process", "process", "spare", "grow", "shrink")

# Exit codes of a job that ckptless ends by itself.
EXIT_SCRIPT = 1
EXIT_USAGE = UsageError.exit_code
EXIT_UNRECOVERABLE = 4

_SCRIPT_DIFFERS = (
    ". The same difference after new processes points to the script, not to a node: something that each "
    "rank does for itself, such as a GradScaler or a clipping without the others' gradients, or a draw "
    "that is not seeded alike. run.compare() between the parts of a step names the first tensor that differs"
)


class NoPlanError(RecoveryError):
    """There is no next generation; `outcome` says how the job ends."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


@dataclass(frozen=True)
class Situation:
    """Everything a plan depends on. `progress` is the newest step that any rank committed.

    `now_s` is Unix time in seconds; another leader's may differ by as much as the nodes' clocks do.
    `wanted` is the newest wish for another size; `resizes`: the generation was stopped so that the job has
    another size. `leaving`: nodes that ranks are to leave; they live, and give their state.
    """

    spec: JobSpec
    nodes: Mapping[int, NodeView]
    current: Assignment
    faults: Sequence[Fault]
    progress: int
    term: int
    leader: int
    now_s: float = 0.0
    wanted: Wish = resizing.AS_MANY_AS_THERE_ARE
    resizes: bool = False
    leaving: Collection[int] = ()

    @property
    def causes(self) -> Sequence[Fault]:
        """The faults to answer: what only follows from another fault is left out."""
        return causes(self.faults)


def causes(faults: Sequence[Fault]) -> Sequence[Fault]:
    """Return the faults that others only follow from; all, where no cause is known."""
    return [fault for fault in faults if fault.finding.kind not in SECONDARY] or faults


@dataclass
class _Answers:
    """The ladder's decisions: slots to renew, slots that may hold no rank any more, the highest rung.

    `flapping` are slots to renew that a rank had better leave; `suspect` too, to another node.
    `drilled`: slots to renew after a drill.
    """

    renew: set[Place] = field(default_factory=set)
    bad: set[Place] = field(default_factory=set)
    flapping: set[Place] = field(default_factory=set)
    suspect: set[Place] = field(default_factory=set)
    drilled: set[Place] = field(default_factory=set)
    rung: str = "in-process"
    tries: list[Tries] = field(default_factory=list)

    def raise_to(self, rung: str) -> None:
        """Rungs only go up within one plan."""
        self.rung = max(self.rung, rung, key=RUNGS.index)


def first_assignment(spec: JobSpec, nodes: Mapping[int, NodeView], term: int, leader: int) -> Assignment:
    """Generation 1: ranks in order over the first usable nodes; see also `start_from`. Raises NoPlanError."""
    usable = sorted(node for node, view in nodes.items() if view.usable)
    if len(usable) < spec.nodes:
        names = spec.names or tuple(f"node-{node}" for node in range(spec.nodes + spec.spares))
        unusable = sorted((node, view.lost) for node, view in nodes.items() if not (view.usable or view.late))
        lost = ", ".join(f"{names[node]} ({why})" for node, why in unusable)
        raise NoPlanError(
            _unrecoverable(f"{len(usable)} of {spec.nodes} nodes came up; missing: {lost}", "never-formed")
        )
    places = tuple(
        Place(node=node, slot=slot) for node in usable[: spec.nodes] for slot in range(spec.slots_per_node)
    )
    start = start_from(nodes.values(), places, spec.saved_step)
    here, former = _split(start.sources, len(places))
    return Assignment(
        job=spec.job,
        generation=1,
        term=term,
        leader=leader,
        places=places,
        nodes=_infos(nodes),
        restore_step=here.step,
        shards=here.shards,
        tensor_nodes=here.tensor_nodes,
        record_nodes=here.record_nodes,
        former=former,
        origin=start.text,
    )


def next_assignment(now: Situation) -> Assignment:
    """The generation after `now.current`. Raises NoPlanError where there is none."""
    answers = _answer_all(now)
    places = _places(now, answers)
    left = answers.suspect - set(places)
    if len(places) != len(now.current.places):
        answers.raise_to("grow" if len(places) > len(now.current.places) else "shrink")
    elif places != now.current.places:
        answers.raise_to("spare")
    try:
        homes = places if len(places) == len(now.current.places) else now.current.places
        sources = state_sources(now.nodes, homes, now.progress, now.current.cut, now.current.former)
    except NoCommonStepError as error:
        raise NoPlanError(_unrecoverable(str(error), "no-common-step")) from error
    generation = now.current.generation + 1
    # A cut that its own ranks have not committed anything of is not gone on with: all begin it anew.
    same = sources.cut == now.current.cut and len(places) == len(now.current.places)
    here, former = _split(sources, len(places))
    # A wish that came beside a fault, and is not followed by this plan, is new still when that one trains.
    followed = now.resizes or len(places) != len(now.current.places)
    return Assignment(
        job=now.spec.job,
        generation=generation,
        term=now.term,
        leader=now.leader,
        places=places,
        nodes=_infos(now.nodes),
        restore_step=sources.step,
        shards=here.shards,
        tensor_nodes=here.tensor_nodes,
        record_nodes=here.record_nodes,
        cut=now.current.cut if same else generation if former or sources.step is None else sources.cut,
        former=former,
        wanted=now.wanted if followed else now.current.wanted,
        done_step=max(now.progress, now.current.done_step) if sources.step is not None else 0,
        renew=tuple(sorted(answers.renew & set(places))),
        rung=answers.rung,
        faults=tuple(fault.id for fault in now.causes),
        tries=tuple(answers.tries),
        bad=tuple(sorted({*now.current.bad, *answers.bad})),
        replaced=_remembered(now, answers, left),
        flapping=tuple(sorted(answers.flapping)),
        stock_roots=now.current.stock_roots or _has_unknown_nccl(now.nodes),
    )


def ahead_of(now: Situation) -> Assignment | None:
    """Return the next generation as far as those need it who build for it, before the present one stops.

    None where it is of another number of ranks, for which all build anew; and where there is none.
    """
    try:
        places = _places(now, _answer_all(now))
    except NoPlanError:
        return None
    if len(places) != len(now.current.places):
        return None
    return structs.replace(
        now.current,
        generation=now.current.generation + 1,
        term=now.term,
        leader=now.leader,
        places=places,
        nodes=_infos(now.nodes),
        restore_step=now.progress,
        former=None,
        renew=(),
        faults=(),
        rung="spare",
    )


# ------------------------------------------------------------------------------------- the ladder


def _answer_all(now: Situation) -> _Answers:
    if not now.spec.recovers:
        raise NoPlanError(_first_failure(now))
    answers = _Answers()
    slots = range(now.spec.slots_per_node)
    answers.bad.update(Place(node=node, slot=slot) for node in now.leaving for slot in slots)
    for fault in now.causes:
        if fault.finding.kind == "no-room":
            reason = one_line(fault.finding.detail)
            raise NoPlanError(Outcome(state="failed", exit_code=EXIT_USAGE, reason=reason, why="no-room"))
        if fault.finding.kind == "refused":
            raise NoPlanError(_script_failed(fault.finding, f"raised {fault.finding.detail}", 1))
        if fault.finding.source == "drill" and fault.finding.kind != "node-lost":
            _answer_drill(fault.finding, answers)
        else:
            _answer(now, fault, answers)
    counted = {tries.cause for tries in answers.tries}
    # Causes that did not come this time are remembered until the job has made progress.
    answers.tries += [
        old for old in now.current.tries if old.cause not in counted and old.step == now.progress
    ]
    return answers


def _answer(now: Situation, fault: Fault, answers: _Answers) -> None:
    """One fault's rung: the first whose budget is not used up. Raises NoPlanError past the last one."""
    finding, limits = fault.finding, now.spec.limits
    if finding.kind == "node-lost":
        answers.bad.update(now.current.places[rank] for rank in now.current.ranks_on(finding.node))
        return
    count = _count(now, fault, answers)
    place = Place(node=finding.node, slot=finding.slot or 0)
    if finding.kind in SECONDARY:
        if count > limits.process_tries:
            text = f"{finding.detail}, {count} times without a step in between"
            raise NoPlanError(_unrecoverable(text, "no-progress", finding))
        return
    if finding.kind == "raised":
        if count > limits.raise_tries + 1:
            raise NoPlanError(_script_failed(finding, f"raised {finding.detail}", count))
        if count > limits.raise_tries:
            _renew(now, place, answers)
        return
    if finding.kind in ("no-state", "no-memory"):
        # Nothing is wrong with the process: what it needs does not get here.
        if count > limits.process_tries:
            answers.bad.add(place)
        return
    if finding.kind == "silent-corruption":
        _answer_corruption(now, fault, count, answers)
        return
    _answer_death(now, fault, count, answers)


def _answer_drill(finding: Finding, answers: _Answers) -> None:
    """A process was killed on purpose, or hangs: nothing is wrong with its slot, and no budget counts it."""
    if finding.kind not in SECONDARY:
        place = Place(node=finding.node, slot=finding.slot or 0)
        answers.renew.add(place)
        answers.drilled.add(place)
        answers.raise_to("process")


def _answer_corruption(now: Situation, fault: Fault, count: int, answers: _Answers) -> None:
    """Twins differ. All go back to where they agreed; the odd one out gets another process, and place.

    Where nobody can say who is wrong that is enough at first; next time both get new processes.
    """
    finding = fault.finding
    assert finding.slot is not None  # twins are processes
    place = Place(node=finding.node, slot=finding.slot)
    if count > now.spec.limits.process_tries:
        text = f"{finding.detail}, {count} times without a step in between"
        # Of those where nobody can say who is wrong the first answer is not a new process.
        renewed = count > (1 if finding.odd else 2)
        raise NoPlanError(_unrecoverable(text + _SCRIPT_DIFFERS * renewed, "corrupt", finding))
    if finding.odd:
        answers.suspect.add(place)
    if finding.odd or count > 1:
        answers.renew.add(place)
        answers.raise_to("process")


def _answer_death(now: Situation, fault: Fault, count: int, answers: _Answers) -> None:
    """A process that ended: by itself (the script's business), or killed."""
    finding, limits = fault.finding, now.spec.limits
    place = Place(node=finding.node, slot=finding.slot or 0)
    ended_itself = finding.exit_code is not None and finding.exit_code >= 0
    if ended_itself:
        budget = limits.raise_tries if finding.hooked else limits.start_tries
        if count > budget:
            code = finding.exit_code or EXIT_SCRIPT
            raise NoPlanError(_script_failed(finding, finding.detail, count, code))
    elif count > limits.process_tries:
        answers.bad.add(place)
        return
    _renew(now, place, answers)


def _first_failure(now: Situation) -> Outcome:
    """Return the end of a job that answers no faults: that of its first rank that failed.

    The others' failures are consequences as a rule, and may have come to the leader before it.
    """
    failed = [fault.finding for fault in now.causes if fault.finding.exit_code is not None]
    if not failed:
        finding = now.causes[0].finding
        text = f"{cause_text(finding, now.nodes)}, and nothing answers faults"
        return _unrecoverable(text, "no-spare")
    first = min(failed, key=lambda finding: _began_s(now, finding))
    code = first.exit_code or EXIT_SCRIPT
    return _script_failed(first, first.detail, 1, code if code > 0 else 128 - code)


def _began_s(now: Situation, finding: Finding) -> float:
    """Return when it began, by the leader's clock; agents tell ages, since their clocks are their own."""
    assert finding.slot is not None  # only a process has an exit code
    view = now.nodes[finding.node]
    slot = view.slot(finding.slot)
    return view.told_s - (slot.age_s if slot is not None else 0.0)


def _renew(now: Situation, place: Place, answers: _Answers) -> None:
    """A new process in the slot. One that has needed many lately is flapping: something there is not sound.

    Its rank moves where there is room; else it stays, since a bad slot is better than the end of the job.
    """
    answers.renew.add(place)
    answers.raise_to("process")
    if len(_lately(now, place)) >= now.spec.limits.flap_tries:
        answers.flapping.add(place)


def _lately(now: Situation, place: Place) -> tuple[float, ...]:
    """Return the times at which the process of a slot was replaced, as far back as that counts."""
    window_s = now.spec.limits.flap_window_s
    known = (at for old in now.current.replaced if old.place == place for at in old.at_s)
    return tuple(at for at in known if now.now_s - at < window_s)


def _remembered(now: Situation, answers: _Answers, left: set[Place]) -> tuple[Replaced, ...]:
    """The same for the next plan: of each slot the newest few, of those that still count.

    What has computed wrongly, and was `left`, counts as flapping: it is taken when nothing else is there.
    """
    most = now.spec.limits.flap_tries
    renewed = answers.renew - answers.drilled
    places = {*(old.place for old in now.current.replaced), *renewed}
    times_of = {p: most if p in left else p in renewed for p in places}
    at = {p: _lately(now, p) + (now.now_s,) * times_of[p] for p in sorted(places)}
    return tuple(Replaced(place=place, at_s=times[-most:]) for place, times in at.items() if times)


def _count(now: Situation, fault: Fault, answers: _Answers) -> int:
    """Return how often this cause has come in a row without a step in between, this time included."""
    finding = fault.finding
    where = "" if finding.kind == "raised" else f"@{finding.node}/{finding.slot}"
    if finding.kind == "silent-corruption":
        # The rank, wherever it has moved: what goes with it is no node's fault.
        where = f"@rank {finding.rank}"
    what = finding.detail if finding.kind == "raised" else ""
    cause = clip(f"{finding.kind}{where}:{what}")
    same = [old for old in now.current.tries if old.cause == cause and old.step == now.progress]
    count = 1 + (same[0].count if same else 0)
    if all(tries.cause != cause for tries in answers.tries):
        answers.tries.append(Tries(cause=cause, count=count, step=now.progress))
    return count


# -------------------------------------------------------------------------------- places and state


def _split(sources: Sources, ranks: int) -> tuple[Sources, Former | None]:
    """Return what so many ranks restore as it is, and what they cut anew; one of them is empty."""
    if sources.step is None or len(sources.shards) == ranks:
        return sources, None
    former = Former(
        cut=sources.cut,
        shards=sources.shards,
        tensor_nodes=sources.tensor_nodes,
        record_nodes=sources.record_nodes,
    )
    return Sources(step=sources.step, cut=sources.cut), former


def _places(now: Situation, answers: _Answers) -> tuple[Place, ...]:
    """Return the slots of as many ranks as before, or of an elastic job's new size. Raises NoPlanError."""
    if not now.spec.elastic:
        return _place(now, answers)
    if not now.resizes:
        try:
            return _place(now, answers)
        except NoPlanError as error:
            no_spare = error
    fleet = Fleet.of(now.spec, now.nodes, now.current, answers.bad)
    size = resizing.size(now.spec, fleet, now.wanted.nodes)
    if size is None and now.wanted.nodes is not None:
        # Better fewer than are wanted, or more, than the end of the job.
        size = resizing.size(now.spec, fleet, None)
    if size is not None and (now.resizes or size < len(fleet.training)):
        return resizing.places_on(fleet.choose(size), now.spec.slots_per_node)
    if now.resizes:
        return _place(now, answers)
    least = f"{min(now.spec.sizes)} node{'s' * (min(now.spec.sizes) > 1)}"
    text = f"{no_spare.outcome.reason}; {len(fleet.whole)} sound nodes are left, and the job needs {least}"
    raise NoPlanError(structs.replace(no_spare.outcome, reason=text))


def _place(now: Situation, answers: _Answers) -> tuple[Place, ...]:
    """Homeless ranks go to free slots, and those of flapping slots where any is left. Raises NoPlanError.

    Ranks of one node stay together where a node has room for them. Free slots that were flapping lately
    themselves are taken only by the homeless, and last.
    """
    homeless = _ranks_in(now, answers.bad)
    shaken = _ranks_in(now, answers.flapping - answers.bad)
    moving = _ranks_in(now, answers.suspect - answers.bad)
    places = list(now.current.places)
    lost = [info.node for info in now.current.nodes if not now.nodes[info.node].usable]
    seats = Seats(now.nodes, now.spec.slots_per_node, now.spec.domains, lost)
    worse = seats.free(now.current, {*now.current.bad, *answers.bad})
    shaky = {
        p.place for p in now.current.replaced if len(_lately(now, p.place)) >= now.spec.limits.flap_tries
    }
    sound = {n: free for n in worse if (free := [s for s in worse[n] if Place(node=n, slot=s) not in shaky])}
    for node in sorted({place.node for place in homeless.values()}):
        ranks = [rank for rank, place in homeless.items() if place.node == node]
        slots = seats.choose(sound, node, len(ranks))
        remove(sound, slots)
        remove(worse, slots)
        slots += (more := seats.choose(worse, node, len(ranks) - len(slots)))
        remove(worse, more)
        if len(slots) < len(ranks):
            text = f"no spare left for rank {ranks[len(slots)]}: {_causes(now)}"
            who = now.causes[0].finding if now.causes else None  # none is to blame that a node is left
            raise NoPlanError(_unrecoverable(text, "no-spare", who))
        for rank, place in zip(ranks, slots, strict=True):
            places[rank] = place
    for rank, place in {**shaken, **moving}.items():
        elsewhere = {node: slots for node, slots in sound.items() if node != place.node or rank in shaken}
        for better in seats.choose(elsewhere, place.node, 1):
            places[rank] = better
            remove(sound, [better])
    return tuple(places)


def _ranks_in(now: Situation, places: set[Place]) -> dict[int, Place]:
    """The ranks that have these slots."""
    found = {now.current.rank_at(place): place for place in places}
    return {rank: found[rank] for rank in sorted(rank for rank in found if rank is not None)}


def _causes(now: Situation) -> str:
    return "; ".join(cause_text(fault.finding, now.nodes) for fault in now.causes)


def _has_unknown_nccl(nodes: Mapping[int, NodeView]) -> bool:
    """Whether any agent has heard of one. Once is enough: all ranks of a job have the same."""
    return any(view.state is not None and view.state.nccl_unknown for view in nodes.values())


def _infos(nodes: Mapping[int, NodeView]) -> tuple[NodeInfo, ...]:
    return tuple(
        view.hello.info for _, view in sorted(nodes.items()) if view.usable and view.hello is not None
    )


def _unrecoverable(reason: str, why: Why, who: Finding | None = None) -> Outcome:
    """`who`: whose log may say more, if it is a process."""
    rank, node = (who.rank, who.node) if who is not None and who.rank is not None else (None, None)
    return Outcome(state="failed", exit_code=EXIT_UNRECOVERABLE, reason=reason, why=why, rank=rank, node=node)


def _script_failed(who: Finding, did: str, count: int, exit_code: int = EXIT_SCRIPT) -> Outcome:
    times = "" if count <= 1 else f", {count} times without a step in between"
    return Outcome(
        state="failed",
        exit_code=exit_code,
        reason=f"rank {who.rank} {one_line(did)}{times}",
        why="script",
        rank=who.rank,
        node=who.node,
    )
