"""The agent: follows the daemon's orders, serves its ranks. The composition root."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from ckptless.daemon.agent.core import actions as a
from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.daemon_link import DaemonLink
from ckptless.daemon.agent.dataloader.service import RingService
from ckptless.daemon.agent.kvstore.guard import StoreGuard
from ckptless.daemon.agent.kvstore.service import StoreService
from ckptless.daemon.agent.lease import AgentLease, lease_over
from ckptless.daemon.agent.nccl.service import NcclService
from ckptless.daemon.agent.ranks.console import ConsoleOutput
from ckptless.daemon.agent.ranks.link import RankLink, RankServer
from ckptless.daemon.agent.ranks.processes import Zygote
from ckptless.daemon.agent.ranks.rank_processes import RankProcesses
from ckptless.daemon.agent.saving.service import SaveService
from ckptless.daemon.agent.versions.connections import Network
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.requeue_memory import RequeueClient
from ckptless.daemon.agent.versions.room import Room
from ckptless.daemon.agent.versions.state_service import FromTraining, StateService
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.agent.versions.twins import AgentTwins
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import check_protocol
from ckptless.daemon.protocol.errors import StartError
from ckptless.daemon.protocol.forming import ask_for_nodes, give_back, mark_begun, mark_up
from ckptless.daemon.protocol.outcome import write_outcome
from ckptless.daemon.protocol.ring import FromRing
from ckptless.daemon.protocol.saving import FromWriter, SaveNow, WriterHello, Written
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.settings.agent_config import AgentConfig
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.25
CANCEL_DEADLINE_S = 5.0
RING_NEWS = ("ring-resumed", "ring-closed")
FLUSH_DEADLINE_S = 1.0


class Agent:
    """One agent. `run` returns the job's exit code when the job is over."""

    def __init__(self, config: AgentConfig, zygote: tuple[int, int] | None = None) -> None:
        """`zygote`: pid and socket of one that this process has already, see `local_fork`."""
        self._config, self._own_zygote = config, zygote
        self._versions = VersionStore()
        self._zygote = Zygote(self._event, ahead=True)
        self._console = ConsoleOutput(1, self._event)
        self._core = AgentCore(config.node, config.spec.slots_per_node, config.spec.limits.pong_s)
        self._rank_processes = RankProcesses(config, self._core, self._zygote, self._console, self._settle)
        self._replicas = Replicas(
            config.node,
            Origin(config.spec.job, config.spec.run_id),
            config.copies,
            self._versions,
            config.spec.domains,
            Network(config.copies_addresses, config.replication.bandwidth_rate or 0.0),
        )
        self._twins = AgentTwins(config.node, config.twins, self._versions, self._replicas)
        self._state = StateService(
            self._core,
            self._versions,
            self._replicas,
            self._rank_processes,
            self._twins,
            Room((config.node, config.name), self._versions, config.copies, config.spec.domains),
        )
        if config.spec.elastic:
            self._state.sizes = tuple(size * config.spec.slots_per_node for size in config.spec.sizes)
        self._saving = SaveService(config, self._versions, self._zygote, self._replicas)
        self._requeue_memory = RequeueClient(config, self._versions, self._twins.holdings)
        self._rings = RingService(self._ring_event, limits=config.data, on_news=self._progressed)
        self._store = StoreService(config.node, self._replicas.dial, config.spec.limits.pong_s)
        self._replicas.serving.on_store = self._store.serve
        self._nccl = NcclService(self._event, self._changed)
        self._ranks = RankServer(config.rank_socket, self._rank_says, self._rank_hung_up)
        self._daemon = DaemonLink(config.daemon_socket, self._greeting, self._hear)
        self._hello: m.AgentHello | None = None
        loop = asyncio.get_running_loop()
        self._lease = AgentLease(config.spec.limits.lease_s, loop.time())
        self._outcome: asyncio.Future[m.Outcome] = loop.create_future()
        self._answer: asyncio.Future[m.Admitted | m.Denied] = loop.create_future()
        self._here_only = False
        self._seq = 0
        self._told_at = 0.0
        self._progress: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------- life cycle

    async def run(self, cancelled: "asyncio.Future[m.Cancel]") -> int:
        """Serve until the daemon says End, or `cancelled` is set."""
        config = self._config
        self._rank_processes.on_event = self._replicas.on_event = self._twins.check.on_event = self._event
        self._store.server.refuses = StoreGuard(self._event).refuses
        self._twins.check.on_doubt = self._changed
        self._saving.saver.on_event = self._requeue_memory.on_event = self._tell_of
        self._state.on_step = self._stepped
        self._versions.on_dropped, self._versions.on_held = self._changed, self._held
        daemon: asyncio.Task[None] | None = None
        lease: asyncio.Task[None] | None = None
        try:
            address, *others = config.copies_addresses or (config.address,)
            agent_port = await self._replicas.start(address, *others)
            self._rank_processes.store = await self._store.start(self._event)
            nccl_port = await self._nccl.start(config.address, config.env)
            self._ranks.start()
            brought = await self._requeue_memory.claim()
            logger.info("importing %s", ", ".join(config.preload) or "nothing ahead")
            await self._zygote.start(config.preload, config.env, config.zygote_deadline_s, self._own_zygote)
            info = m.NodeInfo(
                node=config.node,
                name=config.name,
                address=address,
                agent_port=agent_port,
                nccl_port=nccl_port,
                interfaces=self._replicas.interfaces,
            )
            self._hello = m.AgentHello(
                protocol=m.PROTOCOL, spec=config.spec, info=info, pid=os.getpid(), brought=brought
            )
            self._rank_processes.watch()
            logger.info("asking the daemon at %s to be let in", config.daemon_socket)
            daemon = asyncio.create_task(self._daemon.run())
            await self._be_admitted(cancelled)
            self._lease.renew(asyncio.get_running_loop().time())
            self._mark(mark_up, config.name)
            lease = asyncio.create_task(self._keep_lease())
            outcome = await self._wait(cancelled)
            if config.outcome_dir is not None and not self._here_only:
                write_outcome(Path(config.outcome_dir), config.spec.job, outcome, config.spec.launch)
            return outcome.exit_code
        finally:
            if lease is not None:
                await end_all([lease])
            await self._close(daemon)

    def _mark(self, mark: Callable[..., None], *words: str) -> None:
        """Tell a launcher that waits for it how far this node is: that of a Slurm job, or of a late node."""
        config, spec = self._config, self._config.spec
        late = config.node >= spec.nodes + spec.spares
        folder = config.outcome_dir if spec.names else config.draw_dir if late else None
        try:
            if folder is not None:
                mark(Path(folder), *words)
        except OSError as error:
            logger.warning("the launcher cannot be told how far the job is: %s", error)

    @property
    def first(self) -> bool:
        """Whether this is the first of the nodes that the job has now."""
        nodes = (
            [info.node for info in self._core.assignment.nodes] if self._core.assignment is not None else [0]
        )
        return self._config.node == min(nodes)

    def forward(self, number: signal.Signals) -> None:
        """Pass the user's signal on to the ranks."""
        self._rank_processes.forward(number)

    async def _keep_lease(self) -> None:
        """End this node's ranks where its lease is over, see `lease`: the others go on without it."""
        me = self._config.node
        nodes = lambda: self._core.assignment.nodes if self._core.assignment is not None else ()  # noqa: E731
        why = await lease_over(me, self._lease, nodes, self._replicas.knock)
        reason = f"node-{me} ends its ranks: {why}"
        logger.error("fenced: %s", reason)
        if not self._outcome.done():
            outcome = m.Outcome(state="failed", exit_code=4, reason=reason, why="no-quorum")
            self._outcome.set_result(outcome)
            self._here_only = True

    async def _be_admitted(self, cancelled: "asyncio.Future[m.Cancel]") -> None:
        """The daemon's first answer, or the user's end of it. Raises StartError."""
        either: set[asyncio.Future[Any]] = {cancelled, self._answer}
        await asyncio.wait(either, timeout=self._config.start_s, return_when=asyncio.FIRST_COMPLETED)
        name, where = self._config.name, self._config.daemon_socket
        if not self._answer.done() and not cancelled.done():
            if self._daemon.stranger:
                raise StartError(self._daemon.stranger)
            raise StartError(f"no ckptlessd answers on {name} ({where}): see that it runs there")
        if self._answer.done() and isinstance(answer := self._answer.result(), m.Denied):
            raise StartError(f"ckptlessd on {name} refuses this job: {answer.reason}")

    async def _wait(self, cancelled: "asyncio.Future[m.Cancel]") -> m.Outcome:
        either: set[asyncio.Future[Any]] = {cancelled, self._outcome}
        # no deadline: the job's life; its end is the daemon's word, or the user's
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._outcome.done():
            # Ask for an orderly end of the whole job; without a daemon that is heard, end this node.
            self._daemon.send(cancelled.result())
            loop = asyncio.get_running_loop()
            deadline = loop.time() + CANCEL_DEADLINE_S
            while self._has_daemon and loop.time() < deadline and not self._outcome.done():
                await asyncio.wait({self._outcome}, timeout=0.1)
        if self._outcome.done():
            return self._outcome.result()
        cancel = cancelled.result()
        return m.Outcome(state="stopped", exit_code=cancel.exit_code, reason=cancel.reason, why="cancelled")

    @property
    def _has_daemon(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._daemon.connected and not self._lease.daemon_is_silent(now)

    async def _close(self, daemon: "asyncio.Task[None] | None") -> None:
        await self._rank_processes.close()
        if not self._here_only:
            self._replicas.core.accepting = False
            await self._requeue_memory.at_end(self._outcome.result() if self._outcome.done() else None)
            await self._saving.at_end()
        self._ranks.close()
        self._rings.close()
        await self._state.close()
        await self._replicas.close()
        await self._store.close()
        await self._nccl.close()
        await self._zygote.close()
        if daemon is not None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await self._daemon.flush(FLUSH_DEADLINE_S)
            await end_all([daemon])
        await self._console.flush(FLUSH_DEADLINE_S)
        self._console.close()
        self._versions.close()

    # -------------------------------------------------------------------------------- the daemon

    def _greeting(self) -> list[m.FromAgent]:
        assert self._hello is not None
        return [self._hello, self._told()]

    def _told(self) -> m.AgentState:
        self._seq += 1
        self._told_at = asyncio.get_running_loop().time()
        frozen, former = self._core.frozen is not None, self._versions.former
        return m.AgentState(
            seq=self._seq,
            slots=tuple(slot.told(self._told_at) for slot in self._core.slots),
            assigned=self._core.assignment.generation if self._core.assignment is not None else None,
            frozen=self._core.frozen,
            holdings=self._twins.holdings() if frozen else None,
            former=former.holdings() if frozen and former is not None else None,
            copies=replace(self._versions.copies(), rings=self._rings.told()),
            daemon_pid=self._daemon.daemon_pid,
            doubts=self._twins.check.doubts,
            nccl_unknown=self._nccl.unknown,
        )

    def _changed(self) -> None:
        """Tell the daemon at once."""
        if self._progress is not None:
            self._progress.cancel()
            self._progress = None
        if self._hello is not None:
            self._daemon.send(self._told())

    def _progressed(self) -> None:
        """Tell the daemon soon: steps are many."""
        if self._progress is None:
            loop = asyncio.get_running_loop()
            due = max(0.0, self._told_at + PROGRESS_INTERVAL_S - loop.time())
            self._progress = loop.call_later(due, self._changed)

    def _held(self) -> None:
        """Tell at once what a rank waits for that is about to be here, and soon what else has come."""
        if self._core.arrived(self._versions.newest_whole):
            self._settle()
        self._progressed()

    def _event(self, kind: str, text: str) -> None:
        self._tell_of("warning", kind, text)

    def _ring_event(self, kind: str, text: str) -> None:
        self._tell_of("info" if kind in RING_NEWS else "warning", kind, text)

    def _tell_of(self, level: Literal["info", "warning", "error"], kind: str, text: str) -> None:
        logger.info("%s: %s", kind, text)
        generation = self._core.assignment.generation if self._core.assignment is not None else None
        self._daemon.send(m.AgentEvent(level=level, kind=kind, text=text, generation=generation))

    def _hear(self, message: m.ToAgent | SaveNow) -> None:
        if isinstance(message, m.Announce):
            self._console.write(f"[ckptless] {message.text}\n".encode())
        elif isinstance(message, m.Renewed):
            self._lease.renew(asyncio.get_running_loop().time())
        elif isinstance(message, m.Draw | m.GiveBack):
            self._tell_launcher(message)
        elif isinstance(message, m.JobKey):
            self._replicas.credentials = KeyCredentials(message.key)
            self._saving.learn_key(message.key)
            self._state.learn_key(message.key)
            self._nccl.learn_key(message.key)
        elif isinstance(message, m.Admitted | m.Denied):
            if isinstance(message, m.Admitted) and self._hello is not None:
                self._hello = replace(self._hello, identity=message.identity)
            if not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, m.Ping):
            self._daemon.send(m.Pong(seq=message.seq))
        elif isinstance(message, SaveNow):
            self._saving.save_soon(message, self._daemon.send)
        else:
            self._log(message)
            self._core.obey(message, asyncio.get_running_loop().time())
            self._settle()

    def _log(self, order: m.Order) -> None:
        """Log what comes of a fault, by its id; orders are repeated."""
        current = self._core.assignment.generation if self._core.assignment is not None else 0
        match order:
            case m.Stop() if order.generation == current != self._core.frozen:
                log.always(faults=order.faults)
                logger.info("generation %d stops: %s%s", current, order.reason, log.after(order.faults))
            case m.Assign() if order.assignment.generation > current:
                new = order.assignment
                log.always(generation=new.generation, faults=new.faults)
                logger.info("generation %d (%s)%s", new.generation, new.rung, log.after(new.faults))

    def _tell_launcher(self, message: m.Draw | m.GiveBack) -> None:
        if self._config.draw_dir is not None:
            try:
                if isinstance(message, m.Draw):
                    ask_for_nodes(Path(self._config.draw_dir), message.nodes)
                else:
                    give_back(Path(self._config.draw_dir), message.nodes)
            except OSError as error:
                logger.warning("the launcher cannot be told what nodes the job is to have: %s", error)

    # --------------------------------------------------------------------- what the core asks for

    def _settle(self) -> None:
        """Carry out what the core has asked for since the last time."""
        while self._core.out:
            self._carry_out(self._core.out.pop(0))

    def _carry_out(self, action: a.Action) -> None:  # noqa: C901, PLR0912  # a line for each kind of action
        match action:
            case a.StartProcess():
                self._rank_processes.start(action)
            case a.KillProcess():
                self._rank_processes.kill(action.birth, hung=action.hung)
            case a.PauseProcess():
                self._rank_processes.pause(action.birth, action.for_s)
            case a.KillAgent():
                os.kill(os.getpid(), signal.SIGKILL)
            case a.SendToRank():
                self._rank_processes.send(action.birth, action.message)
            case a.AssignRank():
                self._assign_rank(action)
            case a.PrepareRank():
                part = self._state.assigned(action.assignment, action.rank)
                self._rank_processes.send(action.birth, replace(part, ahead=True))
            case a.GiveAhead():
                self._replicas.core.give_ahead(action.assignment)
            case a.PrefetchState():
                self._state.prefetch(action.rank)
            case a.FollowAssignment():
                self._follow(action.assignment)
            case a.StopAccepting():
                self._replicas.core.accepting = False
            case a.ReleaseReplicas():
                self._replicas.core.release()
            case a.ReportState():
                (self._progressed if action.soon else self._changed)()
            case a.NoteEvent():
                self._event(action.kind, action.text)
            case a.EndJob():
                if not self._outcome.done():
                    self._outcome.set_result(action.outcome)
                    self._here_only = action.here_only

    def _assign_rank(self, action: a.AssignRank) -> None:
        assert self._core.assignment is not None
        if action.fresh:
            self._state.prefetch(action.rank)
            self._rank_processes.promote(action.birth, action.rank)
        self._rank_processes.send(action.birth, self._state.assigned(self._core.assignment, action.rank))

    def _follow(self, assignment: m.Assignment) -> None:
        """Make the services those of a new generation: state first."""
        if assignment.generation == 1 and assignment.places[0].node == self._config.node:
            self._mark(mark_begun)
        self._requeue_memory.follow(assignment)
        self._versions.follow(assignment, self._config.node)
        self._replicas.follow(assignment)
        self._twins.check.follow(assignment.generation)
        self._store.follow(assignment, self._nccl.follow(assignment))
        self._state.follow(assignment)
        self._saving.follow(assignment)
        self._rings.forget(self._core.unused_slots(assignment))

    # --------------------------------------------------------------------------------- the ranks

    def _rank_hung_up(self, link: RankLink) -> None:
        logger.debug("process %d hung up", link.pid)
        self._rings.hung_up(link)

    def _rank_says(self, link: RankLink, message: m.FromRank | FromWriter | FromRing) -> None:
        if isinstance(message, WriterHello | Written):
            self._saving.saver.says(link, message)
            return
        if isinstance(message, FromRing):
            self._rings.says(link, message)
            return
        if isinstance(message, m.Hello):
            check_protocol(message.protocol, "the rank")
            self._rank_processes.welcome(link)
            return
        slot = self._rank_processes.heard(link)
        if slot is None:
            return
        if isinstance(message, m.Pong):
            return
        if isinstance(message, m.Note):
            self._daemon.send(m.AgentEvent(level=message.level, kind=message.kind, text=message.text))
        elif self._core.admits(slot, message.generation, type(message).__name__):
            if isinstance(message, FromTraining):
                self._state.serve(slot, link, message)
            else:
                if isinstance(message, m.Left):
                    self._rank_processes.left(link)
                self._core.advance(slot, message, asyncio.get_running_loop().time())
        self._settle()

    def _stepped(self, slot: Slot, message: m.Commit | m.Stepped, *, first: bool) -> None:
        if isinstance(message, m.Commit):
            self._saving.saver.committed(message.step)
        if first and (new := self._core.assignment) is not None and new.faults:
            text = "generation %d%s: slot %d has made its first step, %d"
            logger.info(text, new.generation, log.after(new.faults), slot.index, message.step)
        self._core.stepped(slot, message, first=first)
        self._settle()
