"""The part that each rank has of a global batch, whatever their number. Pure.

    rank r of R has of B samples those from  B * r // R  to  B * (r + 1) // R - 1

Parts differ by one sample at most, and lie in the order of the ranks.
"""

from ckptless.daemon.protocol.errors import UsageError


def part_of(batch_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's samples of a global batch: the first, and one after the last."""
    return batch_size * rank // ranks, batch_size * (rank + 1) // ranks


def local_batch(batch_size: int, rank: int, ranks: int) -> int:
    """Return how many samples a rank has."""
    first, last = part_of(batch_size, rank, ranks)
    return last - first


def batch_weight(batch_size: int, rank: int, ranks: int) -> float:
    """Return what to multiply the mean over a rank's part by: then the mean over ranks is the batch's.

    On average 1, and 1 where the parts are alike.
    """
    return local_batch(batch_size, rank, ranks) * ranks / batch_size


def micro_batches(batch_size: int, micro_batch: int, ranks: int) -> int:
    """Return into how many pieces of at most `micro_batch` samples every rank can cut its part.

    The same for all ranks. With a `micro_batch` of 1 a piece may be empty, with a larger one none is.
    """
    largest = -(-batch_size // ranks)
    return -(-largest // micro_batch)


def check(batch_size: int, most_ranks: int, micro_batch: int = 1) -> None:
    """Raise UsageError where one of so many ranks would have nothing of a batch, or no number is right."""
    if batch_size < 1 or micro_batch < 1:
        raise UsageError("batch_size, of all ranks together, and micro_batch, of one, must be 1 or more")
    if batch_size < most_ranks:
        raise UsageError(
            f"batch_size is that of all ranks together, and {batch_size} samples are not enough for "
            f"{most_ranks}, as many as the job may have: take a larger one, or fewer nodes"
        )
