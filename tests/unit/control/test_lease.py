"""Who does not hear a majority of the voters decides nothing, and after a while ends its ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.ckptlessd.consensus.lease import WITNESS_AFTER_S, WITNESS_AGAIN_S, Lease
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.election import TURN_S
from ckptless.daemon.ckptlessd.recovery.losses import DARK_FOR_GOOD_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decided, Decree
from ckptless.daemon.protocol.records import FaultSource

from .lease_nodes import LEASE_S, LIMITS, Heard, Node, agreed, first_generation, hello, lost_by, meet, trains

NODES = 5
LONG_S = 4 * LEASE_S

some_nodes = st.sets(st.integers(0, 8))


def groups(nodes: int) -> list[tuple[int, ...]]:
    """Every way to be cut off with some others, but alone with all or with none."""
    return [group for size in range(1, nodes) for group in combinations(range(nodes), size)]


# ------------------------------------------------------------------------------------------ the lease


@settings(max_examples=2000, deadline=None)
@given(
    voters=st.sets(st.integers(0, 8), min_size=1),
    steps=st.lists(st.tuples(some_nodes, some_nodes, st.floats(0.0, 10.0)), min_size=1, max_size=20),
)
def test_the_rule_whatever_happens(voters: set[int], steps: list[tuple[set[int], set[int], float]]) -> None:
    lease, now, last = Lease(), 100.0, 0.0
    for heard, dead, later_s in steps:
        now += later_s
        yes = voters & heard
        enough = 2 * len(yes) > len(voters) or (2 * len(yes) == len(voters) and voters - yes <= dead)
        lease.renew(tuple(voters), heard, dead, now)
        assert lease.held is enough
        if enough:
            last = now
            assert lease.away_s(now + 5.0) == 0.0
        else:
            # The silence is measured from where it began.
            assert lease.since is not None
            assert last <= lease.since <= now
            assert lease.away_s(now) == now - lease.since


@settings(max_examples=2000, deadline=None)
@given(nodes=st.integers(1, 40), picks=st.sets(st.integers(0, 39)))
def test_of_two_sides_of_a_cut_one_goes_on_or_none(nodes: int, picks: set[int]) -> None:
    everybody = set(range(nodes))
    side = everybody & picks
    leases = [Lease(), Lease()]
    for lease, heard in zip(leases, (side, everybody - side), strict=True):
        lease.renew(tuple(everybody), heard, set(), 1.0)
    assert leases[0].held + leases[1].held == (2 * len(side) != nodes)


def test_the_time_of_a_silence_begins_once() -> None:
    lease = Lease()
    for now in (10.0, 11.0, 12.5):
        lease.renew((0, 1, 2), {0}, set(), now)
    assert lease.away_s(12.5) == 2.5
    lease.renew((0, 1, 2), {0, 1}, set(), 13.0)
    assert lease.held
    lease.renew((0, 1, 2), {0}, set(), 14.0)
    assert lease.away_s(15.0) == 1.0


def test_the_witness_is_asked_once_it_is_the_same_half_for_a_while() -> None:
    lease, voters = Lease(), (0, 1, 2, 3)
    lease.renew(voters, {0}, set(), 10.0)
    assert not lease.witness_due(20.0, 0)
    # They are coming back, one after the other.
    lease.renew(voters, {0, 1}, set(), 20.0)
    assert not lease.witness_due(20.5, 0)
    lease.renew(voters, {0, 2}, set(), 20.6)
    assert not lease.witness_due(21.1, 0)
    assert not lease.witness_due(21.75, 1), "one of them asks first"
    assert lease.witness_due(21.75, 0)
    assert not lease.witness_due(22.0, 0)
    assert lease.witness_due(22.75, 0)
    lease.renew(voters, {0, 2}, {1, 3}, 23.0)
    assert lease.held
    assert not lease.witness_due(30.0, 0)


def test_the_witness_is_asked_from_the_very_moment_on_that_it_is_due() -> None:
    lease = Lease()
    lease.renew((0, 1), {0}, set(), 10.0)
    assert not lease.witness_due(10.0, 0)
    assert lease.witness_due(10.0 + WITNESS_AFTER_S, 0)
    assert not lease.witness_due(10.0 + WITNESS_AFTER_S + WITNESS_AGAIN_S / 2, 0)
    assert lease.witness_due(10.0 + WITNESS_AFTER_S + WITNESS_AGAIN_S, 0)


# ---------------------------------------------------------------------------- what a daemon makes of it


def _decides_nothing(heard: Heard) -> None:
    assert heard.orders == []
    assert heard.dark == []


@pytest.mark.parametrize("group", [g for g in groups(NODES) if 2 * len(g) < NODES])
def test_a_minority_decides_nothing_and_ends_its_ranks(group: tuple[int, ...]) -> None:
    """Whoever of it led before, or would be the next to lead."""
    for me in group:
        node = Node(me, NODES)
        heard = node.silent(other for other in range(NODES) if other not in group)
        term = node.control.job.term
        before = node.wait(LEASE_S - 0.6)
        assert heard.ends + before.ends == []
        after = node.wait(LONG_S)
        assert len(after.ends) == 1
        assert after.ends[0].outcome.exit_code == 4
        assert "counts as lost" in after.ends[0].outcome.reason
        for part in (heard, before, after):
            _decides_nothing(part)
        assert node.control.job.term == term
        assert not node.control.job.leads
        assert node.control.job.assignment == first_generation(NODES)
        assert after.events.count("fenced") == 1


def test_its_agent_is_told_of_the_lease_as_long_as_there_is_one() -> None:
    node = Node(3, NODES)
    assert 7 <= node.wait(LEASE_S).renewals <= 10
    node.feed(*(e.PeerDown(other) for other in node.others))
    assert node.wait(LEASE_S - 0.6).renewals == 0
    node.heals(node.others)
    assert node.wait(LEASE_S).renewals > 0
    node.feed(*(e.PeerDown(other) for other in node.others))
    assert node.wait(LONG_S).ends
    # It has ended its ranks; who is heard then changes nothing.
    node.heals(node.others)
    assert node.wait(LEASE_S).renewals == 0


def test_an_answer_of_before_the_end_of_a_connection_is_none_after_it() -> None:
    node = Node(0, 4)
    node.feed(e.PeerDown(2), e.AgentAnswers(2, answers=True))
    assert 2 in node.control.job.heard_voters
    node.feed(e.PeerDown(2))
    assert 2 not in node.control.job.heard_voters


def test_this_node_counts_among_those_that_may_speak_for_all() -> None:
    job = Node(0, 4).control.job
    assert job.is_quorum({1, 2})
    assert not job.is_quorum({1})
    assert not job.is_quorum(set())


def test_a_write_that_gets_to_the_disk_is_no_news() -> None:
    node = Node(0, 4)
    assert node.feed(e.Saved()).events == []
    node.feed(e.NotSaved("full"))
    assert node.feed(e.Saved()).events == ["vote-again"]


def test_a_daemon_that_has_forgotten_its_generation_gives_no_lease() -> None:
    """It has just been started, knows nobody, and assumes nothing for ranks that train."""
    views = {node: NodeView(node) for node in range(NODES)}
    control = Controller(me=3, session="s", nodes=views)
    found = Heard(control.handle(e.Report(3, hello(3, NODES)), 100.0))
    assert found.renewals == 0, "what its agent is in it hears next"
    found = Heard(control.handle(e.Report(3, trains(3, first_generation(NODES))), 100.1))
    found.outputs += [output for tick in range(200) for output in control.handle(e.Tick(), 100.2 + tick / 10)]
    assert (found.renewals, found.ends) == (0, [])
    standing = e.Standing(1, 0, "running", index=1)
    found = Heard(
        control.handle_all(
            (e.Said(1, Decided(decree=agreed(NODES))), e.PeerUp(1, standing), e.PeerUp(2, standing)), 121.0
        )
    )
    assert found.renewals == 1


def test_a_lease_before_the_first_generation() -> None:
    views = {node: NodeView(node) for node in range(NODES)}
    control = Controller(me=3, session="s", nodes=views)
    control.handle(e.Report(3, hello(3, NODES)), 100.0)
    state = m.AgentState(seq=1, slots=(m.SlotState(slot=0, phase="empty", generation=0),))
    assert Heard(control.handle(e.Report(3, state), 100.1)).renewals == 1


@pytest.mark.parametrize("group", [g for g in groups(NODES) if 2 * len(g) > NODES])
def test_a_majority_goes_on(group: tuple[int, ...]) -> None:
    """Its lowest node leads: it stops the generation at once, and none of its nodes ends its ranks.

    The others wait for that, each for so long; and then no longer.
    """
    leader = Node(min(group), NODES)
    lost = [other for other in range(NODES) if other not in group]
    heard = Heard(leader.silent(lost).outputs + leader.wait(LONG_S).outputs)
    assert leader.control.job.leads
    assert heard.ends == []
    assert sorted(heard.dark) == lost
    if set(lost) & set(range(NODES - 1)):
        assert isinstance(heard.orders[0], m.Stop)
    for turn, me in enumerate(group[1:], 1):
        node = Node(me, NODES)
        heard = Heard(node.silent(lost).outputs + node.wait(turn * TURN_S - 0.55).outputs)
        assert heard.ends == []
        _decides_nothing(heard)
        assert node.wait(LONG_S).ends == []
        assert node.control.job.leads is (0 in lost)


def test_exactly_half_goes_on_by_the_word_of_a_witness() -> None:
    node = Node(0, 4)
    heard = Heard(node.silent((2, 3)).outputs + node.wait(1.5).outputs)
    assert [one for one in heard.outputs if isinstance(one, e.AskWitness)] == [e.AskWitness((2, 3), (0, 1))]
    _decides_nothing(heard)
    heard = Heard(node.feed(e.Witnessed((2, 3))).outputs + node.wait(LONG_S).outputs)
    assert heard.ends == []
    assert [type(order) for order in heard.orders][:1] == [m.Stop]
    # The witness has them down: nobody needs to tell it.
    assert heard.dark == []


def test_exactly_half_without_a_witness_is_no_majority() -> None:
    node = Node(0, 4)
    heard = Heard(node.silent((2, 3)).outputs + node.wait(LONG_S).outputs)
    _decides_nothing(heard)
    assert len(heard.ends) == 1


@pytest.mark.parametrize(
    ("lease_s", "asked_s"),
    [(10.0, (1.0, 2.0, 4.0, 5.0)), (6.5, (1.0, 2.0, 1.5, 2.5)), (3.0, (1.0, 2.0, 1.0, 2.0))],
)
def test_one_of_a_half_asks_and_before_the_other_half_that_of_the_lowest(
    lease_s: float, asked_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later only where the lease leaves time for a busy witness."""
    monkeypatch.setattr("tests.unit.control.lease_nodes.LIMITS", structs.replace(LIMITS, lease_s=lease_s))
    for me, after_s in enumerate(asked_s):
        node = Node(me, 4)
        heard = Heard(node.silent({0, 1, 2, 3} - {me, me ^ 1}).outputs + node.wait(after_s - 0.65).outputs)
        assert not [one for one in heard.outputs if isinstance(one, e.AskWitness)]
        assert [one for one in node.wait(0.25).outputs if isinstance(one, e.AskWitness)]


def test_an_agent_that_answers_is_heard() -> None:
    """All other daemons are away, for as long as it takes: their nodes live, and nothing happens."""
    node = Node(0, NODES)
    heard = node.feed(*(event for n in node.others for event in (e.PeerDown(n), e.AgentAnswers(n, n <= 2))))
    heard.outputs += node.wait(LONG_S).outputs
    assert heard.ends == []
    _decides_nothing(heard)
    # One answer less, and it is a minority.
    heard = Heard(node.feed(e.AgentAnswers(2, False)).outputs + node.wait(LONG_S).outputs)
    assert len(heard.ends) == 1


@pytest.mark.parametrize("me", range(NODES))
def test_a_silence_shorter_than_the_lease_changes_nothing(me: int) -> None:
    node = Node(me, NODES)
    node.feed(*(e.PeerDown(other) for other in node.others))
    node.wait(LEASE_S - 0.1)
    node.heals(node.others)
    node.wait(LONG_S)
    assert node.told.ends == []
    _decides_nothing(node.told)
    assert (node.control.job.term, node.control.job.leader, node.control.job.stage) == (1, 0, "running")
    assert node.held


def test_it_ends_its_ranks_only_once_the_lease_is_over() -> None:
    node = Node(3, NODES)
    node.feed(*(e.PeerDown(other) for other in node.others))
    began = node.now
    while not node.told.ends:
        assert node.now < began + LONG_S
        node.wait(0.01, tick_s=0.01)
    assert LEASE_S < node.now - began <= LEASE_S + 0.02
    # And once only: what it hears afterwards does not bring it back.
    node.heals(node.others)
    node.wait(LONG_S)
    assert len(node.told.ends) == 1
    assert not node.control.job.leads


def test_a_node_that_comes_back_is_told_of_once_and_gets_nothing() -> None:
    node = Node(0, NODES)
    node.feed(lost_by(2, "dark", dark=True), e.PeerDown(2))
    node.wait(1.0)
    back = e.PeerUp(2, e.Standing(1, 0, "running", index=1))
    heard = [node.feed(back).events, node.feed(e.PeerDown(2), back).events]
    assert [events.count("node-returned") for events in heard] == [1, 0]
    assert node.control.job.nodes[2].lost is not None


def test_no_lease_before_the_job_and_none_after_it() -> None:
    node = Node(0, NODES)
    node.feed(e.Report(0, m.Cancel(exit_code=143, reason="by the user")))
    assert node.control.job.outcome is not None
    node.silent(node.others)
    node.wait(LONG_S)
    assert {order.outcome for order in node.told.ends} == {node.control.job.outcome}
    assert "fenced" not in node.told.events


@settings(max_examples=1500, deadline=None)
@given(
    me=st.integers(0, NODES - 1),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["down", "up", "answers", "silent", "dark", "gone", "tick"]),
            st.integers(0, NODES - 1),
            st.floats(0.0, 2.0),
        ),
        max_size=40,
    ),
)
@example(1, [("dark", 0, 0.0), *[("down", 0, 2.0)] * 15])
@example(1, [("dark", 0, 0.0), *[("down", 0, 2.0)] * 12, ("down", 2, 2.0), ("down", 3, 2.0), ("up", 0, 2.0)])
def test_without_the_lease_nothing_is_decided_in_any_order_of_events(
    me: int, steps: list[tuple[str, int, float]]
) -> None:
    """Losses may come from another daemon, too, which hears more."""
    node = Node(me, NODES)
    standing = e.Standing(1, 0, "running", index=1)
    for what, other, later_s in steps:
        if other == me:
            continue
        events: dict[str, e.Input] = {
            "down": e.PeerDown(other),
            "up": e.PeerUp(other, standing),
            "answers": e.AgentAnswers(other, True),
            "silent": e.AgentAnswers(other, False),
            "dark": lost_by(other, "silent", 1.0, dark=True),
            "gone": lost_by(other, "gone"),
            "tick": e.Tick(),
        }
        before = node.held
        node.now += later_s
        lost = node.control.job.nodes[me].lost
        heard = node.feed(events[what])
        if not node.held:
            _decides_nothing(heard)
        if not node.control.job.leads:
            assert heard.dark == []
        if heard.ends and node.control.job.outcome is None:
            assert lost is None
            mine = node.control.job.nodes[me]
            if mine.lost_source == "lease":
                # Its own end for want of others, and only after the whole lease.
                assert not before
                assert node.control.job.lease.away_s(node.now) > LEASE_S
            else:
                # It leads a recovery, and its own agent, which says nothing here, has not stopped in time.
                assert before or node.held
                assert mine.lost is not None
                assert "did not stop in" in mine.lost


# --------------------------------------------------------------------------- what Slurm is told of a loss


def test_only_the_leader_says_that_a_node_is_dark_and_once() -> None:
    nodes = [Node(me, NODES) for me in range(4)]
    for node in nodes:
        node.silent((4,))
        node.wait(1.0)
        assert node.told.dark == ([4] if node.me == 0 else [])


def test_a_node_that_stays_dark_is_gone_after_a_while() -> None:
    node = Node(0, NODES)
    node.silent((4,))
    node.wait(DARK_FOR_GOOD_S - 2.0)
    assert node.told.dark_states == [(4, "dark")]
    node.wait(4.0)
    assert node.told.dark_states == [(4, "dark"), (4, "gone")]


def test_of_a_node_that_was_not_dark_nobody_says_that_it_is_back() -> None:
    node = Node(0, NODES)
    node.feed(lost_by(2, "its agent is gone"), e.PeerDown(2))
    node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1)))
    assert node.told.events.count("node-returned") == 1
    assert node.told.dark_states == []


def test_a_dark_node_that_is_heard_again_is_back_and_never_gone() -> None:
    """A cable that flaps for 20 s: to set the node down would end what lives on it."""
    node = Node(0, NODES)
    node.silent((4,))
    node.wait(20.0)
    node.feed(e.PeerUp(4, e.Standing(0, 0, "running", index=0)))
    node.wait(2 * DARK_FOR_GOOD_S)
    assert node.told.dark_states == [(4, "dark"), (4, "back")]


def test_one_that_is_dead_by_the_cluster_s_word_is_not_told_of_again() -> None:
    """It is marked already, and whatever it says when it is back, the mark stays."""
    node = Node(0, NODES)
    node.silent((4,))
    node.feed(e.Witnessed((4,)))
    node.feed(e.PeerUp(4, e.Standing(0, 0, "running", index=0)))
    assert node.told.dark_states == [(4, "dark")]


def test_an_agent_that_was_refused_is_no_dark_node() -> None:
    node = Node(0, NODES)
    node.refused((2,))
    node.wait(1.0)
    assert isinstance(node.told.orders[0], m.Stop)
    assert node.told.dark == []
    # What is said of it later does not make it one: it is lost already.
    node.feed(lost_by(2, "silent", 9.0, dark=True))
    node.wait(1.0)
    assert node.told.dark == []


def test_the_next_leader_says_it_of_the_leader() -> None:
    node = Node(1, NODES)
    node.wait(2.5)
    node.silent((0,))
    node.wait(1.0)
    assert node.control.job.leads
    assert node.told.dark == [0]


def _answered(node: Node, lost: int) -> None:
    """The loss of a node has been answered: generation 2 runs without it."""
    first = first_generation(NODES)
    places = tuple(m.Place(node=NODES - 1 if p.node == lost else p.node, slot=0) for p in first.places)
    second = m.Assignment(
        job=first.job,
        generation=2,
        term=1,
        leader=0,
        places=places,
        nodes=tuple(info for info in first.nodes if info.node != lost),
        restore_step=7,
        rung="spare",
    )
    decree = Decree(index=2, voters=agreed(NODES).voters, assignment=second)
    node.feed(e.OrderFrom(0, 1, m.Stop(generation=1, reason="lost")), e.Said(0, Decided(decree=decree)))
    node.feed(*(e.OrderFrom(0, 1, order) for order in (m.Go(generation=2), m.Running(generation=2))))
    node.feed(e.Report(node.me, trains(node.me, second, seq=2)))


def test_a_loss_of_long_ago_is_not_told_again_by_the_next_leader() -> None:
    """The admin may have mended that node and given it back: other jobs run there now."""
    node = Node(1, NODES)
    node.silent((3,))
    _answered(node, 3)
    node.wait(60.0, tick_s=1.0)
    node.silent((0,))
    node.wait(1.0)
    assert node.control.job.leads
    assert node.told.dark == [0]


# ------------------------------------------------------------------------------- when the cable is back


@pytest.mark.parametrize("waits_s", [0.1, 1.0, LEASE_S, LONG_S])
def test_a_cut_off_node_that_is_back_does_the_others_no_harm(waits_s: float) -> None:
    """Healed before or after its lease was over, and whether the others have given it up or not."""
    for given_up in (False, True):
        cut, other = Node(3, NODES), Node(1, NODES)
        cut.silent(cut.others)
        if given_up:
            other.silent([3])
        cut.wait(waits_s)
        other.now = cut.now
        cut.quiet.clear()
        other.quiet.clear()
        meet(cut, other)
        other.wait(LONG_S)
        assert other.told.ends == []
        assert other.control.job.nodes[1].lost is None
        assert other.control.job.decides
        _decides_nothing(cut.told)


def test_nobody_is_lost_when_it_heals_in_time() -> None:
    """One after the other: the first of them give the lease back while the rest is still away."""
    node = Node(3, NODES)
    node.silent(node.others)
    node.wait(1.0)
    for other in node.others:
        node.heals([other])
    node.wait(LONG_S)
    assert node.told.ends == []
    assert [n for n, view in node.control.job.nodes.items() if view.lost is not None] == []


def test_whom_the_majority_has_given_up_ends_its_ranks_when_it_is_back() -> None:
    node = Node(3, NODES)
    node.feed(*(e.PeerDown(other) for other in node.others))
    node.wait(1.0)
    lost: tuple[tuple[int, str, FaultSource], ...] = ((3, "silent", "membership"),)
    heard = node.feed(e.PeerUp(0, e.Standing(1, 0, "running", index=1, lost=lost)))
    assert len(heard.ends) == 1
    node.wait(LONG_S)
    assert len(node.told.ends) == 1
    _decides_nothing(node.told)


# -------------------------------------------------------------------------- ways around the count of nodes


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_a_cut_that_is_noticed_node_by_node_is_still_a_cut(nodes: int) -> None:
    """One cable, pulled once: beats fall out of phase, so links end up to a beat apart, and where the own
    interface is down a connect fails at once, so that the loss is confirmed before the next link ends."""
    node = Node(0, nodes)
    for other in node.others:
        node.feed(e.PeerDown(other), e.AgentAnswers(other, False), lost_by(other, "silent", 1.5, dark=True))
        node.now += 0.1
    node.wait(LONG_S)
    assert not node.control.job.leads
    assert len(node.told.ends) == 1


def test_a_daemon_that_starts_again_in_a_minority_does_not_lead() -> None:
    """Nodes 0 and 1 of 5 are cut off; then node 0's daemon is started again, and hears all from node 1."""
    nodes = 5
    stays = Node(1, nodes, leader=2)
    stays.silent((2, 3, 4))
    again = Node.started_again(0, nodes, leader=2, now=stays.now)
    meet(again, stays)
    for _ in range(25):  # longer than a daemon that was started again leaves to others to lead
        again.wait(0.1)
        stays.wait(0.1)
        assert again.told.orders + stays.told.orders == []
    assert not again.held
    assert not stays.held


# ------------------------------------------------------------------------------- nobody is left to lead


def test_a_cancel_on_the_only_node_whose_agent_is_gone_ends_the_job() -> None:
    node = Node(0, 2)
    node.silent([1])
    node.feed(lost_by(0, "its agent is gone"))
    node.wait(1.0)
    assert "end" not in node.told.events
    node.feed(e.Report(0, m.Cancel(exit_code=143, reason="Slurm has ended the job")))
    node.wait(3.0)
    assert node.outcome == m.Outcome(
        state="stopped", exit_code=143, reason="Slurm has ended the job", why="cancelled"
    )


def test_a_cancel_where_all_agents_are_gone_and_all_daemons_live_ends_the_job() -> None:
    """`scancel --signal=KILL --full`, then the epilog on every node: the daemons would keep it for ever."""
    nodes = [Node(me, 3) for me in range(3)]
    for node in nodes:
        node.feed(*(lost_by(lost, "its agent is gone") for lost in range(3)))
        node.feed(e.Report(node.me, m.Cancel(exit_code=143, reason="Slurm has ended the job")))
    for node in nodes:
        assert node.control.job.outcome is not None, "nobody is left to ask"


def test_a_cancel_where_one_agent_is_gone_is_agreed_on_with_the_others() -> None:
    node = Node(1, 3)
    node.quiet = {0}
    node.feed(lost_by(2, "its agent is gone"))
    node.feed(e.Report(1, m.Cancel(exit_code=143, reason="Slurm has ended the job")))
    assert node.control.job.outcome is None


def test_a_node_that_is_lost_already_has_no_turn_to_ask_the_witness() -> None:
    """Its daemon votes on, and is heard; it asks nobody."""
    node = Node(1, 4)
    node.feed(lost_by(0, "gone"))
    heard = Heard(node.silent((2, 3)).outputs + node.wait(1.5).outputs)
    assert e.AskWitness((2, 3), (0, 1)) in heard.outputs
