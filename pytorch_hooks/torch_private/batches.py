"""How many batches an iterator of a DataLoader has given."""

from typing import Any


def given(iterator: Any) -> int:
    """Return it; 0 with a torch that does not say, which test_own_loops finds out."""
    count: int = getattr(iterator, "_num_yielded", 0)
    return count
