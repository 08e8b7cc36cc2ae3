"""Ends the node of the script that calls it: for scripts that inject faults into themselves."""

import os
import signal
from pathlib import Path


def kill_daemon() -> None:
    """Kill the daemon of this process's node."""
    config = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    home = Path(os.fsdecode(config[config.index(b"--local") + 1])).parent
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes()
        except OSError:
            continue
        if os.fsencode(home / "daemon.json") in line:
            os.kill(int(process.parent.name), signal.SIGKILL)


def lose_node() -> None:
    """The daemon goes first, so that nobody can say goodbye; the agent's death takes its ranks."""
    kill_daemon()
    os.kill(os.getppid(), signal.SIGKILL)
