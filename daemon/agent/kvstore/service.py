"""The key-value store as an agent has it: its ranks' end, its keys, and its way to the other agents."""

from collections.abc import Callable
from functools import partial

from ckptless.daemon.agent.kvstore.exchange import StoreExchange
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.node import StoreNode
from ckptless.daemon.agent.kvstore.peers import StorePeers
from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.api.messages import Assignment

# Numeric, and one that every resolver knows: torch looks the name of its store up each time it connects.
ADDRESS = "127.0.0.1"


class StoreService:
    """Owned by the agent's event loop; takes the connections that other agents make for the store."""

    def __init__(self, node: int, peers: StorePeers, silence_s: float) -> None:
        self._me = node
        self.server = StoreServer()
        self.exchange = peers.taker = StoreExchange(node, peers.dial, silence_s)

    async def start(self, on_event: Callable[[str, str], None]) -> tuple[str, int]:
        """Listen for this node's ranks; where. Raises OSError."""
        self.exchange.on_event = on_event
        return ADDRESS, await self.server.start(ADDRESS)

    def follow(self, assignment: Assignment, ids: NcclIds | None) -> None:
        """A new generation: no key of the old one, and nobody who waits for one, is left."""
        generation = assignment.generation
        homes = Homes([place.node for place in assignment.places], generation)
        node = StoreNode(self._me, homes, partial(self.exchange.send, generation))
        self.server.cut(ids, node)
        self.exchange.follow(generation, {info.node: info for info in assignment.nodes}, node)

    async def close(self) -> None:
        """Hang up on everybody."""
        await self.server.close()
        self.exchange.close()
