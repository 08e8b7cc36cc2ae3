"""Bugs planted in the shipped cores of daemon and agent; the simulator finds each in so many seeds."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType

import pytest
from _pytest.mark import ParameterSet

from ckptless.daemon.agent.core import replication
from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.core.replication import Replication
from ckptless.daemon.ckptlessd import session
from ckptless.daemon.ckptlessd.consensus import agreement
from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.membership.watch import Membership
from ckptless.daemon.ckptlessd.peering import Peering
from ckptless.daemon.ckptlessd.planning import plan, sources
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.fencing import Fencing
from ckptless.daemon.ckptlessd.recovery.leading import Leading
from ckptless.daemon.ckptlessd.recovery.recovery_log import RecoveryLog
from ckptless.daemon.ckptlessd.recovery.stalls import Stalls
from ckptless.daemon.ckptlessd.session import JobSession
from ckptless.daemon.replication.re_replication import Watermark

from .agreeing import quarrel
from .story import Violation
from .world import simulate

SEEDS = 600
RARE_SEEDS = 6000
QUARRELS = 6000


@dataclass(frozen=True)
class Bug:
    """In the source of `function`, `right` stands once; with `wrong` in its place it is broken.

    What is rare takes so many seeds, or so long, that it is left to `make test-slow`.
    """

    name: str
    owner: type | ModuleType
    function: str
    right: str
    wrong: str
    rare: bool = False

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
    Bug(
        "votes of a former job of the number count",
        session,
        "recall",
        "kept is not None and not kept[0].startswith(launch)",
        "False",
    ),
    Bug(
        "an older assignment counts",
        AgentCore,
        "_assign",
        "assignment.generation <= self.assignment.generation",
        "assignment.generation == self.assignment.generation",
    ),
    Bug(
        "a frozen agent takes replicas", replication, "verdict", '"take" if accepting else "frozen"', '"take"'
    ),
    Bug(
        "what comes too early is dropped",
        replication,
        "verdict",
        '"early" if generation > here else "stale"',
        '"stale"',
    ),
    Bug(
        "replicas of another generation are taken",
        replication,
        "verdict",
        '"early" if generation > here else "stale"',
        '"early" if generation > here else "take"',
        rare=True,
    ),
    Bug("one holder is enough", Replication, "has", "if not task.missing", "if True"),
    Bug(
        "who waits for a lost holder waits on",
        Replication,
        "lost",
        "self._push(key, task)",
        "pass",
        rare=True,
    ),
    Bug(
        "a holder lost before the others have it counts",
        Replication,
        "lost",
        "self._push(key, task)",
        "self._push(key, task) if node in task.missing else None",
        rare=True,
    ),
    Bug("a lost holder is not replaced", Replication, "lost", "self._replace((item, step), task)", "pass"),
    Bug("the unreachable is asked again", Replication, "lost", "self._unreachable.add(node)", "pass"),
    Bug(
        "given back at the first commit",
        Watermark,
        "saw_commit",
        "sorted([*self._seen, step])[-HELD_AFTER:]",
        "[step] * HELD_AFTER",
    ),
    Bug("frozen agents are not waited for", Leading, "_replan", "if moving:", "if False:"),
    Bug("ranks inside are not waited for", Leading, "_replan", "if inside:", "if False:"),
    Bug("nobody is killed", Leading, "_replan", "self._kill(", "(lambda *_: None)("),
    Bug(
        "a step of any rank is enough",
        sources._Held,
        "newest",
        "all(map(records.__contains__, range(world_size)))",
        "records",
    ),
    Bug("the oldest common step", sources._Held, "newest", "reverse=True", "reverse=False"),
    Bug(
        "anybody's tensors do",
        sources,
        "sources_of",
        "(shard, common.tensors[shard])",
        "(shard, common.tensors[0])",
    ),
    Bug(
        "decrees are not passed on",
        Controller,
        "_meet",
        "if theirs.index < job.known.index:",
        "if False:",
    ),
    Bug("the cut off live on", Fencing, "hold_lease", "away_s > limit_s", "away_s > 1e9", rare=True),
    Bug("the cut off decide", Fencing, "hold_lease", "job.lease.renew(", "(lambda *_: None)("),
    Bug("promises are not kept", Agreement, "_answer", "say.ballot < promised", "False"),
    Bug("a vote of before is not proposed", Agreement, "_count", "if newest is not None:", "if False:"),
    Bug(
        "half is a majority",
        agreement,
        "is_quorum",
        "2 * len(yes) > len(voters)",
        "2 * len(yes) >= len(voters)",
    ),
    Bug("one less than a majority", agreement, "is_quorum", "2 * len(yes) >", "2 * len(yes) + 2 >"),
    Bug(
        "said before it is on the disk",
        JobSession,
        "_carry",
        "lambda: self._saved(output)",
        "(self._saved(output), int)[1]",
    ),
    Bug("the disk is not read", JobSession, "__init__", "durable=memory.durable", "durable=None"),
    Bug("a ballot is used twice", Agreement, "campaign", "highest.number + 1", "1"),
    Bug("questions are not repeated", Agreement, "repeat", "now - self._said < REPEAT_S", "True"),
    Bug(
        "a decree is chosen by the first vote",
        Agreement,
        "_count",
        "if self._has(self._accepted):",
        "if self._accepted:",
    ),
    Bug("orders are not repeated", Leading, "_repeat", "if self.job.stage in orders:", "if False:"),
    Bug("budgets are not counted", plan, "_count", "count = 1 +", "count = 1 + 0 *", rare=True),
    Bug(
        "the log outlives its generation", RecoveryLog, "agreed", "self._log = FaultLog()", "pass", rare=True
    ),
    Bug("ranks stay on a lost node", plan, "_answer", "answers.bad.update(", "list("),
    Bug(
        "the news are not counted",
        Leading,
        "_count",
        "progress.look(job.nodes, job.touched)",
        "pass",
    ),
    Bug("the word of others is ignored", Membership, "_answered", "if message.lives:", "if False:"),
    Bug(
        "a suspicion is a verdict",
        Membership,
        "_consider",
        "now - one.lived >= suspicion_s(",
        "0 * suspicion_s(",
    ),
    Bug(
        "a silent daemon keeps the lease",
        Membership,
        "tick",
        "if one.linked and now - one.heard > self.times.dark_s:",
        "if False:",
    ),
    Bug(
        "the cut off accuse",
        Peering,
        "_may_judge",
        "return control.is_quorum(",
        "return True or control.is_quorum(",
    ),
    Bug("pairs stay together", Stalls, "in_the_way", "if not found or (", "if True or ("),
    Bug(
        "said though the disk has not taken it",
        JobSession,
        "_carry",
        ", failed)",
        ", lambda _: self._saved(output))",
    ),
)


def game(bug: Bug) -> tuple[Callable[[int], object], int]:
    """The simulator that can find it, and how many seeds that may take."""
    if bug.owner in (Agreement, agreement) and bug.function != "repeat":
        return quarrel, QUARRELS
    return simulate, RARE_SEEDS if bug.rare else SEEDS


def seeds_until_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return how many seeds it takes; None where they are not enough."""
    play, seeds = game(bug)
    with monkeypatch.context() as patch:
        bug.plant(patch)
        for seed in range(seeds):
            try:
                play(seed)
            except Violation:
                return seed + 1
            except (AssertionError, KeyError, StopIteration, IndexError, ValueError):
                # The control plane itself fell over what the bug had done.
                return seed + 1
    return None


def _cases() -> list[ParameterSet]:
    return [
        pytest.param(bug, id=bug.name.replace(" ", "-"), marks=[pytest.mark.slow] if bug.rare else [])
        for bug in BUGS
    ]


@pytest.mark.timeout(900)  # up to 900 seeds, on a machine that may be busy
@pytest.mark.parametrize("bug", _cases())
def test_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = seeds_until_found(bug, monkeypatch)
    assert seeds is not None
    play, _ = game(bug)
    play(seeds - 1)  # it was the bug


def test_without_a_bug_nothing_is_found() -> None:
    for seed in range(20):
        simulate(seed)
        quarrel(seed)
