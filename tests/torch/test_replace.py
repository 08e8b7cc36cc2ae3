"""What a recovery asks of a node does not grow with the job, and what it asks of the home grows by nodes."""

from tests.bench.init import replaced
from tests.bench.store import PER_NODE


def test_a_survivor_is_asked_no_more_in_a_larger_job() -> None:
    """One node of 8 is replaced, and one of 16, with real sockets between them."""
    for pattern in ("lazy", "ckptless"):
        by_ranks = {ranks: replaced(ranks, pattern) for ranks in (64, 128)}
        assert by_ranks[128]["of_a_rank"] == by_ranks[64]["of_a_rank"], pattern
        for ranks, found in by_ranks.items():
            nodes = ranks // PER_NODE
            # A rank sets its key, and what it is compared by; and each of the node's ranks has neighbours.
            assert found["asks"] <= 5 * PER_NODE, pattern
            assert found["asked"] <= nodes * found["asks"], pattern
            # Of all who follow, the home among them not; the spare is one of them.
            assert found["connected"] == nodes - 1, pattern
