"""What clients of one node ask alike is asked once of other nodes, and taken apart and answered once."""

import random

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import DONE, Answer
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.node import StoreNode
from ckptless.daemon.agent.kvstore.parser import KeyLists, StoreParser
from ckptless.daemon.agent.kvstore.protocol import Op
from ckptless.daemon.agent.kvstore.wire import Ask, Item

KEYS = tuple(b"default_pg/0//cpu//0/%d" % rank for rank in range(4))
HELLO = bytes([Op.VALIDATE]) + protocol.MAGIC.to_bytes(4, "little")


class Pair:
    """Two nodes with two ranks each, and what each has sent the other and nobody has delivered."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Item]] = []
        homes = Homes([0, 0, 1, 1])
        self.nodes = [StoreNode(me, homes, self._sender(1 - me)) for me in (0, 1)]
        self.answers: list[Answer] = []

    def _sender(self, target: int):  # type: ignore[no-untyped-def]
        return lambda _node, item: self.sent.append((target, item))

    def asks(self) -> int:
        return sum(isinstance(item, Ask) for _target, item in self.sent)

    def settle(self) -> None:
        while self.sent:
            target, item = self.sent.pop(0)
            self.nodes[target].heard(1 - target, item)

    def set_all(self) -> None:
        for rank, key in enumerate(KEYS):
            self.nodes[rank // 2].ask(protocol.Set(key, b"at %d" % rank), lambda _answer: None)


def test_of_eight_that_wait_alike_one_asks() -> None:
    pair = Pair()
    for _ in range(8):
        pair.nodes[0].ask(protocol.Wait(KEYS), pair.answers.append)
    assert pair.asks() == 1
    pair.set_all()
    pair.settle()
    assert pair.answers == [DONE] * 8
    assert pair.nodes[1].asked == 1
    for _ in range(8):
        pair.nodes[0].ask(protocol.MultiGet(KEYS), pair.answers.append)
    assert pair.answers[8] is pair.answers[15]
    assert not pair.sent


def test_when_the_one_who_asks_gives_up_the_others_ask() -> None:
    pair = Pair()
    cancels = [pair.nodes[0].ask(protocol.Wait(KEYS), pair.answers.append) for _ in range(3)]
    cancels[1]()
    cancels[0]()
    pair.set_all()
    pair.settle()
    assert pair.answers == [DONE]


def test_a_lost_owner_is_told_to_all_who_stand_behind() -> None:
    pair = Pair()
    for _ in range(3):
        pair.nodes[0].ask(protocol.Wait(KEYS), pair.answers.append)
    pair.nodes[0].lost(1)
    assert len(pair.answers) == 3
    assert DONE not in pair.answers


def test_a_known_list_is_taken_apart_as_an_unknown_one_is() -> None:
    """Of many clients, in any pieces, with lists that begin alike."""
    dice = random.Random(1)
    lists = KeyLists()
    for _ in range(300):
        requests: list[protocol.Request] = []
        stream = HELLO
        for _ in range(dice.randrange(1, 6)):
            count = dice.choice((0, 1, 2, 3, 3))
            keys = tuple(dice.choice((b"", b"a", b"ab", b"b")) for _ in range(count))
            op, make = dice.choice(
                ((Op.WAIT, protocol.Wait), (Op.CHECK, protocol.Check), (Op.MULTI_GET, protocol.MultiGet))
            )
            requests.append(make(keys))
            stream += bytes([op]) + len(keys).to_bytes(8, "little")
            stream += b"".join(len(key).to_bytes(8, "little") + key for key in keys)
        parser = StoreParser(lists)
        found: list[protocol.Request] = []
        while stream:
            size = dice.randrange(1, 40)
            found += parser.feed(stream[:size])
            stream = stream[size:]
        assert found == requests
