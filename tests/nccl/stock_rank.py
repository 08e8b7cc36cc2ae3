"""One rank of stock NCCL, as far as it goes without a GPU: the bootstrap of the communicators it is told.

`stock_rank.py LIBRARY VERSION < communicators.json`. The functions are local to the library, so they are
called by their addresses; recorded.json has these, and where the fields of a communicator lie.
"""

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

POINTER, INT, U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
# More than the recorded size, in case something writes behind it.
SPARE_NBYTES = 4096


class Library:
    """A loaded libnccl, and its functions by name."""

    def __init__(self, path: str, version: str) -> None:
        recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())[version]
        self.version = tuple(int(part) for part in version.split("."))
        self.fields: dict[str, int] = recorded["in"]
        self._at: dict[str, int] = recorded["at"]
        self._loaded = ctypes.CDLL(path)
        known = ctypes.cast(self._loaded.ncclGetVersion, POINTER).value
        assert known is not None
        self._base = known - self._at["ncclGetVersion"]

    def call(self, name: str, types: list[Any], *arguments: Any) -> None:
        result = ctypes.CFUNCTYPE(INT, *types)(self._base + self._at[name])(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returns {result}")


class Communicator:
    """As much of a ncclComm as the bootstrap looks at."""

    def __init__(self, library: Library, rank: int, ranks: int) -> None:
        self._library, self.rank, self.ranks = library, rank, ranks
        fields = library.fields
        self._memory = ctypes.create_string_buffer(fields["sizeof_comm"] + SPARE_NBYTES)
        self._shared = ctypes.create_string_buffer(fields["sizeof_shared"] + SPARE_NBYTES)
        self._abort = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._memory)
        INT.from_address(self.address + fields["rank"]).value = rank
        INT.from_address(self.address + fields["nRanks"]).value = ranks
        U64.from_address(self.address + fields["abortFlag"]).value = ctypes.addressof(self._abort)
        U64.from_address(self.address + fields["sharedRes"]).value = ctypes.addressof(self._shared)

    @property
    def state(self) -> int:
        return U64.from_address(self.address + self._library.fields["bootstrap"]).value

    def bootstrap(self, ids: bytes) -> None:
        """What needs roots."""
        data = ctypes.create_string_buffer(ids, len(ids))
        count = len(ids) // 128
        if self._library.version < (2, 23):
            assert count == 1
            self._library.call("bootstrapInit", [POINTER, POINTER], data, self.address)
        elif self._library.version < (2, 29):
            self._library.call("bootstrapInit", [INT, POINTER, POINTER], count, data, self.address)
        else:
            types = [INT, POINTER, POINTER, POINTER]
            self._library.call("bootstrapInit", types, count, data, self.address, None)

    def gather(self) -> None:
        """Every rank tells every other one something: the ring is closed, and in order."""
        data = (U64 * self.ranks)()
        data[self.rank] = 100 + self.rank
        self._library.call("bootstrapAllGather", [POINTER, POINTER, INT], self.state, data, 8)
        if list(data) != [100 + rank for rank in range(self.ranks)]:
            raise RuntimeError(f"gathered {list(data)}")

    def shift(self) -> None:
        """Sockets between two ranks that are not next to each other."""
        half = self.ranks // 2
        to, source = (self.rank + half) % self.ranks, (self.rank - half) % self.ranks
        sent, got = U64(self.rank), U64(2**63)
        types = [POINTER, INT, INT, POINTER, INT]
        self._library.call("bootstrapSend", types, self.state, to, 5, ctypes.byref(sent), 8)
        self._library.call("bootstrapRecv", types, self.state, source, 5, ctypes.byref(got), 8)
        if got.value != source:
            raise RuntimeError(f"rank {source} sent {got.value}")

    def split(self, ids: bytes) -> None:
        """Odd and even ranks part, as with ncclCommSplit: all have to derive the same from the first id."""
        color = self.rank % 2
        members = [rank for rank in range(self.ranks) if rank % 2 == color]
        child = Communicator(self._library, members.index(self.rank), len(members))
        magic = hashlib.sha256(ids[:128]).digest()[:8]
        ranks = (INT * len(members))(*members)
        rest = (child.address, self.address, color, self.rank, ranks)
        types = [POINTER, POINTER, INT, INT, POINTER]
        if self._library.version < (2, 23):
            handle = ctypes.create_string_buffer(magic, 128)
            self._library.call("bootstrapSplit", [POINTER, *types], handle, *rest)
        else:
            number = int.from_bytes(magic, "little")
            self._library.call("bootstrapSplit", [U64, *types], number, *rest)
        child.gather()


def main(path: str, version: str) -> None:
    library = Library(path, version)
    library.call("bootstrapNetInit", [])
    made = []
    for wanted in json.load(sys.stdin):
        ids = bytes.fromhex(wanted["ids"])
        made.append(communicator := Communicator(library, wanted["rank"], wanted["ranks"]))
        communicator.bootstrap(ids)
        communicator.gather()
        if communicator.ranks > 1:
            communicator.shift()
        if communicator.ranks >= 4:
            communicator.split(ids)
    # So that nobody closes what another still reads from.
    for communicator in made:
        communicator.gather()
    print(json.dumps({"communicators": len(made)}), flush=True)
    # NCCL's threads and sockets end with the process, not by unloading.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
