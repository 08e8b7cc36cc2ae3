"""Messages past neighbours, long ones by offer, and pulses that go with the beats."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.membership.offers import ASK_AGAIN_S, KEPT, Offers
from ckptless.daemon.membership.pulses import MOST, Pulses
from ckptless.daemon.membership.router import LIFE_SERIALS, WINDOW, Router

# --------------------------------------------------------------------------------------------- routes


@given(st.lists(st.integers(1, WINDOW), max_size=200))
def test_each_message_counts_once(serials: list[int]) -> None:
    router = Router(me=0, life=0)
    for at, serial in enumerate(serials):
        assert router.heard(1, 7, serial) is (serial not in serials[:at])
        assert router.has(7, serial)


def test_what_is_older_than_the_window_has_come() -> None:
    router = Router(me=0, life=0)
    for serial in range(1, WINDOW + 11):
        assert router.heard(1, 7, serial)
    assert not any(router.heard(1, 7, serial) for serial in range(1, 11))
    assert router.heard(1, 7, WINDOW + 11)


def test_the_way_back_is_the_way_it_came() -> None:
    router = Router(me=0, life=0)
    assert router.toward(7) is None
    router.heard(1, 7, 1)
    router.heard(2, 7, 1)
    assert router.toward(7) == 1
    router.heard(2, 7, 2)
    assert router.toward(7) == 2
    router.forget(2)
    assert router.toward(7) is None


def test_own_messages_come_back_to_nobody() -> None:
    router = Router(me=0, life=5)
    own = [router.next_serial(), router.next_serial()]
    assert own == [5 * LIFE_SERIALS + 1, 5 * LIFE_SERIALS + 2]
    assert not router.heard(1, 0, own[1] + 1)
    assert router.has(0, own[0])


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9, unique=True))
def test_each_life_begins_anew(lives: list[int]) -> None:
    """Whatever the clock says: nothing is taken for old that a daemon says after it was started again."""
    router = Router(me=0, life=0)
    for life in lives:
        daemon = Router(me=7, life=life)
        said = [daemon.next_serial() for _ in range(WINDOW + 3)]
        assert all(router.heard(1, 7, serial) for serial in said)
        assert not any(router.heard(1, 7, serial) for serial in said)


# --------------------------------------------------------------------------------------------- offers


def test_a_long_message_is_asked_for_once() -> None:
    offers: Offers[str] = Offers()
    assert offers.offered((7, 1), node=1, now=0.0)
    assert not offers.offered((7, 1), node=2, now=0.0)
    offers.keep((7, 1), "long")
    assert offers.asked((7, 1)) == "long"
    assert not offers.offered((7, 1), node=3, now=0.1)
    assert offers.overdue(10.0) == []


def test_whoever_does_not_send_it_is_passed_over() -> None:
    offers: Offers[str] = Offers()
    offers.offered((7, 1), node=1, now=0.0)
    offers.offered((7, 1), node=2, now=0.0)
    assert offers.overdue(ASK_AGAIN_S / 2) == []
    assert offers.overdue(ASK_AGAIN_S) == [((7, 1), 2)]
    # Nobody else has it: the next offer begins anew.
    assert offers.overdue(2 * ASK_AGAIN_S) == []
    assert offers.offered((7, 1), node=3, now=1.0)


def test_few_are_kept() -> None:
    offers: Offers[int] = Offers()
    for serial in range(100):
        offers.keep((7, serial), serial)
    kept = [serial for serial in range(100) if offers.asked((7, serial)) is not None]
    assert kept == list(range(100 - KEPT, 100))


# --------------------------------------------------------------------------------------------- pulses

VOTERS = (0, 5)


def test_a_pulse_gets_to_whoever_has_no_connection() -> None:
    line = [Pulses(me) for me in range(5)]
    for beat in range(1, 6):
        for one, following in pairwise(line):
            following.hear(one.beat(VOTERS, float(beat)), float(beat))
    assert line[4].fresh(5.0, within_s=1.0) == {0}
    assert line[4].fresh(7.0, within_s=1.0) == frozenset()


def test_an_old_pulse_that_goes_round_keeps_nobody_alive() -> None:
    one, other = Pulses(1), Pulses(2)
    one.hear(((0, 1000, 0),), 1.0)
    for at in range(2, 20):
        other.hear(one.beat(VOTERS, float(at)), float(at))
        one.hear(other.beat(VOTERS, float(at)), float(at))
    assert one.fresh(20.0, within_s=3.0) == frozenset()
    assert other.fresh(20.0, within_s=3.0) == frozenset()


def test_an_old_pulse_that_comes_late_is_old() -> None:
    """Over a connection that is new, or by way of a daemon that was stopped."""
    one, other, third = Pulses(1), Pulses(2), Pulses(3)
    one.hear(((0, 1000, 0),), 1.0)
    other.hear(one.beat(VOTERS, 4.0), 504.0)  # its clock shows something else
    third.hear(other.beat(VOTERS, 505.0), 5.0)
    assert third.seen_since(3.0) == set()
    assert third.fresh(5.0, within_s=3.0) == frozenset()
    assert third.seen_since(0.5) == {0}


def test_a_daemon_whose_clock_went_back_is_heard_again() -> None:
    before, other = Pulses(0), Pulses(1)
    other.hear(before.beat(VOTERS, 1000.0), 1.0)
    after = Pulses(0)
    other.hear(after.beat(VOTERS, 900.0), 2.0)
    after.hear(other.beat(VOTERS, 2.0), 900.1)
    other.hear(after.beat(VOTERS, 900.2), 3.0)
    assert other.fresh(3.0, within_s=0.5) == {0}


def test_who_votes_no_more_has_no_pulse() -> None:
    pulses = Pulses(1)
    pulses.hear(tuple((node, 1, 0) for node in range(2, 100)), 1.0)
    assert len(pulses.fresh(1.0, 1.0)) == MOST
    assert pulses.beat((1, 2), 2.0) == ((1, 2000, 0), (2, 1, 1000))
    assert pulses.fresh(2.0, 5.0) == {2}
