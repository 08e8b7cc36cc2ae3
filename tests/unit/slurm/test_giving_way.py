"""How many nodes an elastic job keeps where another waits: for any queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.slurm import resize
from ckptless.daemon.slurm.giving_way import Queued, could_use_idle, gives_way, waits_before
from ckptless.daemon.slurm.text import JobFormat

REASONS = ("Resources", "Priority", "Dependency", "QOSMaxNodePerUserLimit")


def queued(job_id: int = 2, **fields: object) -> Queued:
    known = {"state": "PENDING", "partition": "gpu", "priority": 20, "nodes": 2, "reason": "Resources"}
    return Queued(job_id=job_id, **{"name": "train", **known, **fields})  # type: ignore[arg-type]


OURS = queued(1, state="RUNNING", priority=10, nodes=8, reason="None")
SIZES = (2, 4, 6, 8)


def test_it_keeps_the_largest_size_that_leaves_enough() -> None:
    assert gives_way(OURS, [queued(nodes=3)], 0, SIZES) == (queued(nodes=3), 4)
    assert gives_way(OURS, [queued(nodes=3)], 1, SIZES) == (queued(nodes=3), 6)


def test_nobody_gets_what_he_can_have_anyway_or_what_would_not_be_enough() -> None:
    assert gives_way(OURS, [queued(nodes=3)], 3, SIZES) is None
    assert gives_way(OURS, [queued(nodes=7)], 0, SIZES) is None


def test_the_first_in_the_queue_counts() -> None:
    """A small one behind a large one would not start with what it is given: Slurm goes by priority."""
    first, small = queued(2, nodes=20, priority=40), queued(3, nodes=1, priority=30)
    assert gives_way(OURS, [small, first], 0, SIZES) is None
    equal = [queued(5, nodes=1), queued(4, nodes=4)]
    assert gives_way(OURS, equal, 0, SIZES) == (queued(4, nodes=4), 4)


def test_what_waits_for_something_else_or_elsewhere_or_behind_is_nothing_to_give_way_to() -> None:
    others = [
        queued(2, priority=10),
        queued(3, partition="cpu"),
        queued(4, reason="Dependency"),
        queued(5, state="RUNNING"),
    ]
    assert gives_way(OURS, others, 0, SIZES) is None


def test_no_way_is_given_to_a_request_for_idle_nodes() -> None:
    """The job's own has another priority than the job, where that is nice or of another QOS."""
    helper = queued(2, name="ckptless-draw-in-1-0123456789ab")
    assert gives_way(OURS, [helper], 0, SIZES) is None
    assert not waits_before(OURS, [helper])
    assert gives_way(OURS, [helper, queued(3)], 0, SIZES) == (queued(3), 6)


def test_no_idle_node_is_taken_that_a_job_before_it_waits_for() -> None:
    """One of the same priority counts, too; one behind, elsewhere, or that waits for something else not."""
    equal, first = queued(2, priority=10), queued(3)
    assert could_use_idle(OURS, [OURS, equal]) == equal
    assert could_use_idle(OURS, [equal, first]) == first
    others = [
        queued(2, priority=9),
        queued(3, partition="cpu"),
        queued(4, reason="Dependency"),
        queued(5, state="RUNNING"),
        queued(6, name="ckptless-draw-in-9-0123456789ab"),
    ]
    assert could_use_idle(OURS, others) is None


@given(
    st.lists(
        st.builds(
            queued,
            st.integers(2, 99),
            state=st.sampled_from(("PENDING", "RUNNING")),
            partition=st.sampled_from(("gpu", "cpu")),
            priority=st.integers(1, 30),
            nodes=st.integers(1, 12),
            reason=st.sampled_from(REASONS),
        ),
        max_size=6,
    ),
    st.integers(0, 4),
    st.sets(st.integers(1, 8)).map(lambda found: tuple(sorted(found | {8}))),
)
def test_who_gives_way_keeps_a_size_and_lets_the_other_start(
    others: list[Queued], idle: int, sizes: tuple[int, ...]
) -> None:
    found = gives_way(OURS, others, idle, sizes)
    if found is None:
        return
    first, keeps = found
    assert waits_before(OURS, others)
    assert keeps in sizes
    assert keeps < OURS.nodes
    assert OURS.nodes - keeps + idle >= first.nodes
    # No more than that takes.
    larger = [size for size in sizes if keeps < size]
    assert all(OURS.nodes - size + idle < first.nodes for size in larger)


def test_squeues_answer() -> None:
    form = JobFormat.of_queue("separator")
    end, last = "separator;", "separator."
    rows = [
        ("7", "PENDING", "gpu", "4294901758", "4-8", "Resources", "other", "normal", "0"),
        ("4", "RUNNING", "gpu", "900", "12", "None", "a;name", "(null)", "1000"),
        ("5", "RUNNING", "gpu", "900", "1", "None", "x", "low", "-5"),
    ]
    first, second, third = form.read_queue("\n".join(end.join(row) + last for row in rows))
    assert (first.nodes, first.reason, first.qos, first.nice) == (4, "Resources", "normal", 0)
    assert (second.priority, second.name, second.qos, second.nice) == (900, "a;name", "", 1000)
    assert third.nice == -5


def test_the_request_for_nodes_stands_in_the_queue_where_the_job_did() -> None:
    assert resize._standing(None) == ()
    assert resize._standing(queued(qos="low", nice=1000)) == ("--nice=1000", "--qos=low")
    # Only root may say less than 0.
    assert resize._standing(queued(nice=-5)) == ()
