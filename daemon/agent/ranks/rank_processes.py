"""The training processes of this node: forks them, prints what they say, sees their deaths, pings them.

Decides nothing: the core does, and is told of everything that happens.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ckptless.daemon.agent.core.actions import StartProcess
from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.ranks import stacks
from ckptless.daemon.agent.ranks.activity import activity
from ckptless.daemon.agent.ranks.console import ConsoleOutput, RankOutput, error_path, rank_log_path
from ckptless.daemon.agent.ranks.environment import (
    AGENT_SOCKET,
    LOG_FORMAT,
    POLICY,
    RANKS_PER_ROOT,
    RESUME,
    rank_env,
    ranks_per_root,
    user_env,
)
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.agent.ranks.processes import Process, SpawnSpec, Zygote
from ckptless.daemon.agent.ranks.socket_folder import Scratch
from ckptless.daemon.agent.ranks.standing import LOOK_S, Page, Standing, is_in_script
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.settings.agent_config import AgentConfig
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

OUTPUT_DEADLINE_S = 1.0
# From SIGKILL to the end of a process that the kernel can end.
KILL_DEADLINE_S = 5.0
PINGS_PER_DEADLINE, PING_S = 4, 1.0


@dataclass
class RankProcess:
    """A training process that has not ended yet, and its connection once it has said Hello."""

    birth: int
    slot: int
    process: Process
    output: RankOutput
    scratch: Path | None
    link: RankLink | None = None
    # Once it has said Hello.
    page: Page | None = None
    # Held while it is asked where it is.
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    # While its native stacks are read; whether its log is still to have them.
    spied: asyncio.Task[None] | None = None
    unread: bool = False


class RankProcesses:
    """Owned by the agent's event loop. `settle` carries out what the core has asked for."""

    def __init__(
        self,
        config: AgentConfig,
        core: AgentCore,
        zygote: Zygote,
        console: ConsoleOutput,
        settle: Callable[[], None],
    ) -> None:
        self._config, self._core, self._zygote, self._console = config, core, zygote, console
        self._settle = settle
        self._running: dict[int, RankProcess] = {}
        self._starts = [0] * config.spec.slots_per_node
        self._early: dict[int, RankLink] = {}
        self._standing = Standing(config.spec.limits.stall_s)
        self._tasks = Tasks()
        # One for each process, until it is dead and all that it has printed is written.
        self._ends = Tasks()
        self._resume = config.save.resume if config.save is not None else ""
        # Those of which a rank's end was told, and those before.
        self._oom_kills = oom_kills()
        self.store = ("", 0)
        self._scratch = Scratch(config.rank_socket)
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def watch(self) -> None:
        """Begin to ask the processes whether they live, and to look whether they get on."""
        self._tasks.spawn(self._ping())
        self._tasks.spawn(self._look())

    # ------------------------------------------------------------------------------------- start

    def ranks_per_root(self, assignment: m.Assignment | None) -> int:
        """Return the most ranks of an NCCL communicator that needs no id of the store's."""
        stock_roots = assignment is not None and assignment.stock_roots
        return ranks_per_root(self._config.env, stock_roots=stock_roots)

    def start(self, order: StartProcess) -> None:
        """Fork a process; the core is told when it is there, or why it is not."""
        self._tasks.spawn(self._start(order, self._starts[order.slot]))
        self._starts[order.slot] += 1

    async def _start(self, order: StartProcess, restarts: int) -> None:
        place = m.Place(node=self._config.node, slot=order.slot)
        assignment = order.assignment
        rank = assignment.rank_at(place) if assignment is not None else None
        own = rank_env(self._config.spec, place, assignment, self.store, restarts)
        spec = SpawnSpec(
            argv=tuple(_filled(word, order.slot) for word in self._config.argv),
            module=self._config.module,
            env={
                **user_env(self._config.env),
                **own,
                # A spare's is another rank's later: see pytorch_hooks.env.
                "TORCHELASTIC_ERROR_FILE": str(error_path(Path(self._config.log_dir), rank or 0)),
                RANKS_PER_ROOT: str(self.ranks_per_root(assignment)),
                **self._hooks_env(),
            },
            cwd=Path(self._config.cwd),
            scratch=self._scratch.make(),
        )
        output, theirs = os.pipe()
        try:
            process = await self._zygote.spawn(spec, theirs)
        except CkptlessError as error:
            os.close(output)
            self._fail(order, str(error), spec)
            return
        finally:
            os.close(theirs)
        try:
            printed = RankOutput(output, *self._destination(process.pid, rank), self.on_event)
        except OSError as error:
            os.close(output)
            process.kill()
            if (link := self._early.pop(process.pid, None)) is not None:
                link.close()
            self._fail(order, f"its log cannot be opened: {error}", spec)
            return
        one = self._running[order.birth] = RankProcess(
            order.birth, order.slot, process, printed, spec.scratch
        )
        self._ends.spawn(self._wait(one))
        self._core.born(order.slot, order.birth, process.pid, asyncio.get_running_loop().time())
        if (link := self._early.pop(process.pid, None)) is not None:
            self._welcome(one, link)
        self._settle()

    def _fail(self, order: StartProcess, why: str, spec: SpawnSpec) -> None:
        self._scratch.remove(spec.scratch)
        self._core.not_born(order.slot, order.birth, why, asyncio.get_running_loop().time())
        self._settle()

    def _hooks_env(self) -> dict[str, str]:
        """Return the variables by which ckptless.run finds the agent; a script without them is plain."""
        if not self._config.spec.recovers:
            return {}
        return {
            AGENT_SOCKET: self._config.rank_socket,
            RESUME: self._resume,
            POLICY: self._config.policy,
            LOG_FORMAT: self._config.log_format,
        }

    def _destination(self, pid: int, rank: int | None) -> tuple[Path, str, ConsoleOutput | None]:
        """Return the log file, the prefix, and the console if it is to be shown there."""
        log_dir = Path(self._config.log_dir)
        path = rank_log_path(log_dir, rank) if rank is not None else log_dir / f"spare-{pid}.log"
        shown = self._config.tee is None or rank in self._config.tee
        return path, f"[rank {rank}] " if rank is not None else "[spare] ", self._console if shown else None

    def promote(self, birth: int, rank: int) -> None:
        """A spare has become a rank: its output is the rank's from now on."""
        if (one := self._running.get(birth)) is not None:
            one.output.redirect(*self._destination(one.process.pid, rank))

    # ------------------------------------------------------------------------------- connections

    def welcome(self, link: RankLink) -> None:
        """A process has said Hello: find out which it is."""
        one = next((one for one in self._running.values() if one.process.pid == link.pid), None)
        if one is None:
            # Its Hello came before the zygote's word that it is forked.
            self._early[link.pid] = link
            return
        self._welcome(one, link)
        self._settle()

    def _welcome(self, one: RankProcess, link: RankLink) -> None:
        slot = self._core.occupied(one.birth)
        if slot is None:
            link.close()
            return
        one.link = link
        spec = self._config.spec
        if one.page is None:
            one.page = Page.make(asyncio.get_running_loop().time())
        link.send(
            m.Welcome(
                job=spec.job,
                run=spec.run_id,
                slot=slot.index,
                host=self._config.comm_address or self._config.address,
                pong_s=spec.limits.pong_s,
            ),
            one.page.fd,
        )
        self._core.hello(one.birth, asyncio.get_running_loop().time())

    def heard(self, link: RankLink) -> Slot | None:
        """Note a sign of life; return the slot that the process is in."""
        one = next((one for one in self._running.values() if one.link is link), None)
        if one is None:
            return None
        return self._core.heard(one.birth, asyncio.get_running_loop().time())

    def left(self, link: RankLink) -> None:
        """A process is out of its training function: what it has done is looked at before it is told of."""
        for one in self._running.values():
            if one.link is link and one.page is not None:
                one.page.count(self._core.slots[one.slot], own=self._core.occupied(one.birth) is not None)

    def send(self, birth: int, message: m.ToRank) -> None:
        """Send a message to a process, if it still runs."""
        one = self._running.get(birth)
        if one is not None and one.link is not None:
            one.link.send(message)

    # ------------------------------------------------------------------------------- end of life

    async def _wait(self, one: RankProcess) -> None:
        # no deadline: a rank lives as long as it trains; `close` ends it
        code = await one.process.wait()
        del self._running[one.birth]
        self._early.pop(one.process.pid, None)
        if one.link is not None:
            one.link.close()
        if one.page is not None:
            own = self._core.occupied(one.birth) is not None
            one.page.count(self._core.slots[one.slot], own=own)
            one.page.close()
        how = describe_exit(code)
        if self._core.occupied(one.birth) is not None:
            how += self._why_killed(code)
        self._core.exited(one.birth, code, how, asyncio.get_running_loop().time())
        self._settle()
        await one.output.finish(OUTPUT_DEADLINE_S)
        self._scratch.remove(one.scratch)

    def _why_killed(self, code: int) -> str:
        if code != -signal.SIGKILL or oom_kills() <= self._oom_kills:
            return ""
        self._oom_kills += 1
        return ", out of memory (OOM): the kernel has ended a process of this cgroup for that"

    def kill(self, birth: int, *, hung: bool = False) -> None:
        """End a process with SIGKILL; one that is `hung` has a moment to write its stacks to its log."""
        one = self._running.get(birth)
        if one is None:
            return
        if hung and one.page is not None:
            self._tasks.spawn(self._kill_hung(one, one.page))
        else:
            _kill(one)

    def pause(self, birth: int, for_s: float) -> None:
        """Stop a process, which goes on after so many seconds where it is not dead by then."""
        if (one := self._running.get(birth)) is not None:
            one.process.kill(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(for_s, one.process.kill, signal.SIGCONT)

    async def _kill_hung(self, one: RankProcess, page: Page) -> None:
        if page.watched.at is None:
            await self._ask_where(one, page, stopped=False)
        if one.spied is not None:
            # It was begun when the rank was told of.
            await asyncio.wait({one.spied}, timeout=stacks.HELD_S)
        _kill(one)

    async def _ask_where(self, one: RankProcess, page: Page, *, stopped: bool) -> None:
        """Write to a process's log what its threads are at; note where its main thread is in the script.

        That is waited for, and the native stacks are not: whoever hangs is told of at once. Where it is being
        asked already, until that is done: WRITTEN_S and HELD_S at most.
        """
        async with one.asking:
            if page.watched.at is None and not page.closed:
                await self._ask(one, page, stopped=stopped)

    async def _ask(self, one: RankProcess, page: Page, *, stopped: bool) -> None:
        pid, one.unread = one.process.pid, True
        _add(one, f"what the kernel says of process {pid}", stacks.kernels_view(pid))
        # One that is stopped cannot write its own; py-spy reads them, and is quick then.
        written = "" if stopped else await stacks.written_by(page, one.process.kill)
        _add(one, f"the stacks of process {pid}", written or "it writes none")
        page.watched.at = stacks.place(stacks.main_thread(written))
        if page.closed:
            return
        spied = self._spy(one, page, stopped=not written)
        if not written:
            await asyncio.wait({spied}, timeout=stacks.HELD_S)

    def _spy(self, one: RankProcess, page: Page, *, stopped: bool) -> asyncio.Task[None]:
        async def spy() -> None:
            found = await stacks.native(one.process.pid, one.process.kill, stopped=stopped)
            _add_native(one, found)
            if page.watched.at == "":
                page.watched.at = stacks.place(stacks.main_thread(found))
            one.spied = None

        if one.spied is None:
            one.spied = self._tasks.spawn(spy())
        return one.spied

    async def _ask_again(self, one: RankProcess, page: Page) -> None:
        """Ask a process that runs whether it is still in the same place; its log has that already."""
        pid, before = one.process.pid, activity(one.process.pid)
        stack = stacks.main_thread(await stacks.written_by(page, one.process.kill))
        now = asyncio.get_running_loop().time()
        page.watched.found(stacks.spot(stack), before, activity(pid), now)

    def forward(self, number: signal.Signals) -> None:
        """Send it to every process that has come up; one that is still being forked does not get it."""
        for one in self._running.values():
            one.process.kill(number)

    async def _ping(self) -> None:
        """Ask every process with hooks, again and again, whether it lives."""
        loop = asyncio.get_running_loop()
        pause_s = min(PING_S, self._config.spec.limits.pong_s / PINGS_PER_DEADLINE)
        sequence = 0
        while True:
            asked = loop.time()
            await asyncio.sleep(pause_s)
            sequence += 1
            self._core.check_answers(max(0.0, loop.time() - asked - pause_s), loop.time())
            self._settle()
            for one in self._running.values():
                if one.link is not None:
                    one.link.send(m.Ping(seq=sequence))

    async def _look(self) -> None:
        """Look at the pages of all processes, again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            # no deadline: those that are asked have one each
            await asyncio.gather(*map(self._look_at, list(self._running.values())))
            self._settle()

    async def _look_at(self, one: RankProcess) -> None:
        slot, page = self._core.occupied(one.birth), one.page
        if page is None or page.closed or slot is None:
            return
        page.count(slot, own=True)
        now = asyncio.get_running_loop().time()
        still, until = self._standing.look(page, slot, one.process.pid, now)
        if still is not None and is_in_script(still):
            if page.watched.at is None:
                # Once, before it is told of: what the others wait for is worth that.
                await self._ask_where(one, page, stopped=still.how == "stopped")
                still = replace(still, at=page.watched.at or "")
            elif still.late and (until is None or still.over) and page.watched.asks_where(now):
                await self._ask_again(one, page)
        if one.birth in self._running:
            self._core.stands(one.birth, still, until)

    # ------------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """End every process: SIGTERM, `shutdown_s` to act on it, SIGKILL. Their last output is kept."""
        self._core.close()
        processes = [one.process for one in self._running.values()]
        if not await _end(processes, signal.SIGTERM, self._config.shutdown_s):
            left = [process for process in processes if process.returncode is None]
            self.on_event(
                "killed", f"{len(left)} ranks did not end in {self._config.shutdown_s:g} s of SIGTERM"
            )
            if not await _end(left, signal.SIGKILL, KILL_DEADLINE_S):
                self.on_event("unkillable", f"processes outlive SIGKILL by {KILL_DEADLINE_S:g} s")
        if self._ends:
            await asyncio.wait(self._ends, timeout=2 * OUTPUT_DEADLINE_S)
        await end_all([*self._tasks, *self._ends])
        self._scratch.close()


def _add_native(one: RankProcess, found: str) -> None:
    """Write the native stacks, or why there are none, to its log: once."""
    if one.unread:
        one.unread = False
        _add(one, f"the native stacks of process {one.process.pid}", found)


def _kill(one: RankProcess) -> None:
    # With its end its log is closed.
    _add_native(one, "not read: it was ended before that was done")
    one.process.kill()


def _add(one: RankProcess, what: str, text: str) -> None:
    one.output.add(f"ckptless: {what}:\n{text.rstrip()}\n".encode())


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
    """Return how many processes of its cgroup the kernel has ended for want of memory; 0 if unknown."""
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


def _filled(word: str, local_rank: int) -> str:
    """Put the local rank where an argument has `${local_rank}`, as torchrun does."""
    return string.Template(word).safe_substitute(local_rank=str(local_rank))
