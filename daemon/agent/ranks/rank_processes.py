"""The training processes of this node: starts them in their slots, sees their death, kills what hangs.

Decides nothing: what a slot should hold comes from the assignment, what has happened goes to `on_change`.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ckptless.daemon.agent.config import AgentConfig
from ckptless.daemon.agent.ranks.console import ConsoleOutput, RankOutput, rank_log_path
from ckptless.daemon.agent.ranks.environment import (
    AGENT_SOCKET,
    RANKS_PER_ROOT,
    RESUME,
    rank_env,
    ranks_per_root,
    user_env,
)
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.agent.ranks.processes import Process, SpawnSpec, Zygote
from ckptless.daemon.agent.ranks.slots import Slot, Tenant
from ckptless.daemon.agent.ranks.socket_folder import Scratch
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import CkptlessError

logger = logging.getLogger(__name__)

OUTPUT_DEADLINE_S = 1.0
# From SIGKILL to the end of a process that the kernel can end.
KILL_DEADLINE_S = 5.0
PINGS_PER_DEADLINE = 4


class RankProcesses:
    """Slots and their tenants. Owned by the agent's event loop."""

    def __init__(self, config: AgentConfig, zygote: Zygote, console: ConsoleOutput) -> None:
        self._config, self._zygote, self._console = config, zygote, console
        self.slots = [Slot(index) for index in range(config.spec.slots_per_node)]
        self._outputs: dict[int, RankOutput] = {}
        self._early: dict[int, RankLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._resume = config.save.resume if config.save is not None else ""
        # Those of which a rank's end was told, and those before.
        self._oom_kills = oom_kills()
        self.store = ("", 0)
        self._scratch = Scratch(config.rank_socket)
        self.on_change: Callable[[], None] = lambda: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self.on_hello: Callable[[Slot], None] = lambda _slot: None

    def start(self) -> None:
        """Begin to watch for processes that hang."""
        self._spawn_task(self._ping())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------- start

    def ranks_per_root(self, assignment: m.Assignment | None) -> int:
        """Of how many ranks NCCL's communicators may be without an id of the store's."""
        stock_roots = assignment is not None and assignment.stock_roots
        return ranks_per_root(self._config.env, stock_roots=stock_roots)

    def occupy(self, slot: Slot, assignment: m.Assignment | None) -> None:
        """Start a process in an empty slot: a rank's by the assignment, or a spare's."""
        place = m.Place(node=self._config.node, slot=slot.index)
        rank = assignment.rank_at(place) if assignment is not None else None
        slot.hooked, slot.exit_code, slot.tenant = False, None, None
        slot.enter("starting", assignment.generation if assignment is not None else 0)
        slot.births += 1
        self._spawn_task(self._start(slot, rank, assignment))

    async def _start(self, slot: Slot, rank: int | None, assignment: m.Assignment | None) -> None:
        birth = slot.births
        place = m.Place(node=self._config.node, slot=slot.index)
        own = rank_env(self._config.spec, place, assignment, self.store, slot.restarts)
        spec = SpawnSpec(
            argv=self._config.argv,
            module=self._config.module,
            env={
                **user_env(self._config.env),
                **own,
                RANKS_PER_ROOT: str(self.ranks_per_root(assignment)),
                **self._hooks_env(),
            },
            cwd=Path(self._config.cwd),
            scratch=self._scratch.make(),
        )
        slot.restarts += 1
        output, theirs = os.pipe()
        try:
            process = await self._zygote.spawn(spec, theirs)
        except CkptlessError as error:
            os.close(output)
            self._scratch.remove(spec.scratch)
            self.on_event("spawn-failed", f"slot {slot.index}: {error}")
            if slot.births != birth:
                return
            slot.exit_code = 1
            slot.enter("exited", slot.generation, m.Cause(kind="died", text=str(error)))
            self.on_change()
            return
        finally:
            os.close(theirs)
        tenant = Tenant(process, heard_at=asyncio.get_running_loop().time(), scratch=spec.scratch)
        if self._closing or slot.births != birth:
            # While it was forked the next generation came, which has a process of its own for this slot.
            tenant.retired = True
            process.kill()
        else:
            slot.tenant = tenant
        to = self._destination(process.pid, rank)
        self._outputs[process.pid] = RankOutput(output, *to, self.on_event)
        self._spawn_task(self._watch(slot, tenant))
        link = self._early.pop(process.pid, None)
        if link is not None and slot.tenant is tenant:
            self._welcome(slot, tenant, link)
        elif link is not None:
            link.close()
        self.on_change()

    def _hooks_env(self) -> dict[str, str]:
        """By which ckptless.run finds the agent; without it a script is plain PyTorch."""
        if not self._config.spec.recovers:
            return {}
        return {AGENT_SOCKET: self._config.rank_socket, RESUME: self._resume}

    def _destination(self, pid: int, rank: int | None) -> tuple[Path, str, ConsoleOutput | None]:
        """Log file, prefix, and the console if it is to be shown there."""
        log_dir = Path(self._config.log_dir)
        path = rank_log_path(log_dir, rank) if rank is not None else log_dir / f"spare-{pid}.log"
        shown = self._config.tee is None or rank in self._config.tee
        return path, f"[rank {rank}] " if rank is not None else "[spare] ", self._console if shown else None

    def promote(self, tenant: Tenant, rank: int) -> None:
        """A spare has become a rank: its output is the rank's from now on."""
        pid = tenant.process.pid
        if (output := self._outputs.get(pid)) is not None:
            output.redirect(*self._destination(pid, rank))

    # ------------------------------------------------------------------------------------- hello

    def welcome(self, link: RankLink) -> None:
        """A process has said Hello: find its slot."""
        for slot in self.slots:
            if slot.tenant is not None and slot.tenant.process.pid == link.pid:
                self._welcome(slot, slot.tenant, link)
                return
        # It was faster than our own bookkeeping of its birth.
        self._early[link.pid] = link

    def _welcome(self, slot: Slot, tenant: Tenant, link: RankLink) -> None:
        tenant.link, tenant.hooked = link, True
        tenant.heard_at = asyncio.get_running_loop().time()
        slot.hooked = True
        link.send(
            m.Welcome(
                job=self._config.spec.job,
                run=self._config.spec.run_id,
                slot=slot.index,
                host=self._config.comm_address or self._config.address,
                pong_s=self._config.spec.limits.pong_s,
            )
        )
        self.on_hello(slot)

    def slot_of(self, link: RankLink) -> Slot | None:
        """The slot whose tenant speaks over this connection."""
        return next((s for s in self.slots if s.tenant is not None and s.tenant.link is link), None)

    def heard(self, link: RankLink) -> None:
        """A sign of life."""
        slot = self.slot_of(link)
        if slot is not None and slot.tenant is not None:
            slot.tenant.heard_at = asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------- end of life

    async def _watch(self, slot: Slot, tenant: Tenant) -> None:
        # no deadline: a rank lives as long as it trains; `close` ends it
        code = await tenant.process.wait()
        self._early.pop(tenant.process.pid, None)
        if tenant.link is not None:
            tenant.link.close()
        if tenant is slot.tenant:
            self._died(slot, tenant, code)
            self.on_change()
        output = self._outputs.pop(tenant.process.pid, None)
        if output is not None:
            await output.finish(OUTPUT_DEADLINE_S)
        self._scratch.remove(tenant.scratch)

    def _died(self, slot: Slot, tenant: Tenant, code: int) -> None:
        well = code == 0 and (slot.phase == "finished" or tenant.released or not tenant.hooked)
        cause: m.Cause | None
        if tenant.retired:
            cause = m.Cause(kind="stop")
        elif well:
            cause = None
        elif tenant.hung:
            cause = m.Cause(kind="hung", text=tenant.hung)
        else:
            cause = m.Cause(kind="died", text=describe_exit(code) + self._why_killed(code))
        slot.exit_code = code
        slot.enter("exited", slot.generation, cause)

    def _why_killed(self, code: int) -> str:
        if code != -signal.SIGKILL or oom_kills() <= self._oom_kills:
            return ""
        self._oom_kills += 1
        return ", out of memory (OOM): the kernel has ended a process of this cgroup for that"

    def retire(self, slot: Slot, tenant: Tenant) -> None:
        """End a process whose time is over; its death is no fault."""
        tenant.retired = True
        tenant.process.kill()
        if tenant is slot.tenant:
            slot.tenant = None

    def forward(self, number: signal.Signals) -> None:
        """Send it to every process that has come up; one that is still being forked does not get it."""
        for slot in self.slots:
            if slot.tenant is not None:
                slot.tenant.process.kill(number)

    def kill_hung(self, slot: Slot) -> None:
        """End a process that does not do what it is told."""
        if slot.tenant is not None and slot.tenant.process.returncode is None:
            slot.tenant.hung = "did not leave its training function in time and was killed"
            slot.tenant.process.kill()

    async def _ping(self) -> None:
        """Ask every process with hooks whether it lives; one that is silent for `pong_s` is killed."""
        loop = asyncio.get_running_loop()
        deadline_s = self._config.spec.limits.pong_s
        pause_s = deadline_s / PINGS_PER_DEADLINE
        sequence = 0
        while True:
            asked = loop.time()
            await asyncio.sleep(pause_s)
            starved_s = max(0.0, loop.time() - asked - pause_s)
            sequence += 1
            for slot in self.slots:
                self._check_alive(slot.tenant, starved_s, deadline_s)
                if slot.tenant is not None and slot.tenant.link is not None:
                    slot.tenant.link.send(m.Ping(seq=sequence))

    def _check_alive(self, tenant: Tenant | None, starved_s: float, deadline_s: float) -> None:
        if tenant is None or tenant.link is None or tenant.released or tenant.process.returncode is not None:
            return
        # For as long as this process itself got no CPU, it could not have heard.
        tenant.heard_at += starved_s
        if asyncio.get_running_loop().time() - tenant.heard_at > deadline_s and not tenant.hung:
            tenant.hung = f"did not answer for {deadline_s:.1f} s and was killed"
            tenant.process.kill()

    # ------------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """End every process: SIGTERM, `shutdown_s` to act on it, SIGKILL. Their last output is kept."""
        self._closing = True
        processes: list[Process] = []
        for slot in self.slots:
            if slot.tenant is not None:
                slot.tenant.retired = True
                processes.append(slot.tenant.process)
        if not await _end(processes, signal.SIGTERM, self._config.shutdown_s):
            left = [process for process in processes if process.returncode is None]
            self.on_event(
                "killed", f"{len(left)} ranks did not end in {self._config.shutdown_s:g} s of SIGTERM"
            )
            if not await _end(left, signal.SIGKILL, KILL_DEADLINE_S):
                self.on_event("unkillable", f"processes outlive SIGKILL by {KILL_DEADLINE_S:g} s")
        # no deadline: each has its own
        await asyncio.gather(*(o.finish(OUTPUT_DEADLINE_S) for o in list(self._outputs.values())))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._scratch.close()


async def _end(processes: list[Process], number: signal.Signals, deadline_s: float) -> bool:
    """Send a signal to all; say whether they have ended within the deadline, in seconds."""
    for process in processes:
        process.kill(number)
        # One that is stopped could not act on it.
        process.kill(signal.SIGCONT)
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*(process.wait() for process in processes))
    except TimeoutError:
        return False
    return True


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of its cgroup the kernel has ended for want of memory; 0 where nothing tells."""
    kills = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            name = {"": "memory.events", "memory": "memory.oom_control"}.get(controllers)
            file = cgroups / controllers / path.lstrip("/") / (name or "")
            if name is not None and file.exists():
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                kills += int(found.group(1)) if found else 0
    return kills


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        # Most real-time signals have no name.
        known = -code in signal.Signals.__members__.values()
        return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"
