"""What a recovery asks of the store does not grow with the job."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_replace import replaced


def test_a_survivor_is_asked_no_more_in_a_larger_job() -> None:
    """One node of 4 is replaced, and one of 8, with real sockets between them."""
    small, large = replaced(32, "lazy"), replaced(64, "lazy")
    for of in ("of_a_rank", "asks", "asked", "connected", "newcomer"):
        assert large[of] == small[of], of
    # The ring's neighbour that was replaced; the connection to the other one is there.
    assert large["connected"] == 1
