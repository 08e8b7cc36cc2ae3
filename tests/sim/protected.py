"""What must hold of replicas: that what agents acknowledge, tell, give back and restore is true.

An acknowledged step is on as many nodes as promised; what a frozen agent told stays so; what is given back is
held elsewhere; what is restored was committed, and trained by all ranks in one generation. All by what agents
really hold. A step that is done again comes out otherwise, as it may on devices, so that generations differ.
"""

from typing import TYPE_CHECKING, NamedTuple

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.protection import Item

from .story import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .agents import Agent
    from .ranks import Process
    from .vault import Content
    from .world import World

COPIES = 2
LOOK_S = 0.25
# So long after a node is lost, what it held is held by another. Tensors take 0.4 s, more on a busy link.
REMADE_S = 3.0
# So long after an agent's end all others know of it, where its machine lives.
KNOWN_S = 0.3
# So long a commit waits for its holders at most.
ACKED_S = 4.0


class Made(NamedTuple):
    """A version of an item as it was committed: in which generation it was trained, and what is in it."""

    generation: int
    value: int


class Protected:
    """`made` is the truth: of each item's step, in each cut, the version on the line that is followed."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.made: dict[tuple[int, Item, int], Made] = {}
        # What each frozen agent has told that it holds.
        self._told: dict[int, tuple[m.Holdings, ...]] = {}
        # Of each item the newest step that is acknowledged, the agent that gave it, and its generation.
        self._acked: dict[Item, tuple[int, Agent, int]] = {}
        # How often each check had something to check.
        self.looked = 0
        world.events.after(LOOK_S, self._look)

    # -------------------------------------------------------------------------- who holds what

    def _others(self, agent: "Agent") -> "list[Agent]":
        """The other agents of its generation."""
        assert agent.assignment is not None
        return [self._world.agents[info.node] for info in agent.assignment.nodes if info.node != agent.node]

    def _steady(self, agent: "Agent", other: "Agent") -> bool:
        """Whether nothing has ever kept one from the other."""
        return other.sound and not self._world.network.ever & {agent.node, other.node}

    def _promised(self, agent: "Agent", item: Item) -> "tuple[int, set[int]]":
        """How many others are to hold an item at least, and who of them has it from a rank of its own."""
        assert agent.assignment is not None
        others = [other.node for other in self._others(agent) if self._steady(agent, other)]
        places = agent.assignment.places
        if item.kind == "record":
            return min(COPIES, len(others)), set()
        ranks = range(item.number, min(item.number + agent.vault.twins, len(places)))
        twins = {places[rank].node for rank in ranks}
        if len(twins) > 1 and twins == set(agent.assignment.ranks_by_node):
            return 0, twins  # see Holders.of_shared
        return min(COPIES, len(twins) - 1 + len(set(others) - twins)), twins - {agent.node}

    def _missing(self, agent: "Agent", item: Item, step: int, others: "Iterable[Agent]") -> str | None:
        """Return who has too few of an item's replicas, as a sentence; None where there are enough."""
        wanted, twins = self._promised(agent, item)
        have = twins | {other.node for other in others if self._has(agent, other, item, step)}
        if len(have) >= wanted:
            return None
        return (
            f"step {step} of {item.kind} {item.number}, given by {agent.name}, is held by {sorted(have)} only"
        )

    @staticmethod
    def _has(agent: "Agent", other: "Agent", item: Item, step: int) -> bool:
        """Whether it has that step or a newer one, or has gone on to another generation, with other steps."""
        assert agent.assignment is not None
        at = other.assignment.generation if other.assignment is not None else 0
        return at > agent.assignment.generation or any(s >= step for s in other.vault.steps(item))

    # ------------------------------------------------------------------------------ commits

    def committed(self, process: "Process", step: int) -> None:
        """A rank's step is in its agent's memory. The restored one, committed again, is what it was."""
        vault = process.agent.vault
        for item in (Item("record", process.rank), Item("tensors", vault.shard(process.rank))):
            content = vault.contents.get((item, step))
            if content is None or step == 0:
                continue  # another twin writes it, or nothing has been trained
            assert process.part is not None
            if step != process.part.restore_step or process.part.former is not None:
                self.made[process.part.cut, item, step] = Made(content.generation, content.value)

    def acked(self, agent: "Agent", item: Item, step: int) -> None:
        """A rank is told that others hold its step."""
        assert agent.assignment is not None
        # A holder that died since has had it; after a while its end is known, if it has hung up.
        since = self._world.events.now - KNOWN_S
        others = [o for o in self._others(agent) if o.alive or o.dark or o.died_at > since]
        missing = self._missing(agent, item, step, others)
        if missing is not None:
            raise Violation(f"acknowledged: {missing}")
        self._acked[item] = step, agent, agent.assignment.generation

    def takes(self, agent: "Agent", item: Item, step: int, generation: int) -> None:
        """An agent holds a version trained in `generation`: after the restored step only one of its own."""
        assignment = agent.assignment
        restored = (assignment.restore_step or 0) if assignment is not None else 0
        if assignment is not None and step > restored and generation != assignment.generation:
            text = f"step {step} of {item.kind} {item.number} as it was in generation {generation}"
            raise Violation(f"{agent.name}, in generation {assignment.generation}, takes {text}")

    def _look(self) -> None:
        """Where a holder is lost another has taken its place, however long the step is."""
        world = self._world
        if world.over:
            return
        world.events.after(LOOK_S, self._look)
        if world.events.now - world.living.steady_since < REMADE_S or world.network.broken:
            return
        able = {node for node, agent in world.agents.items() if self._replicates(agent)}
        for item, (step, agent, generation) in self._acked.items():
            if agent.node not in able or generation != world.generation:
                continue
            self.looked += 1
            missing = self._missing(agent, item, step, [o for o in self._others(agent) if o.sound])
            if missing is not None:
                raise Violation(f"not made again: {missing}")
        for node in able:
            agent = world.agents[node]
            for (rank, step), (what, since) in agent.waiting.items():
                if what & {"record", "tensors"} and world.events.now - since > ACKED_S:
                    raise Violation(f"step {step} of rank {rank}, on {agent.name}, is acknowledged by nobody")

    def _replicates(self, agent: "Agent") -> bool:
        """Whether an agent is in the newest generation, and nothing keeps it from others and from theirs."""
        world, assignment = self._world, agent.assignment
        if assignment is None or assignment.generation != world.generation or world.ending:
            return False
        if not agent.sound or agent.core.frozen is not None or not agent.replicas.core.nodes:
            return False
        # Who does not answer, and has not hung up, is only given up with the generation. Who is frozen
        # takes nothing, nor who has not heard of the generation.
        others = self._others(agent)
        ready = [
            other.assignment is not None and other.assignment.generation == world.generation
            for other in others
            if other.alive
        ]
        return all(ready) and not any(o.dark or o.deaf or o.core.frozen is not None for o in others)

    def gives_back(self, agent: "Agent", item: Item) -> None:
        """An agent gives back only what others have something newer of: all that are to hold it."""
        newest = agent.vault.newest(item)
        others = self._others(agent)
        home = {other.node for other in others if other.node in self._homes(agent, item)}
        wanted = min(COPIES + len(home), sum(self._steady(agent, other) for other in others))
        if item.kind == "tensors":
            # Twins count as holders, and may be all that there are.
            wanted = min(wanted, max(1, len(home)))
        have = [other.node for other in others if self._has(agent, other, item, newest + 1)]
        if len(have) < wanted:
            text = f"{item.kind} {item.number}, of which only {have} have more than step {newest}"
            raise Violation(f"{agent.name} gives back {text}")

    @staticmethod
    def _homes(agent: "Agent", item: Item) -> set[int]:
        assert agent.assignment is not None
        places = agent.assignment.places
        last = item.number + (agent.vault.twins if item.kind == "tensors" else 1)
        return {places[rank].node for rank in range(item.number, min(last, len(places)))}

    # --------------------------------------------------------------------------- recoveries

    def told(self, agent: "Agent", *holdings: m.Holdings) -> None:
        """A frozen agent tells what it holds of each cut; what it has told before it still has."""
        self._still(agent)
        self._told[agent.node] = holdings

    def goes_on(self, agent: "Agent") -> None:
        """An agent follows a new assignment: until here it was bound to what it has told."""
        self._still(agent)
        self._told.pop(agent.node, None)

    def _still(self, agent: "Agent") -> None:
        for holdings in self._told.get(agent.node, ()):
            told = [(Item("tensors", number), steps) for number, steps in holdings.tensors]
            told += [(Item("record", number), steps) for number, _, steps in holdings.records]
            vault = agent.vault.of(holdings.cut)
            for item, steps in told:
                if gone := set(steps) - (vault.steps(item) if vault is not None else set()):
                    text = f"steps {sorted(gone)} of {item.kind} {item.number}"
                    raise Violation(f"{agent.name} has told while it was frozen of {text}, and has lost them")

    def assigned(self, new: m.Assignment) -> None:
        """An assignment is agreed on: who is named as a holder is one."""
        step = new.restore_step
        if step is None:
            return
        source, cut = new.former or new, new.former.cut if new.former is not None else new.cut
        named = [(Item("tensors", shard), nodes) for shard, nodes in source.tensor_nodes]
        named += [(Item("record", rank), nodes) for rank, nodes in enumerate(source.record_nodes)]
        for item, nodes in named:
            for agent in [self._world.agents[node] for node in nodes]:
                at = agent.assignment.generation if agent.assignment is not None else 0
                vault = agent.vault.of(cut)
                if at < new.generation and not (vault is not None and vault.has(item, step)):
                    raise Violation(f"{agent.name} is said to hold step {step} of {item}, and does not")

    def fetches(self, assignment: m.Assignment, item: Item, step: int, giver: "Agent") -> None:
        """A rank asks for its state somebody who can be reached, and of whom the assignment says it."""
        at = giver.assignment.generation if giver.assignment is not None else 0
        vault = giver.vault.of(assignment.former.cut if assignment.former is not None else assignment.cut)
        if at == assignment.generation and not (vault is not None and vault.has(item, step)):
            raise Violation(f"{giver.name} is to give step {step} of {item}, and has lost it")

    def restored(self, process: "Process") -> None:
        """A rank has its state back: that which was committed last, in one generation by all."""
        part, vault = process.part, process.agent.vault
        assert part is not None
        step = part.restore_step
        if not step or part.former is not None:
            return
        for item in (Item("record", process.rank), Item("tensors", vault.shard(process.rank))):
            content, truth = vault.contents[item, step], self.made[part.cut, item, step]
            if not self._world.flips and (content.generation, content.value) != truth:
                raise Violation(f"rank {process.rank} goes on with {content} as step {step}, not {truth}")
        self._of_one_line(part.cut, step)

    def _of_one_line(self, cut: int, step: int) -> None:
        origins = {made.generation for (of, _, at), made in self.made.items() if (of, at) == (cut, step)}
        if len(origins) > 1:
            raise Violation(f"step {step} is restored, of which parts are of generations {sorted(origins)}")

    def cut_anew(self, cut: int, step: int, found: "Mapping[Item, Content]") -> None:
        """A rank has taken its part of what others had: what was committed last, in one generation."""
        for item, content in found.items():
            truth = self.made.get((cut, item, step))
            if step and not self._world.flips and (content.generation, content.value) != truth:
                raise Violation(f"{content} is cut anew as {item} of step {step}, not {truth}")
        if step:
            self._of_one_line(cut, step)
