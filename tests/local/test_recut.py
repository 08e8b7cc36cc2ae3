"""A saved step is gone on from by another number of ranks than have saved it, on the same global batches."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from .localrun import Job, wait_until
from .resized import BATCH, SAMPLES, SCRIPT, Seen, lines, newest, samples_of, steps_seen

pytestmark = pytest.mark.timeout(300)

STEPS, FIRST = 40, 12
DEADLINE_S = 100.0


def job(home: Path, out: str, ranks: int, kind: str, env: Mapping[str, str] | None = None) -> Job:
    options = ["--nodes", ranks, "--max-stall", 60, "--tee", "none", "--save-dir", home / "save"]
    return Job(home / out, options, [SCRIPT, STEPS, home / out / "out", kind], env)


def seen(folder: Path) -> dict[int, list[Seen]]:
    """Of each step what each rank had."""
    found: dict[int, list[Seen]] = {}
    for one in steps_seen(folder):
        found.setdefault(one.step, []).append(one)
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
        wait_until(lambda: newest(tmp_path / "first/out") >= FIRST, DEADLINE_S, first)
        first.launcher.send_signal(signal.SIGTERM)
        first.ended(128 + signal.SIGTERM, DEADLINE_S)
    with job(tmp_path, "second", after, kind) as second:
        second.ended(0, DEADLINE_S)
        assert f"which {before} ranks have saved, with {after}" in second.stderr, second.story()
    old, new = seen(tmp_path / "first/out"), seen(tmp_path / "second/out")
    resumed = [words for _, words in lines(tmp_path / "second/out", "resumed")]
    ((step, world, digest),) = {tuple(one[:3]) for one in resumed}
    assert world == after
    assert FIRST - 2 <= step < STEPS
    # The same bits on all new ranks, of parameters and of moments, as the old ones had.
    assert {one.digest for one in old[step]} == {digest}
    # Each rank draws numbers of its own.
    assert len({one[3] for one in resumed}) == after
    assert sorted(new) == list(range(step + 1, STEPS + 1))
    assert_each_sample_once({s: old[s] for s in old if s <= step} | new)
    assert all(len(ranks) == after for ranks in new.values())


def assert_each_sample_once(steps: Mapping[int, list[Seen]]) -> None:
    """In each epoch, in global batches of one size."""
    batches = [samples_of(steps[step]) for step in sorted(steps)]
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
        wait_until(lambda: newest(tmp_path / "first/out") >= FIRST, DEADLINE_S, first)
        first.launcher.send_signal(signal.SIGTERM)
        first.ended(128 + signal.SIGTERM, DEADLINE_S)
    with job(tmp_path, "second", 3, "fsdp") as second:
        second.ended(0, DEADLINE_S)
    wanted, new = seen(tmp_path / "whole/out"), seen(tmp_path / "second/out")
    for step, ranks in new.items():
        assert ranks[0].loss == pytest.approx(wanted[step][0].loss, rel=1e-4)
        assert samples_of(ranks) == samples_of(wanted[step])
