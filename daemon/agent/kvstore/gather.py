"""How every node comes by the addresses of all ranks: along a tree of the nodes. Pure.

The default group of ckptless.run is connected at once: each rank sets one key, and gets those of all. Asked
for one by one they would cost a node a request, and a connection, for each other node. So a node asks its
children in the tree for what is below them, and its parent for all the rest, once each; and answers the same
to them. What was given away so is not changed any more in this generation: nobody could call it back.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import DONE, Answer, Done, Refusal, Reply, nothing
from ckptless.daemon.agent.kvstore.cache import Cache
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.owner import Cancel, Owner
from ckptless.daemon.agent.kvstore.sharing import Memo
from ckptless.daemon.agent.kvstore.wire import Gather
from ckptless.daemon.api.errors import ProtocolError

# Children of a node. All values pass through each node once more for each: few make a deep tree, many a
# crowded root. Of 128 nodes the last are five steps away.
FANOUT = 3
# Of one answer. A larger one is so long on its way that its sender would be taken for silent.
MAX_ANSWER_NBYTES = 64 << 20
# Rounds of one group in one generation: there is one.
MAX_FAMILIES = 64
_BEGIN = b"ckptless/"
_FAMILY = re.compile(rb"ckptless/[0-9]{1,18}/0//[0-9]{1,6}/")
_KEY = re.compile(rb"(ckptless/[0-9]{1,18}/0//[0-9]{1,6}/)(0|[1-9][0-9]{0,8})")


AskNode: TypeAlias = Callable[[int, Gather, Done], Cancel]
"""Ask another node; `done` hears its answer, or that it is lost, maybe at once."""


class Tree:
    """The nodes in the order of their first ranks, as one of them sees them; `nodes[rank]` is a rank's node.

    `ranks`: whose keys come from each neighbour, and whose are kept here, in order; `source` is the reverse.
    A lost node's place goes with its ranks to who gets them, so that all others keep their neighbours.
    """

    def __init__(self, me: int, nodes: Sequence[int]) -> None:
        order = list(dict.fromkeys(nodes))
        mine = order.index(me)
        places = {node: place for place, node in enumerate(order)}

        def source(place: int) -> int:
            while place > mine:
                above = (place - 1) // FANOUT
                if above == mine:
                    return order[place]
                place = above
            return me if place == mine else order[(mine - 1) // FANOUT]

        found: dict[int, list[int]] = {me: []}
        for rank, node in enumerate(nodes):
            found.setdefault(source(places[node]), []).append(rank)
        self.ranks = {node: tuple(ranks) for node, ranks in found.items()}
        self.source = {rank: node for node, ranks in self.ranks.items() for rank in ranks}


class _Family:
    """The keys of one group; of which neighbours they have been asked for, and have come; who waits."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.there: set[int] = set()
        self.waiting: dict[int, tuple[set[int], Done]] = {}


class Gathering:
    """One node's part in it: none without ranks here, or where the nodes are so few that all are asked."""

    def __init__(self, me: int, homes: Homes, owner: Owner, cache: Cache, ask: AskNode) -> None:
        self._me, self._homes, self._owner, self._cache, self._ask = me, homes, owner, cache, ask
        apart = len(homes.nodes) > FANOUT + 1 and me in homes.nodes
        self._tree = Tree(me, homes.ranks) if apart else None
        self._families: dict[bytes, _Family] = {}
        self._number = 0
        self._known: Memo[tuple[bytes, frozenset[int]]] = Memo()

    def wait(self, keys: protocol.Keys, done: Done) -> Cancel | None:
        """Wait for keys of one group; None where they are no such keys. Raises ProtocolError."""
        tree = self._tree
        if tree is None or not keys or not keys[0].startswith(_BEGIN):
            return None
        found = self._known.get(keys) or self._sources(tree, keys)
        if found is None:
            return None
        self._known.put(keys, found)
        where, sources = found
        family = self._family(where)
        cancel = self._need(where, family, sources, done)
        # Who waits for some of them waits for the others next.
        self._begin(where, family, tree.ranks)
        return cancel

    def _sources(self, tree: Tree, keys: protocol.Keys) -> tuple[bytes, frozenset[int]] | None:
        """The group, and where these come from; None where they are not of one."""
        where, sources = None, set()
        for key in keys:
            found = _KEY.fullmatch(key)
            if found is None or where not in (None, found[1]) or int(found[2]) not in tree.source:
                return None
            where = found[1]
            sources.add(tree.source[int(found[2])])
        assert where is not None
        self._homes.admit(where)
        return where, frozenset(sources)

    def serve(self, node: int, where: bytes, done: Done) -> Cancel:
        """Another node asks for all that it does not have, or have below it. Raises ProtocolError."""
        tree = self._tree
        if tree is None or node == self._me or node not in tree.ranks:
            raise ProtocolError("it gathers from a node that is none of its neighbours")
        if _FAMILY.fullmatch(where) is None:
            raise ProtocolError("it gathers keys of which not all nodes have some")
        self._homes.admit(where)
        theirs = set(tree.ranks[node])
        keys = [where + b"%d" % rank for rank in range(len(self._homes.ranks)) if rank not in theirs]

        def over(answer: Answer) -> None:
            done(answer if isinstance(answer, Refusal) else Reply(values=self._values(keys)))

        return self._need(where, self._family(where), tree.ranks.keys() - {node}, over)

    def count(self, node: int) -> int:
        """How many keys that neighbour is asked for."""
        return len(self._tree.ranks.get(node, ())) if self._tree is not None else 0

    def _family(self, where: bytes) -> _Family:
        family = self._families.get(where)
        if family is None:
            if len(self._families) >= MAX_FAMILIES:
                raise ProtocolError(f"more than {MAX_FAMILIES} rounds of one group in one generation")
            family = self._families[where] = _Family()
        return family

    def _need(self, where: bytes, family: _Family, sources: Collection[int], done: Done) -> Cancel:
        left = set(sources) - family.there
        if not left:
            done(DONE)
            return nothing
        number = self._number = self._number + 1
        family.waiting[number] = (left, done)
        self._begin(where, family, tuple(left))

        def cancel() -> None:
            family.waiting.pop(number, None)

        return cancel

    def _begin(self, where: bytes, family: _Family, sources: Collection[int]) -> None:
        """Ask those that were not asked yet."""
        assert self._tree is not None
        for source in sources:
            if source in family.asked:
                continue
            family.asked.add(source)
            keys = tuple(where + b"%d" % rank for rank in self._tree.ranks[source])
            came = self._taker(family, source, keys)
            if source == self._me:
                self._owner.ask(protocol.Wait(keys), None, came)
            else:
                self._ask(source, Gather(where), came)

    def _taker(self, family: _Family, source: int, keys: protocol.Keys) -> Done:
        def came(answer: Answer) -> None:
            if isinstance(answer, Refusal):
                family.asked.discard(source)
                for number, (left, done) in list(family.waiting.items()):
                    if source in left and family.waiting.pop(number, None) is not None:
                        done(answer)
                return
            if source == self._me:
                self._owner.fix(keys)
            else:
                for key, value in zip(keys, answer.values, strict=True):
                    if value is not None:
                        self._cache.put(self._homes.of(key), key, value)
            family.there.add(source)
            for number, (left, done) in list(family.waiting.items()):
                left.discard(source)
                if not left and family.waiting.pop(number, None) is not None:
                    done(DONE)

        return came

    def _values(self, keys: Sequence[bytes]) -> tuple[bytes | None, ...]:
        """None where it is not here, or too much: it is asked for where it is kept."""
        left_nbytes = MAX_ANSWER_NBYTES
        values: list[bytes | None] = []
        for key in keys:
            home = self._homes.of(key)
            value = self._owner.find(key) if home == self._me else self._cache.get(home, key)
            if value is not None and len(value) > left_nbytes:
                value = None
            left_nbytes -= len(value or b"")
            values.append(value)
        return tuple(values)
