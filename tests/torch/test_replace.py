"""What a recovery asks of a node does not grow with the job, and what it asks of the home grows by nodes."""

from .bench_replace import WAYS, replaced
from .bench_store import PER_NODE


def test_a_survivor_is_asked_no_more_in_a_larger_job() -> None:
    """One node of 8 is replaced, and one of 16, with real sockets between them."""
    for way in WAYS:
        small, large = replaced(64, way), replaced(128, way)
        assert large["of_a_rank"] == small["of_a_rank"], way
        for found in (small, large):
            nodes = found["ranks"] // PER_NODE
            # A rank sets its key, and what it is compared by; and each of the node's ranks has neighbours.
            assert found["asks"] <= 5 * PER_NODE, way
            assert found["asked"] <= nodes * found["asks"], way
            # Of all who follow, the home among them not; the spare is one of them.
            assert found["connected"] == nodes - 1, way
