"""Ranks of one node share a version: what is each one's own stays so; who trains apart is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .localrun import FAULTY_DEADLINE_S, HERE, Job, read_toy

STEPS = 24
# Either rank, at each place; the second and the third right after each other.
FAULTS = ((1, 3, "update"), (0, 8, "backward"), (1, 9, "committed"), (0, 17, "forward"))


@contextmanager
def started(home: Path, kind: str, faults: Sequence[tuple[int, int, str]] = ()) -> Iterator[Job]:
    words = ["--nodes", 1, "--nproc-per-node", 2, "--max-stall", 60]
    with Job(home, words, [HERE / "own_script.py", kind, STEPS, home / "out", json.dumps(faults)]) as job:
        yield job


def test_buffers_and_counters_of_each_rank_are_its_own_again(tmp_path: Path) -> None:
    with started(tmp_path / "clean", "buffers") as job:
        job.ended(0)
    clean = read_toy(tmp_path / "clean" / "out").losses
    assert set(clean) == {(rank, step) for rank in range(2) for step in range(1, STEPS + 1)}
    with started(tmp_path / "struck", "buffers", FAULTS) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        found = read_toy(tmp_path / "struck" / "out")
        assert found.struck == frozenset(range(len(FAULTS))), job.story()
        assert found.losses == clean, job.story()


def test_ranks_that_begin_to_train_apart_are_refused(tmp_path: Path) -> None:
    with started(tmp_path, "apart") as job:
        job.ended(1)
        # Apart from step 10 on and averaged at each fourth, they are compared at the commits 9 and 17.
        assert "ranks 0 and 1 have different tensors, first state.model." in job.stderr, job.story()
        assert max(step for _rank, step in read_toy(tmp_path / "out").losses) == 17, job.story()
