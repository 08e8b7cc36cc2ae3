"""Which ranks are slower than the others, by how much and by what; and when that is told."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from msgspec import structs

from ckptless.daemon.agent.core.stillness import WINDOW
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.planning.pace import by_group, shares, slow
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.ckptlessd.recovery.stragglers import STRIKES, Stragglers, names_of
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.page import Stepped, pace_of

NODES, SLOTS = 4, 2
RANKS = NODES * SLOTS


def pace(own_s: float = 0.1, data_s: float = 0.02, step: int = 0, waited_s: float = 0.03) -> m.Pace:
    return m.Pace(
        step=step,
        took_s=own_s + waited_s + 0.01,
        own_s=own_s,
        waited_s=waited_s,
        data_s=data_s,
        commit_s=0.01,
    )


def noisy(seed: int, rank: int, factor: float = 1.0, spread: float = 0.05) -> m.Pace:
    """The median over a window of steps that last 100 ms, and differ by so much."""
    draw = random.Random(f"{seed} {rank}")
    own = [0.1 * factor * max(0.2, draw.gauss(1.0, spread)) for _ in range(WINDOW)]
    return pace_of([Stepped(step, 0.2, 0.2 - one, 0.0, 0.0) for step, one in enumerate(own)])


def test_a_pace_is_of_medians() -> None:
    steps = [Stepped(step, 1.0 + step, 0.5, 0.25, 0.125) for step in range(3)]
    assert pace_of(steps) == m.Pace(
        step=2, took_s=2.0, own_s=1.375, waited_s=0.5, data_s=0.25, commit_s=0.125
    )


def test_who_is_slower_than_ranks_differ_is_slow() -> None:
    paces = {rank: pace() for rank in range(RANKS)}
    assert slow(paces) == []
    (one,) = slow({**paces, 5: pace(0.12)})
    assert (one.who, one.bound, one.median_s) == (5, "compute", 0.1)
    assert one.by_s == pytest.approx(0.02)
    assert one.share == pytest.approx(0.2)
    assert slow({**paces, 5: pace(0.109)}) == []
    assert slow({**paces, 5: pace(0.05)}) == [], "who is fast holds nobody up"
    assert slow({5: pace(0.5)}) == [], "one rank is as fast as itself"
    assert [one.who for one in slow({**paces, 5: pace(0.12), 6: pace(0.2)})] == [6, 5]


@pytest.mark.parametrize(("data_s", "bound"), [(0.02, "compute"), (0.029, "compute"), (0.04, "data")])
def test_what_makes_a_rank_slow(data_s: float, bound: str) -> None:
    paces = {rank: pace() for rank in range(RANKS)}
    (one,) = slow({**paces, 2: pace(0.12, data_s)})
    assert one.bound == bound


def test_of_ranks_that_differ_much_a_small_difference_is_none() -> None:
    paces = {rank: pace(0.1 + 0.01 * (rank % 4)) for rank in range(RANKS)}
    assert slow({**paces, 5: pace(0.14)}) == []
    assert [one.who for one in slow({**paces, 5: pace(0.25)})] == [5]


def test_where_the_time_goes() -> None:
    found = shares({0: pace(0.1, 0.02, waited_s=0.03), 1: pace(0.12, 0.02, waited_s=0.01)})
    assert found is not None
    assert found.step_s == pytest.approx(0.14)
    parts = (found.compute, found.data, found.network, found.waiting, found.commit)
    assert parts == pytest.approx([0.09 / 0.14, 0.02 / 0.14, 0.01 / 0.14, 0.01 / 0.14, 0.01 / 0.14])
    assert sum(parts) == pytest.approx(1.0)
    assert shares({}) is None
    assert shares({0: m.Pace(step=0, took_s=0.0, own_s=0.0, waited_s=0.0, data_s=0.0, commit_s=0.0)}) is None


class Job:
    """What a leader has heard of a job of 8 ranks on 4 nodes."""

    def __init__(self, move_stragglers: int = 0, domains: tuple[str, ...] = ()) -> None:
        self.spec = m.JobSpec(
            job="j",
            command=("t",),
            nodes=NODES,
            spares=0,
            slots_per_node=SLOTS,
            limits=m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10),
            domains=domains,
        )
        self.move_stragglers = move_stragglers
        self.slow: dict[int, Leave] = {}
        self.held_up_by: frozenset[int] = frozenset()
        self.nodes = NodeViews(tuple(range(NODES)))
        self.assignment = m.Assignment(
            job="j",
            generation=1,
            term=1,
            leader=0,
            places=tuple(m.Place(node=rank // SLOTS, slot=rank % SLOTS) for rank in range(RANKS)),
            nodes=(),
            restore_step=None,
        )
        self.stragglers = Stragglers(self)  # type: ignore[arg-type]  # of a job it takes the nodes alone
        self.windows = 0

    def tell(self, node: int, *paces: m.Pace | None) -> list[Line]:
        slots = tuple(
            m.SlotState(slot=slot, phase="restored", generation=self.assignment.generation, pace=one)
            for slot, one in enumerate(paces)
        )
        self.nodes[node].state = m.AgentState(seq=1, slots=slots)
        return self.stragglers.take(self.assignment, [node])

    def window(self, slow_ranks: dict[int, float] | None = None) -> list[Line]:
        """Every rank tells of another window."""
        self.windows += 1
        lines: list[Line] = []
        for node in range(NODES):
            ranks = range(node * SLOTS, (node + 1) * SLOTS)
            paces = [pace(0.1 * (slow_ranks or {}).get(rank, 1.0), step=self.windows) for rank in ranks]
            lines += self.tell(node, *paces)
        return lines


def test_a_rank_is_named_once_it_was_slow_time_and_again() -> None:
    job = Job()
    for _ in range(STRIKES - 1):
        assert job.window({5: 1.2}) == []
    assert job.held_up_by == set()
    (line,) = job.window({5: 1.2})
    assert job.held_up_by == {5}
    assert (line.level, line.kind) == ("warning", "straggler")
    assert line.text == (
        "rank 5 on node-2: 120.0 ms of own work a step where the median is 100.0 ms (+20 %), compute; "
        "all others wait for it"
    )
    assert line.about is not None
    assert (line.about.rank, line.about.node, line.about.slot) == (5, 2, 1)
    for _ in range(5):
        assert job.window({5: 1.2}) == [], "it is named once"


def test_one_that_is_slow_now_and_then_is_not_named() -> None:
    job = Job()
    for _ in range(20):
        for _ in range(STRIKES - 1):
            assert job.window({5: 2.0}) == []
        assert job.window() == []


def test_it_is_told_when_that_is_over_and_begins_again() -> None:
    job = Job()
    for _ in range(STRIKES):
        job.window({5: 1.2})
    assert job.window() == job.window() == []
    assert job.window({5: 1.2}) == job.window() == job.window() == []
    assert job.held_up_by == {5}
    (line,) = job.window()
    assert job.held_up_by == set()
    assert (line.level, line.kind, line.text) == (
        "info",
        "straggler-over",
        "rank 5 as fast as the others again",
    )
    for _ in range(STRIKES - 1):
        assert job.window({5: 1.2}) == []
    assert [line.kind for line in job.window({5: 1.2})] == ["straggler"]


def test_a_node_whose_ranks_are_all_slow_is_named_as_a_whole() -> None:
    job = Job()
    for _ in range(STRIKES - 1):
        job.window({4: 1.3, 5: 1.3, 0: 1.2})
    (line,) = job.window({4: 1.3, 5: 1.3, 0: 1.2})
    assert line.text.startswith("rank 0 on node-0, node-2, all of it (ranks 4, 5): 130.0 ms")
    assert line.about is None


@pytest.mark.parametrize(
    ("domains", "new", "slow_ranks", "told"),
    [
        ("a a b c", range(4), range(4), "failure domain a, all of it (node-0, node-1)"),
        ("a a b c", [3], range(4), "failure domain a, all of it (node-0, node-1)"),
        ("a a b c", [4], range(5), "rank 4 on node-2"),
        ("a a b c", range(3), range(3), "node-0, all of it (ranks 0, 1), rank 2 on node-1"),
        (
            "a b b c",
            [0, 5],
            [0, 2, 3, 4, 5],
            "failure domain b, all of it (node-1, node-2), rank 0 on node-0",
        ),
        ("a b c d", [0, 1], [0, 1], "node-0, all of it (ranks 0, 1)"),
        ("", [1], [0, 1], "node-0, all of it (ranks 0, 1)"),
    ],
)
def test_a_failure_domain_whose_ranks_are_all_slow_is_named_as_a_whole(
    domains: str, new: Collection[int], slow_ranks: Collection[int], told: str
) -> None:
    job = Job(domains=tuple(domains.split()))
    assert ", ".join(names_of(new, slow_ranks, job.assignment, job.spec.domains)) == told


def test_the_switch_of_three_whose_nodes_are_all_slow_is_named() -> None:
    job = Job(domains=("a", "b", "c", "c"))
    for _ in range(STRIKES - 1):
        job.window({2: 1.3, 3: 1.3})
    (line,) = job.window({2: 1.3, 3: 1.3})
    assert line.text.startswith("node-1, all of it (ranks 2, 3): 130.0 ms"), (
        "a domain of one node is the node"
    )


def test_groups_of_ranks_have_the_medians_of_theirs() -> None:
    paces = {rank: pace(0.1 + 0.01 * rank, step=rank) for rank in range(6)}
    found = by_group(paces, {0: "a", 1: "a", 2: "a", 3: "b", 9: "b"})
    assert {name: one.own_s for name, one in found.items()} == {
        "a": pytest.approx(0.11),
        "b": pytest.approx(0.13),
    }
    assert found["a"].step == 2
    even = {node: pace() for node in ("a", "b", "c")}
    assert [(one.who, one.bound) for one in slow({**even, "d": pace(0.13, 0.05)})] == [("d", "data")]


@pytest.mark.parametrize(
    ("paces", "bound"),
    [
        ({0: pace(0.1), 1: pace(0.1)}, "compute"),
        ({0: pace(0.1, 0.08), 1: pace(0.1, 0.08)}, "data"),
        ({0: pace(0.1, waited_s=0.3), 1: pace(0.1, waited_s=0.3)}, "network"),
        ({0: pace(0.1, waited_s=0.0), 1: pace(0.02, waited_s=0.4)}, "waiting"),
    ],
)
def test_what_a_job_is_bound_by(paces: dict[int, m.Pace], bound: str) -> None:
    found = shares(paces)
    assert found is not None
    assert found.bound == bound


def test_nothing_is_said_before_every_rank_has_told_anew() -> None:
    job = Job()
    for _ in range(STRIKES * 3):
        for node in range(1, NODES):
            job.windows += 1
            slow_s = 0.2 if node == 3 else 0.1
            assert job.tell(node, pace(step=job.windows), pace(slow_s, step=job.windows)) == []
    job.tell(0, pace(), None)
    assert job.stragglers.take(job.assignment, []) == []


def test_another_generation_begins_anew() -> None:
    job = Job()
    for _ in range(STRIKES - 1):
        job.window({5: 1.2})
    job.assignment = structs.replace(job.assignment, generation=2)
    for _ in range(STRIKES - 1):
        assert job.window({5: 1.2}) == []
    assert len(job.window({5: 1.2})) == 1
    job.assignment = structs.replace(job.assignment, generation=3)
    assert job.tell(0) == []
    assert job.held_up_by == set()


def test_a_node_is_to_be_left_where_the_site_wants_that_and_its_rank_stays_slow() -> None:
    for most, after in ((0, None), (1, 1), (4, 4)):
        job = Job(most)
        for _ in range(STRIKES):
            job.window({5: 1.2})
        assert job.slow == {}, "it was only named"
        left = None
        for window in range(1, 10):
            job.window({5: 1.2})
            if left is None and job.slow:
                left = window
        assert left == after
    reason = "unwell (rank 5 holds up the others: +20 %, compute)"
    assert job.slow == {2: Leave(reason, "leader")}


def test_a_rank_that_is_fast_again_keeps_its_node() -> None:
    job = Job(2)
    for _ in range(STRIKES + 2):
        job.window({5: 1.2})
    assert [*job.slow] == [2]
    for _ in range(STRIKES):
        job.window()
    assert job.slow == {}
    for _ in range(STRIKES + 2):
        job.window({5: 1.2})
    job.assignment = structs.replace(job.assignment, generation=2)
    job.window({5: 1.2})
    assert job.slow == {}, "it is another generation"


def windows_named(spread: float, factor: float) -> tuple[int, int]:
    """Return in how many of 200 jobs rank 5 is named within four windows, and another one within 50."""
    right = wrong = 0
    for seed in range(200):
        job = Job()
        for window in range(50):
            lines: list[Line] = []
            for node in range(NODES):
                ones = [
                    noisy(1000 * seed + window, rank, factor if rank == 5 else 1.0, spread)
                    for rank in range(node * SLOTS, (node + 1) * SLOTS)
                ]
                lines += job.tell(node, *ones)
            about = [line.about.rank if line.about else -1 for line in lines if line.kind == "straggler"]
            right += window < 4 and 5 in about
            wrong += any(rank != 5 for rank in about)
    return right, wrong


@pytest.mark.parametrize(("spread", "at_once"), [(0.02, 198), (0.1, 150)])
def test_a_fifth_more_is_found_and_noise_is_not(spread: float, at_once: int) -> None:
    right, wrong = windows_named(spread, 1.2)
    assert right >= at_once
    assert wrong == 0
    assert windows_named(spread, 1.0) == (0, 0)
