"""Pure: what the leader makes of ranks that are slower than the others, time and again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.pace import Slow, slow
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import Subject
from ckptless.daemon.replication.failure_domains import domain_of

# So many windows in a row a rank is slow before it is named, and not slow before that is over.
STRIKES = 3
MOST_NAMED = 8


@dataclass
class Stragglers:
    """The paces that ranks have told, and which ranks are named. All begins anew with each generation."""

    job: JobState
    _generation: int = 0
    _paces: dict[int, m.Pace] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)
    # Windows in a row in which a rank was slow, or, of one that is named, was not.
    _strikes: dict[int, int] = field(default_factory=dict)
    # In how many windows it was slow since it was named.
    _named: dict[int, int] = field(default_factory=dict)

    def take(self, assignment: m.Assignment, nodes: Iterable[int]) -> list[Line]:
        """Take what these nodes have told; return what is to be said once every rank has told anew."""
        if self._generation != assignment.generation:
            self._generation = assignment.generation
            for kept in (self._paces, self._fresh, self._strikes, self._named, self.job.slow):
                kept.clear()
            self.job.held_up_by = frozenset()
        for node in nodes:
            view = self.job.nodes[node]
            for rank in assignment.ranks_on(node):
                slot = view.slot(assignment.places[rank].slot)
                pace = slot.pace if slot is not None and slot.generation == assignment.generation else None
                if pace is not None and pace != self._paces.get(rank):
                    self._paces[rank] = pace
                    self._fresh.add(rank)
        if len(self._fresh) < len(assignment.places):
            return []
        self._fresh.clear()
        return self._judge(assignment)

    def _judge(self, assignment: m.Assignment) -> list[Line]:
        found = {one.who: one for one in slow(self._paces)}
        begun: list[int] = []
        over: list[int] = []
        for rank in {*found, *self._strikes, *self._named}:
            before = self._strikes.get(rank, 0)
            if (rank in found) != (rank in self._named):
                # It is as it was not: how often that was so in a row.
                self._strikes[rank] = before + 1
                if before + 1 >= STRIKES:
                    del self._strikes[rank]
                    (begun if rank in found else over).append(rank)
            else:
                self._strikes.pop(rank, None)
        for rank in over:
            del self._named[rank]
        self._named.update(dict.fromkeys(begun, 0))
        self.job.held_up_by = frozenset(self._named)
        self._leave(assignment, found, begun)
        lines = [self._line(assignment, [found[rank] for rank in sorted(begun)])] if begun else []
        if over:
            names = ", ".join(map(str, sorted(over)[:MOST_NAMED]))
            text = f"rank{'s' if len(over) > 1 else ''} {names} as fast as the others again"
            lines.append(Line("info", "straggler-over", text))
        return lines

    def _leave(
        self, assignment: m.Assignment, found: Mapping[int, Slow[int]], begun: Collection[int]
    ) -> None:
        """Have the job leave the nodes whose ranks are still slow, where the site wants that."""
        for rank in self._named:
            if rank in found and rank not in begun:
                self._named[rank] += 1
            if 0 < self.job.move_stragglers <= self._named[rank]:
                share = f"+{100 * found[rank].share:.0f} %, {found[rank].bound}" if rank in found else "slow"
                reason = f"unwell (rank {rank} holds up the others: {share})"
                self.job.slow.setdefault(assignment.places[rank].node, Leave(reason, "leader"))
        slow_nodes = {assignment.places[rank].node for rank in self._named}
        for node in self.job.slow.keys() - slow_nodes:
            del self.job.slow[node]

    def _line(self, assignment: m.Assignment, ranks: Sequence[Slow[int]]) -> Line:
        """Return who is named now, in a sentence."""
        worst = max(ranks, key=lambda one: one.by_s)
        domains = self.job.spec.domains if self.job.spec is not None else ()
        names = names_of({one.who for one in ranks}, self._named, assignment, domains)
        more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        text = (
            f"{', '.join(names[:MOST_NAMED])}{more}: {1000 * worst.own_s:.1f} ms of own work a step where "
            f"the median is {1000 * worst.median_s:.1f} ms (+{100 * worst.share:.0f} %), {worst.bound}; "
            "all others wait for it"
        )
        place = assignment.places[worst.who]
        about = Subject(rank=worst.who, node=place.node, slot=place.slot) if len(ranks) == 1 else None
        return Line("warning", "straggler", text, about)


def names_of(
    new: Collection[int], slow_ones: Collection[int], assignment: m.Assignment, domains: Sequence[str]
) -> list[str]:
    """Return names of the ranks that are slow since now.

    A failure domain of several nodes, or a node of several ranks, is named as a whole where all of its ranks
    are among `slow_ones`, new or not.
    """
    nodes: dict[int, list[int]] = {}
    for rank, place in enumerate(assignment.places):
        nodes.setdefault(place.node, []).append(rank)
    homes: dict[str, list[int]] = {}
    for node in nodes:
        homes.setdefault(domain_of(domains, node), []).append(node)
    whole = {node for node, on_it in nodes.items() if all(rank in slow_ones for rank in on_it)}
    has_new = {node for node, on_it in nodes.items() if any(rank in new for rank in on_it)}
    names = []
    for home, inside in homes.items():
        if len(inside) > 1 and whole.issuperset(inside) and has_new.intersection(inside):
            more = ", ..." if len(inside) > MOST_NAMED else ""
            told = ", ".join(f"node-{node}" for node in inside[:MOST_NAMED])
            names.append(f"failure domain {home}, all of it ({told}{more})")
            has_new.difference_update(inside)
    for node in sorted(has_new):
        all_of_it = node in whole and len(nodes[node]) > 1
        ranks = nodes[node] if all_of_it else [rank for rank in nodes[node] if rank in new]
        told = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks[:MOST_NAMED]))}"
        names.append(f"node-{node}, all of it ({told})" if all_of_it else f"{told} on node-{node}")
    return names
