"""What an agent makes of orders, words, starts and deaths: pure, one node of two slots."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from ckptless.daemon.agent.core import actions as a
from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.versions.state_service import StateService
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import ProtocolError

ME, PONG_S = 1, 5.0


def place(slot: int, node: int = ME) -> m.Place:
    return m.Place(node=node, slot=slot)


def assignment(
    generation: int, *places: m.Place, renew: tuple[m.Place, ...] = (), restore_step: int | None = None
) -> m.Assignment:
    """Rank 0 is on another node; `places` have the ranks after it."""
    nodes = tuple(
        m.NodeInfo(node=node, name=f"node-{node}", address=f"10.0.0.{node}", agent_port=1) for node in (0, ME)
    )
    return m.Assignment(
        job="4711",
        generation=generation,
        term=1,
        leader=0,
        places=(place(0, 0), *places),
        nodes=nodes,
        restore_step=restore_step,
        renew=renew,
    )


class Node:
    """An agent's core, of which the actions are looked at and forgotten after each input."""

    def __init__(self) -> None:
        self.core = AgentCore(ME, 2, PONG_S)
        self.now = 0.0

    def out(self) -> list[a.Action]:
        actions, self.core.out = self.core.out, []
        return actions

    def obey(self, order: m.Order) -> list[a.Action]:
        self.core.obey(order, self.now)
        return self.out()

    def assign(self, new: m.Assignment) -> list[a.Action]:
        return self.obey(m.Assign(assignment=new))

    def births(self, actions: list[a.Action]) -> list[int]:
        """Fork all that were to be started, in order."""
        starts = [action for action in actions if isinstance(action, a.StartProcess)]
        for start in starts:
            self.core.born(start.slot, start.birth, 1000 + start.birth, self.now)
        return [start.birth for start in starts]

    def hello(self, *births: int) -> list[a.Action]:
        self.out()
        for birth in births:
            self.core.hello(birth, self.now)
        return self.out()

    def train(self, new: m.Assignment) -> list[int]:
        """Begin a generation with processes that all say Hello; the births of its ranks' processes."""
        births = self.births(self.assign(new))
        self.hello(*births)
        return births

    def phases(self) -> list[str]:
        return [slot.phase for slot in self.core.slots]

    def stepped(self) -> list[bool]:
        return [slot.stepped for slot in self.core.slots]

    def causes(self) -> list[str | None]:
        return [slot.cause.kind if slot.cause is not None else None for slot in self.core.slots]


@pytest.fixture
def node() -> Node:
    return Node()


def kinds(actions: list[a.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_state_follows_before_a_process_is_started(node: Node) -> None:
    said = node.assign(assignment(1, place(0)))
    assert kinds(said) == ["FollowAssignment", "StartProcess", "PrefetchState", "StartProcess", "ReportState"]
    rank, spare = (action for action in said if isinstance(action, a.StartProcess))
    assert rank.assignment is not None
    assert spare.assignment is None
    assert node.phases() == ["starting", "starting"]
    # A spare is of no generation.
    assert [slot.generation for slot in node.core.slots] == [1, 0]


def test_a_process_that_takes_another_s_place_is_not_at_the_hooks_yet(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    assert [slot.hooked for slot in node.core.slots] == [True, True]
    node.core.exited(births[0], -9, "was ended by SIGKILL", node.now)
    said = node.assign(assignment(2, place(0), place(1)))
    assert [slot.hooked for slot in node.core.slots] == [False, True]
    assert node.phases()[0] == "starting"
    (start,) = (one for one in said if isinstance(one, a.StartProcess))
    assert (node.core.slots[0].generation, node.core.slots[0].exit_code) == (2, None)
    node.core.born(start.slot, start.birth, 2000, node.now)
    assert kinds(node.out()) == ["ReportState"]


def test_a_process_gets_its_rank_once_it_says_hello(node: Node) -> None:
    births = node.births(node.assign(assignment(1, place(0), place(1))))
    for rank, birth in enumerate(births, 1):
        assert node.hello(birth) == [a.AssignRank(birth, rank, fresh=True), a.ReportState(soon=False)]
    again = node.assign(assignment(2, place(0), place(1)))
    assert a.AssignRank(births[0], 1, fresh=False) in again
    assert not node.births(again)


def test_a_spare_waits_and_is_fresh_when_it_gets_a_rank(node: Node) -> None:
    births = node.train(assignment(1, place(0)))
    assert node.phases() == ["assigned", "waiting"]
    assert a.AssignRank(births[1], 2, fresh=True) in node.assign(assignment(2, place(0), place(1)))


def prepares(node: Node) -> tuple[int, m.Assignment]:
    """Its spare, in slot 1, builds for rank 2 of generation 2; return its birth, too."""
    births = node.train(assignment(1, place(0), place(0, 2)))
    ahead = assignment(2, place(0), place(1), restore_step=5)
    said = node.obey(m.Prepare(generation=1, assignment=ahead))
    assert said == [a.PrepareRank(births[1], 2, ahead), a.ReportState(soon=False)]
    assert node.phases() == ["assigned", "preparing"]
    return births[1], ahead


def test_a_spare_builds_ahead_and_gets_what_it_has_built_for(node: Node) -> None:
    birth, ahead = prepares(node)
    # Said again, it changes nothing.
    assert node.obey(m.Prepare(generation=1, assignment=ahead)) == []
    node.core.advance(node.core.slots[1], m.Prepared(generation=2), node.now)
    assert node.phases() == ["assigned", "prepared"]
    node.obey(m.Stop(generation=1, reason="it moves"))
    # It is in no generation that could be stopped.
    assert node.phases()[1] == "prepared"
    said = node.assign(structs.replace(ahead, restore_step=9))
    assert a.AssignRank(birth, 2, fresh=True) in said
    assert not node.births(said)
    node.core.advance(node.core.slots[1], m.Prepared(generation=2), node.now)
    assert node.phases()[1] == "assigned"


def test_whoever_trains_gives_a_spare_that_has_built_its_next_commits(node: Node) -> None:
    _birth, ahead = prepares(node)
    order = m.Prepare(generation=1, assignment=ahead, state=True)
    assert node.obey(order) == [a.GiveAhead(ahead)]
    node.obey(m.Stop(generation=1, reason="a fault"))
    assert node.obey(order) == []


def test_a_spare_that_has_built_tells_at_once_that_a_new_commit_has_come(node: Node) -> None:
    _birth, ahead = prepares(node)
    slot, core = node.core.slots[1], node.core
    # It holds copies of that rank like any other node.
    assert not core.arrived({2: 7}.get)
    core.advance(slot, m.Prepared(generation=2), node.now)
    node.obey(m.Prepare(generation=1, assignment=ahead, state=True))
    assert not core.arrived({2: 7, 1: 9}.get)
    assert slot.told(node.now).step is None
    assert core.arrived({2: 8, 1: 9}.get)
    assert node.out() == [a.ReportState(soon=False)]
    assert slot.told(node.now).step == 8
    # Once is enough; who is told again waits for another one.
    assert not core.arrived({2: 9}.get)
    node.obey(m.Prepare(generation=1, assignment=ahead, state=True))
    assert slot.step is None
    assert core.arrived({2: 10}.get)


def test_what_comes_to_a_node_that_builds_nothing_is_no_news(node: Node) -> None:
    node.train(assignment(1, place(0), place(0, 2)))
    assert not node.core.arrived({1: 5, 2: 5}.get)
    assert node.out() == []


@pytest.mark.parametrize(
    "comes",
    [
        assignment(2, place(1), place(0), restore_step=5),
        assignment(2, place(0), restore_step=5),
        assignment(2, place(0), place(1)),
        assignment(3, place(0), place(1), restore_step=5),
        structs.replace(assignment(2, place(0), place(1), restore_step=5), cut=2),
    ],
)
def test_one_that_has_built_for_what_does_not_come_is_replaced(node: Node, comes: m.Assignment) -> None:
    birth, _ahead = prepares(node)
    said = node.assign(comes)
    assert a.KillProcess(birth) in said
    assert not any(isinstance(one, a.AssignRank) and one.birth == birth for one in said)
    (start,) = (one for one in said if isinstance(one, a.StartProcess) and one.slot == 1)
    assert start.birth != birth


def test_one_that_raises_while_it_builds_is_replaced_by_a_spare(node: Node) -> None:
    birth, _ahead = prepares(node)
    cause = m.Cause(kind="raised", text="ValueError: x")
    node.core.advance(node.core.slots[1], m.Left(generation=2, cause=cause), node.now)
    said = node.out()
    assert kinds(said) == ["NoteEvent", "KillProcess", "StartProcess", "ReportState"]
    assert (said[1], said[2]) == (a.KillProcess(birth), a.StartProcess(1, birth + 1, None))
    assert node.phases()[1] == "starting"


@pytest.mark.parametrize("late", ["stopped", "another generation", "starting", "another number"])
def test_nobody_builds_ahead_for_what_cannot_come(node: Node, late: str) -> None:
    now = assignment(1, place(0)) if late == "another number" else assignment(1, place(0), place(0, 2))
    if late == "starting":
        node.births(node.assign(now))
    else:
        node.train(now)
    if late == "stopped":
        node.obey(m.Stop(generation=1, reason="a fault"))
    ahead = assignment(3 if late == "another generation" else 2, place(0), place(1), restore_step=5)
    for state in (False, True):
        said = node.obey(m.Prepare(generation=ahead.generation - 1, assignment=ahead, state=state))
        assert "PrepareRank" not in kinds(said)
        assert late == "starting" or "GiveAhead" not in kinds(said)


@pytest.mark.parametrize("generation", [1, 2])
def test_an_assignment_that_is_not_newer_changes_nothing(node: Node, generation: int) -> None:
    node.train(assignment(2, place(0)))
    assert kinds(node.assign(assignment(generation, place(1)))) == ["ReportState"]
    assert node.phases() == ["assigned", "waiting"]


RANK = m.Drill(kind="kill-rank", rank=2, uid=0)
PAUSE = m.Drill(kind="pause-rank", rank=2, for_s=2.5, uid=0)
NODE = m.Drill(kind="kill-agent", node=ME, uid=0)


def strike(drill: m.Drill, generation: int = 1, slot: int = 1, node: int = ME) -> m.Strike:
    return m.Strike(generation=generation, place=place(slot, node), drill=drill)


def test_what_a_drill_does(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    assert node.obey(strike(PAUSE)) == [a.PauseProcess(births[1], 2.5)]
    assert node.obey(strike(NODE, slot=0)) == [a.KillAgent()]
    assert node.obey(strike(RANK)) == [a.KillProcess(births[1])]
    # Its death is told as any other.
    node.core.exited(births[1], -9, "was ended by SIGKILL", 1.0)
    assert node.causes() == [None, "died"]
    node.out()
    assert node.obey(strike(RANK)) == [], "it is dead"


def test_a_drill_of_another_node_or_generation_is_none(node: Node) -> None:
    assert node.obey(strike(RANK)) == []
    node.train(assignment(1, place(0), place(1)))
    for drill in (RANK, PAUSE, NODE):
        assert node.obey(strike(drill, node=0)) == []
        assert node.obey(strike(drill, generation=2)) == []
    node.obey(m.Stop(generation=1, reason="x"))
    assert node.obey(strike(RANK)) == [], "the generation is stopped"
    node.assign(assignment(2, place(0), place(1)))
    assert node.obey(strike(RANK)) == []


def test_a_process_that_lives_is_replaced_where_the_assignment_says_so(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    said = node.assign(assignment(2, place(0), place(1), renew=(place(1),)))
    assert a.KillProcess(births[1]) in said
    assert a.AssignRank(births[0], 1, fresh=False) in said
    node.births(said)
    # Its death, which comes later, is nobody's.
    node.core.exited(births[1], -9, "was killed", 1.0)
    assert node.phases() == ["assigned", "starting"]


def test_a_rank_that_trained_and_is_none_any_more_ends_and_a_spare_stays(node: Node) -> None:
    births = node.train(assignment(1, place(0)))
    said = node.assign(assignment(2, place(1)))
    assert a.KillProcess(births[0]) in said
    assert node.phases() == ["empty", "assigned"]
    # With the generation after it a new spare is started there.
    assert len(node.births(node.assign(assignment(3, place(1))))) == 1


def test_before_the_first_assignment_nothing_is_stopped_and_nobody_is_known(node: Node) -> None:
    assert kinds(node.obey(m.Stop(generation=1, reason="a fault"))) == ["ReportState"]
    assert node.core.frozen is None
    assert node.core.rank(node.core.slots[0]) is None
    assert not node.obey(m.Go(generation=1))
    assert not node.obey(m.Release(generation=1))
    assert node.core.occupied(99) is None
    assert node.core.heard(99, 1.0) is None
    node.core.hello(99, 1.0)
    assert not node.out()


def test_a_spare_that_never_was_a_rank_stays_over_generations(node: Node) -> None:
    births = node.train(assignment(1, place(0)))
    said = node.assign(assignment(2, place(0)))
    assert kinds(said) == ["FollowAssignment", "AssignRank", "ReportState"]
    assert node.core.occupied(births[1]) is node.core.slots[1]


def test_a_spare_that_is_only_being_started_is_not_started_again(node: Node) -> None:
    node.assign(assignment(1, place(0)))
    said = node.assign(assignment(2, place(0)))
    assert [one.slot for one in said if isinstance(one, a.StartProcess)] == [0]


def test_a_process_that_has_not_said_hello_is_not_given_the_next_generation(node: Node) -> None:
    births = node.births(node.assign(assignment(1, place(0))))
    said = node.assign(assignment(2, place(0)))
    assert a.KillProcess(births[0]) in said
    assert "AssignRank" not in kinds(said)
    assert node.phases()[0] == "starting"


def test_stop_freezes_and_is_told_once(node: Node) -> None:
    births = node.train(assignment(1, place(0)))
    stop = m.Stop(generation=1, reason="a fault")
    said = node.obey(stop)
    assert kinds(said) == ["StopAccepting", "SendToRank", "ReportState"]
    assert a.SendToRank(births[0], stop) in said
    assert node.core.frozen == 1
    assert kinds(node.obey(stop)) == ["ReportState"]


@pytest.mark.parametrize("generation", [1, 3])
def test_stop_of_another_generation_freezes_nothing(node: Node, generation: int) -> None:
    node.train(assignment(2, place(0)))
    assert kinds(node.obey(m.Stop(generation=generation, reason="a fault"))) == ["ReportState"]
    assert node.core.frozen is None


def test_stop_ends_a_process_without_hooks_that_has_a_rank(node: Node) -> None:
    births = node.births(node.assign(assignment(1, place(0))))
    node.out()
    said = node.obey(m.Stop(generation=1, reason="a fault"))
    assert kinds(said) == ["StopAccepting", "KillProcess", "ReportState"]
    assert a.KillProcess(births[0]) in said
    assert (node.phases()[0], node.causes()[0]) == ("exited", "stop")


def test_a_hello_while_frozen_waits_for_the_next_generation(node: Node) -> None:
    births = node.births(node.assign(assignment(1, place(0), place(1))))
    node.hello(births[0])
    node.obey(m.Stop(generation=1, reason="a fault"))
    assert not any(isinstance(one, a.AssignRank) for one in node.hello(births[0]))
    assert node.phases()[0] == "waiting"


def test_only_processes_of_this_node_are_killed_and_are_hung(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    said = node.obey(m.Stop(generation=1, reason="late", kill=(place(0, 0), place(1))))
    assert [one for one in said if isinstance(one, a.KillProcess)] == [a.KillProcess(births[1], hung=True)]
    node.core.exited(births[1], -9, "was killed", 1.0)
    assert node.causes() == [None, "hung"]


@pytest.mark.parametrize("order", [m.Go(generation=1), m.Release(generation=1)])
def test_go_and_release_are_of_the_generation(node: Node, order: m.Order) -> None:
    births = node.train(assignment(1, place(0)))
    said = node.obey(order)
    assert said[0] == a.SendToRank(births[0], order)  # type: ignore[arg-type]
    assert kinds(said[1:]) == (["ReleaseReplicas"] if isinstance(order, m.Release) else [])
    node.train(assignment(2, place(0)))
    assert not node.obey(order)


def test_the_end_is_handed_on(node: Node) -> None:
    outcome = m.Outcome(state="done", exit_code=0, reason="every rank has ended", why="done")
    assert node.obey(m.End(outcome=outcome))[-1] == a.EndJob(outcome, here_only=False)


def test_a_process_that_is_forked_too_late_is_ended(node: Node) -> None:
    late, _ = (one for one in node.assign(assignment(1, place(0))) if isinstance(one, a.StartProcess))
    new, *_ = (one for one in node.assign(assignment(2, place(0))) if isinstance(one, a.StartProcess))
    node.core.born(late.slot, late.birth, 11, 1.0)
    assert node.out() == [a.KillProcess(late.birth)]
    node.core.born(new.slot, new.birth, 12, 1.0)
    assert [slot.occupant.pid for slot in node.core.slots if slot.occupant is not None] == [12]
    # Neither a word nor the death of the first is this slot's.
    node.core.hello(late.birth, 1.0)
    node.core.exited(late.birth, -9, "was killed", 1.0)
    assert node.phases()[0] == "starting"


def test_a_process_that_cannot_be_forked_is_dead(node: Node) -> None:
    start = next(one for one in node.assign(assignment(1, place(0))) if isinstance(one, a.StartProcess))
    node.core.not_born(start.slot, start.birth, "no memory", 1.0)
    assert kinds(node.out()) == ["NoteEvent", "ReportState"]
    assert (node.phases()[0], node.causes()[0]) == ("exited", "died")
    # As a script that fails at once.
    assert node.core.slots[0].exit_code == 1


def test_a_process_that_cannot_be_forked_and_is_not_wanted_any_more_is_no_fault(node: Node) -> None:
    late, _ = (one for one in node.assign(assignment(1, place(0))) if isinstance(one, a.StartProcess))
    node.assign(assignment(2, place(0)))
    node.core.not_born(late.slot, late.birth, "no memory", 1.0)
    assert kinds(node.out()) == ["NoteEvent"]
    assert (node.phases()[0], node.causes()[0]) == ("starting", None)


@pytest.mark.parametrize(
    ("code", "hooked", "phase", "cause"),
    [
        (0, True, "finished", None),
        (0, True, "restored", "died"),
        (0, False, "starting", None),
        (1, True, "finished", "died"),
        (-9, True, "restored", "died"),
        (1, False, "starting", "died"),
    ],
)
def test_what_a_death_is(node: Node, code: int, hooked: bool, phase: m.Phase, cause: str | None) -> None:
    births = node.births(node.assign(assignment(1, place(0), place(1))))
    if hooked:
        node.hello(births[0])
    node.core.slots[0].enter(phase, 1, 0.0)
    node.out()
    node.core.exited(births[0], code, "ended", 2.0)
    assert node.out() == [a.ReportState(soon=False)]
    slot = node.core.slots[0]
    assert (slot.phase, slot.exit_code, node.causes()[0]) == ("exited", code, cause)
    assert slot.living is None


def test_after_release_an_end_with_0_is_no_fault_until_the_next_order(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    node.obey(m.Release(generation=1))
    node.core.exited(births[0], 0, "ended", 1.0)
    assert node.causes()[0] is None
    node.obey(m.Stop(generation=1, reason="a fault"))
    node.core.exited(births[1], 0, "ended", 1.0)
    assert node.causes()[1] == "died"


def test_words_of_another_generation_are_refused(node: Node) -> None:
    births = node.train(assignment(2, place(0)))
    slot = node.core.slots[0]
    assert not node.core.admits(slot, 1, "Joined")
    assert node.out() == [
        a.NoteEvent("stale-message", "Joined of slot 0, generation 1, here 2"),
        a.SendToRank(births[0], m.Refused(generation=1, what="Joined")),
    ]
    assert node.core.admits(slot, 2, "Joined")


def test_a_commit_of_who_has_not_said_which_shard_it_has_is_refused(node: Node) -> None:
    node.train(assignment(1, place(0)))
    unasked: Any = SimpleNamespace()
    service = StateService(node.core, unasked, unasked, unasked, unasked, unasked)
    early = m.Commit(generation=1, step=1, record=b"", digest="", tensors=None, loss=None)
    with pytest.raises(ProtocolError, match="Commit before Twins"):
        service.serve(node.core.slots[0], unasked, early)


def test_a_step_before_the_restore_is_none_of_the_new_generation(node: Node) -> None:
    node.train(assignment(1, place(0)))
    slot = node.core.slots[0]
    step = m.Stepped(generation=1, step=9, loss=0.5, every=1, share=None)
    node.core.stepped(slot, step, first=True)
    node.core.stepped(slot, step, first=False)
    assert node.out() == [a.ReportState(soon=False), a.ReportState(soon=True)]
    assert node.stepped() == [True, False]
    node.assign(assignment(2, place(0), restore_step=7))
    assert node.stepped() == [False, False]
    node.core.advance(slot, m.Restored(generation=2), 1.0)
    assert (slot.step, slot.phase) == (7, "restored")


def test_a_step_counts_for_its_generation_whatever_becomes_of_the_process(node: Node) -> None:
    births = node.train(assignment(1, place(0)))
    step = m.Stepped(generation=1, step=9, loss=0.5, every=1, share=None)
    node.core.stepped(node.core.slots[0], step, first=True)
    node.core.exited(births[0], -9, "was killed", 1.0)
    assert node.stepped() == [True, False]
    node.assign(assignment(2, place(0)))
    assert node.stepped() == [False, False]


@pytest.mark.parametrize(
    ("reuse", "restore_step", "cut", "renewed"),
    [
        ("any", None, 1, False),
        ("any", 7, 2, False),
        ("going-on", 7, 1, False),
        ("going-on", None, 1, True),
        ("going-on", 7, 2, True),
        ("none", 7, 1, True),
        ("none", None, 2, True),
    ],
)
def test_a_process_is_used_again_for_what_it_is_good_for(
    node: Node, reuse: m.Reuse, restore_step: int | None, cut: int, renewed: bool
) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    left = m.Left(generation=1, cause=m.Cause(kind="stop"), reuse=reuse)
    node.core.advance(node.core.slots[0], left, node.now)
    node.out()
    new = assignment(2, place(0), place(1), restore_step=restore_step)
    said = node.assign(structs.replace(new, cut=cut))
    assert [one.birth for one in said if isinstance(one, a.KillProcess)] == births[:1] * renewed
    assert [one.slot for one in said if isinstance(one, a.StartProcess)] == [0] * renewed
    # Who said nothing of it is good for any.
    assert births[1] in [one.birth for one in said if isinstance(one, a.AssignRank)]


def test_what_the_daemon_is_told_of_a_slot(node: Node) -> None:
    slot = node.core.slots[0]
    assert slot.told(5.0) == m.SlotState(slot=0, phase="empty", generation=0, age_s=5.0)
    node.train(assignment(1, place(0)))
    node.core.advance(slot, m.Left(generation=1, cause=m.Cause(kind="raised", text="ValueError")), 2.0)
    assert slot.occupant is not None
    assert slot.told(5.0) == m.SlotState(
        slot=0,
        phase="left",
        generation=1,
        pid=slot.occupant.pid,
        hooked=True,
        cause=m.Cause(kind="raised", text="ValueError"),
        age_s=3.0,
    )


def test_slots_without_a_rank_are_unused(node: Node) -> None:
    assert node.core.unused_slots(assignment(1, place(1))) == [0]
    assert node.core.unused_slots(assignment(1, place(0), place(1))) == []


def test_a_broken_collective_blames_and_changes_no_phase(node: Node) -> None:
    node.train(assignment(1, place(0)))
    slot = node.core.slots[0]
    node.core.advance(slot, m.Joined(generation=1), 1.0)
    node.out()
    node.core.advance(slot, m.Broken(generation=1, text="reset by peer"), 2.0)
    assert node.out() == [a.ReportState(soon=False)]
    assert (slot.phase, slot.since, node.causes()[0]) == ("joined", 2.0, "broken")


def test_who_has_not_come_to_the_hooks_may_be_silent(node: Node) -> None:
    """A script before ckptless.run answers nobody."""
    births = node.births(node.assign(assignment(1, place(0), place(1))))
    node.hello(births[0])
    node.core.check_answers(0.0, PONG_S + 1.0)
    assert [one.birth for one in node.out() if isinstance(one, a.KillProcess)] == [births[0]]


def test_who_is_silent_is_killed_once_but_not_for_time_that_the_agent_was_starved(node: Node) -> None:
    births = node.train(assignment(1, place(0), place(1)))
    node.core.heard(births[1], 3.0)
    node.core.check_answers(0.0, PONG_S)
    assert not node.out()
    node.core.check_answers(2.0, PONG_S + 1.9)
    assert not node.out()
    node.core.check_answers(0.0, PONG_S + 2.1)
    node.core.check_answers(0.0, PONG_S + 2.2)
    assert node.out() == [a.KillProcess(births[0], hung=True)]
    node.core.exited(births[0], -9, "was killed", 8.0)
    assert node.causes() == ["hung", None]


def test_who_was_released_owes_no_answer(node: Node) -> None:
    node.train(assignment(1, place(0)))
    node.obey(m.Release(generation=1))
    node.core.slots[1].occupant = None
    node.core.check_answers(0.0, 100.0)
    assert not node.out()


def test_at_the_end_of_the_agent_no_death_is_a_fault_and_nothing_is_born(node: Node) -> None:
    said = node.assign(assignment(1, place(0), place(1)))
    first, second = (one for one in said if isinstance(one, a.StartProcess))
    node.core.born(first.slot, first.birth, 11, 0.0)
    node.core.close()
    node.out()
    node.core.born(second.slot, second.birth, 12, 0.0)
    assert node.out() == [a.KillProcess(second.birth)]
    node.core.exited(first.birth, -15, "was ended by SIGTERM", 1.0)
    assert node.causes() == ["stop", None]


@pytest.mark.parametrize("bad", [False, True])
def test_a_slot_that_leaves_a_job_which_shrinks_is_a_spare_again(node: Node, bad: bool) -> None:
    """It may grow: a new process waits there. One that may hold no rank any more stays empty."""
    born = node.train(assignment(1, place(0), place(1)))
    for slot in node.core.slots:
        node.core.stepped(slot, m.Stepped(generation=1, step=9, loss=0.5, every=1, share=None), first=True)
    node.out()
    smaller = assignment(2, place(0))
    actions = node.assign(structs.replace(smaller, bad=(place(1),)) if bad else smaller)
    starts = [action for action in actions if isinstance(action, a.StartProcess)]
    assert [(start.slot, start.assignment) for start in starts] == ([] if bad else [(1, None)])
    assert a.KillProcess(born[1]) in actions


def test_the_spare_in_a_slot_that_has_left_stays_over_generations(node: Node) -> None:
    """What the process before it has trained is none of its."""
    node.train(assignment(1, place(0), place(1)))
    for slot in node.core.slots:
        node.core.stepped(slot, m.Stepped(generation=1, step=9, loss=0.5, every=1, share=None), first=True)
    (spare,) = node.births(node.assign(assignment(2, place(0))))
    for generation in (3, 4):
        node.hello(spare)
        said = node.assign(assignment(generation, place(0)))
        assert kinds(said) == ["FollowAssignment", "AssignRank", "ReportState"]
        assert node.core.occupied(spare) is node.core.slots[1]
        assert node.phases() == ["assigned", "waiting"]


@pytest.mark.parametrize("bad", [False, True])
def test_where_a_rank_has_moved_away_from_a_process_that_ended_a_spare_waits(node: Node, bad: bool) -> None:
    """An elastic job grows on nodes of which all slots have one; a slot that is given up stays as it is."""
    (birth, _) = node.train(assignment(1, place(0)))
    node.core.exited(birth, -9, "was killed", 1.0)
    moved = assignment(2, place(1))
    starts = node.births(node.assign(structs.replace(moved, bad=(place(0),)) if bad else moved))
    assert len(starts) == (0 if bad else 1)
    assert node.phases()[0] == ("exited" if bad else "starting")
