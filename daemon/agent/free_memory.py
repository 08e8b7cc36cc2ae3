"""The memory that a node has left: of itself, and of every cgroup around this process."""

from pathlib import Path
from typing import NamedTuple


class FreeMemory(NamedTuple):
    """Bytes that can be had still, and by whose measure."""

    nbytes: int
    whose: str


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """The least of what the node and each cgroup around this process have; None where nothing tells."""
    found = [*_of_node(proc), *_of_cgroups(proc, cgroups)]
    return min(found, default=None)


def _of_node(proc: Path) -> list[FreeMemory]:
    words = _words(proc / "meminfo")
    found: list[FreeMemory] = []
    if "MemAvailable:" in words:
        found.append(FreeMemory(words["MemAvailable:"] * 1024, "the node's memory"))
    # Every page that is promised counts; one of a memfd when it is touched: SIGBUS, where it is one too many.
    if _text(proc / "sys/vm/overcommit_memory").strip() == "2" and "CommitLimit:" in words:
        left = words["CommitLimit:"] - words.get("Committed_AS:", 0)
        found.append(FreeMemory(max(0, left) * 1024, "CommitLimit, as vm.overcommit_memory is 2,"))
    return found


def _of_cgroups(proc: Path, root: Path) -> list[FreeMemory]:
    found: list[FreeMemory] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            # Those above it, too, to the root of what is mounted here.
            at = (root / controllers / path.lstrip("/")).parts
            least = len((root / controllers).parts)
            for end in range(least, len(at) + 1):
                found += _of_cgroup(Path(*at[:end]), controllers == "")
    return found


def _of_cgroup(folder: Path, unified: bool) -> list[FreeMemory]:
    names = ("max", "current") if unified else ("limit_in_bytes", "usage_in_bytes")
    limit, used = (_text(folder / f"memory.{name}").strip() for name in names)
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= 1 << 60:
        return []
    # Pages of files count as used, and go when room is wanted.
    kept = _words(folder / "memory.stat")
    prefix = "" if unified else "total_"
    files = sum(kept.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return [FreeMemory(max(0, int(limit) - max(0, int(used) - files)), f"the cgroup {folder}")]


def _words(path: Path) -> dict[str, int]:
    """A file of lines that are a word and a number."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
