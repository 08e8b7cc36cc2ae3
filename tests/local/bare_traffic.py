"""What the bytes of a commit cost any program: copied, digested, sent, received and digested again.

`bare_traffic.py NBYTES`: once for each byte that comes on stdin, over a connection with itself, on the
last of its cores, with nothing of ours. What a neighbour loses by that it loses to whoever moves these
bytes.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator

import xxhash

PIECE_NBYTES = 1 << 20


class Traffic:
    """Both ends of one connection. One `move` at a time."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._copy, self._got = (memoryview(bytearray(nbytes)) for _ in range(3))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._here = socket.create_connection(server.getsockname())
            self._there, _ = server.accept()

    def move(self) -> None:
        """All of it, once."""
        digest = xxhash.xxh3_64()
        for part in self._pieces():
            self._copy[part] = self._source[part]
            digest.update(self._copy[part])
        receiver = threading.Thread(target=self._receive)
        receiver.start()
        self._here.sendall(self._copy)
        receiver.join()

    def _receive(self) -> None:
        digest = xxhash.xxh3_64()
        for part in self._pieces():
            into = self._got[part]
            came = 0
            while came < len(into):
                came += self._there.recv_into(into[came:])
            digest.update(into)

    def _pieces(self) -> Iterator[slice]:
        return (slice(at, at + PIECE_NBYTES) for at in range(0, len(self._source), PIECE_NBYTES))

    def close(self) -> None:
        """Hang up."""
        self._here.close()
        self._there.close()


def main() -> None:
    """Until stdin ends."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    traffic = Traffic(int(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.read(0, 1):
        traffic.move()
    traffic.close()


if __name__ == "__main__":
    main()
