"""PID 1 of a machine: its name, network and file system, then its services for as long as it lives.

It runs behind the machine's own root, where Python's library may be another one or none: whatever it needs
is imported before.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from . import control, files, kernel, root
from .plan import CONTROLLER, Layout, Plan, Service
from .supervise import Supervisor

READY_DEADLINE_S = 10.0
LONGEST_SLEEP_S = 60.0


def run(layout: Layout, plan: Plan, machine: str, ready: int) -> None:
    """Boot the machine, write "ok" to the descriptor `ready`, and never return."""
    kernel.set_hostname(machine)
    passwd = (layout.etc / "passwd").read_text()
    _network(plan, machine)
    root.enter(layout, plan, machine)
    _directories(machine, passwd)
    Init(plan, machine, passwd).run(ready)


def _network(plan: Plan, machine: str) -> None:
    for scope in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")
    commands = f"link set lo up\naddr add {plan.address(machine)}/24 dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)


def _directories(machine: str, passwd: str) -> None:
    """What packages and systemd make on a system."""
    wanted = [
        ("/run/lock", "root", 0o755),
        ("/run/munge", "munge", 0o755),
        ("/run/slurm", "slurm", 0o755),
        ("/var/tmp", "root", 0o1777),
        ("/var/log", "root", 0o755),
        ("/var/log/munge", "munge", 0o700),
        ("/var/lib/munge", "munge", 0o711),
        ("/var/lib/ckptless", "root", 0o700),
        ("/var/spool/slurmctld", "slurm", 0o755)
        if machine == CONTROLLER
        else ("/var/spool/slurmd", "root", 0o755),
    ]
    for path, owner, mode in wanted:
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        account = files.account(passwd, owner)
        assert account is not None, owner
        os.chown(directory, account.uid, account.gid)
        directory.chmod(mode)
    run = Path("/var/run")
    if not run.is_symlink():
        run.symlink_to("/run")


class Init:
    """The services of one machine and the loop around them."""

    def __init__(self, plan: Plan, machine: str, passwd: str) -> None:
        self._plan = plan
        self._machine = machine
        self._passwd = passwd
        self._supervisor = Supervisor(plan.services_of(machine), self._spawn, time.time)

    def run(self, ready: int) -> None:
        """Start everything, then reap, restart and answer until killed."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        server = control.listen()
        selector = selectors.DefaultSelector()
        selector.register(wake_read, selectors.EVENT_READ)
        selector.register(server, selectors.EVENT_READ)
        for name, unit in self._supervisor.units.items():
            self._supervisor.start(name)
            if unit.service.ready:
                self._await(unit.service)
        os.write(ready, b"ok")
        os.close(ready)
        while True:
            self._reap()
            pause_s = self._supervisor.run_due(time.monotonic())
            for key, _ in selector.select(LONGEST_SLEEP_S if pause_s is None else max(0.0, pause_s)):
                if key.fileobj is server:
                    control.answer_one(server, self._supervisor)
                else:
                    os.read(wake_read, 4096)

    def _reap(self) -> None:
        for pid, status in _dead_children():
            code = os.waitstatus_to_exitcode(status)
            unit = self._supervisor.ended(pid, code, time.monotonic())
            if unit is not None:
                self._log(f"{unit.service.name} ({pid}) ended with {code}")

    def _await(self, service: Service) -> None:
        limit = time.monotonic() + READY_DEADLINE_S
        while not Path(service.ready).exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"{service.name}: no {service.ready} within {READY_DEADLINE_S:.0f} s")
            time.sleep(0.005)

    def _spawn(self, service: Service, argv: tuple[str, ...]) -> int:
        account = files.account(self._passwd, service.user)
        if account is None:
            raise ValueError(f"{service.name}: no user {service.user!r}")
        argv = tuple(word.replace("{node}", self._machine) for word in argv)
        env = {"PATH": self._plan.search_path, "LANG": "C.UTF-8", "HOME": account.home, "USER": account.name}
        env |= {key: value.replace("{node}", self._machine) for key, value in service.env.items()}
        pid = os.fork()
        if pid == 0:
            _become(account, Path(f"/var/log/{service.name}.log"), argv, env)
        self._log(f"{service.name} ({pid}) started")
        return pid

    def _log(self, text: str) -> None:
        print(f"{time.time():.3f} {self._machine}: {text}", flush=True)


def _dead_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _become(account: files.Account, log: Path, argv: tuple[str, ...], env: dict[str, str]) -> None:
    """In the child: never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # the last two Python ignores
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.setgroups([account.gid])
        os.setgid(account.gid)
        os.setuid(account.uid)
        os.chdir("/")
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)
