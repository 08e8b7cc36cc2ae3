"""Several real ranks have the bits of one process, whatever their number and that of the virtual ones."""

from __future__ import annotations

import pytest

from .world import run


@pytest.mark.parametrize(
    ("ranks", "virtual", "bucket_nbytes"), [(2, 4, 1 << 20), (3, 4, 64), (3, 5, 1 << 20), (4, 7, 100)]
)
def test_bits(ranks: int, virtual: int, bucket_nbytes: int) -> None:
    results = run("exact_scenarios:bits", ranks, virtual=virtual, bucket_nbytes=bucket_nbytes)
    wanted = results[0]["alone"]
    # The parameter that nobody uses has no gradient, all others have.
    assert wanted.count(None) == 3
    for result in results:
        assert result["alone"] == wanted
        assert result["together"] == wanted
        drawn, threads, call = result["refused"]
        assert "ranks have drawn different random numbers" in drawn
        assert f"ranks compute with {list(range(1, ranks + 1))} threads" in threads
        assert "ranks are not at the same call" in call
