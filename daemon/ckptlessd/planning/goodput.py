"""Pure: where the time of a job's slots went, from its rows in the ledger: each second of each in one class.

A job's time is cut at what its leader has recorded: its start, each recovery's phases, and windows between
them in which ranks train. Of windows, a rank's own count of its steps (`Spent`) says what they were used for;
what no step that was done accounts for was thrown away, or came after the last one. So the classes of a slot
add up to the time that the job had it, and all of them to that of all slots. A slot has a rank, or a spare.

Clocks: recoveries are by the leader's, a rank's steps by its own node's. Where a rank counts more steps in
its windows than these are long (the leader hears of a first step some milliseconds late), its steps are made
shorter in proportion; `Account.excess_s` says by how much in all.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from ckptless.daemon.protocol.records import (
    GIVEN_BACK,
    PHASES,
    TRAINS,
    EventRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    RecoveryRecord,
    SlotRecord,
)

# The class of a second, and what it was; in the order in which they are shown.
CLASSES: Mapping[str, str] = {
    "training": "steps done for the first time, evaluations among them",
    "data": "waiting for batches",
    "commit": "held up by commits",
    "checkpoint": 'in run.phase("checkpoint")',
    "redone": "steps that had been done before a fault",
    "unfinished": "begun after the last step before a fault, a resize or a failed end, and thrown away",
    "detect": "recovery: from the first sign of a fault to the order to stop",
    "stop": "recovery: until every agent has stopped",
    "leave": "recovery: until every rank is out of its training function",
    "agree": "recovery: until the next generation stands",
    "join": "recovery: until every rank is ready, new processes among them",
    "restore": "recovery: until every rank has its groups and its state",
    "first step": "recovery: until every rank has made one new step",
    "planned": "resizes and planned moves, from the stop to the first new step",
    "start": "until every rank has made its first step",
    "end": "from the last step to the job's end",
    "spare": "spares, idle",
    "lost": "slots of nodes that were lost or taken out, until the job's end",
    "untold": "training, as far as is known: no steps were told of",
    "queue": "waiting in Slurm's queue to go on after a requeue",
}
# Kinds of events that say when the slots of a node come and go, and when the job first trained.
NODE_UP, NODE_GONE = ("agent-up",), ("node-lost", "evicted")
KINDS = frozenset({*NODE_UP, *NODE_GONE, TRAINS})

# The name of a run of a Slurm job that was started before (daemon/slurm/run_name.py): 4711.1, or 4711.s3r1.
_RESTARTED = re.compile(r"\.(s\d+r)?[1-9]\d*$", re.ASCII)


Place: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class History:
    """The rows of one run in the ledger. By key, as in a Snapshot; `events` of KINDS at least."""

    job: JobRecord
    nodes: Sequence[NodeRecord]
    slots: Sequence[SlotRecord]
    generations: Sequence[GenerationRecord]
    recoveries: Sequence[RecoveryRecord]
    events: Sequence[EventRecord]


@dataclass
class Account:
    """The seconds of each of CLASSES, over all slots. `wall_s`: from the job's begin to its end, or to now.

    `untold`: slots that had a rank, and told of no steps. `excess_s`: see above.
    """

    wall_s: float = 0.0
    slots: int = 0
    untold: int = 0
    excess_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))

    @property
    def total_s(self) -> float:
        """Seconds of all slots."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The part of them in which the job trained, at least; None where nothing of it is known."""
        trained_s, total_s = self.seconds["training"], self.total_s
        return trained_s / total_s if trained_s or (total_s and not self.seconds["untold"]) else None

    def add(self, other: "Account") -> None:
        """Add another run's."""
        self.wall_s += other.wall_s
        self.slots = max(self.slots, other.slots)
        self.untold += other.untold
        self.excess_s += other.excess_s
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds


@dataclass(frozen=True)
class Span:
    """A part of the job's time: `kind` is a class, or "window" while ranks train; of which generation."""

    begin_s: float
    end_s: float
    kind: str
    generation: int


def of_run(history: History, now_s: float) -> Account:
    """Return where the time of a run's slots went. `now_s`: Unix time, for a run that goes on."""
    job = history.job
    end_s = max(job.started_s, job.ended_s if job.ended_s is not None else now_s)
    spans = [*_spans(history, end_s)]
    ranks = _ranks(history.generations)
    # Of a slot that the job has all the time it matters who had ranks, and of that there is little new.
    whole: dict[frozenset[Place], dict[str, float]] = {}
    for span in spans:
        kinds = whole.setdefault(ranks.get(span.generation, frozenset()), {})
        kinds[span.kind] = kinds.get(span.kind, 0.0) + span.end_s - span.begin_s
    told = {(one.node, one.slot): one for one in history.slots}
    present, freed = _present(history, end_s), _freed(history.events)
    last = spans[-1] if spans and spans[-1].kind == "window" else None
    account = Account(wall_s=end_s - job.started_s, slots=len(present))
    for place, (begin_s, gone_s) in present.items():
        slot = _Slot(account, gone_s, lost=gone_s < end_s)
        if begin_s == job.started_s and not slot.lost:
            for places, kinds in whole.items():
                for kind, seconds in kinds.items():
                    slot.take(kind, seconds, has_rank=place in places)
        else:
            for span in spans:
                seconds = max(0.0, min(span.end_s, gone_s) - max(span.begin_s, begin_s))
                has_rank = place in ranks.get(span.generation, frozenset())
                slot.take(span.kind, seconds, has_rank=has_rank)
        if place[0] not in freed:
            account.seconds["lost"] += max(0.0, end_s - max(gone_s, begin_s))
        slot.settle(told.get(place), last, job)
    return account


def _ranks(generations: Iterable[GenerationRecord]) -> dict[int, frozenset[Place]]:
    """Return the slots that have a rank in each generation; one object for those that are alike."""
    found: dict[int, frozenset[Place]] = {}
    places: tuple[Place, ...] = ()
    slots: frozenset[Place] = frozenset()
    for one in generations:
        if one.places != places:
            places, slots = one.places, frozenset(one.places)
        found[one.generation] = slots
    return found


def of_runs(runs: Iterable[tuple[JobRecord, Account]]) -> Account:
    """Add up the runs of one Slurm job, and what it waited in the queue before it was started again."""
    whole, ended_s = Account(), None
    for job, account in sorted(runs, key=lambda one: (one[0].started_s, one[0].job)):
        if ended_s is not None and _RESTARTED.search(job.job):
            queued_s = max(0.0, job.started_s - ended_s)
            whole.wall_s += queued_s
            whole.seconds["queue"] += queued_s * account.slots
        whole.add(account)
        ended_s = max(ended_s or 0.0, job.started_s + account.wall_s)
    return whole


@dataclass
class _Slot:
    """The time of one slot; `window_s` of it are windows in which it had a rank."""

    account: Account
    gone_s: float
    lost: bool
    window_s: float = 0.0
    had_rank: bool = False

    def take(self, kind: str, seconds: float, *, has_rank: bool) -> None:
        """Take so many seconds of a part of the job's time."""
        if kind == "start":
            # Nobody has a rank before the first generation.
            self.account.seconds["start"] += seconds
        elif not has_rank:
            self.account.seconds["spare"] += seconds
        elif kind == "window":
            self.window_s += seconds
            self.had_rank |= seconds > 0
        else:
            self.account.seconds[kind] += seconds

    def settle(self, told: SlotRecord | None, last: Span | None, job: JobRecord) -> None:
        """Divide the time of windows as the slot's own count says; `last`: the one that the job ended in."""
        seconds, spent = self.account.seconds, told.spent if told is not None else None
        if told is None or spent is None:
            self.account.untold += self.had_rank
            seconds["untold"] += self.window_s
            return
        # What a node did between its last word and its loss was told to nobody: most likely the same.
        unheard_s = max(0.0, self.gone_s - told.updated_s) if self.lost else 0.0
        counted_s = min(self.window_s, spent.total_s + unheard_s)
        scale = counted_s / spent.total_s if spent.total_s else 0.0
        self.account.excess_s += max(0.0, spent.total_s - self.window_s)
        seconds["training"] += scale * spent.training_s
        seconds["data"] += scale * spent.data_s
        seconds["commit"] += scale * spent.commit_s
        seconds["checkpoint"] += scale * spent.checkpoint_s
        seconds["redone"] += scale * spent.redone_s
        left_s = max(0.0, self.window_s - scale * spent.total_s)
        tail_s = 0.0
        if last is not None and not self.lost:
            # After the newest step; of a window that has none yet, all of it.
            newest_s = max(last.begin_s, told.updated_s - spent.since_s)
            tail_s = min(left_s, max(0.0, last.end_s - newest_s))
        # A job that goes on is in a step; of one that has failed nobody gets what came after the last.
        tail = "training" if job.ended_s is None else "end" if job.exit_code == 0 else "unfinished"
        seconds[tail] += tail_s
        seconds["unfinished"] += left_s - tail_s


def _present(history: History, end_s: float) -> dict[Place, tuple[float, float]]:
    """Return from when to when the job had each slot, by node and slot."""
    job, first = history.job, next(iter(history.generations), None)
    per_node = (len(first.places) if first is not None else job.world_size) // max(1, job.nodes)
    founders = job.nodes + job.spares
    nodes = {*range(founders), *(one.node for one in history.nodes)}
    nodes |= {node for one in history.generations for node, _slot in one.places}
    up, lost = _first(history.events, NODE_UP), _first(history.events, NODE_GONE)
    return {
        (node, slot): (
            # A founder's slots were the job's while its agent was still coming up.
            job.started_s if node < founders else min(end_s, max(job.started_s, up.get(node, job.started_s))),
            min(end_s, lost.get(node, end_s)),
        )
        for node in sorted(nodes)
        for slot in range(per_node)
    }


def _first(events: Iterable[EventRecord], kinds: Collection[str]) -> dict[int, float]:
    """Return when each node was first told of so."""
    found: dict[int, float] = {}
    for one in events:
        if one.kind in kinds:
            node = one.about.node if one.about is not None else one.node
            found[node] = min(one.at_s, found.get(node, one.at_s))
    return found


def _freed(events: Iterable[EventRecord]) -> set[int]:
    """Return the nodes that Slurm has back, whose slots are the job's no more."""
    gone = (one.about for one in events if one.kind in NODE_GONE and one.about is not None)
    return {about.node for about in gone if (about.error or "").startswith(GIVEN_BACK)}


def _spans(history: History, end_s: float) -> Iterator[Span]:
    """Yield the parts of a job's time in order, without gap or overlap, empty ones left out."""
    marks = [*_marks(history)]
    begin_s = history.job.started_s
    for (_, kind, generation), (next_s, _, _) in pairwise([*marks, (end_s, "", 0)]):
        # The clocks of two leaders may differ: what has begun is over before the next begins.
        until_s = min(max(next_s, begin_s), end_s)
        if until_s > begin_s:
            yield Span(begin_s, until_s, kind, generation)
        begin_s = until_s


def _marks(history: History) -> Iterator[tuple[float, str, int]]:
    """Yield when each part begins: time, kind, generation."""
    yield history.job.started_s, "start", 0
    first = next(iter(history.generations), None)
    if first is None:
        return
    recoveries = {one.generation: one for one in history.recoveries}
    known = {one.generation: one for one in history.generations}
    first_steps = {one.generation: one.at_s for one in history.events if one.kind == TRAINS}
    if _tells_nothing(history):
        # Its processes run from when they were told to: nobody knows more.
        first_steps = {one.generation: one.agreed_s for one in history.generations}
    trained = False
    for number in sorted({*recoveries, *known}):
        generation, recovery = known.get(number), recoveries.get(number)
        holds = (
            number if generation is not None else max(n for n in known if n <= max(number, first.generation))
        )
        if recovery is not None and trained:
            yield from _phases(recovery, holds)
        if generation is None:
            continue
        began_s = first_steps.get(number)
        if began_s is None and recovery is not None and recovery.outcome == "recovered":
            began_s = recovery.started_s + sum(recovery.phases.values())
        if began_s is not None:
            trained = True
            yield began_s, "window", number


def _tells_nothing(history: History) -> bool:
    """Whether the job has a script without `ckptless.run`, whose processes only start and end."""
    steps = any(one.kind == TRAINS for one in history.events)
    steps |= any(one.outcome == "recovered" for one in history.recoveries)
    ranks = [one for one in history.slots if one.rank is not None]
    return bool(ranks) and not steps and all(one.phase in ("starting", "exited") for one in ranks)


def _phases(recovery: RecoveryRecord, generation: int) -> Iterator[tuple[float, str, int]]:
    """Yield when each phase of a recovery begins; the one after the last that is over goes on."""
    at_s = recovery.started_s
    planned = not recovery.faults
    for phase in PHASES:
        yield at_s, "planned" if planned else phase, generation
        if phase not in recovery.phases:
            return
        at_s += recovery.phases[phase]
