"""What must hold, always: checked by what really happens, not by what the control plane believes."""

from collections import Counter
from typing import TYPE_CHECKING

from ckptless.daemon.ckptlessd.consensus.quorum import first_decree, is_quorum
from ckptless.daemon.ckptlessd.membership.watch import ASKED
from ckptless.daemon.ckptlessd.recovery.events import NodeLost
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Accepted, Decree, Durable, Promise, Say
from ckptless.daemon.protocol.peers.messages import Standing

from .story import Violation

if TYPE_CHECKING:
    from .agents import Agent
    from .daemons import Daemon
    from .ranks import Process
    from .vault import Vault
    from .world import World

BEFORE_ANY = -1
# What was seen before a network broke, or was whole again, may be believed for so long.
RECENTLY_S = 0.5
# A question about a node is asked again and again, as long as nobody has answered it.
ASKED_OFTEN_S = 1.5
# So long after an order at the latest, everybody who is connected has heard it.
HEARD_S = 0.5


def _has(durable: Durable, decree: Decree) -> bool:
    """Whether a disk has it, as chosen or as a vote."""
    return durable.known.index >= decree.index or (durable.vote is not None and durable.vote.decree == decree)


class Checks:
    """The ledger of the truth: `newest[rank]` is its newest committed step on the line that is followed."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.newest = dict.fromkeys(range(world.spec.world_size), BEFORE_ANY)
        self.outcome: m.Outcome | None = None
        # What ranks are numbered by.
        self.cut = 1
        self._decrees = {0: first_decree(tuple(range(world.spec.nodes + world.spec.spares)))}
        self._seen: dict[Daemon, set[int]] = {}
        # What each daemon has said last of the job's end.
        self._told: dict[Daemon, m.Outcome] = {}
        # How nodes were stopped by themselves.
        self._alone: set[m.Outcome] = set()
        self._running: dict[int, float] = {}
        self._stopped: set[int] = set()
        self._stopped_at = 0.0
        # Nodes that the job has left by a health check's word.
        self._left: set[int] = set()

    def _fail(self, text: str) -> None:
        raise Violation(text)

    # --------------------------------------------------------------------------- what is decided

    @property
    def voters(self) -> tuple[int, ...]:
        """Those of the newest decree."""
        return self._decrees[max(self._decrees)].voters

    def knows(self, daemon: "Daemon") -> None:
        """One decree for each index, and what is chosen is on the disks of a quorum."""
        control = daemon.control
        if control is None or control.known.index in self._seen.setdefault(daemon, {0}):
            return
        new = control.known
        self._seen[daemon].add(new.index)
        if new.index in self._decrees:
            if new != self._decrees[new.index]:
                self._fail(
                    f"{daemon.name} knows another decree {new.index}: {new}, not {self._decrees[new.index]}"
                )
            return
        self._decrees[new.index] = new
        self._voted(new)
        before = self._decrees[new.index - 1].assignment
        if new.assignment is not None and new.assignment != before:
            self._assigns(daemon, new.assignment)

    def proposed(self, daemon: "Daemon", new: m.Assignment) -> None:
        """Nobody plans with a node that it holds for lost."""
        control = daemon.control
        assert control is not None
        for node in {place.node for place in new.places}:
            if control.nodes[node].lost is not None:
                self._fail(f"a rank on node-{node}, which is lost")
        if max(self._decrees) > control.known.index:
            return  # it comes too late, and is never chosen: what it counts on may have been given back since
        usable = [node for node, view in control.nodes.items() if view.lost is None and not view.absent]
        trusted = [self._world.agents[node] for node in usable if node in self._world.agents]
        if new.restore_step is not None and new.restore_step not in self._given_by(trusted):
            self._fail(f"only a lost node has all of step {new.restore_step}")

    def says(self, daemon: "Daemon", say: Say) -> None:
        """What a daemon answers, it knows again after its death."""
        disk = self._world.disks.get(daemon.node)
        if isinstance(say, Promise | Accepted) and (disk is None or disk.promised < say.ballot):
            self._fail(f"{daemon.name} says {say}, and has {disk} on its disk")

    def remembers(self, daemon: "Daemon") -> None:
        """A daemon that is started again knows what it had promised."""
        disk = self._world.disks.get(daemon.node)
        assert daemon.control is not None
        if disk is not None and daemon.control.agreement.durable.promised < disk.promised:
            self._fail(f"{daemon.name} has forgotten that it promised {disk.promised}")

    def accuses(self, daemon: "Daemon", loss: NodeLost) -> None:
        """What a daemon says of a node that it watches is true, as far as anybody could know."""
        world, node = self._world, loss.node
        network, agent = world.network, world.agents[node]
        recently = world.events.now - max(network.healed_at, network.broken_at) < RECENTLY_S
        if loss.source != "membership" or not agent.alive or recently:
            return
        if not loss.dark or not network.apart(daemon.node, node):
            self._fail(f"{daemon.name} says of node-{node}, which lives and can be reached: {loss.reason}")
        others = [n for n in daemon.links if n != node and self._answers(daemon, n)]
        seen_by = [n for n in others if not network.apart(n, node) and not network.apart(n, daemon.node)]
        # It asks a few: these may be those that do not see it.
        blind = len(daemon.links.keys() - {node, *seen_by})
        # In a storm questions and answers are lost, or come after the verdict.
        stormy = world.events.now < world.storm_until + ASKED_OFTEN_S
        # Where most of those that it hears do not see it either, that is a verdict, whoever else sees it.
        few = 2 * len(seen_by) <= len(daemon.links.keys() - {node})
        if 2 * len(seen_by) > len(others) and blind < ASKED and not stormy and not few:
            self._fail(f"{daemon.name} says of node-{node}, which {seen_by} see: {loss.reason}")
        reached = network.reached_from(daemon.node)
        assert daemon.control is not None
        if network.broken and not is_quorum(daemon.control.known.voters, reached, world.witness.down):
            self._fail(f"{daemon.name}, which reaches {sorted(reached)}, says of node-{node}: {loss.reason}")

    def _answers(self, asker: "Daemon", node: int) -> bool:
        """Whether it could have been asked, and heard: of a question and its answer some are lost."""
        daemon = self._world.daemons.get(node)
        if daemon is None or daemon.control is None:
            return False
        since = max(daemon.awake_since, daemon.born, daemon.began, asker.linked_at[node])
        return self._world.events.now - since > ASKED_OFTEN_S

    def can_agree(self) -> bool:
        """Whether enough of the voters live, and can vote, and some of these hear each other."""
        world = self._world
        able = {
            node
            for node, daemon in world.daemons.items()
            if daemon.control is not None
            and node not in world.forgot
            and world.takes_votes(node)
            and world.agents[node].sound
        }
        dead = world.witness.down
        return any(is_quorum(self.voters, able & world.network.reached_from(node), dead) for node in able)

    def cut_off(self, side: set[int], voters: tuple[int, ...], steady: set[int]) -> None:
        """So long after a cut, nobody runs on without a quorum, whose daemon was there all the time."""
        for node in side & steady:
            agent = self._world.agents[node]
            begun = agent.sound and agent.assignment is not None
            # A decree that was under way may have other voters.
            able = any(is_quorum(known, side, self._world.witness.down) for known in (voters, self.voters))
            if begun and not able:
                self._fail(f"{agent.name} runs on, cut off from {voters} with {sorted(side)}")

    def _voted(self, new: Decree) -> None:
        world = self._world
        if new.index - 1 not in self._decrees:
            self._fail(f"decree {new.index} comes before {new.index - 1}")
        voters = self._decrees[new.index - 1].voters
        kept = {node for node, durable in world.disks.items() if _has(durable, new)}
        # One of them may have lost its disk since, and votes no more.
        kept |= {node for node in world.forgot if any(_has(one, new) for one in world.history.get(node, ()))}
        dead = {node for node, agent in world.agents.items() if not agent.alive} | world.witness.down
        if not is_quorum(voters, kept, dead):
            self._fail(f"decree {new.index} of voters {voters} is on the disks of {sorted(kept)} only")

    def ordered(self, message: p.Ordered) -> None:
        """A leader's order, as it leaves."""
        match message.order:
            case m.Running():
                self._running.setdefault(message.order.generation, self._world.events.now)
            case m.Stop():
                self._stops(message.order)

    def met(self, standing: Standing) -> None:
        """A daemon tells where it stands: a node is left from the moment on that anybody says so."""
        left = {node for node, reason, _ in standing.lost if reason == self._world.unwell.get(node)}
        if left - self._left:
            self._left |= left
            self._world.faulted("leave")

    def _assigns(self, daemon: "Daemon", new: m.Assignment) -> None:
        if not self._world.generation:
            self._world.formed_at = self._world.events.now
        self._world.generation = max(self._world.generation, new.generation)
        if len(set(new.places)) < len(new.places):
            self._fail(f"two ranks in one slot: {new.places}")
        if set(new.places) & set(new.bad):
            self._fail(f"a rank in a bad slot: {sorted(set(new.places) & set(new.bad))}")
        self._only_the_dead_are_lost(daemon, new)
        self._restores(new)
        if len(new.places) != len(self.newest):
            self._resized(new)
        self.cut = new.cut
        self._world.protected.assigned(new)

    def _resized(self, new: m.Assignment) -> None:
        """Another number of ranks goes on, on whole nodes, as many as an elastic job may have."""
        spec, nodes = self._world.spec, set(new.ranks_by_node)
        whole = len(nodes) * spec.slots_per_node == len(new.places)
        if not spec.elastic or len(nodes) not in spec.sizes or not whole:
            self._fail(f"generation {new.generation} has {len(new.places)} ranks on {len(nodes)} nodes")
        begun = BEFORE_ANY if new.restore_step is None else new.restore_step
        self.newest = dict.fromkeys(range(len(new.places)), begun)
        # What a rank of another number is told to do by now is no fault.
        self._world.faulted("resize")

    def _only_the_dead_are_lost(self, daemon: "Daemon", new: m.Assignment) -> None:
        control = daemon.control
        assert control is not None
        # What is said again and again may be lost each time, as long as messages are: then a deadline passes.
        world, leave_s = self._world, self._world.spec.limits.leave_s
        stormy = world.events.now < world.storm_until + leave_s or (
            world.crowded and any(at > world.events.now - leave_s - RECENTLY_S for at in world.control_faults)
        )
        for node, view in control.nodes.items():
            if stormy and view.lost_source == "leader":
                continue
            if view.lost is not None and self._sound(node):
                self._fail(f"node-{node} lives and is held for lost: {view.lost}")

    def _sound(self, node: int) -> bool:
        """Whether nobody has a reason to hold it for lost: it does its work, and no cut has been near it."""
        return self._world.agents[node].sound and node not in self._world.network.ever

    def _restores(self, new: m.Assignment) -> None:
        """Not above what every rank has committed, and at most one step below while copies survive."""
        committed = min(self.newest.values())
        step = BEFORE_ANY if new.restore_step is None else new.restore_step
        if step > committed:
            self._fail(f"generation {new.generation} goes on from step {step}; all have only {committed}")
        # Whoever was cut off may have made the first step without the others.
        if new.restore_step is None and committed > (1 if self._world.network.ever else 0):
            self._fail(f"generation {new.generation} begins anew, though all have step {committed}")
        survived = self.survived()
        if step < committed - 1 and committed - 1 in survived:
            self._fail(f"generation {new.generation} goes on from step {step}; all have {committed}")

    def survived(self) -> set[int]:
        """Steps that the living agents together can give."""
        return self._given_by([agent for node, agent in self._world.agents.items() if self._sound(node)])

    def _given_by(self, agents: "list[Agent]") -> set[int]:
        vaults = [vault for agent in agents if (vault := agent.vault.of(self.cut)) is not None]
        return self._common(vaults, len(self.newest)) | self._common_former(agents)

    def _common_former(self, agents: "list[Agent]") -> set[int]:
        """The same of the number of ranks before, as long as that is kept."""
        newest = self._decrees[max(self._decrees)].assignment
        former = newest.former if newest is not None else None
        if former is None:
            return set()
        vaults = [vault for agent in agents if (vault := agent.vault.of(former.cut)) is not None]
        return self._common(vaults, len(former.shards))

    @staticmethod
    def _common(vaults: "list[Vault]", ranks: int) -> set[int]:
        common: set[int] | None = None
        for rank in range(ranks):
            steps = {step for vault in vaults for step in vault.records.get(rank, ())}
            steps &= {step for vault in vaults for step in vault.tensors.get(vault.shard(rank), ())}
            common = steps if common is None else common & steps
        return common or set()

    def _stops(self, stop: m.Stop) -> None:
        """Nobody is stopped without a reason: a fault since the last one, or a leader lost."""
        if stop.generation in self._stopped:
            return
        self._stopped.add(stop.generation)
        world = self._world
        until = self._running.get(stop.generation, world.events.now) + HEARD_S
        half_done = any(self._stopped_at <= at <= until for at in world.control_faults)
        # As long as some cannot talk to others, what one gives may not get to the other, again and again.
        broken = world.network.broken or world.network.healed_at >= self._stopped_at
        resized = world.spec.elastic and stop.reason.startswith("the job goes on with ")
        moved = any(reason in stop.reason for reason in world.unwell.values())
        if moved:
            world.faulted("move")
        if resized or moved:
            self._stopped_at = world.events.now
            return
        if not half_done and not broken and all(at < self._stopped_at for at in world.training_faults):
            self._fail(f"generation {stop.generation} is stopped for nothing: {stop.reason}")
        self._stopped_at = world.events.now

    # ---------------------------------------------------------------------------- what ranks do

    def after_event(self) -> None:
        """No rank twice in one generation, no agent with two generations."""
        seen: Counter[tuple[int, int]] = Counter()
        for agent in self._world.agents.values():
            inside = [process for process in agent.living if process.inside]
            seen.update((process.generation, process.rank) for process in inside)
            if len({process.generation for process in inside}) > 1:
                self._fail(f"{agent.name} runs ranks of generations {[i.generation for i in inside]}")
        twice = [key for key, count in seen.items() if count > 1]
        if twice:
            self._fail(f"generation {twice[0][0]} has rank {twice[0][1]} in two living slots")

    def entered(self, here: "list[Process]") -> None:
        """Ranks that reduce together are of one assignment."""
        if any(process.part != here[0].part for process in here):
            self._fail(f"generation {here[0].generation} is two worlds: {[process.part for process in here]}")

    def built_for(self, ahead: m.Assignment | None, its: int, part: m.Assignment, rank: int) -> None:
        """A process that has built ahead gets the part that it has built for, or none."""
        if ahead is None:
            return
        if (ahead.places, ahead.cut, its) != (part.places, part.cut, rank) or part.former is not None:
            self._fail(f"rank {rank} of generation {part.generation} goes to one that has built for {its}")

    def restored(self, process: "Process") -> None:
        """A rank has its state back."""
        part = process.part
        assert part is not None
        if self._behind(process):
            return
        newest = self.newest[process.rank]
        if part.restore_step is None:
            if newest > (1 if self._world.network.ever else 0):
                self._fail(f"rank {process.rank} begins anew after step {newest}")
            self.newest[process.rank] = BEFORE_ANY
            return
        if part.restore_step > newest:
            self._fail(f"rank {process.rank} goes on from step {part.restore_step} without {newest + 1}")
        self.newest[process.rank] = part.restore_step

    def committed(self, process: "Process", step: int) -> None:
        """A rank's steps are contiguous; the restored one is committed again."""
        if self._behind(process):
            return
        newest = self.newest[process.rank]
        if step not in (newest, newest + 1):
            self._fail(
                f"rank {process.rank} commits step {step} after {newest} in generation {process.generation}"
            )
        self.newest[process.rank] = step

    def _behind(self, process: "Process") -> bool:
        """Whether it was cut off, and does not know yet that there is a newer generation."""
        return process.generation < self._world.generation and process.agent.node in self._world.network.ever

    # ---------------------------------------------------------------------------------- the end

    def ended(self, daemon: "Daemon", outcome: m.Outcome) -> None:
        """A daemon knows the job's end: one end for all, and a true one; or is stopped by its user, alone."""
        assert daemon.control is not None
        self._told[daemon] = outcome
        if daemon.control.known.outcome is None:
            self._alone.add(outcome)
            if outcome.state != "stopped":
                self._fail(f"{daemon.name} ends by itself with {outcome}")
            return
        if self.outcome is not None:
            if (outcome.state, outcome.exit_code) != (
                self.outcome.state,
                self.outcome.exit_code,
            ):
                self._fail(f"{daemon.name} ends with {outcome}, others with {self.outcome}")
            return
        self.outcome = outcome
        self._world.story.tell(daemon.name, f"END {outcome}")
        wrong = self._untrue(outcome)
        if wrong is not None:
            self._fail(f"{outcome.state}, exit code {outcome.exit_code}: {outcome.reason!r}; but {wrong}")

    def _untrue(self, outcome: m.Outcome) -> str | None:
        """Why an outcome is wrong, by what really happened."""
        world, spec = self._world, self._world.spec
        everything = all(step == world.job.steps for step in self.newest.values())
        if outcome.state == "stopped":
            return None if world.cancelled or outcome.why != "cancelled" else "nobody has cancelled it"
        if outcome.state == "done":
            return None if everything and outcome.exit_code == 0 else f"the steps are {self.newest}"
        if not outcome.reason or outcome.exit_code == 0:
            return "a failure has a reason and an exit code"
        if "after training" in outcome.reason:
            return None if everything else f"the steps are {self.newest}"
        if "no spare left" in outcome.reason:
            room = [
                (agent.node, slot.index)
                for agent in world.agents.values()
                if self._sound(agent.node)
                for slot in agent.slots
                if world.deaths[(agent.node, slot.index)] <= spec.limits.process_tries
            ]
            if not spec.elastic:
                return None if len(room) < spec.world_size else f"there is room: {room}"
            whole = [
                n for n, count in Counter(node for node, _ in room).items() if count == spec.slots_per_node
            ]
            return None if len(whole) < min(spec.sizes) else f"there is room on nodes {whole}"
        if "no step" in outcome.reason:
            return f"steps {self.survived()} survive" if self.survived() else None
        if "nodes came up" in outcome.reason:
            living = sum(self._sound(node) for node in world.agents)
            return None if living < spec.nodes else f"{living} live"
        if outcome.why == "corrupt":
            return None if world.flips > spec.limits.process_tries else f"{world.flips} values have changed"
        often = [text for text, count in world.raised.items() if count > spec.limits.raise_tries + 1]
        return None if any(text in outcome.reason for text in often) else f"raised: {dict(world.raised)}"

    def finished(self) -> None:
        """Nothing will happen any more: everybody knows the end, and every fault has been answered."""
        world = self._world
        for agent in world.agents.values():
            if agent.outcome not in {None, self.outcome, *self._alone}:
                self._fail(f"{agent.name} ended with {agent.outcome}, which no daemon has decided")
        for daemon, told in self._told.items():
            known = daemon.control.known.outcome if daemon.control is not None else None
            if known not in (None, told):
                self._fail(f"{daemon.name} has told of {told}, and knows of {known}")
        if self.outcome is None or self.outcome.state != "done":
            return
        for generation, rank in world.interrupted:
            if generation >= world.generation:
                self._fail(f"rank {rank} was interrupted in generation {generation}: no generation after it")
