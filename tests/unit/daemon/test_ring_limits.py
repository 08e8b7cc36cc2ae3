"""How much a ring may take: the least of what is asked for, allowed and free."""

import pytest

from ckptless.daemon.agent.dataloader.limits import limited
from ckptless.daemon.agent.free_memory import FreeMemory
from ckptless.daemon.settings.options import DataSettings

MIB = 1 << 20


def test_what_is_asked_for() -> None:
    found = limited(8, 100 * MIB, DataSettings(), FreeMemory(1000 * MIB, "the node's memory"))
    assert found == (8, 100 * MIB, ())
    assert limited(8, 100 * MIB, DataSettings(), None).budget_nbytes == 100 * MIB
    assert limited(8, 100 * MIB, DataSettings(budget_nbytes=200 * MIB, prefetch=9), None).reasons == ()


def test_what_the_site_allows() -> None:
    found = limited(8, 100 * MIB, DataSettings(budget_nbytes=10 * MIB, prefetch=2), None)
    assert (found.window, found.budget_nbytes) == (2, 10 * MIB)
    assert found.reasons == (
        "2 batches are made ahead, not 8: data.prefetch or --data-prefetch",
        f"its batches take {10 * MIB} bytes at most, not {100 * MIB}: data.budget or --data-budget",
    )


@pytest.mark.parametrize("free", [0, 1, 30 * MIB])
def test_what_is_free(free: int) -> None:
    found = limited(8, 100 * MIB, DataSettings(budget_nbytes=50 * MIB), FreeMemory(free, "the cgroup /x"))
    assert found.budget_nbytes == max(1, free // 2)
    assert f"not {100 * MIB}: the cgroup /x has {free} bytes left" in found.reasons[0]
