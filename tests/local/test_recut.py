"""A saved step is gone on from by another number of ranks than have saved it, on the same global batches."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .localrun import Job, wait_until

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("recut_script.py")
STEPS, FIRST = 40, 12
SAMPLES, BATCH = 60, 12
DEADLINE_S = 100.0


def job(home: Path, out: str, ranks: int, kind: str, env: Mapping[str, str] | None = None) -> Job:
    options = ["--nodes", ranks, "--max-stall", 60, "--tee", "none", "--save-dir", home / "save"]
    return Job(home / out, options, [SCRIPT, STEPS, home / out, kind], env)


def seen(folder: Path) -> dict[int, list[tuple[list[int], float, str]]]:
    """Of each step what each rank had: samples, global loss, digest of the state after it."""
    found: dict[int, list[Any]] = {}
    for path in sorted(folder.glob("seen-*.txt")):
        for line in path.read_text().splitlines():
            step, *rest = json.loads(line)
            found.setdefault(step, []).append(tuple(rest))
    return found


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        pytest.param("ddp", (2, 3), marks=pytest.mark.slow),
        ("fsdp", (3, 4)),
        pytest.param("fsdp", (4, 1), marks=pytest.mark.slow),
        ("hsdp", (4, 2)),
    ],
)
def test_another_number_of_ranks_goes_on(tmp_path: Path, kind: str, worlds: tuple[int, int]) -> None:
    before, after = worlds
    with job(tmp_path, "first", before, kind, {"RECUT_SLEEP_S": "0.1"}) as first:
        wait_until(lambda: max(seen(tmp_path / "first"), default=0) >= FIRST, DEADLINE_S, first)
        first.launcher.send_signal(signal.SIGTERM)
        first.ended(128 + signal.SIGTERM, DEADLINE_S)
    with job(tmp_path, "second", after, kind) as second:
        second.ended(0, DEADLINE_S)
        assert f"which {before} ranks have saved, with {after}" in second.stderr, second.story()
    old, new = seen(tmp_path / "first"), seen(tmp_path / "second")
    resumed = [json.loads(path.read_text()) for path in (tmp_path / "second").glob("resumed-*.txt")]
    ((step, world, digest),) = {tuple(one[:3]) for one in resumed}
    assert world == after
    assert FIRST - 2 <= step < STEPS
    # The same bits on all new ranks, of parameters and of moments, as the old ones had.
    assert {one[2] for one in old[step]} == {digest}
    # Each rank draws numbers of its own.
    assert len({one[3] for one in resumed}) == after
    assert sorted(new) == list(range(step + 1, STEPS + 1))
    assert_each_sample_once({s: old[s] for s in old if s <= step} | new)
    assert all(len(ranks) == after for ranks in new.values())


def assert_each_sample_once(steps: Mapping[int, list[tuple[list[int], float, str]]]) -> None:
    """In each epoch, in global batches of one size."""
    batches = [[number for ranks in steps[step] for number in ranks[0]] for step in sorted(steps)]
    assert {len(batch) for batch in batches} == {BATCH}
    per_epoch = SAMPLES // BATCH
    for first in range(0, len(batches), per_epoch):
        epoch = [number for batch in batches[first : first + per_epoch] for number in batch]
        assert len(set(epoch)) == len(epoch)


@pytest.mark.slow
def test_the_curve_does_not_notice(tmp_path: Path) -> None:
    """Losses are those of a run with the first number of ranks, but for the order of sums."""
    with job(tmp_path, "whole", 4, "fsdp") as whole:
        whole.ended(0, DEADLINE_S)
    for path in (tmp_path / "save").iterdir():
        path.rename(tmp_path / f"not-{path.name}")
    with job(tmp_path, "first", 4, "fsdp", {"RECUT_SLEEP_S": "0.1"}) as first:
        wait_until(lambda: max(seen(tmp_path / "first"), default=0) >= FIRST, DEADLINE_S, first)
        first.launcher.send_signal(signal.SIGTERM)
        first.ended(128 + signal.SIGTERM, DEADLINE_S)
    with job(tmp_path, "second", 3, "fsdp") as second:
        second.ended(0, DEADLINE_S)
    wanted, new = seen(tmp_path / "whole"), seen(tmp_path / "second")
    for step, ranks in new.items():
        assert ranks[0][1] == pytest.approx(wanted[step][0][1], rel=1e-4)
        assert sorted(n for rank in ranks for n in rank[0]) == sorted(n for r in wanted[step] for n in r[0])
