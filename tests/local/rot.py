"""Flips bits in versions that agents on this machine hold: through /proc, in their memfds."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError

PAGE = version.PAGE_NBYTES


def rot(which: str, shard: int) -> int:
    """Spoil versions of a shard, and say how many; for a child of the agent.

    `which`: "own", all that this node's agent holds; "replica", all in that agent of another node which has
    any; "newest", the newest step of every agent.
    """
    mine = os.getppid()
    found = [(pid, at) for pid in _agents(mine) for at in _versions(pid, shard)]
    others = sorted({pid for pid, _ in found if pid != mine})
    newest = max((step for _, (_, _, step) in found), default=-1)
    chosen = [
        at
        for pid, at in found
        if {"own": pid == mine, "replica": pid in others[:1], "newest": at[2] == newest}[which]
    ]
    for path, offset, _ in chosen:
        with _mapped(path) as memory:
            memory[offset] ^= 0x10
    return len(chosen)


def _agents(mine: int) -> Iterator[int]:
    """The agents of the job whose agent on this node is process `mine`."""
    line = _words(mine)
    config = next(Path(os.fsdecode(word)) for word in line if word.endswith(b"agent.json"))
    for entry in Path("/proc").glob("[0-9]*"):
        words = _words(int(entry.name))
        if b"ckptless.daemon.agent.main" in words and any(
            os.fsdecode(word).startswith(f"{config.parent.parent}/") for word in words
        ):
            yield int(entry.name)


def _words(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _versions(pid: int, shard: int) -> Iterator[tuple[Path, int, int]]:
    """(memfd, offset of the middle of the payload, step) of each version of a shard."""
    memfds: dict[int, Path] = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("/memfd:ckptless-"):
                # One only of each: its mapping has a descriptor of its own.
                memfds[path.stat().st_ino] = path
    for path in memfds.values():
        with _mapped(path) as memory, memoryview(memory) as view:
            for start in range(0, len(view), PAGE):
                with contextlib.suppress(BadVersionError), view[start:] as rest:
                    header = version.decode(rest)
                    if header.shard == shard:
                        yield path, start + header.header_nbytes + header.nbytes // 2, header.step


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory
