"""What the kernel says a process and its children do: whether they run, want to run, or wait for a disk."""

import os
from pathlib import Path

from ckptless.daemon.agent.core.stillness import Activity

# Of a tree that is larger nobody needs to know whether all of it is asleep.
MOST_PROCESSES = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name in parentheses, see proc(5): of the process, and of its children
# that have ended.
_STATE, _MINFLT, _CMAJFLT, _UTIME, _CSTIME = 0, 7, 10, 11, 14


def activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """Return what a process and its descendants have done; None where the kernel does not say all of it."""
    ran_s, asked, wanted_s = 0.0, 0, {}
    blocked = stopped = False
    left, seen = [pid], 0
    try:
        while left:
            one = left.pop()
            seen += 1
            if seen > MOST_PROCESSES:
                return None
            stat = _stat(proc / str(one))
            ran_s += sum(map(int, stat[_UTIME : _CSTIME + 1])) / _TICKS_PER_S
            asked += sum(map(int, stat[_MINFLT : _CMAJFLT + 1])) + _moved(proc / str(one))
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
    return Activity(ran_s, wanted_s, asked=asked, blocked=blocked, stopped=stopped)


def _moved(process: Path) -> int:
    """Return how often it has read and written; 0 where the kernel does not say."""
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("syscr:", "syscw:")))


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()
