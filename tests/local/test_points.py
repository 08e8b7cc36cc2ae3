"""A node is lost at every point of the replication protocol: nothing is torn, and no step is another one.

Real agents, killed from within (struck_agent.py), with their daemons and ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .localrun import HERE, recovered, same_as_reference, toy
from .points import RECOVERY, Point

pytestmark = pytest.mark.timeout(400)

STEPS = 34
DEADLINE_S = 300.0
SPARES = 3
# The steps from which nodes are lost: apart, so that each is a recovery of its own.
AT = (6, 16, 26)


Strike = tuple[Point, int, int]


def plans() -> list[list[Strike]]:
    """As many losses in each job as there are spares: in commits; or one in the recovery from a loss in one.

    Then it is node 1 that is lost first, whose place is taken by a spare that holds nothing of it.
    """
    commits = [point for point in Point if point not in RECOVERY]
    batches = (zip(points, AT, strict=False) for points in _batches(commits, SPARES))
    found = [[(point, step, -1) for point, step in batch] for batch in batches]
    rest = sorted(RECOVERY, key=list(Point).index)
    return found + [[(Point.COMMIT_TAKEN, AT[0], 1), (point, -1, -1)] for point in rest]


def _batches(points: list[Point], size: int) -> list[list[Point]]:
    return [points[n : n + size] for n in range(0, len(points), size)]


def names(plan: list[Strike]) -> str:
    return "+".join(point.name.lower() for point, _, _ in plan)


def test_every_point_is_struck() -> None:
    assert {point for plan in plans() for point, _, _ in plan} == set(Point)


def test_what_is_wrapped_is_there(tmp_path: Path) -> None:
    """The agent that is struck names functions of the one that ships."""
    (tmp_path / "plan").write_text("[]")
    words = ("struck_agent.py", str(tmp_path / "plan"), "", "--local", str(tmp_path / "node-0/agent.json"))
    program = f"import sys; sys.argv = {list(words)}; sys.path.insert(0, {str(HERE)!r}); import struck_agent"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("plan", plans(), ids=names)
def test_a_node_is_lost_at_every_point(tmp_path: Path, plan: list[Strike]) -> None:
    strikes = tmp_path / "plan.json"
    strikes.write_text(json.dumps([(point.name, step, node) for point, step, node in plan]))
    launcher = [str(HERE / "struck_launcher.py"), str(strikes)]
    env = {"TOY_PARALLEL": "fsdp"}
    with toy(tmp_path, spares=SPARES, steps=STEPS, env=env, launcher=launcher) as job:
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [], STEPS, parallel="fsdp")
    struck = [strikes.with_suffix(f".{n}") for n in range(len(plan))]
    assert all(path.exists() for path in struck), f"{[path.exists() for path in struck]}\n{job.story()}"
    lost = [int(path.read_text()) for path in struck]
    assert len(set(lost)) == len(plan)
    assert {fault.node for fault in ledger.faults if fault.kind == "node-lost"} <= set(lost)
    assert recovered(ledger)
    assert all(g.restore_step is not None for g in ledger.generations[1:])
