"""What a run's training data may take in memory: by options and the site, of which the lower counts."""

from collections.abc import Mapping

from ckptless.daemon.agent.config import DataConfig
from ckptless.daemon.api.errors import UsageError
from ckptless.daemon.settings import WANTED, DataSettings
from ckptless.daemon.settings_file import nbytes

LEAST_NBYTES, MOST_NBYTES = 1 << 20, 1 << 50


def data_config(options: Mapping[str, object], site: DataSettings) -> DataConfig:
    """Raises UsageError."""
    budget, prefetch = options.get("data_budget"), options.get("data_prefetch")
    return DataConfig(
        budget_nbytes=_lower(_nbytes(budget) if isinstance(budget, str) else None, site.budget_nbytes),
        prefetch=_lower(prefetch if isinstance(prefetch, int) else None, site.prefetch),
    )


def _lower(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _nbytes(text: str) -> int:
    found = nbytes(text)
    if found is None or not LEAST_NBYTES <= found <= MOST_NBYTES:
        wanted = WANTED["data.budget"].removesuffix(", or null")
        raise UsageError(f"--data-budget is {text[:40]!r}: it must be {wanted}")
    return found
