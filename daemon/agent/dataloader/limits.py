"""The memory that a ring may take: what its loader asks for, the site allows, and is free at its opening."""

from typing import NamedTuple

from ckptless.daemon.agent.free_memory import FreeMemory
from ckptless.daemon.settings.options import DataSettings

# Of the free memory a ring takes one part in so many: the ranks, and other rings, need some, too.
PARTS = 2


class RingLimits(NamedTuple):
    """Batches made ahead of each replica, bytes of all together, and why it is less than was asked for."""

    window: int
    budget_nbytes: int
    reasons: tuple[str, ...]


def limited(window: int, budget_nbytes: int, site: DataSettings, free: FreeMemory | None) -> RingLimits:
    """The smallest of what the loader asks for, the site allows, and the memory has room for."""
    reasons = []
    if site.prefetch is not None and site.prefetch < window:
        reasons.append(
            f"{site.prefetch} batches are made ahead, not {window}: data.prefetch or --data-prefetch"
        )
        window = site.prefetch
    wanted, why = budget_nbytes, ""
    if site.budget_nbytes is not None and site.budget_nbytes < budget_nbytes:
        budget_nbytes, why = site.budget_nbytes, "data.budget or --data-budget"
    if free is not None and free.nbytes // PARTS < budget_nbytes:
        budget_nbytes = max(1, free.nbytes // PARTS)
        why = f"{free.whose} has {free.nbytes} bytes left, and the ranks need some, too"
    if why:
        reasons.append(f"its batches take {budget_nbytes} bytes at most, not {wanted}: {why}")
    return RingLimits(window, budget_nbytes, tuple(reasons))
