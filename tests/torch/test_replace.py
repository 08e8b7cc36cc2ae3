"""What a recovery asks of the store does not grow with the job."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_replace import WAYS, replaced


def test_a_survivor_is_asked_no_more_in_a_larger_job() -> None:
    """One node of 8 is replaced, and one of 16, with real sockets between them."""
    for way in WAYS:
        small, large = replaced(64, way), replaced(128, way)
        for of in ("of_a_rank", "asks", "asked", "connected"):
            assert large[of] == small[of], (way, of)
        # To the newcomer; those to the others are there.
        assert large["connected"] == 1
