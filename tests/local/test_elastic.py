"""A job shrinks and grows while it trains: the same bits go on, on the same global batches, in order."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ledger.merge import Snapshot

from .localrun import lose_node, recovered
from .resized import Story, arm, elastic, end, pid_of, resize, resized, story, struck, trains

pytestmark = pytest.mark.timeout(300)

SLOW = {"RECUT_SLEEP_S": "0.02"}
TOOK = re.compile(r"rank \d+ took (\d+) bytes of \d+ shards")
# Of recut_script.py's model, in float32: all parameters, and those that are trained.
WIDTH = 37
PARAMETERS = (16 * WIDTH, WIDTH, WIDTH * WIDTH, WIDTH, WIDTH * 16, 16)
TRAINED = sum(PARAMETERS) - WIDTH


def nodes_of(ledger: Snapshot) -> list[list[int]]:
    """The nodes that train in each generation."""
    return [sorted({node for node, _slot in one.places}) for one in ledger.generations]


def fell(ledger: Snapshot) -> list[str]:
    """The rungs, from the second generation on."""
    return [one.rung for one in ledger.generations[1:]]


def all_were_told(found: Story) -> None:
    """Every rank of every generation of another size than before has called what on_resize was given."""
    for one, before in zip(found.ledger.generations[1:], found.worlds, strict=False):
        cuts = found.cuts.get(one.generation, [])
        assert [cut.rank for cut in cuts] == list(range(len(one.places)))
        assert {cut.old for cut in cuts} == {before}


@pytest.mark.parametrize(
    ("kind", "nodes", "per_node"),
    [pytest.param("ddp", 4, 1, marks=pytest.mark.slow), ("fsdp", 4, 1), ("hsdp", 3, 2)],
)
def test_a_node_is_lost_and_sizes_are_asked_for(tmp_path: Path, kind: str, nodes: int, per_node: int) -> None:
    least = nodes - 2
    options = ["--nodes", nodes, "--min-nodes", least, "--nproc-per-node", per_node]
    with elastic(tmp_path, kind, options, SLOW) as job:
        trains(job, nodes * per_node)
        # Ranks that stay get other numbers.
        lose_node(job, 1)
        trains(job, (nodes - 1) * per_node)
        resized(job, least, least * per_node)
        resized(job, "max", (nodes - 1) * per_node)
        ledger = end(job)
    found = story(job, ledger)
    left = [node for node in range(nodes) if node != 1]
    assert nodes_of(ledger) == [list(range(nodes)), left, left[:least], left]
    assert fell(ledger) == ["shrink", "shrink", "grow"]
    assert [len(ranks) for ranks in found.steps.values()] == sorted_by_generation(found)
    all_were_told(found)
    # Who goes on training does so in the same process.
    assert not found.replaced()
    assert len(recovered(ledger)) == 3
    # That one was told to stop is no fault of anybody's.
    assert {fault.kind for fault in ledger.faults if fault.generation > 1} == set()
    kinds = [event.kind for event in ledger.events if event.kind in ("shrink", "grow")]
    assert kinds == ["shrink", "shrink", "grow"]
    if kind == "fsdp":
        no_byte_twice(ledger)


def sorted_by_generation(found: Story) -> list[int]:
    """The number of ranks that each step should have had."""
    return [found.worlds[ranks[0].generation - 1] for ranks in found.steps.values()]


def no_byte_twice(ledger: Snapshot) -> None:
    """Of all that ranks took in a resize nothing was more than they have now."""
    for one in ledger.generations[1:]:
        texts = [e.text for e in ledger.events if e.kind == "recut" and e.generation == one.generation]
        took = [int(match.group(1)) for text in texts if (match := TOOK.match(text))]
        assert len(took) == len(one.places)
        # Each moment is as large as its parameter, and each rank has a count of steps of each.
        bound = 4 * (sum(PARAMETERS) + 2 * TRAINED + (len(PARAMETERS) - 1) * len(one.places))
        print(f"{len(one.places)} ranks took {sum(took)} bytes, {sum(took) / bound:.3f} of the least")
        assert bound <= sum(took) <= 1.1 * bound


def strike(where: str, kind: str, rank: int, world: int) -> dict[str, Any]:
    return {"where": where, "kind": kind, "rank": rank, "world": world}


@pytest.mark.parametrize(
    "kind",
    [pytest.param("ddp", marks=pytest.mark.slow), "fsdp", pytest.param("hsdp", marks=pytest.mark.slow)],
)
def test_faults_in_the_middle_of_resizes(tmp_path: Path, kind: str) -> None:
    """Processes, another node, the leader's: what was committed is gone on with, whoever takes it."""
    # HSDP has an even number of ranks.
    per_node = 2 if kind == "hsdp" else 1
    ranks = [per_node * nodes for nodes in range(6)]
    strikes = [
        strike("parts", "kill", 1, ranks[4]),
        strike("resized", "kill", 0, ranks[5]),
        strike("parts", "node", 1, ranks[4]),
        strike("parts", "node", 0, ranks[2]),
    ]
    env = {**SLOW, "RECUT_STRIKES": json.dumps(strikes)}
    options = ["--nodes", 5, "--min-nodes", 1, "--nproc-per-node", per_node]
    with elastic(tmp_path, kind, options, env) as job:
        trains(job, ranks[5])
        arm(job, 0)
        resized(job, 4, ranks[4])
        assert struck(job, 0)
        arm(job, 1)
        resized(job, "max", ranks[5])
        assert struck(job, 1)
        # A second node is lost while the job shrinks by one.
        arm(job, 2)
        lose_node(job, 4)
        trains(job, ranks[3])
        assert struck(job, 2)
        # And the leader's, where somebody wanted fewer.
        arm(job, 3)
        resized(job, 2, ranks[2])
        assert struck(job, 3)
        ledger = end(job)
    found = story(job, ledger)
    assert {one.kind for one in ledger.faults} >= {"died", "node-lost"}
    assert len(found.worlds) >= 9
    for one in ledger.generations[1:]:
        assert one.restore_step


@pytest.mark.slow
def test_a_rank_is_killed_as_soon_as_a_smaller_size_is_agreed_on(tmp_path: Path) -> None:
    with elastic(tmp_path, "fsdp", ["--nodes", 4, "--min-nodes", 2], SLOW) as job:
        first = trains(job, 4)
        victim = pid_of(job, 0)
        assert resize(job, 2)[0] == 0
        while job.ledger().generations[-1].generation == first:
            assert job.launcher.poll() is None, job.story()
        os.kill(victim, signal.SIGKILL)
        trains(job, 2, after=first + 1)
        found = story(job, end(job))
    assert found.worlds[0] == 4
    assert set(found.worlds[1:]) == {2}
    assert found.replaced() == {(0, 0)}


def test_sizes_that_are_refused(tmp_path: Path) -> None:
    with elastic(tmp_path, "ddp", ["--nodes", 4, "--min-nodes", 3], SLOW) as job:
        trains(job, 4)
        code, answer = resize(job, 2)
        assert (code, answer["verdict"]) == (1, "refused")
        why = "2 is none of the numbers of nodes that it may have, which are 3, 4"
        assert answer["text"] == f"job el stays as large as it is: {why}"
        lose_node(job, 3)
        trains(job, 3)
        lose_node(job, 2)
        job.ended(4)
        ledger = job.ledger()
    (row,) = ledger.jobs
    assert (row.state, row.exit_code) == ("failed", 4)
    assert row.reason is not None
    assert row.reason.startswith("no spare left for rank 2: node-2")
    assert row.reason.endswith("; 2 sound nodes are left, and the job needs 3 nodes")
    (line,) = [line for line in job.stderr.splitlines() if "no spare left" in line]
    assert row.reason in line
    assert "Traceback" not in job.stderr
