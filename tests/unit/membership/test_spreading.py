"""Messages past neighbours, long ones by offer, and pulses that go with the beats."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.membership.offers import ASK_AGAIN_S, ASKED_MOST, KEPT, Offers
from ckptless.daemon.ckptlessd.membership.pulses import MOST, Pulses
from ckptless.daemon.ckptlessd.membership.router import LIFE_SERIALS, LIVES, REMEMBERED_S, WINDOW, Router

# --------------------------------------------------------------------------------------------- routes


@given(st.lists(st.integers(1, WINDOW), max_size=200))
def test_each_message_counts_once(serials: list[int]) -> None:
    router = Router(me=0, life=0)
    for at, serial in enumerate(serials):
        assert router.heard(1, 7, serial, serial, 0.0) is (serial not in serials[:at])
        assert all(router.has(7, one) is (one in serials[: at + 1]) for one in range(1, max(serials) + 2))


def test_what_is_older_than_the_window_has_come() -> None:
    router = Router(me=0, life=0)
    for serial in range(1, WINDOW + 11):
        assert router.heard(1, 7, serial, serial, 0.0)
    assert not any(router.heard(1, 7, serial, serial, 0.0) for serial in range(1, 11))
    assert router.heard(1, 7, WINDOW + 11, 99, 0.0)


def test_a_late_message_is_new_as_long_as_few_others_have_come() -> None:
    """Serials 1 and 3 are late: 2 and all from 4 on come before them."""
    router = Router(me=0, life=0)
    in_time = [2, *range(4, WINDOW + 3)]
    for serial in in_time:
        assert router.heard(1, 7, serial, serial, 0.0)
    assert len(in_time) == WINDOW
    assert not router.has(7, 1)
    assert router.heard(1, 7, WINDOW + 3, 200, 0.0)
    # Of what is older than all in the window nobody knows any more: it is taken for one that has come.
    assert router.has(7, 1)
    assert not router.heard(1, 7, 1, 201, 0.0)
    assert router.heard(1, 7, 3, 202, 0.0)


def test_what_a_daemon_says_after_its_restart_is_new_to_the_others() -> None:
    router = Router(me=0, life=0)
    for life in (1, 2):
        origin = Router(me=7, life=life)
        for _ in range(3):
            assert router.heard(1, 7, origin.next_serial(), 100, 0.0)


def test_what_this_daemon_has_said_itself_is_no_news_and_no_way_leads_to_it() -> None:
    router = Router(me=0, life=5)
    assert not router.heard(1, 0, router.next_serial(), 100, 0.0)
    router.learn(0, 1, 100, 0.0)
    assert router.toward(0) is None


def test_the_way_back_is_the_way_it_came() -> None:
    router = Router(me=0, life=0)
    assert router.toward(7) is None
    router.heard(1, 7, 1, 100, 0.0)
    router.heard(2, 7, 1, 100, 0.0)
    assert router.toward(7) == 1
    router.heard(2, 7, 2, 101, 0.0)
    assert router.toward(7) == 2
    router.forget(2)
    assert router.toward(7) is None


def test_what_was_said_earlier_shows_no_way() -> None:
    """Over a slow connection, or by a neighbour to whom the way leads by way of this daemon."""
    router = Router(me=0, life=0)
    router.heard(1, 7, 2, 200, 0.0)
    router.heard(2, 7, 1, 199, 0.0)
    router.learn(7, 3, 200, 0.0)
    assert router.toward(7) == 1
    router.forget(1)
    router.learn(7, 2, 200, 0.0)
    assert router.toward(7) is None
    router.learn(7, 2, 201, 0.0)
    assert router.toward(7) == 2


def test_a_message_that_was_passed_over_has_not_come() -> None:
    router = Router(me=0, life=0)
    router.heard(1, 7, 5, 100, 0.0)
    assert router.has(7, 5)
    assert not router.has(7, 4)
    assert not router.has(7, 6)
    assert router.has(0, 99)


def test_one_neighbour_gone_is_one_way_gone() -> None:
    router = Router(me=0, life=0)
    router.heard(1, 7, 1, 100, 0.0)
    router.heard(2, 8, 1, 100, 0.0)
    router.forget(2)
    assert (router.toward(7), router.toward(8)) == (1, None)


def test_a_daemon_whose_clock_was_set_back_is_found_again() -> None:
    router = Router(me=0, life=0)
    router.heard(1, 7, 5 * LIFE_SERIALS + 1, 9000, 0.0)
    router.heard(2, 7, 6 * LIFE_SERIALS + 1, 100, 0.0)
    assert router.toward(7) == 2


def test_a_word_of_a_former_life_that_comes_late_hides_the_way_for_a_moment() -> None:
    """Node 7 is started again with an earlier clock, and something that it said before comes after that."""
    router = Router(me=0, life=0)
    router.heard(1, 7, 5 * LIFE_SERIALS + 1, 9000, 50.0)
    router.heard(2, 7, 6 * LIFE_SERIALS + 1, 100, 50.5)
    router.heard(1, 7, 5 * LIFE_SERIALS + 2, 9001, 51.0)
    router.forget(1)
    router.heard(2, 7, 6 * LIFE_SERIALS + 2, 200, 51.0 + REMEMBERED_S)
    assert router.toward(7) is None
    router.heard(2, 7, 6 * LIFE_SERIALS + 3, 300, 51.5 + REMEMBERED_S)
    assert router.toward(7) == 2
    router.heard(3, 7, 6 * LIFE_SERIALS + 4, 299, 52.0 + REMEMBERED_S)
    assert router.toward(7) == 2


ends = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda both: both[0] != both[1])
steps = st.one_of(
    st.tuples(st.just("say"), st.just((0, 0))),
    st.tuples(st.just("deliver"), st.tuples(st.integers(0, 9), st.just(0))),
    st.tuples(st.sampled_from(("beat", "beat", "beat", "cut")), ends),
)


@given(st.lists(steps, min_size=20, max_size=60))
@settings(max_examples=500)
def test_no_way_goes_round(story: list[tuple[str, tuple[int, int]]]) -> None:
    """Node 0 says things to all and gives signs of life; they pass in any order, connections come and go."""
    routers = [Router(me=node, life=node) for node in range(4)]
    pulses = [Pulses(me=node) for node in range(4)]
    wires: list[tuple[int, int, int, int]] = []
    for now, (what, (one, other)) in enumerate(story, start=1):
        match what:
            case "say":
                serial, clock_ms = routers[0].next_serial(), pulses[0].clock_ms(float(now))
                wires += [(0, node, serial, clock_ms) for node in range(1, 4)]
            case "deliver" if wires:
                sender, node, serial, clock_ms = wires.pop(one % len(wires))
                if routers[node].heard(sender, 0, serial, clock_ms, 0.0):
                    onward = {1, 2, 3} - {sender, node}
                    wires += [(node, neighbour, serial, clock_ms) for neighbour in sorted(onward)]
            case "beat":
                for node, clock_ms, _ in pulses[other].hear(pulses[one].beat((0,), float(now)), float(now)):
                    routers[other].learn(node, one, clock_ms, 0.0)
            case "cut":
                routers[one].forget(other)
                routers[other].forget(one)
        for begin in range(1, 4):
            way, passed = routers[begin].toward(0), [begin]
            while way is not None:
                assert way not in passed, f"{passed} leads back to {way}"
                passed.append(way)
                way = routers[way].toward(0)


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


def test_who_was_asked_instead_has_as_long_to_answer() -> None:
    offers: Offers[str] = Offers()
    for node in (1, 2, 3):
        offers.offered((7, 1), node=node, now=0.0)
    assert offers.overdue(ASK_AGAIN_S) == [((7, 1), 2)]
    assert offers.overdue(1.5 * ASK_AGAIN_S) == []
    assert offers.overdue(2 * ASK_AGAIN_S) == [((7, 1), 3)]


def test_of_very_many_offers_the_oldest_are_forgotten() -> None:
    offers: Offers[str] = Offers()
    for serial in range(ASKED_MOST + 1):
        assert offers.offered((7, serial), node=1, now=0.0)
    assert not offers.offered((7, 1), node=2, now=0.0)
    assert offers.offered((7, 0), node=2, now=0.0)


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


def test_a_daemon_whose_clock_went_back_is_sure_as_soon_as_any_other() -> None:
    """Its signs of life go on from the former ones as fast as time does, not one by one."""
    before, other = Pulses(0), Pulses(1)
    other.hear(before.beat(VOTERS, 1000.0), 1.0)
    other.doubt(0, margin_s=0.5)
    after = Pulses(0)
    after.hear(other.beat(VOTERS, 1.1), 900.0)
    for at, sure in ((900.4, False), (900.6, True)):
        other.hear(after.beat(VOTERS, at), at - 899.0)
        assert (other.fresh(at - 899.0, within_s=0.5) == {0}) is sure


def test_who_votes_no_more_has_no_pulse() -> None:
    pulses = Pulses(1)
    pulses.hear(tuple((node, 1, 0) for node in range(2, 100)), 1.0)
    assert len(pulses.fresh(1.0, 1.0)) == MOST
    assert pulses.beat((1, 2), 2.0) == ((1, 2000, 0), (2, 1, 1000))
    assert pulses.fresh(2.0, 5.0) == {2}


def test_a_sign_of_life_that_was_given_at_the_end_of_a_connection_is_none() -> None:
    pulses = Pulses(1)
    pulses.hear(((0, 1000, 0),), 1.0)
    pulses.doubt(0, margin_s=2.0)
    for pulse, sure in ((2999, False), (3000, False), (3001, True)):
        pulses.hear(((0, pulse, 0),), pulse / 1000)
        assert (pulses.seen_since(0.0) == {0}) is sure


def test_the_end_of_a_connection_casts_no_doubt_on_what_was_never_heard_of() -> None:
    pulses = Pulses(1)
    pulses.doubt(0, margin_s=2.0)
    pulses.hear(((0, 1000, 0),), 1.0)
    assert pulses.fresh(1.0, within_s=1.0) == {0}


def test_only_a_newer_pulse_is_news() -> None:
    pulses = Pulses(me=0)
    assert pulses.hear(((1, 500, 0), (2, 400, 0)), 1.0) == [(1, 500, 0), (2, 400, 0)]
    assert pulses.hear(((1, 500, 0), (2, 399, 0), (1, 501, 0)), 5.0) == [(1, 501, 0)]
    assert pulses.seen_since(1.0) == {1}
    assert pulses.seen_since(0.9) == {1, 2}


def test_a_pulse_is_as_old_as_it_was_and_what_has_passed_since() -> None:
    pulses = Pulses(me=0)
    pulses.hear(((1, 500, 2000),), 10.0)
    assert pulses.beat((1,), 10.0) == ((1, 500, 2000),)
    assert pulses.beat((1,), 10.5) == ((1, 500, 2500),)
    assert pulses.seen_since(8.0) == set()
    pulses.hear(((1, 501, 0),), 11.0)
    assert pulses.beat((1,), 11.0) == ((1, 501, 0),)


def test_an_own_pulse_has_no_age_and_one_that_is_doubted_is_not_fresh() -> None:
    pulses = Pulses(me=0)
    pulses.hear(((1, 500, 0),), 1.0)
    assert pulses.beat((0, 1), 3.0) == ((0, 3000, 0), (1, 500, 2000))
    assert pulses.fresh(3.0, 2.0) == {1}
    pulses.doubt(1, 0.2)
    assert pulses.fresh(3.0, 2.0) == frozenset()
    pulses.hear(((1, 701, 0),), 3.0)
    assert pulses.fresh(3.0, 2.0) == {1}


def test_of_many_lives_of_a_daemon_the_first_are_forgotten() -> None:
    router = Router(me=0, life=0)
    for life in range(1, LIVES + 2):
        assert router.heard(1, 7, life * LIFE_SERIALS + 1, life, 0.0)
    assert not router.has(7, LIFE_SERIALS + 1)
    assert all(router.has(7, life * LIFE_SERIALS + 1) for life in range(2, LIVES + 2))
