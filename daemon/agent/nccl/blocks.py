"""Pure: which ranks belong to which root, where a communicator has several; NCCL's own arithmetic.

Ranks are dealt out in blocks as even as can be, the larger ones first. The first rank of a block also reports
to the root before it, as the one after its last: so every root can tell each of its ranks who comes next.
"""


def block(root: int, ranks: int, roots: int) -> range:
    """The ranks of a root, 0 <= root < roots <= ranks."""
    size, larger = divmod(ranks, roots)
    start = root * size + min(root, larger)
    return range(start, start + size + (root < larger))
