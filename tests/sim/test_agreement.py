"""The agreement alone over the worst of networks: any order, losses, repeats, daemons that come back."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.quorum import choose_voters, is_quorum
from ckptless.daemon.ckptlessd.recovery.events import Tell
from ckptless.daemon.protocol.peers.agreement import (
    NO_BALLOT,
    Ballot,
    Decided,
    Decree,
    Durable,
    Prepare,
    Promise,
    Propose,
    Refusal,
    Vote,
)

from .agreeing import Room, ending, quarrel


def nothing(voters: tuple[int, ...]) -> Durable:
    return Durable(promised=NO_BALLOT, vote=None, known=Decree(index=0, voters=voters))


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 6))
def test_no_two_decrees_whatever_happens(seed: int, nodes: int) -> None:
    quarrel(seed, nodes)


def test_the_hostile_world_does_choose() -> None:
    """Else the property above would say nothing."""
    highest = [max(quarrel(seed, 3).chosen) for seed in range(40)]
    assert sum(highest) / len(highest) > 1


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 7))
def test_when_the_world_is_kind_again_it_goes_on(seed: int, nodes: int) -> None:
    room = Room(tuple(range(nodes)), Random(seed))
    for _ in range(200):
        room.anything()
    room.settle()
    newest = max(room.chosen)
    for node in room.nodes:
        room.daemons[node].resign()
        room.daemons[node].learn(room.chosen[newest])
        room.collect(node)
    voter = room.chosen[newest].voters[0]
    for _ in range(3):
        room.campaign(voter)
        room.settle()
        for _ in range(3):
            room.repeat(voter)
            room.settle()
    room.propose(voter, tuple(room.nodes))
    room.settle()
    assert max(room.chosen) > newest
    assert all(room.daemons[node].known.index == max(room.chosen) for node in room.nodes)


def test_what_may_have_been_chosen_is_proposed_again() -> None:
    """Node 0 had its decree accepted by itself and node 1, then died with the answer under way."""
    room = Room((0, 1, 2))
    room.campaign(0)
    room.settle()
    room.propose(0)
    mine = room.daemons[0].proposal
    while room.writes[0] or room.writes[1] or room.under_way:
        for node in (0, 1):
            room.write(node)
        room.under_way = [one for one in room.under_way if 2 not in one[:2] and one[1] != 0]
        if room.under_way:
            room.deliver(0)
    room.restart(0)
    assert max(room.chosen) == 0
    room.campaign(2)
    room.under_way = [one for one in room.under_way if 0 not in one[:2]]
    room.settle()
    assert room.daemons[2].known == mine


def test_an_answer_is_on_the_disk_before_it_is_said() -> None:
    room = Room((0, 1, 2))
    room.campaign(0)
    assert room.under_way == []  # not even that it wants to lead
    room.write(0)
    room.deliver(0)
    asked = [say for _, receiver, say in room.under_way if receiver == 1]
    assert [type(say) for say in asked] == [Prepare]
    room.deliver(next(n for n, one in enumerate(room.under_way) if one[1] == 1))
    assert not any(isinstance(say, Promise) for _, _, say in room.under_way)
    room.write(1)
    assert room.disks[1].promised == Ballot(number=1, node=0)
    assert any(isinstance(say, Promise) for _, _, say in room.under_way)


def test_a_ballot_is_never_used_twice() -> None:
    room = Room((0, 1, 2))
    room.campaign(0)
    room.settle()
    first = room.daemons[0].ballot
    room.restart(0)
    room.campaign(0)
    second = room.daemons[0].ballot
    assert first is not None
    assert second is not None
    assert second > first


def test_whoever_forgot_neither_votes_nor_leads() -> None:
    daemon = Agreement(1, nothing((0, 1, 2)), may_vote=False)
    decree = ending(1, (0, 1, 2), "x")
    ballot = Ballot(number=1, node=0)
    for say in (Prepare(ballot=ballot, index=0), Propose(ballot=ballot, decree=decree)):
        daemon.hear(0, say, 0.0, content=False)
    daemon.campaign(0.0)
    assert all(isinstance(one, Tell) and isinstance(one.say, Refusal) for one in daemon.out)
    daemon.hear(0, Decided(decree=decree), 0.0, content=False)
    assert daemon.known == decree


def test_who_hears_its_leader_wants_no_other() -> None:
    daemon = Agreement(1, nothing((0, 1, 2)))
    daemon.hear(2, Prepare(ballot=Ballot(number=5, node=2), index=0), 0.0, content=True)
    (answer,) = daemon.out
    assert isinstance(answer, Tell)
    assert answer.say == Refusal(ballot=Ballot(number=5, node=2), promised=NO_BALLOT, index=0, content=True)
    assert daemon.durable.promised == NO_BALLOT


def test_who_lags_gets_the_newest_decree() -> None:
    decree = ending(3, (0, 1, 2), "x")
    ahead = Agreement(1, nothing((0, 1, 2)))
    ahead.learn(decree)
    ahead.out.clear()
    ahead.hear(0, Prepare(ballot=Ballot(number=9, node=0), index=0), 0.0, content=False)
    assert ahead.out == [Tell(0, Decided(decree=decree))]
    behind = Agreement(0, nothing((0, 1, 2)))
    behind.hear(1, Prepare(ballot=Ballot(number=9, node=1), index=3), 0.0, content=False)
    (answer,) = behind.out
    assert isinstance(answer, Tell)
    assert isinstance(answer.say, Refusal)
    assert answer.say.index == 0


def test_only_what_comes_next_can_be_proposed() -> None:
    room = Room((0,))
    with pytest.raises(ValueError, match="cannot be proposed"):
        room.daemons[0].propose(ending(1, (0,), "x"), 0.0)
    room.campaign(0)
    room.settle()
    with pytest.raises(ValueError, match="decree 2"):
        room.daemons[0].propose(ending(2, (0,), "x"), 0.0)


@settings(max_examples=2000, deadline=None)
@given(
    voters=st.sets(st.integers(0, 9), min_size=1, max_size=7),
    one=st.sets(st.integers(0, 9)),
    other=st.sets(st.integers(0, 9)),
    dead=st.sets(st.integers(0, 9)),
)
def test_two_quorums_meet(voters: set[int], one: set[int], other: set[int], dead: set[int]) -> None:
    """As long as the dead are the same for both, and none of them answers."""
    one, other, names = one - dead, other - dead, tuple(sorted(voters))
    if is_quorum(names, one, dead) and is_quorum(names, other, dead):
        assert one & other & voters


@settings(max_examples=2000, deadline=None)
@given(
    current=st.sets(st.integers(0, 20), min_size=1, max_size=7),
    living=st.sets(st.integers(0, 20)),
    sound=st.sets(st.integers(0, 20)),
)
def test_voters_stay_while_they_live(current: set[int], living: set[int], sound: set[int]) -> None:
    sound &= living
    after = choose_voters(tuple(sorted(current)), living, sound)
    assert len(after) <= 7
    assert current & living <= set(after)
    if set(after) != current:
        assert set(after) <= living
        assert len(after) == min(7, len((current & living) | sound))
        assert 2 * len(sound & set(after)) > len(after)


def test_the_vote_of_the_highest_ballot_is_proposed() -> None:
    """Node 0 was elected by 0, 1 and 2, and heard by 1; then node 3 by 2, 3 and 4, and heard by them."""
    room = Room((0, 1, 2, 3, 4))
    old, new = (ending(1, (0, 1, 2, 3, 4), reason) for reason in ("old", "new"))
    first, second = Ballot(number=1, node=0), Ballot(number=2, node=3)
    for node, ballot, decree in (
        (0, first, None), (1, first, old), (2, second, new), (3, second, new), (4, second, new)
    ):  # fmt: skip
        vote = Vote(ballot=ballot, decree=decree) if decree is not None else None
        room.disks[node] = Durable(promised=ballot, vote=vote, known=room.chosen[0])
        room.restart(node)
    room.campaign(4)
    room.settle()
    assert room.chosen[1] == new


def test_voters_that_a_decree_names_are_asked_before_the_next() -> None:
    """One of them may have voted for another one in a lower ballot, of which the leader cannot know."""
    room = Room((0, 1, 2, 3, 4))
    room.campaign(0)
    room.settle()
    room.propose(0, (2, 3, 4))
    while not room.daemons[0].known.index:
        room.write(next(node for node in room.nodes if room.writes[node])) if any(
            room.writes.values()
        ) else room.deliver(0)
    assert room.daemons[0].elected
    assert not room.daemons[0].ready
    room.settle()
    assert room.daemons[0].ready


def test_a_leader_that_hears_of_a_higher_promise_stands_down() -> None:
    room = Room((0, 1, 2))
    room.campaign(0)
    room.settle()
    room.daemons[0].beware(1, Ballot(number=1, node=0))
    before = room.daemons[0].elected
    room.daemons[0].beware(1, Ballot(number=7, node=2))
    assert (before, room.daemons[0].elected) == (True, False)
    room.campaign(0)
    assert room.daemons[0].ballot == Ballot(number=8, node=0)
