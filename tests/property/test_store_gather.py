"""What all ranks tell all others goes along a tree: it comes everywhere, and costs every node the same."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import Refusal, Reply
from ckptless.daemon.agent.kvstore.gather import FANOUT, Tree
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.wire import Ask, Gather, Told
from ckptless.daemon.api.errors import ProtocolError

sys.path.insert(0, str(Path(__file__).parent))

from store_world import Op, World

WHERE = b"ckptless/7/0//0/"
NODES = st.lists(st.integers(0, 30), min_size=1, max_size=60)
SEEDS = st.integers(0, 1 << 48)


def keys(nodes: int) -> tuple[bytes, ...]:
    return tuple(WHERE + b"%d" % rank for rank in range(nodes))


class Mesh(World):
    """One client on each node, which sets its key, waits for all in a few parts, and gets them."""

    def __init__(self, nodes: int, dice: random.Random) -> None:
        super().__init__(nodes, nodes)
        self.dice = dice
        every = list(keys(nodes))
        self.todo: list[list[protocol.Request]] = []
        for rank in range(nodes):
            cut = dice.randrange(nodes + 1)
            parts = [tuple(part) for part in (every[:cut], every[cut:]) if part]
            asked: list[protocol.Request] = [protocol.Set(every[rank], b"of %d" % rank)]
            for part in parts:
                asked += [protocol.Wait(part), protocol.MultiGet(part)]
            self.todo.append(asked)
        self.gone: set[int] = set()

    def act(self) -> bool:
        """Something that can happen, by chance; False where nothing can."""
        idle = [
            client
            for client, op in enumerate(self.current)
            if op is None and self.todo[client] and client not in self.gone
        ]
        pairs = self.ready()
        if idle and (not pairs or self.dice.random() < 0.3):
            client = self.dice.choice(idle)
            self.call(client, self.todo[client].pop(0))
        elif pairs:
            self.deliver(self.dice.choice(pairs))
        return bool(idle or pairs)

    def lose(self, lost: int) -> None:
        """A node is gone; who expects something of it notices."""
        self.gone.add(lost)
        for pair in list(self.wires):
            if lost in pair:
                del self.wires[pair]
        self.notice()

    def notice(self) -> bool:
        """As connections do that end, or are silent."""
        noticed = False
        for lost in self.gone:
            for number, node in enumerate(self.nodes):
                if number not in self.gone and node.waits_for(lost):
                    node.lost(lost)
                    noticed = True
        for pair in [pair for pair in self.wires if self.gone & set(pair)]:
            del self.wires[pair]
        return noticed

    def got(self, client: int) -> dict[bytes, bytes | None]:
        """What it has."""
        found: dict[bytes, bytes | None] = {}
        for op in self.history:
            if op.client == client and isinstance(op.request, protocol.MultiGet):
                assert isinstance(op.answer, Reply)
                found.update(zip(op.request.keys, op.answer.values, strict=True))
        return found


@given(NODES, st.data())
def test_of_two_neighbours_each_has_what_the_other_lacks(nodes: list[int], data: st.DataObject) -> None:
    me = data.draw(st.sampled_from(nodes))
    tree = Tree(me, nodes)
    assert len(tree.ranks) <= FANOUT + 2
    assert sorted(rank for ranks in tree.ranks.values() for rank in ranks) == list(range(len(nodes)))
    assert tree.ranks[me] == tuple(rank for rank, node in enumerate(nodes) if node == me)
    for other in tree.ranks.keys() - {me}:
        theirs = Tree(other, nodes)
        assert sorted((*tree.ranks[other], *theirs.ranks[me])) == list(range(len(nodes)))


@given(NODES, st.data())
def test_a_replaced_node_leaves_the_others_where_they_were(nodes: list[int], data: st.DataObject) -> None:
    lost, spare = data.draw(st.sampled_from(nodes)), 31
    after = [spare if node == lost else node for node in nodes]
    for me in set(nodes) - {lost}:
        before = Tree(me, nodes).ranks
        expected = {spare if node == lost else node: ranks for node, ranks in before.items()}
        assert Tree(me, after).ranks == expected


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(FANOUT + 2, 24))
def test_all_come_everywhere_and_no_node_is_asked_more_in_a_larger_job(seed: int, nodes: int) -> None:
    world = Mesh(nodes, random.Random(seed))
    while world.act():
        pass
    expected = {key: b"of %d" % rank for rank, key in enumerate(keys(nodes))}
    for client in range(nodes):
        assert world.got(client) == expected
    assert max(node.asked for node in world.nodes) <= FANOUT + 1


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_nobody_waits_for_a_node_that_is_gone(seed: int) -> None:
    """Lost at any point of it: each survivor has all, or is hung up on."""
    dice = random.Random(seed)
    world = Mesh(dice.randrange(FANOUT + 2, 14), dice)
    for _ in range(dice.randrange(200)):
        world.act()
    world.lose(dice.randrange(len(world.nodes)))
    while world.act() or world.notice():
        for client, op in enumerate(world.current):
            if op is None and any(_refused(op) for op in world.history if op.client == client):
                world.todo[client].clear()
    for op in world.history:
        assert op.end is not None or op.client in world.gone
    for client in set(range(len(world.nodes))) - world.gone:
        refused = any(_refused(op) for op in world.history if op.client == client)
        assert refused or len(world.got(client)) == len(world.nodes)


def _refused(op: Op) -> bool:
    return isinstance(op.answer, Refusal)


def test_an_address_that_was_given_away_stays() -> None:
    world = Mesh(6, random.Random(1))
    while world.act():
        pass
    assert _refused(world.call(0, protocol.Set(keys(6)[0], b"another")))
    elsewhere = world.call(1, protocol.Delete(keys(6)[0]))
    world.settle()
    assert _refused(elsewhere)


def test_keys_of_another_generation_are_not_gathered() -> None:
    world = World(6, 6)
    world.nodes[0]._homes = world.nodes[0]._gathering._homes = Homes(list(range(6)), generation=8)
    assert _refused(world.call(0, protocol.Wait(keys(6))))
    with pytest.raises(ProtocolError, match="of generation 7"):
        world.nodes[0].heard(1, Ask(1, Gather(WHERE)))


@pytest.mark.parametrize(
    ("node", "where", "words"),
    [
        (5, WHERE, "none of its neighbours"),
        (9, WHERE, "none of its neighbours"),
        (1, b"default_pg/0//cpu//0/", "not all nodes"),
        (1, b"", "not all nodes"),
    ],
)
def test_what_is_not_to_be_asked_is_refused(node: int, where: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        World(6, 0).nodes[0].heard(node, Ask(1, Gather(where)))


def test_rounds_without_an_end_are_refused() -> None:
    (node, *_) = World(6, 0).nodes
    for number in range(64):
        node.heard(1, Ask(number, Gather(b"ckptless/7/0//%d/" % number)))
    with pytest.raises(ProtocolError, match="more than 64 rounds"):
        node.heard(1, Ask(64, Gather(b"ckptless/7/0//64/")))


def test_an_answer_of_another_length_is_none_and_its_client_hears_of_it() -> None:
    world = World(6, 6)
    op = world.call(0, protocol.Wait(keys(6)))
    with pytest.raises(ProtocolError, match="no answer to Gather"):
        world.nodes[0].heard(1, Told(1, Reply(values=(b"x",) * 5)))
    assert op.answer is None
    world.nodes[0].lost(1)
    assert _refused(op)
