"""One voter's rules, a message at a time: which answers count, who is asked, when a leader stands down."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.consensus import agreement as a
from ckptless.daemon.ckptlessd.recovery.events import Save
from ckptless.daemon.protocol.peers.agreement import (
    NO_BALLOT,
    Accepted,
    Ballot,
    Canvass,
    Decided,
    Decree,
    Durable,
    Prepare,
    Promise,
    Propose,
    Refusal,
    Support,
    Vote,
)

from .lone_voter import HIGHER, MINE, OTHER, VOTERS, Daemon, decree, fresh

# ------------------------------------------------------------------------------------- being elected


def test_a_try_asks_first_and_changes_nothing() -> None:
    daemon = Daemon()
    ask = Canvass(ballot=MINE, index=0)
    assert daemon.campaign() == [(1, ask), (2, ask)]
    assert daemon.it.campaigns
    assert daemon.saves == []
    assert daemon.it.durable.promised == NO_BALLOT


def test_the_only_voter_elects_itself() -> None:
    daemon = Daemon(fresh((0,)))
    assert daemon.campaign() == []
    assert daemon.ready()
    assert not daemon.it.campaigns


def test_the_support_of_another_ballot_or_place_does_not_count() -> None:
    daemon = Daemon()
    daemon.campaign()
    assert daemon.hear(1, Support(ballot=OTHER, index=0)) == []
    assert daemon.hear(1, Support(ballot=MINE, index=1)) == []
    assert daemon.it.ballot is None
    ask = Prepare(ballot=MINE, index=0)
    assert daemon.hear(1, Support(ballot=MINE, index=0)) == [(1, ask), (2, ask)]
    assert daemon.it.ballot == MINE


def test_the_promise_of_another_ballot_or_place_does_not_count() -> None:
    daemon = Daemon()
    daemon.stand()
    daemon.hear(1, Promise(ballot=OTHER, index=0, vote=None))
    daemon.hear(1, Promise(ballot=MINE, index=1, vote=None))
    assert not daemon.elected()
    daemon.hear(1, Promise(ballot=MINE, index=0, vote=None))
    assert daemon.elected()
    assert daemon.ready()


def test_others_are_asked_for_promises_once_the_own_one_is_on_the_disk() -> None:
    daemon = Daemon()
    daemon.campaign()
    daemon.it.hear(1, Support(ballot=MINE, index=0), daemon.now, content=False)
    (save,) = daemon.it.out
    assert isinstance(save, Save)
    assert save.durable.promised == MINE
    daemon.it.out.clear()
    assert daemon.it.campaigns
    # Somebody else's promise is none as long as the own one is not there.
    daemon.it.hear(1, Promise(ballot=MINE, index=0, vote=None), daemon.now, content=False)
    daemon.it.hear(2, Promise(ballot=MINE, index=0, vote=None), daemon.now, content=False)
    assert not daemon.elected()
    daemon.it.repeat(daemon.now + 1.0)
    assert daemon.it.out == []


def test_a_new_try_is_above_every_ballot_that_was_heard_of() -> None:
    for heard in (Canvass(ballot=HIGHER, index=0), Prepare(ballot=HIGHER, index=0)):
        daemon = Daemon()
        daemon.hear(2, heard, content=True)
        daemon.campaign()
        assert daemon.it.sought == Ballot(number=8, node=0)
    daemon = Daemon(fresh(promised=HIGHER))
    daemon.campaign()
    assert daemon.it.sought == Ballot(number=8, node=0)


def test_what_another_has_voted_for_is_proposed_by_whoever_is_elected() -> None:
    daemon = Daemon()
    daemon.stand()
    vote = Vote(ballot=NO_BALLOT, decree=decree(1))
    told = daemon.hear(1, Promise(ballot=MINE, index=0, vote=vote))
    ask = Propose(ballot=MINE, decree=decree(1))
    assert told == [(1, ask), (2, ask)]
    assert daemon.elected()
    assert not daemon.ready()


def test_a_refusal_of_a_try_is_answered_by_a_higher_one() -> None:
    daemon = Daemon()
    daemon.campaign()
    told = daemon.hear(2, Refusal(ballot=MINE, promised=HIGHER, index=0, content=False))
    ask = Canvass(ballot=Ballot(number=8, node=0), index=0)
    assert told == [(1, ask), (2, ask)]


@pytest.mark.parametrize("promised", [NO_BALLOT, MINE])
def test_a_refusal_for_another_reason_is_not(promised: Ballot) -> None:
    daemon = Daemon()
    daemon.campaign()
    assert daemon.hear(2, Refusal(ballot=MINE, promised=promised, index=0, content=True)) == []
    assert daemon.it.sought == MINE


# --------------------------------------------------------------------------------- what a leader does


def test_the_vote_of_another_ballot_or_place_does_not_count() -> None:
    daemon = Daemon()
    daemon.lead()
    daemon.propose(decree(1))
    daemon.hear(1, Accepted(ballot=OTHER, index=1))
    daemon.hear(1, Accepted(ballot=MINE, index=2))
    assert daemon.it.known.index == 0
    assert daemon.hear(1, Accepted(ballot=MINE, index=1)) == [(None, Decided(decree=decree(1)))]
    assert daemon.it.known == decree(1)
    assert daemon.ready()


def test_votes_for_the_decree_before_do_not_count_for_the_next() -> None:
    daemon = Daemon()
    daemon.lead()
    for index in (1, 2):
        daemon.propose(decree(index))
        assert daemon.it.known.index == index - 1
        daemon.hear(1, Accepted(ballot=MINE, index=index))
        assert daemon.it.known.index == index
    assert daemon.hear(2, Accepted(ballot=MINE, index=1)) == []


def test_a_leader_that_learns_from_another_leads_no_more() -> None:
    daemon = Daemon()
    daemon.lead()
    daemon.hear(2, Decided(decree=Decree(index=0, voters=VOTERS)))
    assert daemon.elected(), "it knows that one"
    daemon.hear(2, Decided(decree=decree(1)))
    assert not daemon.elected()
    assert daemon.it.known == decree(1)


def test_a_leader_that_is_refused_for_a_higher_promise_stands_down() -> None:
    for ballot, promised, leads in (
        (MINE, HIGHER, False),
        (MINE, MINE, True),
        (MINE, NO_BALLOT, True),
        (OTHER, HIGHER, True),
    ):
        daemon = Daemon()
        daemon.lead()
        daemon.hear(2, Refusal(ballot=ballot, promised=promised, index=0, content=False))
        assert daemon.elected() is leads, (ballot, promised)


def test_a_leader_that_promises_more_to_another_stands_down() -> None:
    daemon = Daemon()
    daemon.lead()
    assert daemon.hear(2, Canvass(ballot=HIGHER, index=0)) == [(2, Support(ballot=HIGHER, index=0))]
    assert daemon.elected(), "a canvass binds nobody"
    daemon.hear(2, Prepare(ballot=HIGHER, index=0))
    assert not daemon.elected()
    assert daemon.it.durable.promised == HIGHER


def test_a_leader_that_tries_anew_leads_no_more_until_it_is_elected() -> None:
    daemon = Daemon()
    daemon.lead()
    daemon.campaign()
    assert not daemon.elected()
    assert not daemon.ready()


def test_who_promises_another_while_it_asks_for_support_asks_no_more() -> None:
    daemon = Daemon()
    daemon.campaign()
    daemon.hear(2, Prepare(ballot=HIGHER, index=0))
    assert not daemon.it.campaigns


def test_who_refuses_since_it_lags_is_sent_the_decree() -> None:
    daemon = Daemon()
    daemon.lead()
    daemon.propose(decree(1))
    daemon.hear(1, Accepted(ballot=MINE, index=1))
    told = daemon.hear(2, Refusal(ballot=MINE, promised=MINE, index=0, content=False))
    assert told == [(2, Decided(decree=decree(1)))]
    assert daemon.hear(2, Refusal(ballot=MINE, promised=MINE, index=1, content=False)) == []


def test_only_the_higher_promise_of_a_voter_deposes() -> None:
    for node, promised, leads in ((9, HIGHER, True), (2, MINE, True), (2, HIGHER, False)):
        daemon = Daemon()
        daemon.lead()
        daemon.it.beware(node, promised)
        assert daemon.elected() is leads, (node, promised)
        daemon.it.resign()
        daemon.campaign()
        assert daemon.it.sought == Ballot(number=max(promised, MINE).number + 1, node=0)


def test_voters_that_a_decree_names_are_asked_by_the_leader_that_stays() -> None:
    daemon = Daemon()
    daemon.lead()
    named = decree(1, voters=(0, 3, 4))
    daemon.propose(named)
    told = daemon.hear(1, Accepted(ballot=MINE, index=1))
    ask = Prepare(ballot=MINE, index=1)
    assert told == [(None, Decided(decree=named)), (3, ask), (4, ask)]
    assert daemon.elected()
    assert not daemon.ready()
    daemon.hear(1, Promise(ballot=MINE, index=1, vote=None))
    assert not daemon.ready(), "node 1 votes no more"
    daemon.hear(3, Promise(ballot=MINE, index=1, vote=None))
    assert daemon.ready()


# ------------------------------------------------------------------------------------- asked again


def test_whoever_has_not_answered_is_asked_again_and_not_too_often() -> None:
    daemon = Daemon(fresh((0, 1, 2, 3, 4)))
    daemon.campaign()
    daemon.hear(1, Support(ballot=MINE, index=0))
    assert daemon.repeat(a.REPEAT_S / 2) == []
    assert daemon.repeat(a.REPEAT_S / 2) == [(node, Canvass(ballot=MINE, index=0)) for node in (2, 3, 4)]
    daemon.hear(2, Support(ballot=MINE, index=0))
    daemon.hear(1, Promise(ballot=MINE, index=0, vote=None))
    assert daemon.repeat(a.REPEAT_S) == [(node, Prepare(ballot=MINE, index=0)) for node in (2, 3, 4)]
    daemon.hear(2, Promise(ballot=MINE, index=0, vote=None))
    assert daemon.repeat(a.REPEAT_S) == [], "elected, and nothing is open"
    daemon.propose(decree(1, voters=(0, 1, 2, 3, 4)))
    daemon.hear(4, Accepted(ballot=MINE, index=1))
    ask = Propose(ballot=MINE, decree=decree(1, voters=(0, 1, 2, 3, 4)))
    assert daemon.repeat(a.REPEAT_S / 2) == []
    written = len(daemon.saves)
    assert daemon.repeat(a.REPEAT_S) == [(node, ask) for node in (1, 2, 3)]
    assert len(daemon.saves) == written, "its own vote it has"


def test_who_wants_nothing_asks_nothing() -> None:
    assert Daemon().repeat(1.0) == []


def test_half_is_enough_once_the_others_are_dead() -> None:
    voters = (0, 1, 2, 3)
    daemon = Daemon(fresh(voters))
    daemon.campaign()
    daemon.hear(1, Support(ballot=MINE, index=0))
    daemon.repeat(a.REPEAT_S)
    assert daemon.it.ballot is None
    daemon.it.dead |= {2, 3}
    daemon.repeat(a.REPEAT_S)
    assert daemon.it.ballot == MINE


# --------------------------------------------------------------------------------- what a voter does


def test_a_vote_is_on_the_disk_with_its_ballot() -> None:
    daemon = Daemon()
    assert daemon.hear(2, Prepare(ballot=HIGHER, index=0)) == [
        (2, Promise(ballot=HIGHER, index=0, vote=None))
    ]
    assert daemon.hear(2, Propose(ballot=HIGHER, decree=decree(1))) == [(2, Accepted(ballot=HIGHER, index=1))]
    vote = Vote(ballot=HIGHER, decree=decree(1))
    assert daemon.saves[-1].durable == Durable(promised=HIGHER, vote=vote, known=daemon.it.known)
    above = Ballot(number=9, node=1)
    assert daemon.hear(1, Prepare(ballot=above, index=0)) == [(1, Promise(ballot=above, index=0, vote=vote))]
    assert daemon.saves[-1].durable.vote == vote


@pytest.mark.parametrize("ask", [Canvass, Prepare])
def test_a_lower_ballot_is_refused_and_the_same_one_is_not(ask: type[Canvass] | type[Prepare]) -> None:
    daemon = Daemon(fresh(promised=HIGHER))
    refusal = Refusal(ballot=OTHER, promised=HIGHER, index=0, content=False)
    assert daemon.hear(1, ask(ballot=OTHER, index=0)) == [(1, refusal)]
    assert daemon.hear(1, Propose(ballot=OTHER, decree=decree(1))) == [(1, refusal)]
    ((_, yes),) = daemon.hear(2, ask(ballot=HIGHER, index=0))
    assert isinstance(yes, Promise | Support)
    ((_, accepted),) = daemon.hear(2, Propose(ballot=HIGHER, decree=decree(1)))
    assert isinstance(accepted, Accepted)


def test_who_is_content_takes_a_proposal_all_the_same() -> None:
    """The leader that it hears is not the one that was elected: it learns so by that."""
    daemon = Daemon()
    ((_, answer),) = daemon.hear(2, Propose(ballot=HIGHER, decree=decree(1)), content=True)
    assert answer == Accepted(ballot=HIGHER, index=1)


def test_who_lacks_a_decree_does_not_vote_on_the_one_after_it() -> None:
    daemon = Daemon()
    told = daemon.hear(2, Propose(ballot=HIGHER, decree=decree(2)))
    assert told == [(2, Refusal(ballot=HIGHER, promised=NO_BALLOT, index=0, content=False))]


def test_who_asks_about_what_is_decided_is_told_the_decree() -> None:
    daemon = Daemon(fresh(known=decree(2)))
    for ask in (
        Canvass(ballot=HIGHER, index=1),
        Prepare(ballot=HIGHER, index=1),
        Propose(ballot=HIGHER, decree=decree(2, "another")),
    ):
        assert daemon.hear(1, ask) == [(1, Decided(decree=decree(2)))]
    assert daemon.saves == []


def test_a_vote_is_forgotten_with_its_decree_and_not_before() -> None:
    vote = Vote(ballot=HIGHER, decree=decree(3))
    daemon = Daemon(fresh(promised=HIGHER, vote=vote, known=decree(1)))
    daemon.it.learn(decree(2))
    assert daemon.it.durable == Durable(promised=HIGHER, vote=vote, known=decree(2))
    daemon.it.learn(decree(3, "another"))
    assert daemon.it.durable == Durable(promised=HIGHER, vote=None, known=decree(3, "another"))


# -------------------------------------------------------------------------------------- a bad disk


def test_a_disk_that_takes_nothing_is_tried_more_and_more_seldom() -> None:
    daemon = Daemon()
    daemon.it.not_saved("full", daemon.now)
    tries = []
    for _ in range(40):
        before = len(daemon.saves)
        daemon.repeat(0.5)
        if len(daemon.saves) > before:
            tries.append(daemon.now)
            daemon.it.not_saved("still full", daemon.now)
    assert daemon.it.trouble == "full"
    assert tries == [1.0, 3.0, 7.0, 12.0, 17.0]
    daemon.it.saved()
    assert daemon.it.able
    daemon.saves.clear()
    daemon.it.not_saved("full", daemon.now)
    daemon.repeat(1.0)
    assert len(daemon.saves) == 1, "the first pause is short again"


def test_a_disk_that_was_not_written_for_long_is_tried() -> None:
    for durable, may_vote, tried in (
        (fresh(), True, 2),
        (fresh(), False, 0),
        (fresh(known=decree(1)), True, 0),  # the job is over
        (fresh((1, 2, 3)), True, 0),  # no voter
    ):
        daemon = Daemon(durable)
        daemon.it.may_vote = may_vote
        for _ in range(25):
            daemon.repeat(1.0)
        assert len(daemon.saves) == tried, durable
        assert all(save.durable == durable and save.node is None for save in daemon.saves)


def test_trouble_with_the_disk_ends_a_try_and_no_reign() -> None:
    daemon = Daemon()
    daemon.stand()
    daemon.it.not_saved("full", daemon.now)
    assert daemon.it.ballot is None
    assert daemon.campaign() == [], "it could not promise itself anything"
    leader = Daemon()
    leader.lead()
    leader.it.not_saved("full", leader.now)
    assert leader.it.elected
    assert not leader.it.able


def test_who_cannot_write_refuses_everything() -> None:
    daemon = Daemon()
    daemon.it.not_saved("full", daemon.now)
    no = Refusal(ballot=HIGHER, promised=NO_BALLOT, index=0, content=False)
    assert daemon.hear(2, Canvass(ballot=HIGHER, index=0)) == [(2, no)]
    assert daemon.hear(2, Prepare(ballot=HIGHER, index=0)) == [(2, no)]


def test_who_votes_no_more_for_its_disk_tries_it_again_to_be_taken_again() -> None:
    daemon = Daemon(fresh((1, 2, 3)))
    daemon.it.repeat(0.0)
    daemon.it.repeat(a.PROBE_S + 1.0)
    assert daemon.it.out == [], "it has no vote, and its disk no trouble"
    daemon.it.not_saved("it is full", a.PROBE_S + 1.0)
    daemon.it.repeat(a.PROBE_S + 1.0 + a.RETRY_S)
    assert [type(output) for output in daemon.it.out] == [Save]
