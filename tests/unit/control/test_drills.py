"""Faults that somebody asks for: who may, when they are done, and which faults are told as drills."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.planning.drills import FOUND_S, GRACE_S, Drills
from ckptless.daemon.ckptlessd.planning.event_lines import drill_text, strike_line
from ckptless.daemon.ckptlessd.planning.faults import Finding, NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.requests import drill
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.model import DrillKind
from ckptless.daemon.protocol.records import EventRecord, FaultRecord
from ckptless.daemon.protocol.requests import DrillJob
from ckptless.daemon.settings.config import Peer

from .lease_nodes import LIMITS, STEP, Heard, Node, job_spec, lost_by, trains
from .recovering import NODES, Job, kinds

OWNER, STRANGER = 1001, 1002
DAEMON = os.getuid()
KILL = m.Drill(kind="kill-rank", rank=1, uid=OWNER)
PAUSE = m.Drill(kind="pause-rank", rank=1, for_s=20.0, uid=OWNER)
LOSE = m.Drill(kind="kill-agent", node=1, uid=OWNER)
CUT = m.Drill(kind="cut-node", node=1, for_s=30.0, uid=0)
NOW, STALL_S = 100.0, 60.0
DIED = m.Cause(kind="died", text="was ended by SIGKILL")


def struck_by(drill: m.Drill, generation: int = 1) -> m.Strike:
    return m.Strike(generation=generation, place=m.Place(node=1, slot=0), drill=drill)


def finding(kind: str, node: int = 1, slot: int | None = 0) -> Finding:
    return Finding(kind, node, slot, node, "x", source="process")


# ----------------------------------------------------------------------------------------------- pure


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "kill-rank"},
        {"kind": "kill-rank", "node": 1},
        {"kind": "pause-rank", "rank": 1, "node": 1},
        {"kind": "kill-agent", "rank": 1},
        {"kind": "kill-agent"},
        {"kind": "cut-node", "rank": 1},
        {"kind": "cut-node"},
    ],
)
def test_a_drill_is_of_a_rank_or_of_a_node(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of rank"):
        m.Drill(uid=0, **fields)


def test_one_waits_at_a_time() -> None:
    drills = Drills()
    drills.ask(KILL, NOW + 5, here=True)
    drills.ask(LOSE, NOW + 50, here=True)
    assert drills.busy(1, NOW) == "another one waits for its step: rank 1's process is killed"
    assert drills.expire(NOW + 5 + GRACE_S - 0.1) is None
    assert drills.expire(NOW + 5 + GRACE_S) == KILL
    assert drills.waiting is None
    assert drills.expire(NOW + 99) is None
    assert drills.busy(1, NOW) is None


def test_of_one_asked_for_elsewhere_nothing_is_told() -> None:
    drills = Drills()
    drills.ask(KILL, NOW + 5, here=False)
    assert drills.expire(NOW + 4.9) is None
    assert drills.busy(1, NOW) is not None
    assert drills.expire(NOW + 5) is None
    assert drills.busy(1, NOW) is None


@pytest.mark.parametrize(("drill", "over_s"), [(KILL, 0.0), (LOSE, 0.0), (PAUSE, 20.0), (CUT, 30.0)])
def test_one_is_under_way_until_it_is_found(drill: m.Drill, over_s: float) -> None:
    drills = Drills()
    drills.ask(drill, NOW, here=True)
    drills.strike(struck_by(drill), NOW, STALL_S)
    assert drills.waiting is None
    assert drills.busy(1, NOW + over_s + FOUND_S - 0.1) == f"one is under way: {drill.what}"
    assert drills.busy(1, NOW + over_s + FOUND_S) is None
    assert drills.busy(2, NOW) is None, "there has been a recovery since"


@pytest.mark.parametrize("drill", [KILL, PAUSE, LOSE, CUT])
@pytest.mark.parametrize(
    ("kind", "node", "slot", "of_rank", "of_node"),
    [
        ("died", 1, 0, True, False),
        ("hung", 1, 0, True, False),
        ("raised", 1, 0, False, False),
        ("no-state", 1, 0, False, False),
        ("died", 1, 1, False, False),
        ("died", 2, 0, False, False),
        ("hung", 0, 0, False, False),
        ("broken", 0, 0, True, True),
        ("stall", 0, None, True, True),
        ("twins-differ", 1, 0, False, False),
        ("nccl-unknown", 1, None, False, False),
        ("node-lost", 2, None, False, False),
    ],
)
def test_faults_that_follow_are_marked(  # the finding, and what it is marked as
    drill: m.Drill, kind: str, node: int, slot: int | None, of_rank: bool, of_node: bool
) -> None:
    drills = Drills()
    drills.strike(struck_by(drill), NOW, STALL_S)
    found = finding(kind, node, slot)
    marked = drills.marked(found, 1, NOW + 1)
    assert marked.source == ("drill" if (of_rank if drill.rank is not None else of_node) else "process")
    assert marked.key == found.key
    assert drills.marked(found, 2, NOW + 1) == found, "of the next generation it is a fault"
    assert drills.marked(found, 1, NOW + drill.for_s + STALL_S + 0.1) == found, "it has come to nothing"
    assert Drills().marked(found, 1, NOW) == found


def test_which_agent_ends_by_it() -> None:
    drills = Drills()
    assert not drills.ends_agent(1, 1)
    drills.strike(struck_by(KILL), NOW, STALL_S)
    assert not drills.ends_agent(1, 1)
    drills.strike(struck_by(LOSE), NOW, STALL_S)
    assert drills.ends_agent(1, 1)
    assert not drills.ends_agent(2, 1)
    assert not drills.ends_agent(1, 2)
    drills.strike(struck_by(CUT), NOW, STALL_S)
    assert not drills.ends_agent(1, 1), "that of a node that was cut off may end at any time"


def test_which_node_is_silent_by_it() -> None:
    drills = Drills()
    assert not drills.cuts_off(1, 1, NOW)
    drills.strike(struck_by(LOSE), NOW, STALL_S)
    assert not drills.cuts_off(1, 1, NOW)
    drills.strike(struck_by(CUT), NOW, STALL_S)
    assert drills.cuts_off(1, 1, NOW + CUT.for_s + STALL_S)
    assert not drills.cuts_off(1, 1, NOW + CUT.for_s + STALL_S + 0.1), "it has come to nothing"
    assert not drills.cuts_off(2, 1, NOW)
    assert not drills.cuts_off(1, 2, NOW)


@pytest.mark.parametrize(
    ("drill", "asked", "struck"),
    [
        (KILL, "rank 1's process is killed", "rank 1's process is killed (on node-1, slot 0)"),
        (
            structs.replace(PAUSE, step=40),
            "rank 1's process is paused for 20 s once step 40 is done",
            "rank 1's process is paused for 20 s (on node-1, slot 0)",
        ),
        (LOSE, "the agent of node-1 is killed", "the agent of node-1 is killed (on node-1)"),
    ],
)
def test_in_words(drill: m.Drill, asked: str, struck: str) -> None:
    assert drill_text(drill) == f"uid 1001 asks for a drill: {asked}"
    nodes = Node(0, NODES).control.job.nodes
    line = strike_line(drill, m.Place(node=1, slot=0), {**nodes, 1: NodeView(1)})
    assert (line.level, line.kind, line.text) == ("warning", "drill", f"drill of uid 1001: {struck}")
    assert line.about is not None
    assert (line.about.rank, line.about.slot) == (drill.rank, None if drill.rank is None else 0)


# ----------------------------------------------------------------------------------------- the leader


def asks(job: Job, drill: m.Drill, node: int = 0, left_s: float = 60.0) -> Heard:
    return job.node.feed(e.DrillAsked(node, drill, left_s))


def rows(found: Heard, kind: type) -> list[Any]:
    writes = [output for output in found.outputs if isinstance(output, e.Write)]
    return [row for write in writes for row in write.records if isinstance(row, kind)]


def told(found: Heard) -> list[str]:
    return [row.text for row in rows(found, EventRecord) if row.kind == "drill"]


@pytest.mark.parametrize("drill", [KILL, PAUSE, LOSE])
def test_the_leader_orders_it_at_once(drill: m.Drill) -> None:
    job = Job()
    found = asks(job, drill)
    assert found.orders == [struck_by(drill)]
    assert [out.order for out in found.outputs if isinstance(out, e.ToAgent)][-1] == struck_by(drill)
    assert told(found)[0].startswith("uid 1001 asks for a drill: ")
    assert told(found)[1].startswith("drill of uid 1001: ")
    assert job.stage() == "running"
    assert job.node.control.job.drills.waiting is None
    assert job.node.wait(5.0).orders == [], "once"


def test_it_waits_for_its_step() -> None:
    job = Job()
    late = structs.replace(KILL, step=STEP + 1)
    assert asks(job, late, node=2).orders == []
    assert job.node.wait(30.0).orders == []
    assert job.say(0, "restored").orders == [struck_by(late)]


def test_one_whose_step_does_not_come() -> None:
    job = Job()
    asks(job, structs.replace(KILL, step=STEP + 1))
    assert told(job.node.wait(61.0)) == []
    assert told(job.node.wait(2.0)) == [
        "not done in time: uid 1001 asks for a drill: rank 1's process is killed once step 8 is done"
    ]
    assert job.say(0, "restored").orders == []


def test_a_follower_knows_of_it_and_tells_of_its_own_alone() -> None:
    node = Node(1, NODES)
    for here in (0, 1):
        found = node.feed(e.DrillAsked(here, structs.replace(KILL, step=99), 1.0))
        assert bool(told(found)) is (here == 1)
        assert node.control.job.drills.waiting is not None
        assert bool(told(node.wait(4.0))) is (here == 1)
        assert node.control.job.drills.waiting is None


def test_a_follower_takes_the_order_and_keeps_its_stage() -> None:
    node = Node(1, NODES)
    node.feed(e.DrillAsked(2, KILL, 60.0))
    found = node.feed(e.OrderFrom(0, 1, struck_by(KILL)))
    assert [out.order for out in found.outputs if isinstance(out, e.ToAgent)] == [struck_by(KILL)]
    job = node.control.job
    assert (job.stage, job.drills.waiting, job.drills.struck) == ("running", None, struck_by(KILL))
    old = node.feed(e.OrderFrom(0, 1, struck_by(KILL, generation=0)))
    assert [out.order for out in old.outputs if isinstance(out, e.ToAgent)] == []
    assert "order-refused" in old.events


def test_a_daemon_that_has_just_started_takes_the_order_too() -> None:
    node = Node(1, NODES, fresh=True)
    node.feed(e.PeerUp(0, e.Standing(1, 0, "running", index=1)))
    assert (node.control.job.generation, node.control.job.spec) == (1, None)
    found = node.feed(e.OrderFrom(0, 1, struck_by(LOSE)))
    assert [out.order for out in found.outputs if isinstance(out, e.ToAgent)] == [struck_by(LOSE)]
    assert node.control.job.drills.ends_agent(1, 1)


def test_it_waits_while_the_job_recovers() -> None:
    job = Job()
    job.raises()
    assert job.stage() == "stopping"
    assert asks(job, KILL).orders == []
    job.freeze(0, 1, 2, 3)
    assert job.generation == 2
    for phase, stepped in (("joined", False), ("restored", False), ("restored", True)):
        for node in range(NODES):
            job.say(node, cast(m.Phase, phase), stepped=stepped)
    assert job.stage() == "running"
    assert not [text for text in told(job.node.told) if "it waits" in text], "that is no news"
    assert [one for one in job.node.told.orders if isinstance(one, m.Strike)] == [struck_by(KILL, 2)]


def test_it_waits_where_the_job_would_end_and_says_so_once() -> None:
    job = Job()
    job.node.feed(lost_by(3, "gone"))  # the spare
    found = asks(job, LOSE)
    assert found.orders == []
    found.outputs += job.node.wait(5.0).outputs
    assert [text for text in told(found) if "it waits: its rank has no spare to go to" in text] == [
        told(found)[-1]
    ]
    assert asks(Job(), structs.replace(LOSE, force=True)).orders


def test_a_new_leader_has_it_done_once_it_has_heard_of_all_ranks() -> None:
    node = Node(1, NODES)
    waits = structs.replace(KILL, rank=2, step=STEP)
    node.feed(e.DrillAsked(2, waits, 60.0), e.PeerDown(0))
    node.quiet.add(0)
    found = node.feed(e.Tick())
    for _ in range(200):
        if node.control.job.leads:
            break
        node.now += 0.05
        found = node.feed(e.Tick())
    assert node.control.job.leads
    assert found.orders == []
    assignment = node.control.job.assignment
    assert assignment is not None
    for peer in (0, 2, 3):
        assert found.orders == []
        found = node.feed(e.Report(peer, trains(peer, assignment, seq=5)))
        if peer == 2:
            break
    assert found.orders == [m.Strike(generation=1, place=m.Place(node=2, slot=0), drill=waits)]


# ----------------------------------------------------------------------------- the faults that follow


def dies(job: Job, code: int = -9) -> Heard:
    return job.say(1, "exited", cause=DIED, code=code)


def again(job: Job) -> None:
    """The generation is left, and the next one trains at the same step."""
    for node in (0, 2, 3):
        job.say(node, "left", cause=m.Cause(kind="stop"), frozen=True)
    job.say(1, "exited", cause=DIED, code=-9, frozen=True)
    for phase, node in itertools.product(("joined", "restored"), range(NODES)):
        job.say(node, cast(m.Phase, phase))
    assert job.stage() == "running", job.outcome()


def test_a_death_is_told_as_a_drill() -> None:
    job = Job()
    asks(job, KILL)
    found = job.say(0, "left", cause=m.Cause(kind="broken", text="reset"))
    found.outputs += dies(job).outputs
    assert kinds(found)[0] is m.Stop
    again(job)
    faults = {row.kind: row for row in rows(job.node.told, FaultRecord)}
    assert {kind: row.source for kind, row in faults.items()} == {"broken": "drill", "died": "drill"}
    (line,) = [row for row in rows(job.node.told, EventRecord) if row.kind == "died"]
    assert line.text.endswith("was ended by SIGKILL (drill)")


def test_drills_use_up_no_budget() -> None:
    job = Job()
    most = LIMITS.process_tries + LIMITS.flap_tries + 3
    for count in range(1, most + 1):
        job.node.now += FOUND_S
        asks(job, KILL)
        dies(job)
        again(job)
        assert job.generation == 1 + count
    assignment = job.node.control.job.assignment
    assert assignment is not None
    assert (assignment.rung, assignment.places[1]) == ("process", m.Place(node=1, slot=0))
    assert (assignment.bad, assignment.tries, assignment.replaced, assignment.flapping) == ((), (), (), ())


def test_real_deaths_do() -> None:
    job = Job()
    for _ in range(LIMITS.process_tries):
        dies(job)
        again(job)
    dies(job)
    again(job)
    assignment = job.node.control.job.assignment
    assert assignment is not None
    assert assignment.bad == (m.Place(node=1, slot=0),)


def test_one_that_ends_otherwise_at_that_moment_is_none() -> None:
    job = Job()
    asks(job, KILL)
    job.raises()
    assert [(row.kind, row.source) for row in rows(job.node.told, FaultRecord)] == [("raised", "process")]


def test_a_lost_node_is_told_as_a_drill_and_is_not_dark() -> None:
    job = Job()
    asks(job, LOSE)
    found = job.node.feed(lost_by(1, "its agent is gone", source="drill"))
    assert [(row.kind, row.source) for row in rows(found, FaultRecord)] == [("node-lost", "drill")]
    assert found.dark_states == [], "Slurm is told of nothing"
    (line,) = [row for row in rows(found, EventRecord) if row.kind == "node-lost"]
    assert line.text == "node-1 (n1, rank 1) is lost: its agent is gone (drill)"
    job.freeze(0, 2, 3)
    assignment = job.node.control.job.assignment
    assert assignment is not None
    assert (assignment.rung, assignment.places[1]) == ("spare", m.Place(node=3, slot=0))


@pytest.mark.parametrize(("source", "told_as"), [("membership", "drill"), ("slurm", "slurm")])
def test_a_node_that_is_cut_off_is_told_as_a_drill_and_is_not_dark(source: Any, told_as: str) -> None:
    """Whatever else says that it is lost is no drill."""
    job = Job()
    asks(job, CUT)
    found = job.node.feed(lost_by(1, "silent", dark=True, source=source))
    assert [(row.kind, row.source) for row in rows(found, FaultRecord)] == [("node-lost", told_as)]
    assert bool(found.dark_states) is (told_as != "drill")


@pytest.mark.parametrize("me", [1, 2])
def test_its_own_daemon_cuts_a_node_off(me: int) -> None:
    """Nobody else does, and no agent hears of it."""
    node = Node(me, NODES)
    found = node.feed(e.OrderFrom(0, 1, struck_by(CUT)))
    cuts = [out for out in found.outputs if isinstance(out, e.CutNetwork)]
    assert cuts == ([e.CutNetwork(30.0)] if me == 1 else [])
    assert [out for out in found.outputs if isinstance(out, e.ToAgent)] == []
    assert node.control.job.drills.struck == struck_by(CUT)


# ------------------------------------------------------------------------------------------ the answer


@dataclass
class Run:
    """A job in a daemon, as far as a drill goes: its control plane is the real one."""

    node: Node = field(default_factory=lambda: Node(0, NODES))
    job: str = "4711"
    uid: int = OWNER
    drills: list[tuple[m.Drill, float]] = field(default_factory=list)
    address: str = "10.0.0.2"

    @property
    def roster(self) -> Roster:
        peers = (Peer(node=n, name=f"n{n:02}", address="127.0.0.1", port=1) for n in range(NODES))
        return Roster(self.node.me, tuple(peers))

    def name_of(self, node: int) -> str:
        return self.roster.by_node[node].name

    def now(self) -> float:
        return self.node.now

    @property
    def session(self) -> SimpleNamespace:
        return SimpleNamespace(
            control=self.node.control.job,
            drill=lambda *said: self.drills.append(said),
            agent_address=lambda _node: (self.address, 1),
        )

    def asked(
        self, kind: DrillKind = "kill-rank", target: str = "1", uid: int = OWNER, **more: Any
    ) -> tuple[str, str]:
        """(verdict, text)."""
        fields = {"protocol": m.PROTOCOL, "job": self.job, "kind": kind, "target": target, **more}
        answer = drill([cast(JobHost, self)], DrillJob(**fields), uid)
        assert bool(self.drills) is (answer.verdict == "accepted")
        return answer.verdict, answer.text

    @property
    def wanted(self) -> m.Drill:
        ((wanted, _),) = self.drills
        return wanted


def refused(why: str) -> tuple[str, str]:
    return "refused", f"no drill of job 4711: {why}"


@pytest.mark.parametrize("uid", [0, DAEMON, OWNER])
@pytest.mark.parametrize("me", [0, 1, 3])
def test_any_daemon_of_the_job_takes_it(me: int, uid: int) -> None:
    run = Run(Node(me, NODES))
    text = "a drill of job 4711: rank 1's process is killed, now"
    assert run.asked(uid=uid) == ("accepted", text)
    assert run.drills == [(structs.replace(KILL, uid=uid), 600.0)]


def test_at_a_step() -> None:
    run = Run()
    when = "once step 40 is done, if that is within 30 s"
    text = f"a drill of job 4711: rank 0's process is paused for 2.5 s, {when}"
    assert run.asked("pause-rank", "0", for_s=2.5, step=40, deadline_s=30.0) == ("accepted", text)
    assert run.wanted == m.Drill(kind="pause-rank", rank=0, for_s=2.5, step=40, uid=OWNER)


@pytest.mark.parametrize("word", ["n01", "1", "01"])
def test_a_node_by_name_or_number(word: str) -> None:
    run = Run()
    assert run.asked("kill-agent", word)[0] == "accepted"
    assert run.wanted == LOSE


def test_root_alone_cuts_a_node_off_and_only_from_a_network() -> None:
    run = Run()
    verdict, text = run.asked("cut-node", "n01", uid=OWNER, for_s=30.0)
    assert verdict == "refused"
    assert text.startswith("only root may cut a node off")
    for address in ("127.0.0.1", "127.0.0.9", "::1"):
        here = Run(address=address)
        verdict, text = here.asked("cut-node", "n01", uid=0, for_s=30.0)
        assert verdict == "refused"
        assert text.startswith("the job's nodes are all on this machine")
    assert run.asked("cut-node", "n01", uid=0, for_s=30.0)[0] == "accepted"
    assert run.wanted == CUT


def test_a_spare_may_be_lost() -> None:
    assert Run().asked("kill-agent", "n03")[0] == "accepted"


def test_of_others_jobs_nobody_learns_anything() -> None:
    unknown = "unknown", "no job '4711' that uid 1002 may touch runs here"
    assert Run().asked(uid=STRANGER) == unknown
    assert Run(job="4712").asked(uid=STRANGER, job="4711") == unknown


def test_another_version() -> None:
    assert Run().asked(protocol=99) == ("refused", "ckptctl speaks protocol 99, the daemon 1")


@pytest.mark.parametrize("target", ["3", "262143"])
def test_a_rank_that_there_is_not(target: str) -> None:
    assert Run().asked(target=target) == refused(f"there is no rank {target}, only 0 to 2")


@pytest.mark.parametrize("target", ["262144", "-1", "any", "1 ", "٢", "0" * 10, "9" * 200])
def test_what_is_no_rank(target: str) -> None:
    assert Run().asked(target=target) == ("refused", f"job 4711 has no rank {target!r}")


@pytest.mark.parametrize("target", ["n04", "4", "n1"])
def test_what_is_no_node(target: str) -> None:
    assert Run().asked("kill-agent", target) == ("refused", f"job 4711 has no node {target!r}")


@pytest.mark.parametrize(
    ("kind", "for_s"), [("pause-rank", 0.0), ("kill-rank", 1.0), ("kill-agent", 1.0), ("cut-node", 0.0)]
)
def test_pauses_and_cuts_alone_have_a_length(kind: DrillKind, for_s: float) -> None:
    text = "a pause and a cut have a length, and nothing else has"
    assert Run().asked(kind, uid=0, for_s=for_s) == ("refused", text)


def test_a_node_that_is_out() -> None:
    run = Run()
    run.node.feed(lost_by(3, "gone"))
    assert run.asked("kill-agent", "3") == refused("node-3 is out of the job: gone")


def test_one_that_would_end_the_job() -> None:
    run = Run()
    run.node.feed(lost_by(3, "gone"))
    verdict, text = run.asked("kill-agent", "1")
    assert verdict == "refused"
    assert text.endswith(
        "its rank has no spare to go to (1 too few), and the job would end; --force does it all the same"
    )
    assert run.asked("kill-agent", "1", force=True)[0] == "accepted"
    assert run.wanted == structs.replace(LOSE, force=True)


def test_where_nothing_answers_faults() -> None:
    run = Run()
    run.node.control.job.spec = structs.replace(job_spec(NODES), recovers=False)
    why = "nothing answers faults with --tier 1, and the job would end; --force does it all the same"
    assert run.asked() == refused(why)
    assert run.asked(force=True)[0] == "accepted"


@pytest.mark.parametrize("stage", ["joining", "restoring", "stopping", "releasing"])
def test_a_job_that_does_not_train(stage: e.Stage) -> None:
    run = Run()
    run.node.control.job.stage = stage
    assert run.asked() == refused("it does not train: it begins, ends, or recovers from a fault")


def test_a_job_that_has_not_begun() -> None:
    run = Run()
    run.node.control.job.spec = None
    assert run.asked() == refused("the job has not begun yet")


def test_a_job_that_is_over() -> None:
    run = Run()
    run.node.control.job.ended_here = m.Outcome(state="done", exit_code=0, reason="well")
    assert run.asked() == refused("the job is over: well")


def test_one_waits_or_is_under_way() -> None:
    run = Run()
    run.node.feed(e.DrillAsked(2, structs.replace(KILL, step=99), 60.0))
    assert run.asked() == refused("another one waits for its step: rank 1's process is killed")
    run = Run()
    run.node.feed(e.DrillAsked(2, LOSE, 60.0))
    assert run.asked() == refused("one is under way: the agent of node-1 is killed")
    run.node.wait(FOUND_S + 0.1)
    assert run.asked()[0] == "accepted"


def test_a_node_that_is_out_cannot_say() -> None:
    run = Run(Node(1, NODES))
    run.node.feed(lost_by(1, "gone"))
    assert run.asked() == ("elsewhere", "this node is out of the job itself: ask on another one")
