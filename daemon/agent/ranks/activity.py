"""What the kernel says a process and its children do: whether they run, want to run, or wait for a disk."""

import os
from pathlib import Path

from ckptless.daemon.agent.core.stillness import Activity

# Of a tree that is larger nobody needs to know whether all of it is asleep.
MOST_PROCESSES = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name in parentheses, see proc(5): of the process, and of its children
# that have ended.
_STATE, _UTIME, _CSTIME = 0, 11, 14


def activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """Return what a process and its descendants have done; None where the kernel does not say all of it."""
    ran_s, wanted_s = 0.0, {}
    blocked = stopped = False
    left, seen = [pid], 0
    try:
        while left:
            one = left.pop()
            seen += 1
            if seen > MOST_PROCESSES:
                return None
            ran_s += sum(map(int, _stat(proc / str(one))[_UTIME : _CSTIME + 1])) / _TICKS_PER_S
            for task in (proc / str(one) / "task").iterdir():
                wanted_s[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
                left += map(int, (task / "children").read_text().split())
                if one == pid:
                    state = _stat(task)[_STATE]
                    blocked |= state == "D"
                    stopped |= state == "T"
    except (OSError, ValueError):
        # It has ended meanwhile, or this kernel has no such files.
        return None
    return Activity(ran_s, wanted_s, blocked=blocked, stopped=stopped)


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()
