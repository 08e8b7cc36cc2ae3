"""What is done for a verdict: Slurm first, then the jobs; and the breaker, over many nodes at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.health.acting import ASK_S, OURS, Acting
from ckptless.daemon.ckptlessd.health.breaker import SETTLED_S, WINDOW_S, is_among_first
from ckptless.daemon.ckptlessd.health.meanings import ACTIONS, meaning
from ckptless.daemon.ckptlessd.health.verdicts import Key, Verdict
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.settings.options import HealthSettings
from ckptless.daemon.slurm.adapter import MAX_REASON, Node, check_text
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError

EPOCH_S = 1_700_000_000.0


@dataclass
class Controller:
    """slurmctld: one thing after the other, and times in whole seconds. Shared by all nodes."""

    now_s: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    fails: Exception | None = None
    asked: int = 0

    def add(self, *names: str) -> None:
        self.nodes |= {name: Node(name=name, address="", state="MIXED") for name in names}

    def drain(self, name: str, reason: str) -> None:
        check_text(reason)
        at_s = EPOCH_S + float(int(self.now_s))
        old = self.nodes[name]
        self.nodes[name] = replace(old, flags=frozenset({"DRAIN"}), reason=reason, reason_s=at_s)

    def undrain(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], flags=frozenset(), reason="", reason_s=None)

    def drained(self) -> list[str]:
        return [node.name for node in self.nodes.values() if node.draining]


@dataclass
class Own:
    """One node's view of it."""

    controller: Controller
    name: str
    orders: list[str] = field(default_factory=list)

    async def now(self) -> Sequence[Node]:
        self.controller.asked += 1
        if self.controller.fails is not None:
            raise self.controller.fails
        return tuple(self.controller.nodes.values())

    async def drain(self, reason: str) -> None:
        self.orders.append("drain")
        if isinstance(self.controller.fails, SlurmRefusedError):
            raise self.controller.fails
        self.controller.drain(self.name, reason)

    async def undrain(self) -> None:
        self.orders.append("undrain")
        self.controller.undrain(self.name)


@dataclass
class Daemon:
    """One node's daemon, as far as it acts."""

    name: str
    controller: Controller
    settings: HealthSettings = field(default_factory=HealthSettings)
    said: list[Leave | None] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = Own(self.controller, self.name)
        self.acting = Acting(
            self.name,
            self.own,
            self.settings,
            self.said.append,
            lambda _verdict, text: self.told.append(text),
        )

    def look(self, *standing: Verdict) -> None:
        asyncio.run(self.acting.look(standing))

    def after(self, seconds: float, *standing: Verdict) -> None:
        self.controller.now_s += seconds
        self.look(*standing)

    @property
    def leave(self) -> Leave | None:
        return self.said[-1] if self.said else None


def verdict(code: str = "xid-79", probe: str = "kernel-log", where: str = "GPU 0000:4e:00") -> Verdict:
    return Verdict(Key(probe, code, where), meaning(code, {}), 0.0, 0.0, "", 1, stands=True, begun_s=0.0)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    found = Controller()
    found.add("n1", "n2", "n3")
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + found.now_s)
    monkeypatch.setattr(time, "time", lambda: EPOCH_S + found.now_s)
    return found


def test_slurm_is_told_first_and_the_jobs_a_moment_later(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.look(verdict())
    reason = "ckptless: health kernel-log: xid-79 (GPU 0000:4e:00): the GPU has fallen off the bus"
    assert controller.nodes["n1"].reason == reason
    assert daemon.said == []
    daemon.after(SETTLED_S - 0.1, verdict())
    assert daemon.said == []
    daemon.after(0.2, verdict())
    assert daemon.leave == Leave(
        "unwell (kernel-log: xid-79 (GPU 0000:4e:00): the GPU has fallen off the bus)",
        "health",
        at_once=True,
        shrink=True,
    )
    assert daemon.told == ["drained", "drained, and jobs leave it"]
    asked = controller.asked
    daemon.after(ASK_S - 1.0, verdict())
    assert controller.asked == asked  # it is not asked all the time


@pytest.mark.parametrize(
    ("code", "leave"),
    [("link-down", Leave("x", "health")), ("disk-full", None), ("xid-13", None)],
)
def test_what_is_done_by_what_it_is_worth(controller: Controller, code: str, leave: Leave | None) -> None:
    daemon = Daemon("n1", controller)
    for _ in range(3):
        daemon.after(SETTLED_S, verdict(code))
    found = daemon.leave
    assert (found if found is None else replace(found, reason="x")) == leave
    assert controller.drained() == ([] if code == "xid-13" else ["n1"])


@pytest.mark.parametrize("act", ACTIONS)
def test_no_more_than_the_site_allows(controller: Controller, act: Any) -> None:
    daemon = Daemon("n1", controller, HealthSettings(act=act))
    for _ in range(3):
        daemon.after(SETTLED_S, verdict())
    assert controller.drained() == ([] if act == "note" else ["n1"])
    leave = daemon.leave
    assert (leave is not None) is (act in ("move", "evict"))
    assert leave is None or leave.at_once is (act == "evict")


def test_what_somebody_else_has_drained_is_left_as_it_is(controller: Controller) -> None:
    controller.drain("n1", "new cables")
    daemon = Daemon("n1", controller, HealthSettings(undrain_after_s=60.0))
    for _ in range(5):
        daemon.after(ASK_S, verdict())
    assert daemon.own.orders == []
    assert daemon.leave is None
    assert daemon.told[-1] == "nothing: it is drained already (new cables)"
    daemon.after(1.0)
    daemon.after(3600.0)
    assert controller.nodes["n1"].reason == "new cables"


def test_a_daemon_that_starts_again_goes_on(controller: Controller) -> None:
    Daemon("n1", controller).look(verdict())
    controller.now_s += 600.0
    daemon = Daemon("n1", controller)
    daemon.look(verdict())
    assert daemon.own.orders == []
    assert daemon.leave is not None


def test_a_second_finding_finds_the_node_drained(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.look(verdict("disk-full", "disk", "/"))
    daemon.after(SETTLED_S, verdict("disk-full", "disk", "/"))
    daemon.after(ASK_S, verdict(), verdict("disk-full", "disk", "/"))
    assert daemon.leave is not None
    assert daemon.own.orders == ["drain"]


def test_what_an_administrator_undrains_is_drained_again_where_it_is_seen_again(
    controller: Controller,
) -> None:
    daemon, gone = Daemon("n1", controller), verdict()
    daemon.look(gone, verdict("link-down"))
    daemon.after(SETTLED_S, gone, verdict("link-down"))
    assert len(daemon.said) == 1
    controller.undrain("n1")
    for _ in range(5):
        daemon.after(ASK_S, gone, verdict("link-down"))
    assert controller.drained() == []
    assert daemon.said[-1] is None
    assert "nothing any more: somebody has undrained the node" in daemon.told
    gone.count += 1
    daemon.after(ASK_S, gone)
    assert controller.drained() == ["n1"]


def test_it_is_known_in_the_next_life_too_that_the_node_was_drained(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.acting.recall(verdict())
    for _ in range(3):
        daemon.after(ASK_S, verdict())
    assert daemon.own.orders == []


def test_a_second_finding_of_the_probe_waits_as_well(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.look(verdict("link-flap"))
    daemon.after(1.0, verdict(), verdict("link-flap"))
    assert daemon.said == []
    daemon.after(ASK_S, verdict(), verdict("link-flap"))
    assert daemon.leave is not None


def test_jobs_may_stay_once_it_is_well(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.look(verdict())
    daemon.after(SETTLED_S, verdict())
    daemon.after(1.0)
    assert daemon.leave is None
    daemon.after(1e6)
    assert controller.drained() == ["n1"]  # undrained by nobody, unless the site wants it


def test_it_is_undrained_when_it_was_well_for_so_long(controller: Controller) -> None:
    daemon = Daemon("n1", controller, HealthSettings(undrain_after_s=600.0))
    daemon.look(verdict())
    daemon.after(SETTLED_S, verdict())
    daemon.after(1.0)
    for _ in range(19):
        daemon.after(31.0)
    assert controller.drained() == ["n1"]
    daemon.after(31.0)
    assert controller.drained() == []
    daemon.look(verdict())
    assert controller.drained() == ["n1"]


def test_it_is_not_undrained_while_anything_stands(controller: Controller) -> None:
    daemon = Daemon("n1", controller, HealthSettings(undrain_after_s=60.0, most_per_hour=0))
    for _ in range(20):
        daemon.after(31.0, verdict())
    # The breaker has taken the mark back; that is no health.
    assert daemon.own.orders == ["drain", "undrain"]
    assert daemon.leave is None


def test_slurm_that_is_away_is_asked_again(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    controller.fails = SlurmUnreachableError("slurmctld is away")
    daemon.look(verdict())
    assert daemon.own.orders == []
    controller.fails = None
    daemon.after(ASK_S, verdict())
    assert controller.drained() == ["n1"]


def test_slurm_that_refuses_is_told_and_not_pestered(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    controller.fails = SlurmRefusedError("Access/permission denied")
    for _ in range(10):
        daemon.after(ASK_S / 10, verdict())
    assert controller.asked == 1
    assert daemon.told == ["nothing: Slurm refuses to drain it: Access/permission denied"]


def test_a_reason_is_fit_for_slurm(controller: Controller) -> None:
    daemon = Daemon("n1", controller)
    daemon.look(verdict(where="a \"quoted\" 'place' \\ é" + 300 * "x"))
    reason = controller.nodes["n1"].reason
    assert reason.startswith(f"{OURS}kernel-log: xid-79")
    assert len(reason) == MAX_REASON


# ------------------------------------------------------------------------------------ the breaker


@pytest.mark.parametrize("seed", range(40))
def test_a_probe_that_is_wrong_everywhere_takes_out_few(controller: Controller, seed: int) -> None:
    """Hundreds of daemons, each by itself, in any order and at any pace: the first few of an hour act."""
    random = Random(seed)
    most = random.choice((0, 1, 3))
    names = [f"n{number:03}" for number in range(random.choice((5, 60)))]
    controller.nodes.clear()
    controller.add(*names)
    settings = HealthSettings(most_per_hour=most)
    daemons = [Daemon(name, controller, settings) for name in names]
    begins = {daemon.name: random.uniform(0.0, random.choice((0.1, 5.0, 100.0))) for daemon in daemons}
    for _ in range(60):
        controller.now_s += random.uniform(0.5, 3.0)
        for daemon in random.sample(daemons, len(daemons)):
            controller.now_s += 0.001
            if controller.now_s >= begins[daemon.name]:
                daemon.look(verdict())
        assert sum(daemon.leave is not None for daemon in daemons) <= most
    controller.now_s += 2 * SETTLED_S
    for daemon in daemons:
        daemon.look(verdict())
    assert sum(daemon.leave is not None for daemon in daemons) == min(most, len(names))
    assert len(controller.drained()) == min(most, len(names))
    held = [daemon for daemon in daemons if daemon.leave is None]
    assert all(f"has taken {most} nodes out within an hour" in daemon.told[-1] for daemon in held)


def test_an_hour_later_there_is_room_again(controller: Controller) -> None:
    daemon = Daemon("n2", controller, HealthSettings(most_per_hour=1))
    controller.drain("n1", f"{OURS}kernel-log: xid-79: x")
    daemon.after(1.0, verdict())
    daemon.after(SETTLED_S, verdict())
    assert (daemon.leave, controller.drained()) == (None, ["n1"])
    daemon.after(WINDOW_S + 1.0, verdict())
    daemon.after(SETTLED_S, verdict())
    assert daemon.leave is not None


def test_another_probe_has_a_breaker_of_its_own(controller: Controller) -> None:
    controller.drain("n1", f"{OURS}disk: disk-full (/): x")
    daemon = Daemon("n2", controller, HealthSettings(most_per_hour=1))
    daemon.look(verdict())
    daemon.after(SETTLED_S, verdict())
    assert daemon.leave is not None


def test_a_node_whose_clock_is_wrong_does_not_act() -> None:
    mark = f"{OURS}kernel-log: "
    mine = Node(
        name="n1", address="", state="IDLE", flags=frozenset({"DRAIN"}), reason=mark, reason_s=EPOCH_S
    )
    assert is_among_first("n1", [mine], mark, 1, EPOCH_S + 5.0)
    assert not is_among_first("n1", [mine], mark, 1, EPOCH_S + 5.0 + WINDOW_S)
    down = replace(mine, name="n0", flags=frozenset())
    assert is_among_first("n1", [down, mine], mark, 1, EPOCH_S + 5.0)
