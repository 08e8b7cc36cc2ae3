"""A fake agent: obeys its daemon's orders as `daemon.agent.service` does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptless.daemon.agent.lease import INTERVAL_S, ROUND, AgentLease, to_ask
from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.transport.messages import CompareTwins, TwinsCompared

from .events import Channel
from .ranks import SIGKILL, Process
from .slots import Slot
from .vault import Replicas, Vault, digest_of

if TYPE_CHECKING:
    from .daemons import Daemon
    from .world import World

RETRY_S = 0.1
PROGRESS_S = 0.25


class Agent:
    """One node's agent; `dark`: it died with its whole node, so that nothing refuses a connection."""

    def __init__(self, world: "World", node: int) -> None:
        self.world, self.node, self.name = world, node, f"agent-{node}"
        self.alive, self.dark, self.deaf = True, False, False
        self.outcome: m.Outcome | None = None
        self.slots = [Slot(index) for index in range(world.spec.slots_per_node)]
        self.vault, self.replicas = Vault(world.job.twins), Replicas(self)
        self.check = TwinCheck(node, world.twins, self._compare, self._changed)
        self.assignment: m.Assignment | None = None
        self.frozen: int | None = None
        self._daemon: Channel[m.FromAgent] | None = None
        self._waiting: dict[tuple[int, int], set[str]] = {}
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

    @property
    def sound(self) -> bool:
        """Whether it does its work."""
        return self.alive and not self.deaf

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
        """As `agent.orphan` does; who does not answer takes all of a round's time."""
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
        slots = tuple(slot.told(self.world.events.now) for slot in self.slots)
        holdings = self.vault.holdings(self.check.tells) if self.frozen is not None else None
        return m.AgentState(
            seq=self._seq,
            slots=slots,
            assigned=self.assignment.generation if self.assignment is not None else None,
            frozen=self.frozen,
            holdings=holdings,
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

    def obey(self, order: m.Order | m.Announce | m.Renewed) -> None:
        """An order of the daemon."""
        if not self.sound:
            return
        match order:
            case m.Stop():
                self._stop(order)
            case m.Assign():
                self._assign(order.assignment)
            case m.Go() | m.Release():
                if self.assignment is not None and order.generation == self.assignment.generation:
                    self._to_ranks(order)
            case m.End():
                self._end(order)

    def _to_ranks(self, order: m.Stop | m.Go | m.Release) -> None:
        for slot in self.slots:
            process = slot.living
            if process is None or not process.linked or self._rank(slot) is None:
                continue
            process.released = isinstance(order, m.Release)
            if isinstance(order, m.Stop):
                process.stop(order.generation)
            elif isinstance(order, m.Go):
                process.go(order.generation)
            else:
                process.release(order.generation)

    def _rank(self, slot: Slot) -> int | None:
        place = m.Place(node=self.node, slot=slot.index)
        return self.assignment.rank_at(place) if self.assignment is not None else None

    def _stop(self, order: m.Stop) -> None:
        if self.assignment is None or order.generation != self.assignment.generation:
            self._changed()
            return
        if self.frozen != order.generation:
            self.frozen = order.generation
            self.replicas.accepting = False
            self._to_ranks(order)
            for slot in self.slots:
                process = slot.living
                if process is not None and not process.linked and self._rank(slot) is not None:
                    self._retire(slot, process)
                    self._enter(slot, "exited", slot.generation, m.Cause(kind="stop"))
        for place in order.kill:
            if place.node == self.node:
                self._kill_hung(self.slots[place.slot])
        self._changed()

    def _assign(self, assignment: m.Assignment) -> None:
        if self.assignment is not None and assignment.generation <= self.assignment.generation:
            self._changed()
            return
        self.assignment, self.frozen = assignment, None
        self.world.story.tell(self.name, f"accepts generation {assignment.generation}")
        self.vault.drop_after(assignment.restore_step)
        self.vault.drop_unnamed(assignment, self.node)
        self.check.follow(assignment.generation)
        self._waiting.clear()
        self.replicas.follow(assignment)
        for slot in self.slots:
            slot.committed = False
            self._settle(slot, assignment)
        self._changed()

    def _settle(self, slot: Slot, assignment: m.Assignment) -> None:
        place = m.Place(node=self.node, slot=slot.index)
        rank, process = assignment.rank_at(place), slot.living
        if rank is None:
            if process is not None and slot.step is not None:
                self._retire(slot, process)
                self._enter(slot, "empty", assignment.generation)
            elif slot.process is None and slot.phase == "empty":
                self._occupy(slot, 0)
        elif process is None or not process.linked or place in assignment.renew:
            if process is not None:
                self._retire(slot, process)
            self._occupy(slot, assignment.generation)
        else:
            self._tell_rank(slot, process, assignment, rank)

    def _occupy(self, slot: Slot, generation: int) -> None:
        slot.hooked, slot.exit_code = False, None
        slot.process = Process(self.world, self, slot)
        self._enter(slot, "starting", generation)

    def _tell_rank(self, slot: Slot, process: Process, assignment: m.Assignment, rank: int) -> None:
        self._enter(slot, "assigned", assignment.generation)
        process.assigned(assignment, rank)

    def _end(self, order: m.End) -> None:
        if self.outcome is None and not order.here_only:
            self.outcome = order.outcome
        self.world.story.tell(self.name, f"ends: {order.outcome.reason}")
        if order.here_only and order.outcome.why == "no-quorum":
            self.world.living.fences(self.node, order.outcome.reason)
        self.die(dark=False)

    def die(self, *, dark: bool) -> None:
        """The agent and its processes are no more; an ended agent hangs up as a killed one does."""
        self.alive, self.dark = False, dark
        for slot in self.slots:
            if slot.process is not None:
                slot.process.end()
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

    def _enter(self, slot: Slot, phase: m.Phase, generation: int, cause: m.Cause | None = None) -> None:
        slot.phase, slot.generation, slot.cause = phase, generation, cause
        slot.since = self.world.events.now

    def _retire(self, slot: Slot, process: Process) -> None:
        process.retired = True
        slot.process = None
        process.end()

    def _kill_hung(self, slot: Slot) -> None:
        if slot.living is not None:
            slot.living.hung = True
            slot.living.die(SIGKILL)

    def silent(self, process: Process) -> None:
        """It did not answer for too long."""
        if self.sound and process.alive and process.linked and not process.released:
            process.hung = True
            process.die(SIGKILL)

    def rank_hello(self, process: Process) -> None:
        """A process is there."""
        slot = process.slot
        if slot.process is not process or not self.sound:
            return
        slot.hooked = True
        rank = self._rank(slot)
        if self.assignment is not None and rank is not None and self.frozen is None:
            self._tell_rank(slot, process, self.assignment, rank)
        else:
            self._enter(slot, "waiting", slot.generation)
        self._changed()

    def says(self, process: Process, what: str, cause: m.Cause | None = None) -> None:
        """A rank's own word on how far it is; of an old generation it is refused."""
        slot = process.slot
        if slot.process is not process or process.generation != slot.generation or not self.sound:
            return
        match what:
            case "left":
                assert cause is not None
                self._enter(slot, "left", process.generation, cause)
                if cause.kind != "stop":
                    self.world.story.tell(self.name, f"rank {process.rank} left: {cause.kind} {cause.text}")
            case "broken":
                slot.cause, slot.since = (
                    m.Cause(kind="broken", text="a collective failed"),
                    self.world.events.now,
                )
            case "joined" | "restored" | "finished":
                self._enter(slot, what, process.generation)
        self._changed()

    def died(self, process: Process, code: int) -> None:
        """The process of a slot has ended."""
        slot = process.slot
        if slot.process is not process or not self.sound:
            return
        cause: m.Cause | None = m.Cause(kind="died", text=f"ended with {code}")
        if process.retired:
            cause = m.Cause(kind="stop")
        elif code == 0 and (slot.phase == "finished" or process.released or not process.linked):
            cause = None
        elif process.hung:
            cause = m.Cause(kind="hung", text="did not answer and was killed")
        slot.exit_code = code
        self._enter(slot, "exited", slot.generation, cause)
        self._changed()

    # ------------------------------------------------------------------------------------- state

    def commit(self, process: Process, step: int) -> None:
        """A rank's commit; refused while frozen."""
        slot, assignment = process.slot, self.assignment
        if assignment is None or process.generation != slot.generation or not self.sound:
            return
        if self.frozen is not None:
            return
        rank, shard = process.rank, self.vault.shard(process.rank)
        writes = rank == min(r for r in assignment.ranks_on(self.node) if self.vault.shard(r) == shard)
        self._waiting[(rank, step)] = {"record", "tensors", "twins"} if writes else {"record"}
        if writes and step != assignment.restore_step:
            self.vault.put("tensors", shard, step)
            self.vault.contents[shard, step] = rank, process.value
        self.vault.put("record", rank, step)
        self.world.checks.committed(process, step)
        slot.step = step
        first = step > (assignment.restore_step or 0) and not slot.committed
        slot.committed = slot.committed or first
        self.replicas.push("record", rank, step, lambda: self._acked(rank, step, "record"))
        if writes:
            self.replicas.push("tensors", shard, step, lambda: self._acked(rank, step, "tensors"))
            ranks = range(shard, min(shard + self.vault.twins, len(assignment.places)))
            nodes = tuple({assignment.places[twin].node for twin in ranks})
            done = lambda: self._acked(rank, step, "twins")  # noqa: E731
            self.check.committed((shard, step), rank, digest_of(process.value), nodes, done)
        if first:
            self._changed()
        else:
            self._progressed()

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
        waiting = self._waiting.get((rank, step))
        if waiting is None:
            return
        waiting.discard(what)
        if waiting:
            return
        del self._waiting[(rank, step)]
        for slot in self.slots:
            if self._rank(slot) == rank and slot.living is not None and slot.living.linked:
                slot.living.acked(step)
