"""What a rank asks of the store when process groups are made, as torch's client sends it."""

import struct

# Gloo's, where GLOO_ENABLE_STORE_V2_API is set.
CHUNK = 128
# What the names of torch's default group begin with.
PREFIX = "default_pg/0//cpu//"


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def steps(rank: int, ranks: int, pattern: str, value_nbytes: int, where: str) -> list[tuple[bytes, int]]:
    """A rank's requests, each with the size of its answer; the keys begin with `where`."""

    def key(of: int) -> bytes:
        return f"{where}/{of}".encode()

    own = b"\1" + _text(key(rank)) + _text(bytes(value_nbytes))
    if pattern in ("v2", "ckptless"):
        wanted = [[key(r) for r in range(lo, min(lo + CHUNK, ranks))] for lo in range(0, ranks, CHUNK)]
        found = []
        for keys in wanted:
            body = struct.pack("<Q", len(keys)) + b"".join(map(_text, keys))
            found += [(b"\6" + body, 1), (b"\12" + body, len(keys) * (8 + value_nbytes))]
        if pattern == "ckptless":
            found += compared(rank, where)
    else:
        peers = range(ranks) if pattern == "default" else ((rank - 1) % ranks, (rank + 1) % ranks)
        found = []
        for peer in peers:
            body = _text(key(peer))
            found += [(b"\6" + struct.pack("<Q", 1) + body, 1), (b"\3" + body, 8 + value_nbytes)]
    # A set has no answer: the next request goes out with it.
    return [(own + found[0][0], found[0][1]), *found[1:]]


def compared(rank: int, where: str) -> list[tuple[bytes, int]]:
    """Return what ckptless.run's ranks ask next: each whether the one before was started alike."""
    told = b"commit_every=1"

    def key(of: int) -> bytes:
        return _text(f"{'/'.join(where.split('/')[:2])}/rank/{of}/told".encode())

    own = b"\1" + key(rank) + _text(told)
    if rank == 0:
        # Its own, for an answer: how many keys there are would be asked of all nodes.
        return [(own + b"\3" + key(0), 8 + len(told))]
    body = key(rank - 1)
    return [(own + b"\6" + struct.pack("<Q", 1) + body, 1), (b"\3" + body, 8 + len(told))]
