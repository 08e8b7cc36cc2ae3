"""An agent: the shipped core, with simulated processes, replicas and connections around it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptless.daemon.agent.core import actions as a
from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.lease import INTERVAL_S, ROUND, AgentLease, to_ask
from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.messages import CompareTwins, TwinsCompared
from ckptless.daemon.replication.protection import Item

from .events import Channel
from .ranks import SIGKILL, Process
from .vault import Content, Replicas, Vault, digest_of

if TYPE_CHECKING:
    from .daemons import Daemon
    from .world import World

RETRY_S = 0.1
PROGRESS_S = 0.25
FORK_S = 0.02
# How its ranks get on is looked at so often; one that stands still for so long is late: less than the longest
# steps take.
STILL_LOOK_S, STILL_S = 0.5, 1.5


class Agent:
    """One node's agent; `dark`: it died with its whole node, so that nothing refuses a connection."""

    def __init__(self, world: "World", node: int) -> None:
        self.world, self.node, self.name = world, node, f"agent-{node}"
        self.alive, self.dark, self.deaf, self.died_at = True, False, False, 0.0
        self.outcome: m.Outcome | None = None
        self.core = AgentCore(node, world.spec.slots_per_node, world.spec.limits.pong_s)
        self.processes: dict[int, Process] = {}
        self.vault, self.replicas = Vault(world.job.twins), Replicas(self)
        self.check = TwinCheck(node, world.twins, self._compare, self._changed)
        self._daemon: Channel[m.FromAgent] | None = None
        # Of each rank's step what is not held yet where it is to be, and since when it is given.
        self.waiting: dict[tuple[int, int], tuple[set[str], float]] = {}
        # Slots that have made a step in this generation.
        self._moved: set[int] = set()
        self._seq = 0
        self._telling = False
        address = f"10.0.0.{node}"
        info = m.NodeInfo(
            node=node,
            name=f"node-{node}",
            address=address,
            agent_port=1,
        )
        self._hello = m.AgentHello(protocol=m.PROTOCOL, spec=world.spec, info=info, pid=1000 + node)
        self.lease = AgentLease(world.spec.limits.lease_s, 0.0)
        self._keep_lease()
        # Where each process was seen, and since when it is there.
        self._stood: dict[int, tuple[object, float]] = {}
        self._look()

    @property
    def sound(self) -> bool:
        """Whether it does its work."""
        return self.alive and not self.deaf

    @property
    def assignment(self) -> m.Assignment | None:
        """The newest that it has accepted."""
        return self.core.assignment

    @property
    def slots(self) -> list[Slot]:
        """Those of its core."""
        return self.core.slots

    @property
    def living(self) -> list[Process]:
        """All processes that are not dead, known or not."""
        return [process for process in self.processes.values() if process.alive]

    def phase(self, process: Process) -> m.Phase:
        """The phase of the slot that a process is in."""
        return self.core.slots[process.slot].phase

    # -------------------------------------------------------------------------------- the daemon

    def connect(self) -> None:
        """Greet the daemon as soon as there is one."""
        if not self.sound or self._daemon is not None:
            return
        daemon = self.world.daemons.get(self.node)
        if daemon is None:
            self.world.events.after(RETRY_S, self.connect)
            return
        self._daemon = self.world.channel(daemon.agent_says)
        daemon.agent_connected(self)
        self._daemon.send(self._hello)
        self._daemon.send(self._told())

    def say(self, message: m.FromAgent) -> None:
        """To the daemon, where there is one."""
        if self._daemon is not None:
            self._daemon.send(message)

    def hold(self, until: float) -> None:
        """Its daemon hears nothing of it before then."""
        if self._daemon is not None:
            self._daemon.hold(until)

    def daemon_gone(self, daemon: "Daemon") -> None:
        """The connection is no more; what was under way is lost."""
        if self._daemon is not None:
            self._daemon.cut()
            self._daemon = None
            self.world.events.after(RETRY_S, self.connect)

    def _keep_lease(self) -> None:
        """As `agent.lease` does; who does not answer takes all of a round's time."""
        world = self.world
        if not self.sound:
            return
        began, round_s = world.events.now, 0.0
        if self.lease.must_ask(began):
            infos = self.assignment.nodes if self.assignment is not None else ()
            asked = to_ask([info.node for info in infos])
            heard = {node for node in asked if node == self.node or self._answers(world.agents[node])}
            refused = {node for node in asked if not world.agents[node].alive and not world.agents[node].dark}
            round_s = ROUND * self.lease.lease_s if set(asked) - heard - refused else 0.0
            world.events.after(round_s, lambda: self._asked(asked, heard, began))
        world.events.after(round_s + INTERVAL_S, self._keep_lease)

    def _answers(self, other: "Agent") -> bool:
        return other.sound and not self.world.network.apart(self.node, other.node)

    def _asked(self, asked: tuple[int, ...], heard: set[int], began: float) -> None:
        self.lease.asked(asked, heard, began)
        if self.sound and self.lease.over(self.world.events.now):
            text = f"of {len(asked)} it heard {len(heard)}"
            self.world.story.tell(self.name, f"ends its ranks: {text}")
            self.world.living.fences(self.node, text)
            self.die(dark=False)

    def _told(self) -> m.AgentState:
        self._seq += 1
        core, now = self.core, self.world.events.now
        holdings = self.vault.holdings(self.check.tells) if core.frozen is not None else None
        former = self.vault.former
        if holdings is not None:
            parts = (holdings,) if former is None else (holdings, former.holdings())
            self.world.protected.told(self, *parts)
        return m.AgentState(
            seq=self._seq,
            slots=tuple(slot.told(now) for slot in core.slots),
            assigned=core.assignment.generation if core.assignment is not None else None,
            frozen=core.frozen,
            holdings=holdings,
            former=former.holdings() if former is not None and core.frozen is not None else None,
            doubts=self.check.doubts,
        )

    def _changed(self) -> None:
        if self._daemon is not None and self.sound:
            self._daemon.send(self._told())

    def _progressed(self) -> None:
        """Steps are many: tell of them soon."""
        if not self._telling:
            self._telling = True
            self.world.events.after(PROGRESS_S, self._tell_progress)

    def _tell_progress(self) -> None:
        self._telling = False
        if self.alive:
            self._changed()

    def obey(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        """An order of the daemon."""
        if self.sound and isinstance(order, m.Draw):
            self.world.drawing.asked(order.nodes)
        if self.sound and isinstance(order, m.Order):
            self.core.obey(order, self.world.events.now)
            if isinstance(order, m.Strike) and self.core.out:
                self.world.struck += 1
                self.world.faulted("drill")
            self._settle()

    def _settle(self) -> None:
        """Carry out what the core has asked for, as `agent.service` does."""
        while self.core.out:
            self._carry_out(self.core.out.pop(0))

    def _carry_out(self, action: a.Action) -> None:  # noqa: PLR0912  # a line for each kind of action
        match action:
            case a.StartProcess():
                fork_s = self.world.random.uniform(0.0, FORK_S)
                self.world.events.after(fork_s, lambda: self._fork(action))
            case a.KillProcess():
                self._kill(self.processes[action.birth])
            case a.KillAgent():
                self.die(dark=False)
            case a.SendToRank():
                self._send(self.processes[action.birth], action.message)
            case a.AssignRank():
                assert self.core.assignment is not None
                self.processes[action.birth].assigned(self.core.assignment, action.rank)
            case a.PrepareRank():
                self.processes[action.birth].prepare(action.assignment, action.rank)
            case a.GiveAhead():
                self.replicas.core.give_ahead(action.assignment)
            case a.FollowAssignment():
                self._follow(action.assignment)
            case a.StopAccepting():
                self.replicas.core.accepting = False
            case a.ReportState():
                (self._progressed if action.soon else self._changed)()
            case a.NoteEvent():
                self.say(m.AgentEvent(level="warning", kind=action.kind, text=action.text))
            case a.EndJob():
                self._end(action)
            case a.ReleaseReplicas():
                self.replicas.core.release()
            case a.PrefetchState() | a.PauseProcess():
                pass  # here they only take time

    def _follow(self, assignment: m.Assignment) -> None:
        self.world.protected.goes_on(self)
        self.world.story.tell(self.name, f"accepts generation {assignment.generation}")
        self.vault.follow(assignment, self.node)
        self.check.follow(assignment.generation)
        self.waiting.clear()
        self._moved.clear()
        self.replicas.follow(assignment)

    def arrived(self) -> None:
        """Something has come that is held here."""
        if self.core.arrived(self.vault.newest_whole):
            self.world.got_ahead += 1
            self._settle()

    def _end(self, end: a.EndJob) -> None:
        if self.outcome is None and not end.here_only:
            self.outcome = end.outcome
        self.world.story.tell(self.name, f"ends: {end.outcome.reason}")
        if end.here_only and end.outcome.why == "no-quorum":
            self.world.living.fences(self.node, end.outcome.reason)
        self.die(dark=False)

    def die(self, *, dark: bool) -> None:
        """The agent and its processes are no more; an ended agent hangs up as a killed one does."""
        self.alive, self.dark, self.died_at = False, dark, self.world.events.now
        self.core.out.clear()
        for process in self.processes.values():
            process.end()
        if self._daemon is not None:
            daemon = self.world.daemons.get(self.node)
            if daemon is not None:
                self._daemon.finish(daemon.agent_hung_up)
            self._daemon = None
        if not dark:
            for other in self.world.agents.values():
                self.world.soon(lambda agent=other: agent.lost(self.node))  # type: ignore[misc]

    def lost(self, node: int) -> None:
        """Another agent has hung up."""
        self.replicas.lost(node)
        self.check.lost(node, "it has hung up")

    # --------------------------------------------------------------------------------- the ranks

    def _fork(self, start: a.StartProcess) -> None:
        if not self.sound:
            return
        process = self.processes[start.birth] = Process(self.world, self, start.slot, start.birth)
        self.core.born(start.slot, start.birth, process.pid, self.world.events.now)
        self._settle()

    def _kill(self, process: Process) -> None:
        if self.core.occupied(process.birth) is None:
            process.end()  # its time is over: no fault
        else:
            process.die(SIGKILL)

    @staticmethod
    def _send(process: Process, message: m.ToRank) -> None:
        match message:
            case m.Stop():
                process.stop(message.generation)
            case m.Go():
                process.go(message.generation)
            case m.Release():
                process.release(message.generation)

    def silent(self, process: Process) -> None:
        """It did not answer for too long; all others did."""
        if self.sound and process.alive:
            for other in self.living:
                if other is not process:
                    self.core.heard(other.birth, self.world.events.now)
            self.core.check_answers(0.0, self.world.events.now)
            self._settle()

    def rank_hello(self, process: Process) -> None:
        """A process is there."""
        if self.sound:
            self.core.hello(process.birth, self.world.events.now)
            self._settle()

    def says(
        self,
        process: Process,
        message: m.Prepared | m.Left | m.Broken | m.Joined | m.Restored | m.Finished,
    ) -> None:
        """A rank's own word on how far it is; of an old generation it is refused."""
        slot = self.core.occupied(process.birth)
        if slot is None or not self.sound:
            return
        if self.core.admits(slot, message.generation, type(message).__name__):
            if isinstance(message, m.Left) and message.cause.kind != "stop":
                why = f"{message.cause.kind} {message.cause.text}"
                self.world.story.tell(self.name, f"rank {process.rank} left: {why}")
            self.core.advance(slot, message, self.world.events.now)
        self._settle()

    def died(self, process: Process, code: int) -> None:
        """A process has ended."""
        if self.sound:
            self.core.exited(process.birth, code, f"ended with {code}", self.world.events.now)
            self._settle()

    def _look(self) -> None:
        """Look how its ranks get on, as `ranks.standing` does; of one in three it says the wrong thing."""
        now = self.world.events.now
        for process in self.living if self.sound else ():
            self.core.stands(process.birth, self._still(process, now))
        self._settle()
        if self.alive:
            self.world.events.after(STILL_LOOK_S, self._look)

    def _still(self, process: Process, now: float) -> m.Still | None:
        slot = self.core.occupied(process.birth)
        at = process.generation, process.step, process.waits_in
        if slot is None or slot.phase != "restored" or self._stood.get(process.birth, (None, now))[0] != at:
            self._stood[process.birth] = at, now
            return None
        still_s = now - self._stood[process.birth][1]
        if still_s < STILL_S:
            return None
        wrong, works = process.pid % 3 == 0, not process.stuck
        group = "" if process.waits_in != "reduce" else "0"
        call = m.Call(
            group=group, size=self.world.spec.world_size, number=process.step, operation="allreduce"
        )
        return m.Still(
            still_s=still_s,
            late=True,
            how="stopped" if process.stopped else "working" if works != wrong else "asleep",
            phase="compute",
            longest_s=0.1,
            call=call if process.waits_in else None,
        )

    # ------------------------------------------------------------------------------------- state

    def commit(self, process: Process, step: int) -> None:
        """A rank's commit; refused while frozen."""
        slot, assignment = self.core.occupied(process.birth), self.assignment
        if assignment is None or slot is None or process.generation != slot.generation or not self.sound:
            return
        if self.core.frozen is not None:
            return
        rank, shard = process.rank, self.vault.shard(process.rank)
        writes = rank == min(r for r in assignment.ranks_on(self.node) if self.vault.shard(r) == shard)
        what = {"record", "tensors", "twins"} if writes else {"record"}
        self.waiting[(rank, step)] = what, self.world.events.now
        made = step != assignment.restore_step or assignment.former is not None
        if writes and made:
            self.vault.put(Item("tensors", shard), step, Content(rank, process.generation, process.value))
        if made:
            self.vault.put(Item("record", rank), step, Content(rank, process.generation, step))
        self.world.checks.committed(process, step)
        self.world.protected.committed(process, step)
        new = step > (assignment.restore_step or 0)
        first = new and slot.index not in self._moved
        if new:
            self._moved.add(slot.index)
        told = m.Stepped(generation=process.generation, step=step, loss=None, every=1, share=None)
        self.core.stepped(slot, told, first=first)
        self.replicas.push(Item("record", rank), step, lambda: self._acked(rank, step, "record"))
        if writes:
            self.replicas.push(Item("tensors", shard), step, lambda: self._acked(rank, step, "tensors"))
            ranks = range(shard, min(shard + self.vault.twins, len(assignment.places)))
            nodes = tuple({assignment.places[twin].node for twin in ranks})
            done = lambda: self._acked(rank, step, "twins")  # noqa: E731
            self.check.committed((shard, step), rank, digest_of(process.value), nodes, done)
        self._settle()

    def _compare(self, node: int, message: CompareTwins) -> None:
        """To the next twin's agent and back."""
        other, world = self.world.agents[node], self.world

        def back(answer: TwinsCompared) -> None:
            self._carry(other, lambda: self.check.answered(answer) if self.sound else None)

        self._carry(other, lambda: other.check.asked(message, back) if other.sound else None)
        if not other.alive and not other.dark:
            world.soon(lambda: self.check.lost(node, "it is gone"))

    def _carry(self, other: "Agent", action: Callable[[], None]) -> None:
        world = self.world
        delay_s = world.twin_chance.uniform(0.0005, 0.05)
        world.events.after(delay_s, lambda: world.network.when_joined(self.node, other.node, action))

    def _acked(self, rank: int, step: int, what: str) -> None:
        """Every holder has it."""
        if (rank, step) not in self.waiting:
            return
        self._held(rank, step, what)
        waiting, _ = self.waiting[(rank, step)]
        waiting.discard(what)
        if waiting:
            return
        del self.waiting[(rank, step)]
        for slot in self.core.slots:
            if self.core.rank(slot) == rank and slot.occupant is not None:
                self.processes[slot.occupant.birth].acked(step)

    def _held(self, rank: int, step: int, what: str) -> None:
        assert self.assignment is not None
        shard = self.vault.shard(rank)
        if what == "record":
            self.world.protected.acked(self, Item("record", rank), step)
        elif what == "tensors" and self.assignment.places[shard].node == self.node:
            self.world.protected.acked(self, Item("tensors", shard), step)
