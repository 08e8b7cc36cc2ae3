"""What processes of a run hold after each of its recoveries, and how fast that grows."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .localrun import RANKS, Job

POLL_S = 0.06
Numbers = Mapping[str, int]


def numbers(pid: int) -> Numbers:
    """Of a process, memory in KiB, its own and its part of shared. OSError or KeyError if it has ended."""
    home = Path(f"/proc/{pid}")
    memory = _fields(home / "smaps_rollup")
    return {
        "files": len(list((home / "fd").iterdir())),
        "threads": int(_fields(home / "status")["Threads"]),
        "children": len(children(pid)),
        "own": int(memory["Anonymous"]),
        "shared": int(memory["Pss_Shmem"]),
    }


def children(pid: int) -> list[int]:
    """Those of a process, but for one that was forked ahead, which comes and goes."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if Path(f"/proc/{child}/comm").read_text() != "ckptless-ahead\n"]


def _fields(path: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name: words[0] for name, value in pairs if (words := value.split())}


def per_recovery(values: Sequence[float], apart: int) -> float:
    """Growth with each: the median over all pairs that are so many recoveries apart.

    So what is taken once and for all, in whichever recovery, is none.
    """
    pairs = zip(values, values[apart:], strict=False)
    return statistics.median((late - early) / apart for early, late in pairs)


def at_all(values: Sequence[float], part: int) -> float:
    """From the median of the first `part` of them to that of the last."""
    return statistics.median(values[-part:]) - statistics.median(values[:part])


@dataclass
class Watch:
    """The launcher, and each node's daemon, agent and zygote, for as long as the job runs."""

    job: Job
    nodes: int = RANKS
    _pids: dict[str, int] = field(default_factory=dict)
    _samples: dict[str, list[tuple[float, Numbers]]] = field(default_factory=dict)

    def until_ended(self) -> None:
        """Returns when the launcher has ended."""
        while self.job.launcher.poll() is None:
            if len(self._pids) < 1 + 3 * self.nodes:
                self._find()
            for name, pid in self._pids.items():
                with contextlib.suppress(OSError, KeyError):  # a zombie has no memory
                    self._samples.setdefault(name, []).append((time.time(), numbers(pid)))
            time.sleep(POLL_S)

    def _find(self) -> None:
        self._pids["launcher"] = self.job.launcher.pid
        for node in range(self.nodes):
            for what in ("daemon", "agent"):
                if pid := self.job.pid_of(node, what):
                    self._pids[f"{what}-{node}"] = pid
            agent = self._pids.get(f"agent-{node}")
            if agent is not None and (pid := _zygote_of(agent)):
                self._pids[f"zygote-{node}"] = pid

    @property
    def names(self) -> Sequence[str]:
        """Of all that was found."""
        return list(self._samples)

    def after_each(self, name: str, recoveries: Sequence[Any]) -> list[Numbers]:
        """Between each recovery and the next the least of each number: what is there when all is quiet."""
        return [numbers for numbers in self.between(name, recoveries) if numbers is not None]

    def between(self, name: str, recoveries: Sequence[Any]) -> list[Numbers | None]:
        """The same, for each of them; None where the process was not seen in time."""
        found: list[Numbers | None] = []
        begins = [*(row.started_s for row in recoveries[1:]), float("inf")]
        for row, begin in zip(recoveries, begins, strict=True):
            end = row.started_s + sum(row.phases.values())
            inside = [sample for at, sample in self._samples[name] if end <= at <= begin]
            least = {key: min(sample[key] for sample in inside) for key in inside[0]} if inside else None
            found.append(least)
        return found


def _zygote_of(agent: int) -> int | None:
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            if b"zygote" in Path(f"/proc/{word}/cmdline").read_bytes():
                return int(word)
    return None
