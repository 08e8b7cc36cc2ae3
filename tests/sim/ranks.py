"""A training process with hooks: what `ckptless.run` does, as far as its agent can see it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.protection import Item

if TYPE_CHECKING:
    from .agents import Agent
    from .world import World

BROKEN_CHANCE = 0.6
NOT_BUILT_CHANCE = 0.1
# Of what a step may take at most, how much a long one does.
LONG = 0.2, 0.4


def trained(value: int, gradient: frozenset[int], step: int) -> int:
    """Return what tensors are after a step: whatever is wrong with one rank's is in everybody's gradients."""
    return hash((value, tuple(sorted(gradient)), step))


SIGKILL = -9


class Process:
    """One process in slot number `slot`, from its fork to its end.

    `stuck`: its main thread does nothing any more, its listener still answers. `stopped`: nothing answers.
    `inside`: between its assignment and the moment it has left its training function.
    """

    def __init__(self, world: "World", agent: "Agent", slot: int, birth: int) -> None:
        self.world, self.agent, self.slot, self.birth = world, agent, slot, birth
        self.pid = world.next_pid()
        self.alive, self.linked = True, False
        self.stuck = self.stopped = False
        self.inside = self._leaving = self._built = False
        self._cut = 0
        self._finished = 0
        self.part: m.Assignment | None = None
        # What it was told to build for ahead.
        self._ahead: m.Assignment | None = None
        self._next: m.Assignment | None = None
        # What it has cut anew of what another number of ranks had.
        self._recut = 0
        # What its tensors are, and what came out of the last all-reduce.
        self.value, self._gradient = 0, frozenset[int]()
        self.generation, self._ended, self._went, self.rank, self.step = 0, 0, 0, -1, -1
        self._acked = (0, -1)
        self._waits: tuple[str, Callable[[], None]] | None = None
        self._reducing = False
        self._turn = 0
        self.raises: str | None = None
        fate = world.start_fate()
        if fate == "hangs":
            self.stuck = True
        elif fate == "dies":
            self._later(0.0, 0.4, lambda: self.die(SIGKILL))
        self._later(0.05, 0.5, self._hello)

    def _later(self, low: float, high: float, action: Callable[[], None]) -> None:
        """The main thread does this next, unless something else happens to it."""
        turn = self._turn

        def act() -> None:
            if self.alive and not self.stuck and not self.stopped and turn == self._turn:
                action()

        self.world.events.after(self.world.random.uniform(low, high), act)

    def _wait(self, what: str, ready: bool, action: Callable[[], None]) -> None:
        if ready:
            action()
        else:
            self._waits = (what, action)

    def _heard(self, what: str) -> None:
        if self._waits is not None and self._waits[0] == what:
            (_, action), self._waits = self._waits, None
            if not self.stuck and not self.stopped:
                action()

    # --------------------------------------------------------------------------- from the agent

    def assigned(self, part: m.Assignment, rank: int) -> None:
        """A new generation, with this rank in it."""
        if self.stuck or self.stopped:
            # As a spare it was no fault; from now on it is one.
            self.world.faulted("latent")
        self.world.checks.built_for(self._ahead, self.rank, part, rank)
        self._ahead = None
        self._next, self.rank = part, rank
        self._ended = max(self._ended, part.generation - 1)
        if self.inside:
            self._leave(m.Cause(kind="stop"))
        elif not self.stuck and not self.stopped:
            self._enter()

    def prepare(self, ahead: m.Assignment, rank: int) -> None:
        """Build for a rank that it is about to get; one in ten raises there."""
        self._ahead, self.rank = ahead, rank
        if self.world.random.random() < NOT_BUILT_CHANCE:
            left = m.Left(
                generation=ahead.generation, cause=m.Cause(kind="raised", text="it cannot be built")
            )
            self._later(0.005, 0.5, lambda: self.agent.says(self, left))
        else:
            self._later(0.005, 0.5, self._prepared)

    def _prepared(self) -> None:
        assert self._ahead is not None
        self._built, self._cut = True, self._ahead.cut
        self.world.prepared += 1
        self.agent.says(self, m.Prepared(generation=self._ahead.generation))

    def stop(self, generation: int) -> None:
        """STOP frees the main thread, wherever it waits, unless it is stuck elsewhere."""
        self._ended = max(self._ended, generation)
        if self.inside and self.generation <= self._ended:
            self._leave(m.Cause(kind="stop"))

    def go(self, generation: int) -> None:
        """Every rank has joined."""
        self._went = max(self._went, generation)
        if self.inside and self._went >= self.generation:
            self._heard("go")

    def acked(self, step: int) -> None:
        """The record of `step` is held elsewhere."""
        self._acked = max(self._acked, (self.generation, step))
        if self._acked >= (self.generation, self.step):
            self._heard("ack")

    def release(self, generation: int) -> None:
        """Every rank has finished. One that was stopped meanwhile has, too: see `Session.wait_assigned`."""
        if generation == self.generation:
            self._finished = generation
            if self.inside:
                self._heard("release")
            else:
                self._end_unless_assigned()

    # ------------------------------------------------------------------------------ its own life

    def _hello(self) -> None:
        self.linked = True
        self.agent.rank_hello(self)

    def _enter(self) -> None:
        assert self._next is not None
        self.part, self._next = self._next, None
        self.generation, self.inside, self._leaving = self.part.generation, True, False
        self._turn += 1
        self._waits, self._reducing = None, False
        self.world.touched = True
        if self.part.restore_step is None or self.part.cut != self._cut:
            self._built = False
        self._cut = self.part.cut
        quick = self._built or self.part.restore_step is None
        self._later(0.005, 0.05 if quick else 0.3, self._join)

    def _join(self) -> None:
        assert self.part is not None
        self._built = True
        self.agent.says(self, m.Joined(generation=self.generation))
        then = self._restored if self.part.restore_step is None else self._fetch
        self._wait("go", self._went >= self.generation, lambda: self._later(0.01, 0.2, then))

    def _fetch(self) -> None:
        assert self.part is not None
        assert self.part.restore_step is not None
        if self.part.former is not None:
            taken = self.agent.replicas.take_parts(self.part, self.part.former, self.part.restore_step)
            error = taken if isinstance(taken, str) else None
            self._recut = taken if isinstance(taken, int) else 0
        else:
            error = self.agent.replicas.fetch(self.part, self.rank, self.part.restore_step)
        if error is None:
            self._later(0.001, 0.05, self._restored)
        else:
            self._later(0.001, 0.05, lambda: self._leave(m.Cause(kind="no-state", text=error)))

    def _restored(self) -> None:
        assert self.part is not None
        self.step = self.part.restore_step or 0
        vault = self.agent.vault
        # Step 0 is the same for all.
        shard = Item("tensors", vault.shard(self.rank))
        if self.part.former is not None:
            self.value = self._recut
        else:
            self.value = vault.contents[shard, self.step].value if self.step else 0
        self.world.checks.restored(self)
        self.world.protected.restored(self)
        self.agent.says(self, m.Restored(generation=self.generation))
        self.agent.commit(self, self.step)
        self._train()

    def _train(self) -> None:
        if self.step < self.world.job.steps:
            self._later(*self._compute_s(), self._reduce)
        else:
            # Where twins are compared the last step, too, counts only then.
            self._wait("ack", self.world.twins == "off" or self._has_ack(), self._finish)

    def _compute_s(self) -> tuple[float, float]:
        stall_s = self.world.spec.limits.stall_s
        if self.step + 1 == self.world.job.long_step:
            return LONG[0] * stall_s, LONG[1] * stall_s
        return self.world.job.compute_s

    def _finish(self) -> None:
        self.agent.says(self, m.Finished(generation=self.generation))
        self._wait("release", False, lambda: self._later(0.0, 0.2, lambda: self.die(0)))

    def _reduce(self) -> None:
        """Enter the all-reduce of the next step: it ends when every rank has entered it."""
        text = self.raises or self.world.job.raises_at(self.rank, self.step + 1)
        if text is not None:
            self.raises = None
            self.world.note_raise(self, text)
            self._leave(m.Cause(kind="raised", text=text))
            return
        self._reducing = True
        self.world.barriers.enter(self)

    @property
    def waits_in(self) -> str:
        """What its main thread waits in; "" where it is at work, or stuck elsewhere."""
        return "reduce" if self._reducing else self._waits[0] if self._waits is not None else ""

    def reduced(self, gradient: frozenset[int]) -> None:
        """Every rank was there. The next step may be committed once the copies of this one are held."""
        if self._leaving:
            return  # the others have its part; it has been called away before it had theirs
        self._reducing = False
        self._gradient = gradient
        ready = self._acked >= (self.generation, self.step)
        self._later(0.0, 0.02, lambda: self._wait("ack", ready or self._has_ack(), self._commit))

    def _has_ack(self) -> bool:
        return self._acked >= (self.generation, self.step)

    def _commit(self) -> None:
        self.step += 1
        self.value = trained(self.value, self._gradient, self.step) + self.world.noise(self.generation)
        self.agent.commit(self, self.step)
        self._train()

    def peer_gone(self) -> None:
        """A rank of this generation died or left: the collective may break before anybody says STOP."""
        if self.world.random.random() < BROKEN_CHANCE:
            self._later(0.0, 0.4, self._broken)

    def _broken(self) -> None:
        if not self._leaving:
            self.agent.says(self, m.Broken(generation=self.generation, text="a collective failed"))
            self._leave(m.Cause(kind="broken", text="a collective failed"))

    def _leave(self, cause: m.Cause) -> None:
        if self._leaving:
            return
        self._leaving = True
        self._turn += 1
        self._waits = None
        self._later(0.005, 0.2, lambda: self._left(cause))

    def _left(self, cause: m.Cause) -> None:
        self.inside = False
        self.world.touched = True
        self.world.barriers.gone(self)
        self.agent.says(self, m.Left(generation=self.generation, cause=cause))
        if self._next is not None:
            self._enter()
        elif self._finished == self.generation:
            self._end_unless_assigned()

    def _end_unless_assigned(self) -> None:
        if self._next is None:
            self._later(0.0, 0.2, lambda: self.die(0))

    def die(self, code: int) -> None:
        """The process ends; its agent hears of it."""
        inside, unfinished = self.inside, self.agent.phase(self) != "finished"
        if self.end():
            self.world.story.tell(self.agent.name, f"process {self.pid} (rank {self.rank}) ends: {code}")
            if code:
                self.world.faulted("death")
                self.world.deaths[(self.agent.node, self.slot)] += 1
            if inside and unfinished:
                self.world.interrupted.append((self.generation, self.rank))
            self.world.events.after(self.world.random.uniform(0.0, 0.01), lambda: self.agent.died(self, code))

    def end(self) -> bool:
        """It is no more; whether it was."""
        was, self.alive = self.alive, False
        if was and self.inside:
            self.inside = False
            self.world.touched = True
            self.world.barriers.gone(self)
        return was


class Barriers:
    """The all-reduces under way: (generation, step) and who has entered."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._inside: dict[tuple[int, int], list[Process]] = {}
        self._torn: set[int] = set()

    def enter(self, process: Process) -> None:
        """A rank waits here until all have come."""
        key = (process.generation, process.step + 1)
        here = self._inside.setdefault(key, [])
        here.append(process)
        self._world.checks.entered(here)
        if process.generation in self._torn:
            process.peer_gone()
        else:
            self._complete(key)

    def _complete(self, key: tuple[int, int]) -> None:
        here, network = self._inside[key], self._world.network
        apart = any(network.apart(here[0].agent.node, each.agent.node) for each in here)
        assert here[0].part is not None
        if len(here) == len(here[0].part.places) and not apart:
            del self._inside[key]
            for each in here:
                each.reduced(frozenset(one.value for one in here))

    def look(self) -> None:
        """The network is whole again."""
        for key in list(self._inside):
            if key[0] not in self._torn:
                self._complete(key)

    def gone(self, process: Process) -> None:
        """A rank is not in its generation any more: whoever waits for it waits in vain."""
        self._torn.add(process.generation)
        for (generation, _), waiting in list(self._inside.items()):
            if generation == process.generation:
                waiting[:] = [each for each in waiting if each is not process]
                for each in waiting:
                    each.peer_gone()
