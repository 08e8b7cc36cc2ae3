"""Where the time of slots went: random histories whose truth is known; and what ledgers may lack."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.goodput import CLASSES, Account, History, of_run, of_runs
from ckptless.daemon.protocol.model import Spent
from ckptless.daemon.protocol.records import (
    PHASES,
    EventRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    RecoveryRecord,
    SlotRecord,
    Subject,
)

JOB = "4711"
Place = tuple[int, int]


@dataclass
class Truth:
    """A job as it went, second by second; and what its daemons have written down of it."""

    random: random.Random
    nodes: int = 2
    spares: int = 1
    per_node: int = 2
    now_s: float = 1000.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    spent: dict[Place, Spent] = field(default_factory=dict)
    generations: list[GenerationRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    lost: dict[int, float] = field(default_factory=dict)
    newest_s: dict[Place, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started_s = self.now_s
        self.places = [(node, slot) for node in range(self.nodes) for slot in range(self.per_node)]

    @property
    def slots(self) -> list[Place]:
        return [(node, slot) for node in range(self.nodes + self.spares) for slot in range(self.per_node)]

    def pass_time(self, seconds: float, kind: str) -> None:
        """Ranks spend it so, spares idle, lost nodes lost; before the first step all of them start."""
        self.now_s += seconds
        for node, slot in self.slots:
            if node in self.lost:
                self.seconds["lost"] += seconds
            elif kind == "start" or (node, slot) in self.places:
                self.seconds[kind] += seconds
            else:
                self.seconds["spare"] += seconds

    def step(self, kind: str = "training") -> None:
        """All ranks make a step together, each with its own share for data and commit."""
        took_s = self.random.uniform(0.01, 3.0)
        self.pass_time(took_s, kind)
        for place in self.places:
            before = self.spent.get(place, Spent())
            data_s, commit_s = (took_s * self.random.uniform(0, 0.4) for _ in range(2))
            if kind == "training":
                self.seconds["training"] -= data_s + commit_s
                self.seconds["data"] += data_s
                self.seconds["commit"] += commit_s
                after = structs.replace(
                    before,
                    training_s=before.training_s + took_s - data_s - commit_s,
                    data_s=before.data_s + data_s,
                    commit_s=before.commit_s + commit_s,
                )
            else:
                after = structs.replace(before, redone_s=before.redone_s + took_s)
            self.spent[place] = after
            self.newest_s[place] = self.now_s

    def begin(self) -> None:
        agreed_s = self.now_s + 0.3
        self.pass_time(self.random.uniform(1, 9), "start")
        self.generation("start", agreed_s)
        self.events.append(event("trains", self.now_s, 0))

    def generation(self, rung: str, agreed_s: float, faults: tuple[str, ...] = ()) -> None:
        self.generations.append(
            GenerationRecord(
                job=JOB,
                generation=len(self.generations) + 1,
                places=tuple(self.places),
                restore_step=None,
                rung=rung,
                faults=faults,
                leader=0,
                agreed_s=agreed_s,
            )
        )

    def recover(self, *, planned: bool, lose: int | None = None) -> None:
        """A fault in the middle of a step, and what follows; or a resize; all phases of it told."""
        self.pass_time(self.random.uniform(0, 2), "unfinished")
        began_s = self.now_s
        if lose is not None:
            self.lost[lose] = began_s
            about = Subject(node=lose)
            self.events.append(event("node-lost", began_s, about.node, about))
            spare = next(n for n in range(self.nodes + self.spares) if n not in self.used | self.lost.keys())
            self.places = [(spare if node == lose else node, slot) for node, slot in self.places]
        phases = {phase: self.random.uniform(0, 1) for phase in PHASES}
        for phase, seconds in phases.items():
            self.pass_time(seconds, "planned" if planned else phase)
        faults = () if planned else (f"fault {len(self.recoveries)}",)
        rung = "spare" if lose is not None or planned else "process"
        self.generation(rung, began_s + sum(phases.values()) / 2, faults)
        number = len(self.generations)
        self.recoveries.append(
            RecoveryRecord(
                job=JOB,
                generation=number,
                rung=rung,
                faults=faults,
                restore_step=1,
                started_s=began_s,
                phases=phases,
                outcome="recovered",
            )
        )

    @property
    def used(self) -> set[int]:
        return {node for node, _ in self.places}

    def history(self, *, exit_code: int | None) -> History:
        told_s = self.now_s
        slots = [
            SlotRecord(
                job=JOB,
                node=node,
                slot=slot,
                rank=None,
                generation=1,
                pid=1,
                phase="restored",
                step=1,
                loss=None,
                updated_s=self.lost.get(node, told_s),
                spent=structs.replace(spent, since_s=self.lost.get(node, told_s) - self.newest_s[node, slot]),
            )
            for (node, slot), spent in self.spent.items()
        ]
        return History(
            job(self, exit_code), nodes(self), slots, self.generations, self.recoveries, self.events
        )


def job(truth: Truth, exit_code: int | None) -> JobRecord:
    return JobRecord(
        job=JOB,
        command=("train.py",),
        world_size=truth.nodes * truth.per_node,
        nodes=truth.nodes,
        spares=truth.spares,
        state="running" if exit_code is None else "failed" if exit_code else "done",
        started_s=truth.started_s,
        ended_s=None if exit_code is None else truth.now_s,
        exit_code=exit_code,
    )


def nodes(truth: Truth) -> list[NodeRecord]:
    return [
        NodeRecord(
            job=JOB,
            node=node,
            name="",
            address="",
            state="up",
            daemon_pid=1,
            agent_pid=1,
            updated_s=truth.now_s,
        )
        for node in range(truth.nodes + truth.spares)
    ]


def event(kind: str, at_s: float, node: int, about: Subject | None = None) -> EventRecord:
    return EventRecord(
        event=f"{kind}.{node}.{at_s}",
        job=JOB,
        node=node,
        at_s=at_s,
        level="info",
        kind=kind,
        generation=1,
        text="",
        about=about,
    )


def drawn(seed: int) -> tuple[Truth, History, int | None]:
    """A job of up to six recoveries, that goes on, is done, or has failed."""
    draw = random.Random(seed)
    truth = Truth(draw, nodes=draw.randint(1, 3), spares=draw.randint(0, 3), per_node=draw.randint(1, 3))
    truth.begin()
    for _ in range(draw.randint(0, 6)):
        for _ in range(draw.randint(0, 5)):
            truth.step()
        # One that was lost before its first word is one of which nothing is known.
        spare = len(truth.lost) < truth.spares and all(place in truth.spent for place in truth.places)
        lose = draw.choice(sorted(truth.used)) if spare and draw.random() < 0.5 else None
        truth.recover(planned=lose is None and draw.random() < 0.3, lose=lose)
        for _ in range(draw.randint(0, 3)):
            truth.step("redone")
    for _ in range(draw.randint(1, 5)):
        truth.step()
    exit_code = draw.choice((None, 0, 1))
    tail = {None: "training", 0: "end", 1: "unfinished"}[exit_code]
    truth.pass_time(draw.uniform(0, 5), tail)
    return truth, truth.history(exit_code=exit_code), exit_code


@pytest.mark.parametrize("block", range(10))
def test_each_second_of_each_slot_is_in_the_class_that_it_was(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        truth, history, _ = drawn(seed)
        account = of_run(history, truth.now_s)
        assert account.seconds == pytest.approx(truth.seconds, abs=1e-6), seed
        assert account.total_s == pytest.approx(account.wall_s * account.slots, rel=1e-9), seed
        assert account.excess_s == pytest.approx(0.0, abs=1e-6), seed
        assert (account.slots, account.untold) == (len(truth.slots), 0), seed


def test_the_order_of_rows_does_not_matter() -> None:
    for seed in range(50):
        truth, history, _ = drawn(seed)
        shuffled = dataclasses.replace(
            history,
            slots=random.Random(seed).sample(history.slots, len(history.slots)),
            events=[*reversed(history.events)],
            recoveries=[*reversed(history.recoveries)],
        )
        assert of_run(shuffled, truth.now_s).seconds == pytest.approx(of_run(history, truth.now_s).seconds)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_missing_in_a_ledger_the_classes_add_up(seed: int) -> None:
    truth, history, _ = drawn(seed)
    draw = random.Random(seed + 1)

    def some(rows: Sequence[Any]) -> list[Any]:
        return [row for row in rows if draw.random() < 0.7]

    def shifted(row: Any) -> Any:
        """A leader's clock is another one's."""
        by_s = draw.uniform(-3, 3)
        if isinstance(row, RecoveryRecord):
            return structs.replace(row, started_s=row.started_s + by_s)
        return structs.replace(row, agreed_s=row.agreed_s + by_s)

    poor = History(
        history.job,
        some(history.nodes),
        some(history.slots),
        [shifted(row) for row in some(history.generations)],
        [shifted(row) for row in some(history.recoveries)],
        some(history.events),
    )
    account = of_run(poor, truth.now_s)
    assert account.total_s == pytest.approx(account.wall_s * account.slots, rel=1e-9)
    assert min(account.seconds.values()) >= 0
    # No slot is counted as training that has not said so, or is not lost before it could.
    assert (account.seconds["untold"] > 0) <= (account.untold > 0)


def test_a_job_that_has_not_begun_only_starts() -> None:
    truth = Truth(random.Random(0))
    history = truth.history(exit_code=None)
    account = of_run(history, truth.now_s + 7)
    assert {name: s for name, s in account.seconds.items() if s} == {"start": 7.0 * 6}
    assert account.goodput == 0.0
    assert of_run(history, truth.now_s).goodput is None


def test_a_recovery_that_goes_on_is_in_the_phase_after_the_last_that_is_over() -> None:
    truth = Truth(random.Random(1), spares=0)
    truth.begin()
    for _ in range(3):
        truth.step()
    history = truth.history(exit_code=None)
    recovery = RecoveryRecord(
        job=JOB,
        generation=2,
        rung="process",
        faults=("f",),
        restore_step=3,
        started_s=truth.now_s,
        phases={"detect": 1.0, "stop": 2.0},
        outcome=None,
    )
    account = of_run(dataclasses.replace(history, recoveries=[recovery]), truth.now_s + 10)
    assert account.seconds["detect"] == pytest.approx(4 * 1.0)
    assert account.seconds["stop"] == pytest.approx(4 * 2.0)
    assert account.seconds["leave"] == pytest.approx(4 * 7.0)


def test_a_recovery_cut_short_by_another_fault_goes_on_until_that_one() -> None:
    truth = Truth(random.Random(2), spares=0)
    truth.begin()
    truth.step()
    at_s = truth.now_s
    history = truth.history(exit_code=None)

    def recovery(generation: int, started_s: float, phases: dict[str, float], outcome: str) -> RecoveryRecord:
        return RecoveryRecord(
            job=JOB,
            generation=generation,
            rung="process",
            faults=("f",),
            restore_step=1,
            started_s=started_s,
            phases=phases,
            outcome=outcome,
        )

    whole = dict.fromkeys(PHASES, 1.0)
    second = structs.replace(history.generations[0], generation=2)
    third = structs.replace(second, generation=3)
    account = of_run(
        dataclasses.replace(
            history,
            generations=[*history.generations, second, third],
            recoveries=[
                recovery(2, at_s, {"detect": 1.0}, "superseded"),
                recovery(3, at_s + 5, whole, "recovered"),
            ],
        ),
        at_s + 12,
    )
    assert account.seconds["detect"] == pytest.approx(4 * 2.0)
    # Four seconds of the first, and one of the second.
    assert account.seconds["stop"] == pytest.approx(4 * 5.0)
    assert account.total_s == pytest.approx(account.wall_s * account.slots)


@pytest.mark.parametrize("phase", ["starting", "exited"])
def test_a_plain_script_tells_of_no_steps(phase: str) -> None:
    """And nobody sees when it has made one. A rank of it dies after ten seconds, and all begin again."""
    truth = Truth(random.Random(3), spares=0)
    at_s = truth.started_s
    truth.generation("start", at_s + 1)
    truth.generation("process", at_s + 1 + 10 + 0.5, ("f",))
    recovery = RecoveryRecord(
        job=JOB,
        generation=2,
        rung="process",
        faults=("f",),
        restore_step=None,
        started_s=at_s + 11,
        phases={"detect": 0.25, "stop": 0.25, "leave": 0.0, "agree": 0.0},
        outcome="unwatched" if phase == "exited" else None,
    )
    truth.recoveries.append(recovery)
    truth.now_s = at_s + 21.5
    slots = [
        SlotRecord(
            job=JOB,
            node=node,
            slot=slot,
            rank=2 * node + slot,
            generation=2,
            pid=1,
            phase=phase,
            step=None,
            loss=None,
            updated_s=truth.now_s,
        )
        for node, slot in truth.places
    ]
    history = dataclasses.replace(truth.history(exit_code=0 if phase == "exited" else None), slots=slots)
    account = of_run(history, truth.now_s)
    told = {name: seconds / 4 for name, seconds in account.seconds.items() if seconds}
    assert told == pytest.approx({"start": 1.0, "untold": 20.0, "detect": 0.25, "stop": 0.25})
    assert (account.untold, account.goodput) == (4, None)
    # One of `ckptless.run` that has only begun says more than that.
    begins = [structs.replace(one, phase="joined") for one in slots]
    account = of_run(dataclasses.replace(history, slots=begins), truth.now_s)
    assert {name for name, seconds in account.seconds.items() if seconds} == {"start"}


def test_a_node_that_was_drawn_in_counts_from_when_it_came() -> None:
    truth = Truth(random.Random(4), spares=0)
    truth.begin()
    truth.step()
    history = truth.history(exit_code=None)
    late = structs.replace(history.nodes[0], node=2)
    came = event("agent-up", truth.now_s, 2)
    grown = dataclasses.replace(history, nodes=[*history.nodes, late], events=[*history.events, came])
    account = of_run(grown, truth.now_s + 3)
    assert account.slots == 6
    assert account.seconds["spare"] == pytest.approx(2 * 3.0)


@pytest.mark.parametrize(
    ("kind", "reason", "lost_s"),
    [
        ("evicted", "taken out by uid 1001", 2 * 4.0),
        ("evicted", "given back to Slurm by uid 1001", 0.0),
        ("node-lost", "Slurm has it down", 2 * 4.0),
    ],
)
def test_a_node_that_slurm_has_back_costs_the_job_nothing_more(kind: str, reason: str, lost_s: float) -> None:
    truth = Truth(random.Random(8))
    truth.begin()
    truth.step()
    history = truth.history(exit_code=None)
    gone = event(kind, truth.now_s, 0, Subject(node=2, error=reason))
    account = of_run(dataclasses.replace(history, events=[*history.events, gone]), truth.now_s + 4)
    assert account.seconds["lost"] == pytest.approx(lost_s)
    assert account.total_s == pytest.approx(account.wall_s * account.slots - (2 * 4.0 - lost_s))


def test_steps_longer_than_their_windows_are_made_shorter_and_told() -> None:
    truth = Truth(random.Random(5), nodes=1, spares=0, per_node=1)
    truth.begin()
    for _ in range(5):
        truth.step()
    history = truth.history(exit_code=0)
    (slot,) = history.slots
    assert slot.spent is not None
    more = structs.replace(slot, spent=structs.replace(slot.spent, training_s=slot.spent.training_s + 0.5))
    account = of_run(dataclasses.replace(history, slots=[more]), truth.now_s)
    assert account.excess_s == pytest.approx(0.5)
    assert account.total_s == pytest.approx(account.wall_s * account.slots)


def test_what_a_lost_node_has_not_told_any_more_is_taken_for_the_same() -> None:
    truth = Truth(random.Random(6))
    truth.begin()
    for _ in range(20):
        truth.step()
    before = structs.replace(truth.spent[1, 0])
    newest_s = truth.now_s
    for _ in range(3):
        truth.step()
    truth.spent[1, 0], truth.newest_s[1, 0] = before, newest_s
    truth.recover(planned=False, lose=1)
    truth.step()
    history = truth.history(exit_code=0)
    slots = [
        structs.replace(one, updated_s=newest_s) if (one.node, one.slot) == (1, 0) else one
        for one in history.slots
    ]
    account = of_run(dataclasses.replace(history, slots=slots), truth.now_s)
    assert account.seconds["training"] == pytest.approx(truth.seconds["training"], rel=0.1)
    assert account.total_s == pytest.approx(account.wall_s * account.slots)


RUNS = (
    (("4711", 0, 10), ("4711.1", 40, 50), 30.0),
    (("4711.s3", 0, 10), ("4711.s3r1", 40, 50), 30.0),
    # Another step of the same start of the job has waited for nothing.
    (("4711.s3", 0, 10), ("4711.s4", 40, 50), 0.0),
    # Two at a time.
    (("4711.s3r1", 0, 50), ("4711.s4r1", 20, 60), 0.0),
)


@pytest.mark.parametrize(("first", "second", "queued_s"), RUNS)
def test_runs_of_a_job_that_was_requeued_have_the_queue_between_them(
    first: tuple[str, float, float], second: tuple[str, float, float], queued_s: float
) -> None:
    truth = Truth(random.Random(7))
    runs = []
    for name, began_s, ended_s in (second, first):
        row = structs.replace(job(truth, 1), job=name, started_s=began_s, ended_s=ended_s)
        account = Account(wall_s=ended_s - began_s, slots=6)
        account.seconds["training"] = 6 * account.wall_s
        runs.append((row, account))
    whole = of_runs(runs)
    assert whole.seconds["queue"] == queued_s * 6
    assert whole.wall_s == sum(account.wall_s for _, account in runs) + queued_s
    assert whole.slots == 6
