"""A rank computes wrongly and nothing raises: its twins' digests show it, and nothing of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptless.daemon.ledger.merge import Snapshot

from .localrun import FAULTY_DEADLINE_S, Fault, fault, read_toy, recovered, reference, toy

pytestmark = pytest.mark.timeout(400)

STEPS = 40


def last_lines(out: Path) -> dict[tuple[int, int], str]:
    """Of every rank and step the loss that stands, as hex: of a step that was done again the last."""
    found: dict[tuple[int, int], str] = {}
    for path in out.glob("loss-*.txt"):
        for line in path.read_text().splitlines():
            step, loss, seen, _when, _generation = line.split()
            found[int(path.stem.split("-")[1]), int(step)] = f"{loss} {seen}"
    return found


def run(
    home: Path,
    faults: Sequence[Fault],
    ranks: int,
    spares: int = 0,
    *,
    parallel: str = "ddp",
    options: Sequence[object] = (),
) -> Snapshot:
    """To the end, which is that of a run without a fault, bit by bit."""
    env = {"TOY_PARALLEL": parallel}
    with toy(home, faults, nodes=ranks, spares=spares, steps=STEPS, env=env, options=options) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger, clean, found = job.ledger(), reference(STEPS, ranks, parallel), read_toy(home / "out")
        assert found.struck == frozenset(range(len(faults))), job.story()
        assert found.finals == clean.finals, job.story()
        lines = last_lines(home / "out")
        assert {where: {line} for where, line in lines.items()} == clean.losses, job.story()
    assert not ledger.problems
    return ledger


def named(ledger: Snapshot) -> list[int | None]:
    return [f.rank for f in ledger.faults if f.kind == "silent-corruption"]


def only_twins_have_found_it(ledger: Snapshot) -> None:
    """A collective that breaks because a rank has been called away from it is no cause."""
    found = [f for f in ledger.faults if f.kind != "broken"]
    assert {f.kind for f in found} == {"twins-differ", "silent-corruption"}
    assert {f.source for f in found} == {"twins"}


def test_of_three_the_odd_one_is_named_and_moves_to_another_node(tmp_path: Path) -> None:
    ledger = run(tmp_path, [fault("update", "flip", 1, 9)], ranks=3, spares=1)
    only_twins_have_found_it(ledger)
    assert named(ledger) == [1]
    (recovery,) = recovered(ledger)
    # The flip was in step 10, and of step 9 all had the same.
    assert (recovery.rung, recovery.restore_step) == ("spare", 9)
    before, after = (g.places for g in ledger.generations)
    assert after == (before[0], (3, 0), before[2])


@pytest.mark.slow
def test_without_a_spare_it_gets_another_process(tmp_path: Path) -> None:
    """Struck after a commit: by the next one its gradients are in everybody's parameters, too."""
    ledger = run(tmp_path, [fault("forward", "flip", 2, 9)], ranks=3)
    only_twins_have_found_it(ledger)
    assert named(ledger) == [2]
    (recovery,) = recovered(ledger)
    assert (recovery.rung, recovery.restore_step) == ("process", 9)


def test_of_two_nobody_can_say_and_both_go_back(tmp_path: Path) -> None:
    faults = [fault("update", "flip", 0, 9), fault("forward", "flip", 1, 20), fault("update", "flip", 1, 39)]
    ledger = run(tmp_path, faults, ranks=2, spares=1)
    only_twins_have_found_it(ledger)
    assert sorted(map(str, named(ledger))) == ["0", "0", "0", "1", "1", "1"]
    assert [(r.rung, r.restore_step) for r in recovered(ledger)] == [
        ("in-process", 9),
        ("in-process", 20),
        # The last step counts only once it has been compared.
        ("in-process", 39),
    ]


@pytest.mark.slow
def test_one_of_hsdp(tmp_path: Path) -> None:
    """Ranks 1 and 3 have one shard; its copy on a third node is of the same step."""
    ledger = run(tmp_path, [fault("update", "flip", 3, 9)], ranks=4, spares=1, parallel="hsdp")
    only_twins_have_found_it(ledger)
    assert sorted(map(str, named(ledger))) == ["1", "3"]
    assert [r.restore_step for r in recovered(ledger)] == [9]


def events(home: Path, faults: Sequence[Fault], *options: object) -> list[str]:
    """Kinds of events of a job of two ranks in which nothing is done about it."""
    with toy(home, faults, nodes=2, steps=STEPS, options=options) as job:
        job.ended(0)
        ledger = job.ledger()
        assert len(ledger.generations) == 1, job.story()
        assert not ledger.faults
    return [event.kind for event in ledger.events if event.kind.startswith("twins")]


def test_those_that_never_agree_are_let_be(tmp_path: Path) -> None:
    """As ranks on two kinds of processors may; said once, at each end."""
    assert events(tmp_path, [fault("update", "flip", 1, often=True)]) == ["twins-unlike"] * 2


@pytest.mark.slow
def test_only_told(tmp_path: Path) -> None:
    assert (
        events(tmp_path / "warn", [fault("update", "flip", 1, 9)], "--twins", "warn") == ["twins-differ"] * 2
    )
    assert events(tmp_path / "off", [fault("update", "flip", 1, 9)], "--twins", "off") == []
