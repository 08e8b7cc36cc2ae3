"""Another number of ranks goes on in the same processes: the same bits, the same data, new objects."""

from __future__ import annotations

import pytest

from .resize_scenarios import BATCH, SAMPLES, alone
from .world import run


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_leave_and_come_back(kind: str) -> None:
    results = run("resize_scenarios:resize", 3, deadline=90, kind=kind)
    steps = [{int(step): found for step, found in result["steps"].items()} for result in results]
    digests = {step: {one[step][2] for one in steps if step in one} for step in range(1, 10)}
    # On all ranks the same, whatever their number.
    assert all(len(found) == 1 for found in digests.values())
    three, six = digests[3].pop(), digests[6].pop()
    (five,) = digests[5]
    start = results[0]["told"][0][2]
    for me, result in enumerate(results):
        rank = 0 if me == 0 else 1
        grown = [
            "recovery",
            [2, 3, 3, 6],
            [me, 6, six, 1.0],
        ]
        if me == 1:
            assert result["told"] == grown
            assert (result["built"], result["notes"]) == (1, ["recut"])
            continue
        assert result["told"] == [
            [me, 0, start, 1.0],
            "recovery",
            [3, 2, 2, 3],
            [rank, 3, three, 1.0],
            # A fault: the same objects.
            "recovery",
            [rank, 5, five, 1.0],
            *grown,
        ]
        assert (result["built"], result["notes"]) == (3, ["recut", "recut"])
        assert result["free"]
    # The curve of whole batches, but for the order of sums.
    losses = [next(one[step][1] for one in steps if step in one) for step in range(1, 10)]
    assert losses == pytest.approx(alone(9), rel=1e-3)
    batches = [[n for one in steps if step in one for n in one[step][0]] for step in range(1, 10)]
    assert {len(batch) for batch in batches} == {BATCH}
    for first in range(0, 8, SAMPLES // BATCH):
        assert len({n for batch in batches[first : first + SAMPLES // BATCH] for n in batch}) == SAMPLES
