"""Boot machines: fork each one's PID 1 into namespaces of its own and plug it into the switch.

A process of its own, in the namespaces of the caller: `python -I -S -c START DIR NAME..` (see `command`). A
middle process makes the new namespaces and forks PID 1 into them: after unshare(NEW_PID) all of one's own
children are in there, and `ip link .. netns PID` looks PID up in the caller's PID namespace. Until the cable
is in, PID 1 waits, and nothing is mounted. Whoever dies on the way closes a pipe, and what depends on it
ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from . import init, kernel
from .plan import SWITCH, Layout, Plan

LOCK_DEADLINE_S = 10.0
READY_DEADLINE_S = 30.0
MACHINE = kernel.NEW_MOUNT | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_NET | kernel.NEW_PID


def command(layout: Layout, machines: list[str]) -> list[str]:
    """The command that boots them; it needs nothing of a virtual environment."""
    root = Path(__file__).resolve().parents[3]
    start = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from tests.slurm.cluster import boot; boot.main()"
    )
    return [sys.executable, "-I", "-S", "-c", start, str(layout.base), *machines]


def main() -> None:
    """Boot the machines named on the command line; 0 when each is up."""
    layout = Layout(Path(sys.argv[1]))
    plan = Plan.load(layout.plan)
    waiting: dict[str, int] = {}
    for name in sys.argv[2:]:
        ready = start(layout, plan, name)
        if ready is None:
            continue
        if name == SWITCH:
            _await(layout, name, ready)  # the others are plugged into it
        else:
            waiting[name] = ready
    for name, ready in waiting.items():
        _await(layout, name, ready)


def port(machine: str) -> str:
    """The machine's port on the switch."""
    return f"p-{machine}"


def in_switch(layout: Layout, *argv: str) -> list[str]:
    """The command, to be run in the switch's network namespace."""
    return ["nsenter", f"--net=/proc/{living(layout, SWITCH)}/ns/net", "--", *argv]


def living(layout: Layout, machine: str) -> int | None:
    """The machine's PID 1 as seen here, None when it is off. A recycled pid is never taken for it."""
    try:
        recorded = json.loads((layout.machine(machine) / "pid").read_text())
    except (FileNotFoundError, ValueError):
        return None
    pid = int(recorded["pid"])
    return pid if kernel.start_time(pid) == recorded["start"] else None


def start(layout: Layout, plan: Plan, machine: str) -> int | None:
    """Fork the machine; the descriptor on which it will say "ok", or None when it is on already."""
    home = layout.machine(machine)
    (home / "var").mkdir(parents=True, exist_ok=True)
    life = _life_lock(layout, machine)
    if life is None:
        return None
    go_read, go_write = os.pipe()
    pid_read, pid_write = os.pipe()
    ready_read, ready_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        _unshare(machine, pid_write)
        _machine(layout, plan, machine, (life, go_read, ready_write))
    for end in (go_read, pid_write, ready_write, life):
        os.close(end)
    os.waitpid(middle, 0)
    answer = os.read(pid_read, 200).decode()
    os.close(pid_read)
    if not answer.isdigit():
        sys.exit(f"{machine}: no namespaces of its own: {answer}")
    pid = int(answer)
    _record(home / "pid", pid)
    if machine != SWITCH:
        _plug_in(layout, plan, machine, pid)
    os.write(go_write, b"go")
    os.close(go_write)
    return ready_read


def _unshare(machine: str, answer: int) -> None:
    """In the middle process: returns in its child, the machine's PID 1, whose pid is the answer."""
    try:
        kernel.unshare(kernel.NEW_NET if machine == SWITCH else MACHINE)
        pid = os.fork()
        if pid == 0:
            return
        os.write(answer, str(pid).encode())
    except OSError as error:
        os.write(answer, str(error).encode())
    os._exit(0)


def _life_lock(layout: Layout, machine: str) -> int | None:
    """One PID 1 per machine, ever: it keeps this lock for life, whatever became of those who started it."""
    lock = os.open(layout.machine(machine) / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    limit = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if living(layout, machine) is not None:
                os.close(lock)
                return None
        else:
            return lock
        if time.monotonic() > limit:
            sys.exit(f"{machine}: its lock is held, yet it is not on")
        time.sleep(0.02)


def _record(file: Path, pid: int) -> None:
    text = json.dumps({"pid": pid, "start": kernel.start_time(pid)})
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(file)


def _plug_in(layout: Layout, plan: Plan, machine: str, pid: int) -> None:
    name = port(machine)
    subprocess.run(in_switch(layout, "ip", "link", "del", name), capture_output=True, check=False)
    commands = (
        f"link add {name} type veth peer name eth0 address {plan.mac(machine)} netns {pid}\n"
        f"link set {name} master br0 up\n"
    )
    subprocess.run(in_switch(layout, "ip", "-batch", "-"), input=commands, text=True, check=True)


def _machine(layout: Layout, plan: Plan, machine: str, keep: tuple[int, int, int]) -> NoReturn:
    """PID 1, from the fork on."""
    try:
        _, go, ready = keep
        console = os.open(
            layout.machine(machine) / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.dup2(console, 1)
        os.dup2(console, 2)
        _close_all_but(keep)
        os.setsid()
        if os.read(go, 2) == b"go":  # else whoever started this is dead
            os.close(go)
            _switch(ready) if machine == SWITCH else init.run(layout, plan, machine, ready)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the machine's last word
        print(f"{time.time():.3f} {machine}: cannot go on: {error!r}", flush=True)
    finally:
        os._exit(1)


def _close_all_but(keep: tuple[int, ...]) -> None:
    last = 2
    for number in sorted(keep):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, 4096)


def _switch(ready: int) -> None:
    """A bridge in a network namespace of its own, with no way out: no address of this machine can clash."""
    commands = (
        "link set lo up\n"
        "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n"
        "link set br0 up\n"
    )
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    os.write(ready, b"ok")
    os.close(ready)
    while True:
        signal.pause()


def _await(layout: Layout, machine: str, ready: int) -> None:
    readable, _, _ = select.select([ready], [], [], READY_DEADLINE_S)
    if not readable or os.read(ready, 2) != b"ok":
        why = f"not within {READY_DEADLINE_S:.0f} s" if not readable else "it ended"
        lines = (layout.machine(machine) / "console.log").read_text().splitlines()
        sys.exit(f"{machine} did not start: {why}; its console says: {' | '.join(lines[-3:])}")
    os.close(ready)
