"""Who is given which replica, who has it, what becomes garbage: pure; four nodes with a rank, two spares."""

from collections.abc import Callable, Collection, Sequence

import pytest
from msgspec.structs import replace

from ckptless.daemon.agent.core.replication import (
    AHEAD_COMMITS,
    Key,
    Replication,
    ReReplication,
    verdict,
)
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, surplus

RANKS, NODES, COPIES, STEP = 4, 6, 2, 10
RECORD, TENSORS = Item("record", 1), Item("tensors", 1)
ME = 1


def assignment(
    generation: int,
    restore_step: int | None = None,
    tensor_nodes: Sequence[tuple[int, tuple[int, ...]]] = (),
    record_nodes: Sequence[tuple[int, ...]] = (),
) -> m.Assignment:
    """Rank n is on node n."""
    return m.Assignment(
        job="4711",
        generation=generation,
        term=1,
        leader=0,
        places=tuple(m.Place(node=node, slot=0) for node in range(RANKS)),
        nodes=tuple(
            m.NodeInfo(node=node, name=f"node-{node}", address=f"10.0.0.{node}", agent_port=1)
            for node in range(NODES)
        ),
        restore_step=restore_step,
        shards=tuple(range(RANKS)) if restore_step is not None else (),
        tensor_nodes=tuple(tensor_nodes),
        record_nodes=tuple(record_nodes),
    )


class Edge:
    """Notes what it is asked for; `steps`: what is held here; `gave_back`: how often it was asked to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.events: list[tuple[str, str]] = []
        self.given_back: list[Item] = []
        self.gave_back = self.forgot_former = 0
        self.steps: dict[Item, set[int]] = {}
        self.at = 0.0

    def send(self, info: m.NodeInfo, what: str) -> None:
        self.sent.append((info.node, what))

    def held(self, key: Key) -> str | None:
        item, step = key
        return f"{item.kind} {item.number} of {step}" if step in self.steps.get(item, ()) else None

    def items(self) -> Collection[Item]:
        return list(self.steps)

    def newest(self, item: Item) -> int | None:
        return max(self.steps[item], default=None)

    def give_back(self, items: Sequence[Item]) -> None:
        self.given_back += items
        self.gave_back += 1
        for item in items:
            del self.steps[item]

    def forget_former(self) -> None:
        self.forgot_former += 1

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    def now(self) -> float:
        return self.at


class Node:
    """Node ME's replication, and what of its commits counts as held."""

    def __init__(self, copies: int = COPIES) -> None:
        self.edge = Edge()
        self.core = Replication(ME, copies, (), self.edge)
        self.acked: list[object] = []

    def ack(self, what: object) -> Callable[[], None]:
        return lambda: self.acked.append(what)

    def record(self, step: int) -> None:
        self.core.push_record((RECORD, step), f"r{step}", self.ack(("r", step)))

    def tensors(self, step: int, twins: Sequence[int] = (ME,)) -> None:
        self.core.push_tensors((TENSORS, step), f"t{step}", frozenset(twins), self.ack(("t", step)))

    def sent(self) -> list[tuple[int, str]]:
        sent, self.edge.sent = self.edge.sent, []
        return sent

    def events(self) -> list[str]:
        return [kind for kind, _ in self.edge.events]


@pytest.fixture
def node() -> Node:
    made = Node()
    made.core.follow(assignment(1))
    return made


@pytest.mark.parametrize(
    ("generation", "accepting", "expected"),
    [(3, True, "take"), (3, False, "frozen"), (2, True, "stale"), (2, False, "stale"), (4, True, "early")],
)
def test_what_becomes_of_a_replica_that_comes(generation: int, accepting: bool, expected: str) -> None:
    assert verdict(generation, 3, accepting=accepting) == expected


def test_an_agent_that_is_in_no_generation_yet_is_told_of_the_first_one_early() -> None:
    core = Node().core
    assert verdict(1, core.generation, accepting=core.accepting) == "early"
    for step in (1, 2, 3):
        core.saw_commit(step)


def test_a_commit_counts_once_all_holders_have_it(node: Node) -> None:
    node.record(1)
    assert node.sent() == [(2, "r1"), (3, "r1")]
    node.core.has(2, (RECORD, 1), 1)
    assert not node.acked
    node.core.has(3, (RECORD, 1), 1)
    assert node.acked == [("r", 1)]
    # Once is enough.
    node.core.has(3, (RECORD, 1), 1)
    assert node.acked == [("r", 1)]


def test_a_word_of_another_generation_or_of_what_is_not_waited_for_counts_nothing(node: Node) -> None:
    node.core.follow(assignment(2))
    node.record(1)
    for word in (((RECORD, 1), 1), ((RECORD, 1), 3), ((RECORD, 2), 2), ((TENSORS, 1), 2)):
        node.core.has(2, *word)
        node.core.has(3, *word)
    assert not node.acked


def test_with_nobody_to_hold_it_a_commit_counts_as_held() -> None:
    node = Node(copies=0)
    node.core.follow(assignment(1))
    node.record(1)
    node.tensors(1)
    assert node.acked == [("r", 1), ("t", 1)]
    assert not node.sent()


def test_twins_count_as_holders(node: Node) -> None:
    node.tensors(1, twins=(ME, 2))
    assert node.sent() == [(3, "t1")]
    node.tensors(2, twins=(ME, 2, 3))
    assert not node.sent()
    assert node.acked == [("t", 2)]


def test_where_every_node_with_ranks_has_a_shard_it_is_given_to_nobody(node: Node) -> None:
    node.tensors(1, twins=range(RANKS))
    assert node.acked == [("t", 1)]


def test_the_next_on_the_ring_takes_the_place_of_a_lost_holder(node: Node) -> None:
    node.record(1)
    node.tensors(1)
    node.sent()
    node.core.has(3, (RECORD, 1), 1)
    node.core.lost(2, "it has hung up")
    assert node.sent() == [(4, "r1"), (4, "t1")]
    assert node.events() == ["holder-lost"]
    node.core.has(4, (RECORD, 1), 1)
    assert node.acked == [("r", 1)]
    node.core.lost(5, "it has hung up")
    assert not node.sent()
    # Nobody is told of a loss twice, nor of a node that is none of this job.
    node.core.lost(2, "it has hung up")
    node.core.lost(99, "it has hung up")
    assert node.events() == ["holder-lost"] * 2


def test_what_a_holder_has_not_got_is_sent_again_over_another_connection(node: Node) -> None:
    node.record(1)
    node.tensors(1)
    node.sent()
    node.core.has(2, (RECORD, 1), 1)
    node.core.again(2)
    assert node.sent() == [(2, "t1")]
    node.core.again(3)
    assert node.sent() == [(3, "r1"), (3, "t1")]
    node.core.again(99)
    node.core.release()
    node.core.again(2)
    assert not node.sent()
    assert not node.events()


def test_the_loss_of_a_node_that_holds_nothing_is_no_matter(node: Node) -> None:
    node.record(1)
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    node.sent()
    node.core.lost(5, "it has hung up")
    assert not node.sent()
    assert node.events() == ["holder-lost"]


def test_of_a_step_that_is_committed_twice_the_later_is_given_to_another(node: Node) -> None:
    node.record(1)
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    node.core.push_record((RECORD, 1), "again", node.ack("again"))
    node.sent()
    node.core.lost(3, "it has hung up")
    assert node.sent() == [(4, "again")]
    for holder in (2, 4):
        node.core.has(holder, (RECORD, 1), 1)
    node.core.lost(4, "it has hung up")
    assert node.sent() == [(5, "again")]


def test_what_a_lost_holder_had_is_given_to_another_and_told_when_it_is_there(node: Node) -> None:
    for step in (1, 2):
        node.record(step)
        for holder in (2, 3):
            node.core.has(holder, (RECORD, step), 1)
    node.sent()
    node.edge.at = 5.0
    node.core.lost(3, "it has hung up")
    # Only the newest: nobody asks for what is older.
    assert node.sent() == [(4, "r2")]
    node.edge.at = 7.5
    node.core.has(4, (RECORD, 2), 1)
    assert node.edge.events[-1] == ("copies-remade", "step 2: record of rank 1, in 2.50 s")
    assert node.acked == [("r", 1), ("r", 2)]


def test_a_step_that_is_held_late_is_not_the_newest_again(node: Node) -> None:
    for step in (1, 2):
        node.record(step)
    for step in (2, 1):
        for holder in (2, 3):
            node.core.has(holder, (RECORD, step), 1)
    node.sent()
    node.core.lost(3, "it has hung up")
    assert node.sent() == [(4, "r2")]


def test_what_was_the_newest_in_an_older_generation_is_not_given_again(node: Node) -> None:
    node.record(1)
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    node.core.follow(assignment(2))
    node.sent()
    node.core.lost(3, "it has hung up")
    assert not node.sent()
    assert node.events() == ["holder-lost"]


def test_a_newer_step_on_its_way_replaces_a_lost_holder_by_itself(node: Node) -> None:
    node.record(1)
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    node.record(2)
    node.sent()
    node.core.lost(3, "it has hung up")
    assert set(node.sent()) == {(4, "r2"), (4, "r1")}


def test_where_the_last_other_node_is_lost_a_commit_counts_and_that_is_told(node: Node) -> None:
    node.record(1)
    for other in (0, 2, 3, 4, 5):
        node.core.lost(other, "it has hung up")
    assert node.acked == [("r", 1)]
    assert node.edge.events[-1] == ("unprotected", "no other node can hold this node's records")
    assert node.events().count("unprotected") == 1


def test_a_step_that_is_committed_again_acknowledges_both(node: Node) -> None:
    node.record(1)
    node.core.push_record((RECORD, 1), "r1", node.ack("again"))
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    assert node.acked == [("r", 1), "again"]


def test_what_is_bad_here_too_is_waited_for_no_more(node: Node) -> None:
    node.tensors(1)
    node.core.unsound((TENSORS, 1), "what was there before")
    node.core.unsound((TENSORS, 2), "t2")
    assert not node.acked
    node.core.unsound((TENSORS, 1), "t1")
    assert node.acked == [("t", 1)]
    assert node.edge.events == [("unprotected", "shard 1, step 1, is held nowhere else")]
    node.core.has(2, (TENSORS, 1), 1)
    node.core.has(3, (TENSORS, 1), 1)
    assert node.acked == [("t", 1)]


def test_a_new_generation_forgets_what_the_old_one_waited_for(node: Node) -> None:
    node.record(1)
    node.core.lost(2, "it has hung up")
    node.sent()
    node.core.accepting = False
    node.core.follow(assignment(2))
    assert node.core.accepting
    node.core.has(3, (RECORD, 1), 2)
    node.core.has(4, (RECORD, 1), 2)
    assert not node.acked
    # Who could not be reached then may be reached now.
    node.record(2)
    assert node.sent() == [(2, "r2"), (3, "r2")]


def test_after_release_nobody_is_given_anything(node: Node) -> None:
    node.record(1)
    node.sent()
    node.core.release()
    assert not node.core.nodes
    node.record(2)
    node.tensors(2)
    assert not node.sent()
    node.core.lost(2, "it has hung up")
    assert not node.edge.events
    assert node.acked == [("r", 2), ("t", 2)]
    node.core.has(2, (RECORD, 1), 1)
    node.core.has(3, (RECORD, 1), 1)
    assert node.acked == [("r", 2), ("t", 2)]


# ------------------------------------------------------------------------------------------- made again

HAD = {"tensor_nodes": [(1, (ME, 2))], "record_nodes": [(0, 1, 2), (ME, 2), (2, 3, 4), (3, 4, 5)]}


def restored(node: Node, *items: Item) -> None:
    """Begin a generation in which node 3 lacks what it is to hold of rank 1; `items` are here."""
    node.edge.steps = {item: {STEP} for item in items}
    node.core.follow(assignment(2, STEP, **HAD))  # type: ignore[arg-type]


def test_what_holders_lack_of_the_restored_step_they_are_given_at_once(node: Node) -> None:
    restored(node, RECORD, TENSORS)
    assert sorted(node.sent()) == [(3, f"record 1 of {STEP}"), (3, f"tensors 1 of {STEP}")]
    node.edge.at = 0.25
    node.core.has(3, (RECORD, STEP), 2)
    assert not node.edge.events
    node.core.has(3, (TENSORS, STEP), 2)
    text = f"step {STEP}: tensors of shard 1; record of rank 1, in 0.25 s"
    assert node.edge.events == [("copies-remade", text)]
    # A rank that commits that step again waits for the same holders, who have it.
    node.record(STEP)
    assert [to for to, _ in node.sent()] == [2, 3]


def test_what_this_node_has_lost_too_is_told_and_the_rest_is_made(node: Node) -> None:
    restored(node, RECORD)
    assert node.edge.events == [
        ("copies-not-remade", f"step {STEP}: tensors of shard 1: this node has lost it, too")
    ]
    node.core.has(3, (RECORD, STEP), 2)
    assert node.events() == ["copies-not-remade", "copies-remade"]
    assert node.sent() == [(3, f"record 1 of {STEP}")]


@pytest.mark.parametrize("last", ["unsound", "held"])
def test_what_is_made_again_and_found_bad_here_is_told_and_the_rest_is_made(node: Node, last: str) -> None:
    restored(node, TENSORS, RECORD)
    if last == "unsound":
        node.core.has(3, (RECORD, STEP), 2)
    node.core.unsound((TENSORS, STEP), f"tensors 1 of {STEP}")
    assert node.events()[:2] == ["unprotected", "copies-not-remade"]
    if last == "held":
        assert node.events() == ["unprotected", "copies-not-remade"]
        node.core.has(3, (RECORD, STEP), 2)
    assert node.edge.events[2:] == [("copies-remade", f"step {STEP}: record of rank 1, in 0.00 s")]


def test_a_new_generation_waits_for_nothing_that_was_made_again_in_the_old_one(node: Node) -> None:
    restored(node, RECORD, TENSORS)
    node.edge.steps = {RECORD: {STEP + 1}, TENSORS: {STEP + 1}}
    node.core.follow(assignment(3, STEP + 1, **HAD))  # type: ignore[arg-type]
    for item in (RECORD, TENSORS):
        node.core.has(3, (item, STEP + 1), 3)
    assert node.events() == ["copies-remade"]


def test_what_is_lost_while_other_things_are_made_again_is_told_together_with_them() -> None:
    edge = Edge()
    made = ReReplication(edge)
    first, second, third = ((Item("record", number), STEP) for number in range(3))
    made.begin(first)
    made.begin(second)
    made.end(first)
    edge.at = 1.0
    made.begin(third)
    edge.at = 2.0
    made.end(second)
    assert not edge.events
    made.end(third)
    assert edge.events == [("copies-remade", f"step {STEP}: record of rank 0, 1, 2, in 2.00 s")]


# ------------------------------------------------------------------------------------------- garbage


def test_what_has_another_place_is_given_back_once_the_watermark_has_passed_it(node: Node) -> None:
    surplus, fresh = Item("record", 4 - 1), Item("tensors", 2)
    restored(node, RECORD, TENSORS, surplus, fresh)
    for step in (STEP + 1, STEP + 2):
        node.core.saw_commit(step)
    assert not node.edge.given_back
    node.edge.steps[fresh].add(STEP + 1)
    node.core.saw_commit(STEP + 3)
    # Node 1 is no holder of rank 3's record; of shard 2 it has a step that may still be asked for.
    assert node.edge.given_back == [surplus]
    node.core.saw_commit(STEP + 4)
    assert node.edge.given_back == [surplus, fresh]
    assert set(node.edge.steps) == {RECORD, TENSORS}


def test_what_was_set_aside_is_forgotten_once_all_have_a_step_of_the_new_cut(node: Node) -> None:
    """Not at the first commit: whoever has not committed yet may be lost, and then it is asked for."""
    restored(node, RECORD, TENSORS)
    node.core.saw_commit(STEP + 1)
    node.core.saw_commit(STEP + 1)
    assert not node.edge.forgot_former
    for step in (STEP + 2, STEP + 3):
        node.core.saw_commit(step)
    assert node.edge.forgot_former


def test_a_frozen_agent_gives_nothing_back(node: Node) -> None:
    restored(node, RECORD, TENSORS, Item("record", 3))
    node.core.accepting = False
    for step in range(STEP + 1, STEP + 9):
        node.core.saw_commit(step)
    assert not node.edge.given_back


def test_after_release_nothing_is_given_back(node: Node) -> None:
    restored(node, RECORD, TENSORS, Item("record", 3))
    node.core.release()
    for step in range(STEP + 1, STEP + 9):
        node.core.saw_commit(step)
    assert not node.edge.given_back


def test_where_all_has_its_place_nothing_is_asked_to_be_given_back(node: Node) -> None:
    restored(node, RECORD, TENSORS)
    for step in range(STEP + 1, STEP + 9):
        node.core.saw_commit(step)
    assert not node.edge.gave_back
    given = Item("record", 3)
    node.edge.steps[given] = {STEP}
    node.core.follow(assignment(3, STEP, **HAD))  # type: ignore[arg-type]
    for step in range(STEP + 1, STEP + 9):
        node.core.saw_commit(step)
    assert (node.edge.gave_back, node.edge.given_back) == (1, [given])


def test_an_own_commit_moves_the_watermark_as_others_do(node: Node) -> None:
    # What was committed before, and is not restored, is no commit of this generation.
    for step in range(STEP + 5, STEP + 8):
        node.record(step)
    restored(node, RECORD, TENSORS, Item("record", 3))
    for step in range(STEP + 1, STEP + 4):
        node.record(step)
    assert node.edge.given_back == [Item("record", 3)]


def test_a_twin_of_a_shard_needs_no_record_of_its_rank() -> None:
    twins = replace(assignment(2, STEP, record_nodes=[(0,), (1,), (2,), (3,)]), shards=(0, 1, 2, 0))
    to = Holders(twins, copies=1)
    here = [Item("record", 0), Item("tensors", 0), Item("record", 3), Item("record", 2)]
    assert surplus(to, 3, here) == (Item("record", 0),)


def moved(rank: int, to: int) -> m.Assignment:
    """Generation 2 is to have one rank on another node."""
    before = assignment(2)
    places = list(before.places)
    places[rank] = m.Place(node=to, slot=0)
    return replace(before, places=tuple(places))


def test_where_a_rank_is_about_to_go_its_next_commits_are_given_ahead(node: Node) -> None:
    node.record(1)
    node.core.give_ahead(moved(1, 5))
    node.sent()
    node.record(2)
    node.tensors(2)
    assert node.sent() == [*((to, "r2") for to in (2, 3, 5)), *((to, "t2") for to in (2, 3, 5))]
    for key in ((RECORD, 2), (TENSORS, 2)):
        for holder in (2, 3):
            node.core.has(holder, key, 1)
    # The next commit waits for it.
    assert not node.acked
    node.core.has(5, (RECORD, 2), 1)
    node.core.has(5, (TENSORS, 2), 1)
    assert node.acked == [("r", 2), ("t", 2)]


def test_a_few_commits_are_given_ahead(node: Node) -> None:
    """The leader may have thought better of it; where it asks again, more are."""
    node.core.give_ahead(moved(1, 5))
    for step in range(1, AHEAD_COMMITS + 3):
        node.record(step)
        node.tensors(step)
    assert [what for to, what in node.sent() if to == 5] == ["r1", "t1", "r2", "t2", "r3", "t3"]
    node.core.give_ahead(moved(1, 5))
    node.record(9)
    assert 5 in [to for to, _ in node.sent()]
    node.core.follow(assignment(2))
    node.record(10)
    assert 5 not in [to for to, _ in node.sent()]


def test_what_does_not_move_is_given_to_nobody_else(node: Node) -> None:
    node.core.give_ahead(moved(2, 5))
    node.record(1)
    node.tensors(1)
    assert {to for to, _ in node.sent()} == {2, 3}


def test_of_twins_the_one_that_gives_tensors_gives_them_to_where_another_goes(node: Node) -> None:
    """DDP: all nodes have them, so otherwise nobody is given any."""
    node.core.give_ahead(moved(3, 5))
    node.record(1)
    node.tensors(1, twins=range(RANKS))
    assert node.sent() == [(2, "r1"), (3, "r1"), (5, "t1")]


@pytest.mark.parametrize("to", [2, ME])
def test_who_holds_it_anyway_is_given_it_once(node: Node, to: int) -> None:
    node.core.give_ahead(moved(1, to))
    node.record(1)
    node.tensors(1)
    assert node.sent() == [(2, "r1"), (3, "r1"), (2, "t1"), (3, "t1")]


def test_where_a_rank_was_about_to_go_may_be_lost(node: Node) -> None:
    node.core.give_ahead(moved(1, 5))
    node.record(1)
    for holder in (2, 3):
        node.core.has(holder, (RECORD, 1), 1)
    node.core.lost(5, "it is gone")
    assert node.acked == [("r", 1)]
    node.record(2)
    assert 5 not in [to for to, what in node.sent() if what == "r2"]
