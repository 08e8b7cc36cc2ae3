"""`Cluster`: bring a Slurm cluster up, run commands on it, break it, mend it, take it down.

plan = Plan(nodes=3, conf={"PrologFlags": "Alloc"})
with Cluster(directory, plan, ckptless=True, files={"/etc/ckptless/ckptless.yaml": text}) as cluster:
    cluster.run("ctl", "srun", "-N3", "hostname", user="tester")
    cluster.power_off("node02")
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import boot, nodes, requirements
from .machine import Machine, Unit
from .plan import CONTROLLER, SWITCH, ClusterError, Layout, Plan
from .prepare import Files, prepare, with_ckptless, write
from .slurm import Slurm

UP_DEADLINE_S = 60.0
LOCK_DEADLINE_S = 60.0
RUN_DEADLINE_S = 30.0
POLL_S = 0.03


@dataclasses.dataclass(frozen=True)
class Status:
    """One machine. `pid`: its PID 1 as seen here, None while it is off; `link`: up, down or none."""

    machine: str
    address: str
    pid: int | None
    link: str
    slurm: str | None
    services: dict[str, int | None]


class Cluster:
    """One cluster. Its state is a directory and processes: two handles on a directory are the same cluster.

    All methods raise ClusterError with one sentence. Machines are named "ctl", "node01", "node02" and so on.
    The directories `shared` and `home` are /shared and /home on all of them, `etc` is their /etc.

    Args:
        directory: made by `up`, unless it is a cluster's already.
        plan: what the cluster consists of; None: as it was when it was brought up.
        ckptless: this checkout and its virtual environment are on every machine.
        files: content of files in /etc, by path; see `write`.
    """

    def __init__(
        self, directory: Path, plan: Plan | None = None, *, ckptless: bool = False, files: Files | None = None
    ) -> None:
        self._layout = Layout(directory.resolve())
        if plan is None and self._layout.plan.exists():
            self.plan = Plan.load(self._layout.plan)
        else:
            self.plan = plan or Plan()
            if ckptless:
                self.plan = with_ckptless(self.plan)
        self._files = dict(files or {})
        self._slurm = Slurm(self)
        self.etc, self.home, self.shared = self._layout.etc, self._layout.home, self._layout.shared

    # --- the whole

    def up(self, timeout_s: float = UP_DEADLINE_S) -> None:
        """Boot whatever is off, and wait until every node can be given jobs. Up already: nothing to do."""
        requirements.check(self.plan.rootfs)
        with self._locked() as lock:
            self._check_same()
            self.plan.dump(self._layout.plan)
            prepare(self._layout, self.plan, self._files)
            off = [name for name in self.plan.node_names if not self._machine(name).pid]
            self._boot([SWITCH, *self.plan.machines], lock)
        # Slurm holds a reboot against a node of a cluster that was up before.
        self._slurm.wait(nodes.REGISTERED, self._nodes_on(), timeout_s, resume=off)

    def down(self, *, purge: bool = False) -> None:
        """Cut all power: nothing is left running or mounted. `purge`: delete the directory too."""
        if not self._layout.base.exists():
            return
        with self._locked():
            plan = Plan.load(self._layout.plan) if self._layout.plan.exists() else self.plan
            failed = []
            for name in (*plan.machines, SWITCH):
                try:
                    Machine(self._layout, plan, name).power_off()
                except ClusterError as error:  # must not leave the others on
                    failed.append(str(error))
            if failed:
                raise ClusterError("; ".join(failed))
            if purge and not self._is_foreign():
                shutil.rmtree(self._layout.base)

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down(purge=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down(purge=True)

    def status(self) -> list[Status]:
        """Return what is on, plugged in, registered and running."""
        slurm = self.node_states() if self._machine(CONTROLLER).pid else {}
        links = self._links()
        found = []
        for name in self.plan.machines:
            machine = self._machine(name)
            units = machine.units() if machine.pid else {}
            found.append(
                Status(
                    machine=name,
                    address=self.plan.address(name),
                    pid=machine.pid,
                    link=links.get(boot.port(name), "none"),
                    slurm=slurm.get(name),
                    services={service: unit.pid for service, unit in units.items()},
                )
            )
        return found

    def restore(self, timeout_s: float = UP_DEADLINE_S) -> None:
        """As after `up`: no jobs, all on, plugged in, started and idle. Quick if it is so already."""
        for status in self.status():
            if status.pid is None:
                self.boot(status.machine)
            elif status.link != "up":
                self.plug(status.machine)
            for name, unit in self._machine(status.machine).units().items():
                if not unit.wanted or unit.pid is None:
                    self.service_start(status.machine, name)
        self._slurm.cancel_all(timeout_s)
        names = self.plan.node_names
        self._slurm.wait(nodes.IDLE, names, timeout_s, resume=names)

    # --- Slurm's view

    def node_states(self) -> dict[str, str]:
        """Node to the word of sinfo, such as "idle" or "down*"; empty while the controller is silent."""
        return self._slurm.states()

    def wait_registered(self, timeout_s: float = UP_DEADLINE_S) -> None:
        """Wait until every node that is on has reported since its slurmd was started, and can be given jobs.

        With ReturnToService=1, Slurm's default, a node that was rebooted is down until it is resumed.
        """
        self._slurm.wait(nodes.REGISTERED, self._nodes_on(), timeout_s)

    def wait_idle(self, *names: str, timeout_s: float = UP_DEADLINE_S) -> None:
        """The same, and no job is on the nodes named, or on any that is on."""
        self._slurm.wait(nodes.IDLE, names or self._nodes_on(), timeout_s)

    def wait_state(self, node: str, *states: str, timeout_s: float = UP_DEADLINE_S) -> None:
        """Wait until sinfo calls the node by one of these words, such as "down" or "down*"."""
        self._slurm.wait(frozenset(states), [node], timeout_s, reported=False)

    def resume(self, node: str) -> None:
        """Tell Slurm to use a node again that is down or drained."""
        self._slurm.resume(node)

    # --- commands

    def run(
        self,
        machine: str,
        *argv: str,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = RUN_DEADLINE_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises ClusterError: exit code not 0 (with `check`), or over the time."""
        with self.popen(machine, *argv, user=user, env=env, cwd=cwd) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _kill_group(process)
                output, errors = process.communicate()
                raise ClusterError(
                    f"{machine}: {' '.join(argv)} has not ended within {timeout_s:.0f} s: {output}{errors}"
                ) from None
            except BaseException:
                _kill_group(process)
                raise
        if check and process.returncode:
            raise ClusterError(
                f"{machine}: {' '.join(argv)} ended with {process.returncode}: {errors}{output}".rstrip()
            )
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def popen(
        self,
        machine: str,
        *argv: str,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command, output in pipes, in a process group of its own; its end is `kill_group`."""
        command, environment = self._machine(machine).command(argv, user, env, cwd)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    @staticmethod
    def kill_group(process: subprocess.Popen[str]) -> None:
        """End what `popen` started with SIGKILL, its children included, and reap it."""
        _kill_group(process)
        with process:
            process.wait()

    def replace_process(self, machine: str, argv: Sequence[str], user: str, cwd: str | None = None) -> None:
        """Become the command, on this terminal; does not return."""
        command, environment = self._machine(machine).command(argv, user, None, cwd)
        os.execvpe(command[0], command, environment)

    def write(self, path: str, content: str | bytes) -> None:
        """Put a file into /etc of all machines, at once; one that begins with "#!" can be executed."""
        write(self._layout, path, content)

    def log(self, machine: str, service: str) -> str:
        """All that a service has printed, over reboots; "" if it never ran."""
        file = self._layout.machine(self._machine(machine).name) / "var/log" / f"{service}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def var(self, machine: str) -> Path:
        """/var of a machine as seen from here; there whether it is on or off."""
        return self._layout.machine(self._machine(machine).name) / "var"

    # --- failures

    def power_off(self, *machines: str) -> None:
        """A power failure: nothing leaves the machines any more, no FIN and no RST; then all of it is gone.

        Of several it is one failure: the last one is silent before anybody can have missed the first.
        """
        with self._locked():
            for name in machines[1:]:
                self._machine(name).set_link(up=False)
            for name in machines:
                self._machine(name).power_off()

    def boot(self, machine: str) -> None:
        """Power on again: fresh /run, /tmp, memory; /var as it was. Returns when its services are started."""
        with self._locked() as lock:
            self._boot([self._machine(machine).name], lock)

    def cycle(self, machine: str) -> None:
        """Power off and on at once, faster than Slurm can notice."""
        with self._locked() as lock:
            self._machine(machine).power_off()
            self._boot([machine], lock)

    def unplug(self, machine: str) -> None:
        """Pull the network cable; the machine runs on."""
        self._machine(machine).set_link(up=False)

    def plug(self, machine: str) -> None:
        """Put the network cable back in."""
        self._machine(machine).set_link(up=True)

    def block(self, sender: str, receiver: str) -> None:
        """Nothing that one machine sends reaches another any more; back, and to all others, it does."""
        self._machine(sender).set_way(self.plan.address(receiver), open_=False)

    def unblock(self, sender: str, receiver: str) -> None:
        """Take that back; a reboot of the sender does, too."""
        self._machine(sender).set_way(self.plan.address(receiver), open_=True)

    # --- services

    def service_start(self, machine: str, name: str) -> None:
        """Start a service that was stopped."""
        self._machine(machine).start(name)

    def service_stop(self, machine: str, name: str, number: int = signal.SIGTERM) -> None:
        """End a service's main process with a signal, SIGKILL for a crash; once it is gone, it stays down."""
        self._machine(machine).stop(name, number)

    def service_kill(self, machine: str, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal behind its supervisor's back: a service that dies of it comes back 0.2 s later."""
        self._machine(machine).send_signal(name, number)

    def service_pid(self, machine: str, name: str) -> int | None:
        """Its pid inside the machine, None while it is down."""
        return self._machine(machine).unit(name).pid

    def service(self, machine: str, name: str) -> Unit:
        """All that the machine's PID 1 knows of it: how often it was started, how it ended last."""
        return self._machine(machine).unit(name)

    def stop_slurmctld(self, number: int = signal.SIGTERM) -> None:
        """Stop the controller, with SIGKILL as in a crash."""
        self.service_stop(CONTROLLER, "slurmctld", number)

    def start_slurmctld(self, timeout_s: float = UP_DEADLINE_S) -> None:
        """Start the controller and wait until it answers."""
        self.service_start(CONTROLLER, "slurmctld")
        limit = time.monotonic() + timeout_s
        while not self.node_states():
            if time.monotonic() > limit:
                raise ClusterError(f"slurmctld does not answer within {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def stop_slurmd(self, node: str, number: int = signal.SIGTERM) -> None:
        """Stop a node's slurmd, with SIGKILL as in a crash; its jobs' slurmstepds run on."""
        self.service_stop(node, "slurmd", number)

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd; unlike a boot that is no reboot for Slurm."""
        self.service_start(node, "slurmd")

    # --- inside

    def _machine(self, name: str) -> Machine:
        if name not in self.plan.machines:
            raise ClusterError(f"no machine {name!r}: there are {', '.join(self.plan.machines)}")
        return Machine(self._layout, self.plan, name)

    def _nodes_on(self) -> list[str]:
        return [name for name in self.plan.node_names if self._machine(name).pid]

    def _is_foreign(self) -> bool:
        there = set(self._layout.base.iterdir())
        return self._layout.plan not in there and there != {self._layout.lock}

    def _check_same(self) -> None:
        if self._is_foreign():
            raise ClusterError(f"{self._layout.base} is not empty and no cluster's: name another directory")
        if not self._layout.plan.exists():
            return
        old = Plan.load(self._layout.plan)
        if old == self.plan:
            return
        if any(Machine(self._layout, old, name).pid for name in old.machines):
            raise ClusterError(
                f"{self._layout.base}: a cluster with other settings is up, take it down first"
            )

    def _boot(self, names: list[str], lock: int) -> None:
        """The lock goes along: if we are killed now, the next command waits for these machines."""
        log = self._layout.base / "boot.log"
        with log.open("w") as output:
            done = subprocess.run(
                boot.command(self._layout, names),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
                start_new_session=True,
                check=False,
            )
        if done.returncode:
            raise ClusterError(log.read_text().strip() or f"booting ended with {done.returncode}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        self._layout.base.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._layout.lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            limit = time.monotonic() + LOCK_DEADLINE_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > limit:
                        raise ClusterError(f"{self._layout.lock} is held by another command") from None
                time.sleep(POLL_S)
            yield lock
        finally:
            os.close(lock)

    def _links(self) -> dict[str, str]:
        if boot.living(self._layout, SWITCH) is None:
            return {}
        command = boot.in_switch(self._layout, "ip", "-j", "link", "show", "type", "veth")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ports: list[dict[str, Any]] = json.loads(done.stdout or "[]")
        return {port["ifname"]: "up" if "UP" in port["flags"] else "down" for port in ports if port}


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
