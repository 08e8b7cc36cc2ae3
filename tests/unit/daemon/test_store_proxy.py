"""What clients of one node ask alike is asked once of the home; what is remembered is bounded."""

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.proxy import Proxy
from ckptless.daemon.agent.kvstore.wire import Ask, Drop, Dropped, FromHome, Refusal, Reply, ToHome, Told

KEYS = tuple(b"default_pg/0//cpu//0/%d" % rank for rank in range(4))
DONE = protocol.STOP_WAITING


class Pair:
    """A home and one proxy, and what each has said and nobody has delivered."""

    def __init__(self, max_nbytes: int = 1 << 20) -> None:
        self.said: list[ToHome] = []
        self.told: list[FromHome] = []
        self.home = Home(lambda _node, item: self.told.append(item))
        self.proxy = Proxy(0, self.said.append, max_nbytes)
        self.answers: list[bytes | Refusal] = []

    def asks(self) -> int:
        return sum(isinstance(item, Ask) for item in self.said)

    def settle(self) -> None:
        while self.said or self.told:
            if self.said:
                self.home.heard(1, self.said.pop(0))
            else:
                self.proxy.heard(self.told.pop(0))

    def set_all(self) -> None:
        for rank, key in enumerate(KEYS):
            self.proxy.ask(protocol.Set(key, b"of %d" % rank), lambda _answer: None)


def test_of_eight_that_wait_alike_one_asks() -> None:
    pair = Pair()
    for _ in range(8):
        pair.proxy.ask(protocol.Wait(KEYS), pair.answers.append)
    assert pair.asks() == 1
    pair.set_all()
    pair.settle()
    assert pair.answers == [DONE] * 8
    for _ in range(8):
        pair.proxy.ask(protocol.MultiGet(KEYS), pair.answers.append)
        pair.proxy.ask(protocol.Check(KEYS), pair.answers.append)
    assert not pair.said
    expected = protocol.encode_values([b"of %d" % rank for rank in range(4)])
    assert pair.answers[8:] == [expected, protocol.encode_check(True)] * 8


def test_when_the_one_who_asks_gives_up_the_others_ask() -> None:
    pair = Pair()
    cancels = [pair.proxy.ask(protocol.Wait(KEYS), pair.answers.append) for _ in range(3)]
    cancels[1]()
    cancels[0]()
    pair.set_all()
    pair.settle()
    assert pair.answers == [DONE]


def test_one_who_gives_up_later_asks_no_more() -> None:
    pair = Pair()
    cancels = [pair.proxy.ask(protocol.Wait(KEYS), pair.answers.append) for _ in range(3)]
    cancels[0]()
    cancels[2]()
    cancels[1]()
    pair.set_all()
    pair.settle()
    assert pair.answers == []
    assert not pair.home._state._waiting
    assert not pair.proxy.expects


def test_a_lost_home_is_told_to_all_who_stand_behind() -> None:
    pair = Pair()
    for _ in range(3):
        pair.proxy.ask(protocol.Wait(KEYS), pair.answers.append)
    pair.proxy.lost("gone")
    assert pair.answers == [Refusal("gone", hostile=False)] * 3


def test_what_there_is_no_room_for_is_asked_again() -> None:
    pair = Pair(max_nbytes=2 * (len(KEYS[0]) + len(b"of 0") + 8))
    pair.set_all()
    for _ in range(2):
        pair.proxy.ask(protocol.MultiGet(KEYS), pair.answers.append)
        pair.settle()
    assert pair.answers == [protocol.encode_values([b"of %d" % rank for rank in range(4)])] * 2
    assert len(pair.proxy._cache) == 2
    for key in KEYS:
        pair.proxy.heard(Drop(key))
    assert (pair.proxy._cache, pair.proxy._left_nbytes) == ({}, 2 * (len(KEYS[0]) + len(b"of 0") + 8))


def test_a_barrier_that_is_canceled_while_it_waits_for_others_counts() -> None:
    """Its key is remembered elsewhere, so the coming itself waits."""
    pair = Pair()
    other: list[FromHome] = []
    home = Home(lambda node, item: (pair.told if node == 1 else other).append(item))
    pair.home = home
    home.heard(2, Ask(1, protocol.Add(b"b", 0)))
    home.heard(2, Ask(2, protocol.MultiGet((b"b",))))
    assert other.pop() == Told(2, Reply(values=(b"0",), keep=(0,)))
    cancel = pair.proxy.ask(protocol.Barrier(b"b", 2), pair.answers.append)
    pair.settle()
    cancel()
    pair.settle()
    assert other.pop() == Drop(b"b")
    assert home.waits_for(2)
    home.heard(2, Dropped(b"b"))
    assert (home._state.find(b"b"), home._state._at_barrier) == (b"1", {})
    assert pair.answers == []


def test_a_very_large_answer_is_refused() -> None:
    pair = Pair()
    pair.proxy.ask(protocol.Set(b"k", bytes(60 << 10)), lambda _answer: None)
    pair.proxy.ask(protocol.MultiGet((b"k",) * 5000), pair.answers.append)
    pair.settle()
    assert [type(answer) for answer in pair.answers] == [Refusal]
