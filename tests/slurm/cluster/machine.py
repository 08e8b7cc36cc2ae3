"""One machine of a cluster, seen from outside: its power, its cable, its services, commands on it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import boot, control, files
from .plan import SWITCH, ClusterError, Layout, Plan

DEATH_DEADLINE_S = 20.0
STOP_DEADLINE_S = 15.0
# What ip says of a port that has gone, before it looked or while it did.
GONE = ("Cannot find device", "No such device")
POLL_S = 0.01
NOBODY = "02:00:0a:63:ff:ff"


@dataclass(frozen=True)
class Unit:
    """A service as the machine's PID 1 knows it.

    `pid` is the one inside the machine, None while it is down; `started_s` is when it was last started, as
    time.time() has it.
    """

    pid: int | None
    wanted: bool
    starts: int
    started_s: float
    last_exit: int | None


class Machine:
    """A handle: everything is read anew from the cluster's directory and from the kernel."""

    def __init__(self, layout: Layout, plan: Plan, name: str) -> None:
        self.name = name
        self._layout = layout
        self._plan = plan

    @property
    def pid(self) -> int | None:
        """Its PID 1 as seen here; None: it is off."""
        return boot.living(self._layout, self.name)

    @property
    def running_pid(self) -> int:
        """The same. Raises ClusterError: it is off."""
        pid = self.pid
        if pid is None:
            raise ClusterError(f"{self.name} is off: boot it first")
        return pid

    # --- power and cable

    def power_off(self) -> None:
        """As in a power failure: from one moment on nothing leaves it any more. Nothing to do if it is off.

        The cable goes first. Else the kernel closes the sockets of the dying processes, and their peers get
        the FIN or RST that a power failure never sends.
        """
        pid = self.pid
        if pid is None:
            return
        if self._plugged():
            # No port: it is dying already, and its network has gone before it.
            self._in_switch("link", "set", boot.port(self.name), "down", accept=GONE)
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self.pid != pid:  # it went in between, and the number may be another's
                return
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            # Readable when it is dead, and the kernel lets PID 1 die last of its namespace.
            if not select.select([handle], [], [], DEATH_DEADLINE_S)[0]:
                raise ClusterError(f"{self.name} (pid {pid}) has not died within {DEATH_DEADLINE_S:.0f} s")
        finally:
            os.close(handle)
        (self._layout.machine(self.name) / "pid").unlink(missing_ok=True)
        if self._plugged():
            # The kernel would do it too, but some time later.
            self._in_switch("link", "del", boot.port(self.name), accept=GONE)

    def set_link(self, *, up: bool) -> None:
        """Plug the cable in, or pull it. Raises ClusterError."""
        self._in_switch("link", "set", boot.port(self.name), "up" if up else "down")

    def set_way(self, address: str, *, open_: bool) -> None:
        """Whether what this machine sends to an address gets there; what comes from there does in any case.

        Shut, it goes to a card that nobody has: no error and no answer, as with a port that is bad one way.
        """
        words = ["del", address] if open_ else ["replace", address, "lladdr", NOBODY, "nud", "permanent"]
        inside = ["nsenter", f"--net=/proc/{self.running_pid}/ns/net", "--", "ip", "neigh"]
        inside += [*words, "dev", "eth0"]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{self.name}: ip neigh {' '.join(words)}: {done.stderr.strip()}")

    def _plugged(self) -> bool:
        return self.name != SWITCH and boot.living(self._layout, SWITCH) is not None

    def _in_switch(self, *words: str, accept: Sequence[str] = ()) -> None:
        done = subprocess.run(
            boot.in_switch(self._layout, "ip", *words), capture_output=True, text=True, check=False
        )
        if done.returncode and not any(text in done.stderr for text in accept):
            raise ClusterError(f"{self.name}: ip {' '.join(words)}: {done.stderr.strip()}")

    # --- services

    def units(self) -> dict[str, Unit]:
        """Its services by name. Raises ClusterError."""
        answer = control.ask(self.running_pid, {"do": "status"})
        return {name: Unit(**fields) for name, fields in answer["units"].items()}

    def unit(self, name: str) -> Unit:
        """One of them. Raises ClusterError: there is none of that name."""
        units = self.units()
        if name not in units:
            raise ClusterError(f"{self.name} has no service {name!r}: it has {', '.join(units)}")
        return units[name]

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a service's main process; if it dies of it, it is started again as planned."""
        answer = control.ask(self.running_pid, {"do": "signal", "name": name, "signal": number})
        if answer["pid"] is None:
            raise ClusterError(f"{name} is not running on {self.name}")

    def start(self, name: str) -> None:
        """Start a service, unless it runs."""
        control.ask(self.running_pid, {"do": "start", "name": name})

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a service's main process, and only that, and wait for its end; it stays down until started."""
        control.ask(self.running_pid, {"do": "stop", "name": name, "signal": int(number)})
        limit = time.monotonic() + STOP_DEADLINE_S
        while self.unit(name).pid is not None:
            if time.monotonic() > limit:
                raise ClusterError(f"{name} on {self.name} has not ended within {STOP_DEADLINE_S:.0f} s")
            time.sleep(POLL_S)

    # --- commands

    def command(
        self,
        argv: Sequence[str],
        user: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """What to execute here, and with which environment, to run `argv` there; `cwd`: else the home."""
        pid = self.running_pid
        account = files.account((self._layout.etc / "passwd").read_text(), user)
        if account is None:
            raise ClusterError(f"the cluster has no user {user!r}")
        where = cwd or (account.home if account.home != "/nonexistent" else "/")
        if not Path(f"/proc/{pid}/root{where}").is_dir():
            raise ClusterError(f"{self.name} has no directory {where}")
        enter = ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        enter += [f"--wd=/proc/{pid}/root{where}", "--"]
        if user != "root":
            ids = [f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups"]
            enter += ["setpriv", *ids, "--"]
        login = {
            "PATH": self._plan.search_path,
            "HOME": account.home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": os.environ.get("TERM", "dumb"),
        }
        return [*enter, *argv], {**login, **(env or {})}
