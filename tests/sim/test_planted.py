"""Bugs planted in the shipped control core: the simulator must find each within so many seeds."""

import inspect
import textwrap
from dataclasses import dataclass
from types import FunctionType, ModuleType

import pytest

from ckptless.daemon.control import controller, follower, plan
from ckptless.daemon.control.controller import Controller
from ckptless.daemon.control.follower import Follower

from .story import Violation
from .world import simulate

SEEDS = 600


@dataclass(frozen=True)
class Bug:
    """In the source of `function`, `right` stands once; with `wrong` in its place it is broken."""

    name: str
    owner: type | ModuleType
    function: str
    right: str
    wrong: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compile the function again, with the bug in it. Fails where the source has changed."""
        original = getattr(self.owner, self.function)
        assert isinstance(original, FunctionType)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.right) == 1, f"{self.right!r} is not in {self.function} once: mend this bug"
        found: dict[str, FunctionType] = {}
        exec(source.replace(self.right, self.wrong), original.__globals__, found)
        monkeypatch.setattr(self.owner, self.function, found[self.function])


BUGS = (
    Bug("frozen agents are not waited for", Controller, "_replan", "if moving:", "if False:"),
    Bug("ranks inside are not waited for", Controller, "_replan", "if inside:", "if False:"),
    Bug("nobody is killed", Controller, "_replan", "self._kill(", "(lambda *_: None)("),
    Bug(
        "a node that kills nothing is waited for", Controller, "_kill", "self._killed.update(places)", "pass"
    ),
    Bug(
        "a step of any rank is enough",
        plan,
        "recovery_step",
        "(*available)",
        "(set[int]().union(*available))",
    ),
    Bug("the oldest common step", plan, "recovery_step", "max(common", "min(common"),
    Bug("any leader is believed", Follower, "_settle_leader", "> (self.term, self.leader)", "!= (0, 0)"),
    Bug("the end is not passed on", Follower, "_on_peer_up", "if theirs.outcome is not None", "if False"),
    Bug("orders are not repeated", Controller, "_repeat", "if self.stage in orders:", "if False:"),
    Bug("budgets are not counted", plan, "_count", "count = 1 +", "count = 1 + 0 *"),
    Bug("the log outlives its generation", Controller, "_assign", "self._log = FaultLog()", "pass"),
    Bug("ranks stay on a lost node", plan, "_answer", "answers.bad.update(", "list("),
    Bug("a new leader believes old reports", Follower, "_take_over_if_due", "view.state = None", "pass"),
    Bug(
        "a restarted leader still leads",
        Follower,
        "_adopt",
        "NOBODY if former else",
        "self.me if former else",
    ),
    Bug("agents are not told what they missed", Follower, "_tend", "if state is None or", "if True or"),
    Bug("losses are not passed on", Controller, "_give_up", "if nodes:", "if False:"),
    Bug("disputes are not seen", Controller, "_disputed", "return True", "return False"),
)


def seeds_until_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """How many seeds it takes; None where `SEEDS` are not enough."""
    with monkeypatch.context() as patch:
        bug.plant(patch)
        for seed in range(SEEDS):
            try:
                simulate(seed)
            except Violation:
                return seed + 1
            except (AssertionError, KeyError, StopIteration, IndexError):
                # The control plane itself fell over what the bug had done.
                return seed + 1
    return None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_until_found(bug, monkeypatch) is not None


def test_without_a_bug_nothing_is_found() -> None:
    assert {controller.__name__, follower.__name__, plan.__name__} >= {
        bug.owner.__module__ if isinstance(bug.owner, type) else bug.owner.__name__ for bug in BUGS
    }
    for seed in range(20):
        simulate(seed)
