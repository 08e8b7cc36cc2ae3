"""Lost copies are made again at once: the next node may be lost before anybody has committed another step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptless.daemon.replication.protection import protection

from .localrun import RANKS, Fault, Job, fault, newest_loss, recovered, same_as_reference, toy, wait_until

STEPS = 40
LOST_AFTER = 12
DEADLINE_S = 200.0
SOON_S = 60.0


def lose(job: Job, node: int) -> None:
    """The daemon goes first, so that nobody can say goodbye; the agent's death takes its ranks."""
    for what in ("daemon", "agent"):
        pid = job.pid_of(node, what)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def safe_again(job: Job, lost: list[int], then: list[int]) -> int | None:
    """The generation without these nodes, once its nodes hold enough copies to lose the next ones, too."""
    ledger = job.ledger()
    if not ledger.generations:
        return None
    newest = ledger.generations[-1]
    without = not {node for node, _ in newest.places}.intersection(lost)
    nodes = RANKS + len(lost) + len(then)
    held = protection(ledger.holdings, {*lost, *then}, RANKS, nodes)
    given = any(event.kind == "copies-remade" for event in ledger.events)
    return newest.generation if without and given and held.step == newest.restore_step else None


@pytest.mark.parametrize(
    ("copies", "first", "then"),
    [
        # Of shard 0 there is one copy left on node 0, of shard 1 on node 2.
        pytest.param(1, [1], [0], id="one copy"),
        # Each has had two others; shard 0 is left on node 0 only, and shard 1 on node 3.
        pytest.param(2, [1, 2], [0], id="two copies, any two nodes"),
    ],
)
def test_more_nodes_are_lost_before_the_next_step(
    tmp_path: Path, copies: int, first: list[int], then: list[int]
) -> None:
    """The new ranks are still building: no rank has restored anything, let alone committed it again."""
    # Who builds is held up for as long as there is that file, at the start not yet.
    faults: list[Fault] = [fault("build", "hold", first[0], often=True)]
    hold = tmp_path / "out" / "hold"
    options = ["--replicas", copies]
    spares = len(first) + len(then)
    with toy(
        tmp_path, faults, spares=spares, steps=STEPS, options=options, env={"TOY_PARALLEL": "fsdp"}
    ) as job:
        wait_until(lambda: newest_loss(tmp_path) >= LOST_AFTER, SOON_S, job)
        hold.touch()
        # From here, so that they go together: a rank that is struck may come to its place after the other's
        # death has ended the generation.
        for node in first:
            lose(job, node)
        wait_until(lambda: safe_again(job, first, then), SOON_S, job)
        before = safe_again(job, first, then) or 0
        for node in then:
            lose(job, node)
        wait_until(lambda: any(g.generation > before for g in job.ledger().generations), SOON_S, job)
        hold.unlink()
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [], STEPS, parallel="fsdp")
    assert recovered(ledger)
    restored = [g.restore_step for g in ledger.generations[1:]]
    assert len({step for step in restored if step is not None}) == 1, "nothing was committed in between"
