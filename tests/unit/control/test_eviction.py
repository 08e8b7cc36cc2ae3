"""Who may take a node out of a job, when it is done, and what the asker is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.eviction import find_node, homeless_after, may_say, refusal
from ckptless.daemon.ckptlessd.requests import evict
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decree, Durable
from ckptless.daemon.protocol.requests import Evict, EvictionSource
from ckptless.daemon.settings.config import Peer

from .lease_nodes import Node, first_generation, hello, info, job_spec, lost_by

NODES = 5  # the last one is the spare
OWNER = 1001
DAEMON = os.getuid()
STRANGER = 1002


@dataclass
class Run:
    """A job in a daemon, as far as an eviction goes: its control plane is the real one."""

    node: Node
    job: str = "4711"
    uid: int = OWNER
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    losses: list[e.NodeLost] = field(default_factory=list)
    leaves: list[tuple[int, e.Leave]] = field(default_factory=list)

    @property
    def roster(self) -> Roster:
        peers = (Peer(node=n, name=f"n{n:02}", address="127.0.0.1", port=1) for n in range(self.node.nodes))
        return Roster(self.node.me, tuple(peers))

    def name_of(self, node: int) -> str:
        return self.roster.by_node[node].name

    @property
    def session(self) -> SimpleNamespace:
        return SimpleNamespace(control=self.node.control.job, lose=self.lose, leave=self.leave)

    def note(self, level: str, kind: str, text: str) -> None:
        self.notes.append((level, kind, text))

    def lose(self, loss: e.NodeLost) -> None:
        self.losses.append(loss)
        self.node.feed(loss)

    def leave(self, node: int, leave: e.Leave) -> None:
        self.leaves.append((node, leave))
        self.node.feed(e.LeaveAsked(node, leave))

    def asked(self, node: str = "n02", uid: int = OWNER, **more: Any) -> tuple[str, str]:
        """(verdict, text)."""
        fields = {"protocol": m.PROTOCOL, "job": self.job, "source": "operator", "reason": "fan", **more}
        answer = evict([cast(JobHost, self)], Evict(node=node, **fields), uid)
        assert (answer.verdict == "accepted") is bool(self.losses or self.leaves)
        return answer.verdict, answer.text


@pytest.fixture
def run() -> Run:
    return Run(Node(1, NODES))


# ---------------------------------------------------------------------------------------------- pure


@pytest.mark.parametrize("source", ["operator", "health"])
@pytest.mark.parametrize(
    ("uid", "operator", "health"),
    [(0, True, True), (64, True, True), (OWNER, True, False), (STRANGER, False, False)],
)
def test_who_may_say_it(source: EvictionSource, uid: int, operator: bool, health: bool) -> None:
    assert may_say(source, uid, OWNER, 64) is (operator if source == "operator" else health)


@pytest.mark.parametrize(
    ("word", "number"),
    [
        *(
            ("n0", 0),
            ("7", 1),
            ("0", 0),
            ("1", 1),
            ("2", 2),
            ("02", 2),
            ("3", None),
            ("-1", None),
            ("", None),
        ),
        *(("n", None), ("²", None), ("٢", None), ("9" * 5000, None)),
    ],
)
def test_a_node_by_name_else_by_number(word: str, number: int | None) -> None:
    assert find_node(word, ("n0", "7", "n2")) == number


def views(*lost: int, nodes: int = NODES) -> dict[int, NodeView]:
    return {node: NodeView(node, lost="x" if node in lost else None) for node in range(nodes)}


def test_every_rank_without_a_node_takes_a_slot() -> None:
    assignment = first_generation(NODES)
    assert homeless_after(assignment, views(), 1, 2) == 0
    # One is lost already, and its rank waits for the same spare.
    assert homeless_after(assignment, views(1), 1, 2) == 1
    assert homeless_after(assignment, views(4), 1, 2) == 1
    # More slots than one to a node.
    assert homeless_after(assignment, views(1, 2), 2, 3) == 3 - (2 + 1)


def test_a_slot_that_lost_its_rank_for_cause_takes_none() -> None:
    whole = first_generation(NODES)
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    assignment = m.Assignment(**{**fields, "bad": (m.Place(node=4, slot=0),)})
    assert homeless_after(assignment, views(), 1, 2) == 1


def test_a_node_that_never_came_up_has_no_slot_to_give() -> None:
    whole = first_generation(NODES)
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    assignment = m.Assignment(**{**fields, "nodes": tuple(info(node) for node in range(4))})
    assert homeless_after(assignment, views(), 1, 2) == 1
    late = views()
    late[4].hello = m.Introduction(info=info(4), pid=1)
    assert homeless_after(assignment, late, 1, 2) == 0, "it came up after the generation was planned"


# ----------------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize("me", [0, 1, 2, 4])
@pytest.mark.parametrize("uid", [0, DAEMON, OWNER])
def test_any_daemon_of_the_job_takes_it(me: int, uid: int) -> None:
    run = Run(Node(me, NODES))
    assert run.asked(uid=uid) == ("accepted", "n02 is taken out of job 4711")
    assert run.losses == [lost_by(2, f"taken out by uid {uid}: fan", source="operator")]
    assert run.notes == []  # the leader tells of it, as of every loss
    ends = run.node.told.ends
    assert [end.here_only for end in ends] == ([True] if me == 2 else [])
    stops = [order for order in run.node.told.orders if isinstance(order, m.Stop)]
    assert bool(stops) is (me == 0)


def test_a_verdict_on_health_is_roots() -> None:
    run = Run(Node(0, NODES))
    verdict, text = run.asked(source="health")
    assert (verdict, text) == (
        "refused",
        f"uid {OWNER} may not give a verdict on a node's health, only root may",
    )
    assert run.asked(source="health", uid=0)[0] == "accepted"
    assert run.losses == [lost_by(2, "taken out by a health check (uid 0): fan", source="health")]


def test_a_stranger_does_not_learn_that_there_is_a_job(run: Run) -> None:
    if DAEMON == STRANGER:
        pytest.skip("the daemon's own user may")
    for asked in ({}, {"node": "nothing"}, {"source": "health"}, {"force": True}):
        assert run.asked(uid=STRANGER, **asked) == (
            "unknown",
            f"no job '4711' that uid {STRANGER} may touch runs here",
        )
    other = evict([], Evict(protocol=1, job="4711", node="n02", source="operator"), STRANGER)
    assert other.text == f"no job '4711' that uid {STRANGER} may touch runs here"


def test_what_is_out_already_stays_so(run: Run) -> None:
    run.node.feed(lost_by(2, "its agent is gone", source="agent"))
    assert run.asked() == ("already", "n02 is out already: its agent is gone")
    assert run.notes == []


def test_without_a_spare_it_takes_force() -> None:
    run = Run(Node(0, NODES))
    run.node.feed(lost_by(4, "its agent is gone", source="agent"))
    verdict, text = run.asked()
    assert verdict == "refused"
    assert text == (
        "n02 stays in job 4711: its rank has no spare to go to (1 too few), and the job would end;"
        " --force does it all the same"
    )
    assert run.asked(force=True)[0] == "accepted"


def test_a_spare_needs_no_other_one(run: Run) -> None:
    assert run.asked("4")[0] == "accepted"


def test_a_spare_that_ranks_of_a_lost_node_wait_for_takes_force() -> None:
    run = Run(Node(0, NODES))
    run.node.feed(lost_by(2, "its agent is gone", source="agent"))
    verdict, text = run.asked("4")
    assert verdict == "refused"
    assert "ranks of nodes that are lost have no spare to go to (1 too few)" in text
    assert run.asked("4", force=True)[0] == "accepted"


def test_a_daemon_that_is_out_itself_or_hears_nobody_sends_on(run: Run) -> None:
    run.node.silent((0, 2, 3))
    run.node.now += 0.1
    run.node.feed(e.Tick())
    assert not run.node.control.job.decides
    assert run.asked() == ("elsewhere", "this node hears too few of the job's others: ask on another one")
    out = Run(Node(1, NODES))
    out.node.feed(lost_by(1, "x"))
    assert out.asked("3") == ("elsewhere", "this node is out of the job itself: ask on another one")


@pytest.mark.parametrize("has_agent", [False, True])
def test_a_job_that_has_not_begun(has_agent: bool) -> None:
    run = Run(Node(1, NODES))
    run.node.control = Controller(me=1, session="s", nodes=views())
    if has_agent:
        run.node.feed(e.Report(1, hello(1, NODES)))
    text = "n02 stays in job 4711: the job has not begun yet"
    assert run.asked(force=True) == ("refused", text)


def test_a_daemon_that_knows_a_generation_and_not_yet_the_job_takes_out_nobody() -> None:
    run = Run(Node(1, NODES, fresh=True))
    assert run.node.control.job.assignment is not None
    for force in (False, True):
        assert run.asked(force=force)[0] == "refused"


def test_of_a_node_of_many_ranks_each_needs_a_slot() -> None:
    node = Node(0, NODES)
    whole = first_generation(NODES)
    places = tuple(m.Place(node=at, slot=slot) for at in range(4) for slot in range(2))
    spec = structs.replace(job_spec(NODES), slots_per_node=2)
    known = Decree(index=1, voters=(0, 1, 2), assignment=structs.replace(whole, places=places))
    node.control.job.spec = spec
    node.control.job.agreement.durable = Durable(promised=NO_BALLOT, vote=None, known=known)
    node.control.job.nodes[4].lost = "its agent is gone"
    assert str(refusal(node.control.job, 2, force=False)).startswith("its 2 ranks have no spare")


def test_a_job_that_is_about_to_end_or_has_ended(run: Run) -> None:
    run.node.feed(e.OrderFrom(0, 1, m.Release(generation=1)))
    assert run.asked() == (
        "refused",
        "n02 stays in job 4711: training is over, and the job about to end",
    )
    run.node.feed(e.Report(1, m.Cancel(exit_code=143, reason="scancel")))
    run.node.silent(run.node.others)
    run.node.wait(5.0)
    verdict, text = run.asked()
    assert (verdict, text.endswith("the job is over: scancel")) == ("refused", True)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"protocol": 2}, "ckptctl speaks protocol 2, the daemon 1"),
        ({"reason": "a\nb"}, "the reason holds what cannot be printed: leave it out"),
        ({"node": "n99"}, "job 4711 has no node 'n99'"),
    ],
)
def test_what_cannot_be_meant(run: Run, asked: dict[str, Any], says: str) -> None:
    assert run.asked(**asked) == ("refused", says)


def test_the_number_of_a_slurm_job_means_its_only_run() -> None:
    def found(name: str, *runs: str) -> str:
        known = [cast(JobHost, Run(Node(0, NODES), job=run)) for run in runs]
        return evict(known, Evict(protocol=1, job=name, node="n02", source="operator"), OWNER).text

    assert found("4711", "47", "4711.1", "4711x") == "n02 is taken out of job 4711.1"
    assert found("4711", "4711", "4711.1") == "n02 is taken out of job 4711"
    assert found("4711.1", "4711", "4711.1") == "n02 is taken out of job 4711.1"
    assert found("4711", "4711.1", "4711.s2").startswith("no job '4711'")


def test_a_run_that_is_over_is_not_meant_where_another_one_goes_on() -> None:
    over, on = Run(Node(1, NODES)), Run(Node(1, NODES), job="4711.1")
    over.node.feed(e.Report(1, m.Cancel(exit_code=143, reason="scancel")))
    over.node.silent(over.node.others)
    over.node.wait(5.0)
    question = Evict(protocol=m.PROTOCOL, job="4711", node="n02", source="operator")
    jobs = [cast(JobHost, over), cast(JobHost, on)]
    assert evict(jobs[:1], question, OWNER).text.endswith("the job is over: scancel")
    assert evict(jobs, question, OWNER).text == "n02 is taken out of job 4711.1"


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        Evict,
        protocol=st.sampled_from((m.PROTOCOL, m.PROTOCOL, 0, 2)),
        job=st.sampled_from(("4711", "4711.1", "47", "latest")) | st.text(min_size=1, max_size=9),
        node=st.sampled_from(("n00", "n02", "n04", "0", "4", "5", "-1")) | st.text(min_size=1, max_size=9),
        source=st.sampled_from(("operator", "health")),
        reason=st.text(max_size=9),
        force=st.booleans(),
    ),
    st.sampled_from((0, OWNER, STRANGER, 2**32 - 1)),
    st.sets(st.integers(0, NODES - 1), max_size=3),
)
def test_whatever_is_asked_is_answered(asked: Evict, uid: int, lost: set[int]) -> None:
    """And a node goes only where the answer says so, the asker may, and a slot is left or it is by force."""
    run = Run(Node(0, NODES))
    run.node.feed(*(lost_by(node, "x") for node in lost))
    ranks, spares = len(lost - {4}), int(4 not in lost)
    answer = evict([cast(JobHost, run)], asked, uid)
    assert bool(run.losses) is (answer.verdict == "accepted")
    assert answer.text
    if run.losses:
        assert uid in (0, DAEMON) or (uid == OWNER and asked.source == "operator")
        (loss,) = run.losses
        assert loss.node not in lost
        assert loss.source == asked.source
        assert asked.force or (ranks == 0 if loss.node == 4 else ranks < spares)


def test_a_node_is_given_back_and_not_that_of_the_batch_script() -> None:
    """Whoever leads from then on says which nodes Slurm is to have, by the reason alone."""
    run = Run(Node(0, NODES))
    verdict, text = run.asked("n00", give_back=True, force=True)
    assert verdict == "refused"
    assert "its batch script runs there" in text
    spare = f"n{NODES - 1:02}"
    assert run.asked(spare, give_back=True)[0] == "accepted"
    (loss,) = run.losses
    assert loss.reason == f"given back to Slurm by uid {OWNER}: fan"
    run.losses.clear()
    assert run.asked(spare, give_back=True)[0] == "already"
    run.node.wait(6.0, 1.0)
    said = [out.order for out in run.node.told.outputs if isinstance(out, e.ToAgent)]
    assert m.GiveBack(nodes=(NODES - 1,)) in said


def test_a_node_that_was_only_taken_out_is_not_given_back() -> None:
    """Nobody is told that it was, where Slurm keeps it in the job."""
    run, spare = Run(Node(0, NODES)), f"n{NODES - 1:02}"
    assert run.asked(spare)[0] == "accepted"
    run.losses.clear()
    verdict, text = run.asked(spare, give_back=True)
    assert (verdict, text[-45:]) == ("refused", "; it stays the job's in Slurm until that ends")


def test_ranks_move_first_where_that_is_asked_for() -> None:
    run = Run(Node(0, NODES))
    answer = run.asked(planned=True)
    assert answer == ("accepted", "n02 leaves job 4711 once its ranks have moved")
    assert run.losses == []
    assert run.leaves == [(2, e.Leave(f"taken out by uid {OWNER}: fan", "operator", shrink=True))]
    run.leaves.clear()
    again = run.asked(planned=True, reason="")
    assert again == ("already", f"n02 is about to leave: taken out by uid {OWNER}: fan")


def test_a_spare_that_is_to_leave_is_out_at_once() -> None:
    run = Run(Node(0, NODES))
    assert run.asked("4", planned=True)[0] == "accepted"
    run.node.wait(0.5)
    assert run.node.control.job.losses[4].reason == f"taken out by uid {OWNER}: fan"


def test_where_it_has_no_place_to_go_a_planned_move_is_refused_too() -> None:
    run = Run(Node(0, NODES))
    run.node.feed(lost_by(4, "its agent is gone", source="agent"))
    assert run.asked(planned=True)[0] == "refused"


def test_a_script_without_hooks_cannot_move_and_the_node_is_taken_out_at_once() -> None:
    run = Run(Node(0, NODES))
    state = run.node.control.job.nodes[0].state
    assert state is not None
    plain = tuple(structs.replace(slot, hooked=False) for slot in state.slots)
    run.node.control.job.nodes[0].state = structs.replace(state, slots=plain)
    assert run.asked(planned=True) == ("accepted", "n02 is taken out of job 4711")
    assert [loss.node for loss in run.losses] == [2]


def test_what_is_not_trusted_is_left_at_once_whoever_has_asked_before() -> None:
    run = Run(Node(0, NODES))
    run.asked(planned=True)
    run.node.wait(0.5)
    assert run.node.control.job.losses == {}
    gone = e.Leave("unwell (a GPU is gone)", "health", at_once=True)
    run.node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1, unwell=gone)))
    run.node.wait(0.5)
    assert run.node.control.job.losses[2].source == "health"
