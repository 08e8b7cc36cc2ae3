"""What parts share: quantiles, ratios, tables, other processes' CPU time, the file of what was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Run: TypeAlias = Mapping[str, Any]


def quantile(values: Sequence[float], part: float) -> float:
    """The value that such a part of them does not pass, by rank."""
    return sorted(values)[min(len(values) - 1, round(part * (len(values) - 1)))]


def ratios(ones: Sequence[float], others: Sequence[float], digits: int = 2) -> str:
    """Return the ratios, pair by pair: the median, the least and the most."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return (
        f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"
        if found
        else ""
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def grouped(runs: Iterable[Run], *names: str) -> dict[tuple[Any, ...], list[Run]]:
    """Runs by these of their fields, in the order in which they come."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(run[name] for name in names), []).append(run)
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU that another process has had, its threads', by `clock_getcpuclockid(3)`."""
    return time.clock_gettime(~pid << 3 | 2)


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, object]:
    """Where this was measured."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
    }


def finish(runs: Sequence[Run], path: Path | None, told: Callable[[Sequence[Run]], str]) -> None:
    """Print the table, and write all that was measured to a file, if one is wanted."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print(told(runs))
