"""Who may ask for another size of a job, when it is done, and what the asker is told."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.drawing import Drawing
from ckptless.daemon.ckptlessd.requests import resize
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decree, Durable
from ckptless.daemon.protocol.records import GIVEN_BACK
from ckptless.daemon.protocol.requests import ResizeJob

from .lease_nodes import Node, first_generation, job_spec, lost_by

NODES = 5  # the last one is the spare
OWNER, STRANGER = 1001, 1002
DAEMON = os.getuid()


@dataclass
class Run:
    """A job in a daemon, as far as a wish for its size goes: its control plane is the real one."""

    node: Node = field(default_factory=lambda: Node(0, NODES))
    sizes: tuple[int, ...] = (2, 4)
    job: str = "4711"
    uid: int = OWNER
    wishes: list[m.Wish] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node.control.job.spec = structs.replace(job_spec(NODES), sizes=self.sizes)

    @property
    def session(self) -> SimpleNamespace:
        return SimpleNamespace(control=self.node.control.job, resize=self.wishes.append)

    def wants(self, wanted: int | None) -> None:
        """A generation says so."""
        assignment = structs.replace(first_generation(NODES), wanted=m.Wish(nodes=wanted))
        known = Decree(index=1, voters=(0, 1, 2), assignment=assignment)
        self.node.control.job.agreement.durable = Durable(promised=NO_BALLOT, vote=None, known=known)

    def asked(
        self, nodes: int | None = 2, uid: int = OWNER, job: str = "4711", protocol: int = m.PROTOCOL
    ) -> tuple[str, str]:
        """(verdict, text)."""
        answer = resize([cast(JobHost, self)], ResizeJob(protocol=protocol, job=job, nodes=nodes), uid)
        assert bool(self.wishes) is (answer.verdict in ("accepted", "already"))
        return answer.verdict, answer.text


def refused(why: str) -> tuple[str, str]:
    return "refused", f"job 4711 stays as large as it is: {why}"


@pytest.mark.parametrize("uid", [0, DAEMON, OWNER])
def test_it_is_said_to_the_session(uid: int) -> None:
    run, before_s = Run(), time.time()
    assert run.asked(2, uid) == ("accepted", "job 4711 is to train on 2 nodes from now on")
    (wish,) = run.wishes
    assert wish.nodes == 2
    assert before_s <= wish.at_s <= time.time()


def test_one_node() -> None:
    assert Run(sizes=(1, 4)).asked(1) == ("accepted", "job 4711 is to train on 1 node from now on")


@pytest.mark.parametrize(("wanted", "nodes"), [(2, None), (2, 4), (4, 2), (None, 4)])
def test_another_wish_takes_the_place_of_the_old_one(wanted: int | None, nodes: int | None) -> None:
    run = Run()
    run.wants(wanted)
    assert run.asked(nodes)[0] == "accepted"


def test_what_is_wanted_already_is_said_again() -> None:
    """Another wish may be on its way."""
    run = Run()
    assert run.asked(None) == ("already", "job 4711 is wanted to train on as many nodes as there are already")
    assert [wish.nodes for wish in run.wishes] == [None]
    run.wants(2)
    assert run.asked(2) == ("already", "job 4711 is wanted to train on 2 nodes already")
    assert [wish.nodes for wish in run.wishes] == [None, 2]


@pytest.mark.parametrize("nodes", [0, 3, 5, 65536])
def test_what_is_none_of_its_sizes(nodes: int) -> None:
    why = f"{nodes} is none of the numbers of nodes that it may have, which are 2, 4"
    assert Run().asked(nodes) == refused(why)


def test_many_sizes_are_not_all_named() -> None:
    _, text = Run(sizes=tuple(range(1, 101))).asked(101)
    assert text.endswith("which are 1, 2, 3, 4, 5, 6, ..., 95, 96, 97, 98, 99, 100")


@pytest.mark.parametrize("sizes", [(), (4,)])
@pytest.mark.parametrize("nodes", [None, 4, 2])
def test_a_job_that_is_not_elastic(sizes: tuple[int, ...], nodes: int | None) -> None:
    why = "it is not elastic: start it with --min-nodes, --max-nodes or --sizes of ckptless-run"
    assert Run(sizes=sizes).asked(nodes) == refused(why)


def test_a_stranger_does_not_learn_that_there_is_a_job() -> None:
    if DAEMON == STRANGER:
        pytest.skip("the daemon's own user may")
    says = f"no job '4711' that uid {STRANGER} may touch runs here"
    assert Run().asked(2, STRANGER) == ("unknown", says)
    assert Run().asked(3, STRANGER) == ("unknown", says)
    assert Run(job="47").asked(2, STRANGER) == ("unknown", says)


def test_a_daemon_of_another_version() -> None:
    assert Run().asked(protocol=2) == ("refused", "ckptctl speaks protocol 2, the daemon 1")


def test_a_job_that_has_not_begun() -> None:
    run = Run(Node(1, NODES))
    views = {node: NodeView(node) for node in range(NODES)}
    run.node.control = Controller(me=1, session="s", nodes=views)
    assert run.asked() == refused("the job has not begun yet")


def test_a_daemon_that_is_out_itself_or_hears_nobody_sends_on() -> None:
    run = Run(Node(1, NODES))
    run.node.feed(lost_by(1, "x"))
    assert run.asked() == ("elsewhere", "this node is out of the job itself: ask on another one")
    run = Run(Node(1, NODES))
    run.node.silent((0, 2, 3))
    run.node.now += 0.1
    run.node.feed(e.Tick())
    assert run.asked() == ("elsewhere", "this node hears too few of the job's others: ask on another one")


def test_a_job_that_is_about_to_end_or_has_ended() -> None:
    run = Run(Node(1, NODES))
    run.node.feed(e.OrderFrom(0, 1, m.Release(generation=1)))
    assert run.asked() == refused("training is over, and the job about to end")
    run.node.feed(e.Report(1, m.Cancel(exit_code=143, reason="scancel")))
    run.node.silent(run.node.others)
    run.node.wait(5.0)
    assert run.asked() == refused("the job is over: scancel")


@pytest.mark.parametrize("gives_way", [False, True])
def test_what_the_last_leader_was_to_give_back_the_next_one_gives(gives_way: bool) -> None:
    """It has heard the wish from nobody: the generation that follows it says so."""
    run = Run(Node(0, NODES))
    job, spec = run.node.control.job, structs.replace(job_spec(NODES), nodes=2, sizes=(2, 4))
    wish = m.Wish(nodes=2, at_s=1.0, give_back=True, gives_way=gives_way)
    fewer = structs.replace(first_generation(NODES), places=first_generation(NODES).places[:2], wanted=wish)
    job.agreement.durable = Durable(
        promised=NO_BALLOT, vote=None, known=Decree(index=1, voters=(0, 1, 2), assignment=fewer)
    )
    assert job.resize is None
    assert job.wanted == wish
    drawing = Drawing(job)
    drawing.give_back(spec, fewer, run.node.now)
    given = [node for node, loss in job.losses.items() if loss.reason.startswith(GIVEN_BACK)]
    assert given == [4, 3], "one of the three that are left over is the spare"
    assert [out.order for out in job.out if isinstance(out, e.ToAgent)] == [m.GiveBack(nodes=(3, 4))]


def test_the_newest_wish_counts() -> None:
    run = Run(Node(0, NODES))
    job = run.node.control.job
    for at_s, nodes in ((5.0, 2), (4.0, 4), (6.0, None)):
        run.node.feed(e.Report(0, m.Resize(wish=m.Wish(nodes=nodes, at_s=at_s))))
        assert job.wanted == m.Wish(nodes=None if nodes is None else 2, at_s=max(5.0, at_s))
