"""Who votes: spread over failure domains, and no daemon that is away for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.ckptlessd.consensus.quorum import MAX_VOTERS, choose_voters, first_decree
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.voters import VOTER_AWAY_S
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.peers.agreement import Accepted
from ckptless.daemon.replication.failure_domains import by_members, check_name, domain_of

from .lease_nodes import Node

RACKS = st.lists(st.sampled_from(("a", "b", "c", "d", "")), min_size=1, max_size=30).map(tuple)


def racks(*sizes: int) -> tuple[str, ...]:
    """So many nodes in each rack, in order."""
    return tuple(name for name, size in zip("abcdefghij", sizes, strict=False) for _ in range(size))


def per_rack(voters: Sequence[int], domains: Sequence[str]) -> list[int]:
    return sorted(Counter(domain_of(domains, node) for node in voters).values(), reverse=True)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 4, 4), [3, 2, 2]),
        ((20, 2, 2), [3, 2, 2]),
        ((2, 2, 2), [2, 2, 2]),
        ((8, 8), [4, 3]),
        ((9,), [7]),
        ((1, 1, 1, 9), [2, 1, 1, 1]),  # and here four
        ((1, 2, 3), [2, 2, 1]),
        ((1, 2, 4), [2, 2, 1]),  # seven voters would be four of one rack
        ((1, 1, 9), [5, 1, 1]),  # and here fewer would not help
        ((1, 1, 2), [2, 1, 1]),
        ((3,) * 10, [1] * 7),
    ],
)
def test_the_first_voters_are_of_many_racks(sizes: tuple[int, ...], expected: list[int]) -> None:
    domains = racks(*sizes)
    nodes = range(sum(sizes))
    first = first_decree(nodes, domains)
    assert per_rack(first.voters, domains) == expected
    assert first_decree(tuple(reversed(nodes)), domains) == first


@pytest.mark.parametrize("count", range(1, 30))
def test_without_domains_the_first_voters_are_far_apart(count: int) -> None:
    voters = first_decree(range(count)).voters
    assert len(voters) == min(7, count)
    assert voters == tuple(number * count // len(voters) for number in range(len(voters)))
    for nothing_new in (("",) * count, ("one",) * count, tuple(map(str, range(count)))):
        assert first_decree(range(count), nothing_new).voters == voters


@settings(max_examples=500)
@given(sizes=st.lists(st.integers(2, 9), min_size=3, max_size=9), data=st.data())
def test_no_rack_takes_half_of_the_voters_with_it(sizes: list[int], data: st.DataObject) -> None:
    domains = tuple(data.draw(st.permutations(racks(*sizes))))
    voters = first_decree(range(len(domains)), domains).voters
    assert 2 * per_rack(voters, domains)[0] < len(voters)
    # Nor afterwards, as long as three racks are there to take voters from.
    lost = data.draw(st.sampled_from(sorted(set(domains))))
    living = {node for node, domain in enumerate(domains) if domain != lost}
    after = choose_voters(voters, living, living, domains)
    assert set(after) <= living
    if len(sizes) > 3:
        assert 2 * per_rack(after, domains)[0] < len(after)


@settings(max_examples=1000)
@given(domains=RACKS, data=st.data())
def test_who_votes_next(domains: tuple[str, ...], data: st.DataObject) -> None:
    nodes = set(range(len(domains)))
    current = tuple(sorted(data.draw(st.sets(st.sampled_from(sorted(nodes)), min_size=1, max_size=7))))
    living = data.draw(st.sets(st.sampled_from(sorted(nodes))))
    sound = living & data.draw(st.sets(st.sampled_from(sorted(nodes))))
    away = data.draw(st.sets(st.sampled_from(sorted(nodes))))
    after = choose_voters(current, living, sound, domains, away)
    assert after == tuple(sorted(set(after)))
    assert len(after) <= MAX_VOTERS
    if after == current:
        return
    stay = living.intersection(current)
    assert set(after) <= living
    assert 2 * len(sound.intersection(after)) > len(after)
    assert len(after) >= len(stay)
    # Who can be reached, or is away for a moment, keeps the vote; each one taken away went to such a daemon.
    assert {node for node in stay if node in sound or node not in away} <= set(after)
    assert set(after) - stay <= sound
    # The same once more: nobody is voted out and in again.
    assert choose_voters(after, living, sound, domains, away) == after


def test_a_daemon_that_is_away_for_long_is_replaced_where_there_is_another() -> None:
    current, everybody = tuple(range(7)), set(range(9))
    sound = everybody - {2, 3, 4}
    assert choose_voters(current, everybody, sound) == current
    assert choose_voters(current, everybody, sound, (), {2, 3, 4}) == (0, 1, 2, 5, 6, 7, 8)
    few = set(range(5))
    assert choose_voters((0, 1, 2, 3, 4), few, few - {2}, (), {2}) == (0, 1, 2, 3, 4)


def test_a_lost_voter_is_replaced_however_long_it_was_away_before() -> None:
    assert choose_voters((0, 1, 2), {0, 1}, {0, 1}, (), {2}) == (0, 1)
    assert choose_voters((0, 1, 2), {0, 1, 3}, {0, 1, 3}, (), {2}) == (0, 1, 3)


def test_new_voters_are_taken_from_the_rack_that_has_the_fewest_by_then() -> None:
    lost = {9, 10, 11}
    living = set(range(12)) - lost
    assert choose_voters((0, 1, 2, 3, *lost), living, living, racks(6, 6)) == (0, 1, 2, 3, 6, 7, 8)


@pytest.mark.parametrize("away", [set[int](), {3}])
def test_no_vote_is_taken_away_to_leave_no_rack_with_half_of_them(away: set[int]) -> None:
    voters = tuple(range(7))
    assert choose_voters(voters, set(voters), set(voters) - away, racks(4, 2, 1), away) == voters


def test_where_one_rack_has_half_of_any_number_there_are_as_many_as_may_vote() -> None:
    """Node 4 is away for long, and node 7, of the same rack, takes its vote."""
    living, domains = set(range(8)), (*racks(5, 1, 1), "a")
    assert choose_voters(tuple(range(7)), living, living - {4}, domains, {4}) == (0, 1, 2, 3, 5, 6, 7)


def test_most_of_the_new_voters_can_be_reached_or_nothing_changes() -> None:
    assert choose_voters((0, 1, 2, 3, 4), set(range(6)), {0, 5}, (), {1, 2, 3, 4}) == (0, 1, 2, 3, 4)


def test_a_leader_replaces_a_voter_whose_daemon_stays_away() -> None:
    """Of eight nodes seven vote; the daemon of node 2 goes away, and its agent goes on to answer."""
    node = Node(0, 8)
    before = node.control.job.known
    voters = first_decree(range(8)).voters
    assert before.voters == voters
    gone, spare = 2, next(iter(set(range(8)) - set(voters)))
    assert gone in voters
    node.feed(e.PeerDown(gone), e.AgentAnswers(gone, True))
    node.now += VOTER_AWAY_S - 1
    node.feed(e.Tick())
    assert node.control.job.known == before
    # One that comes back in between begins anew.
    standing = e.Standing(1, 0, "running", index=before.index)
    node.feed(e.PeerUp(gone, standing), e.PeerDown(gone), e.AgentAnswers(gone, True))
    node.now += VOTER_AWAY_S - 1
    node.feed(e.Tick())
    assert node.control.job.known == before
    node.now += 1
    node.feed(e.Tick())
    assert node.control.job.known.voters == tuple(sorted({*voters, spare} - {gone}))
    assert node.control.job.known.assignment == before.assignment
    assert node.outcome is None


@pytest.mark.parametrize(("unable", "voters"), [((2,), (0, 1)), ((1, 2), (0, 2))])
def test_who_cannot_vote_is_left_out_while_two_others_can(
    unable: tuple[int, ...], voters: tuple[int, ...]
) -> None:
    node = Node(0, 3)
    node.feed(*(e.PeerUp(one, e.Standing(1, 0, "running", index=1, able=False)) for one in unable))
    assert node.control.job.known.voters == voters


def test_a_voter_is_replaced_by_one_of_another_domain() -> None:
    """Of nine nodes seven vote; of the two others one is in the rack of the voters, the other is not."""
    before = first_decree(range(9)).voters
    first, last = sorted(set(range(9)) - set(before))
    for here, elsewhere in ((first, last), (last, first)):
        node = Node(0, 9)
        assert node.control.job.spec is not None
        domains = tuple("new" if one == elsewhere else "old" for one in range(9))
        node.control.job.spec = structs.replace(node.control.job.spec, domains=domains)
        node.feed(e.PeerUp(before[1], e.Standing(1, 0, "running", index=1, able=False)))
        after = set(node.control.job.known.voters)
        assert elsewhere in after
        assert here not in after


def test_who_cannot_vote_any_more_while_new_voters_are_asked_is_left_out_after_that() -> None:
    node = Node(0, 5)
    node.quiet = set(node.others)

    def disk_fails(one: int) -> None:
        node.feed(e.PeerUp(one, e.Standing(1, 0, "running", index=node.control.job.known.index, able=False)))

    def voters() -> tuple[int, ...]:
        return tuple(node.control.job.known.voters)

    disk_fails(2)
    ballot = node.control.job.agreement.ballot
    assert ballot is not None
    node.feed(*(e.Said(one, Accepted(ballot=ballot, index=2)) for one in (1, 3)))
    assert voters() == (0, 1, 3, 4)
    assert not node.control.job.agreement.ready
    disk_fails(4)
    node.quiet = set()
    node.wait(1.0)
    assert voters() == (0, 1, 3)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "tab\t", 7, None])
def test_what_is_no_name_of_a_domain(name: object) -> None:
    with pytest.raises(UsageError, match=r"no name of a domain|must be text"):
        check_name(name)


def test_what_is_a_name_of_a_domain() -> None:
    assert check_name("rack-1") == "rack-1"
    assert check_name("x" * 64) == "x" * 64


def test_domains_by_their_members() -> None:
    members = {"r1": ["n1", "n2"], "r2": ["n3", "n1"]}
    assert by_members(("n3", "n1", "n9"), members) == ("r2", "r1", "")
    assert by_members(("n1", "n2"), members) == ()
    assert by_members(("n8", "n9"), members) == ()
    assert by_members((), members) == ()
    assert domain_of(("r2", ""), 0) == "r2"
    assert len({domain_of(("r2", ""), node) for node in range(4)}) == 4
