"""What the process of a training script holds, for tests of leaks."""

import ctypes
import os
from pathlib import Path


def held() -> tuple[int, int, int, int, int]:
    """Its pid, open files, threads, resident KiB, and KiB that it has allocated and not freed."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (
        os.getpid(),
        len([*Path("/proc/self/fd").iterdir()]),
        int(status["Threads"]),
        int(status["VmRSS"].split()[0]),
        _allocated(),
    )


class Malloc(ctypes.Structure):
    """What mallinfo2(3) gives."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for line in ("arena ordblks smblks hblks hblkhd usmblks", "fsmblks uordblks fordblks keepcost")
        for name in line.split()
    )


def _allocated() -> int:
    """KiB that malloc has given out, without what it keeps of freed memory for each thread there has been."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Malloc
    found = ask()
    return int((found.uordblks + found.hblkhd) >> 10)
