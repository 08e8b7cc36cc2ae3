"""NCCL without a root, as an agent does it: its roots, the ids of each generation, and its fallback."""

from collections.abc import Callable, Mapping

from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.agent.nccl.server import NcclServer
from ckptless.daemon.agent.nccl.wire import Address
from ckptless.daemon.agent.ranks.environment import NCCL_COMM_ID, RANKS_PER_ROOT, own_ranks_per_root
from ckptless.daemon.protocol.messages import Assignment


class NcclService:
    """Owned by the agent's event loop. `on_change`: `unknown` has changed, and the daemon should hear of it.

    `unknown` says what this agent has heard of an NCCL that it does not know; "" for nothing.
    """

    def __init__(self, on_event: Callable[[str, str], None], on_change: Callable[[], None]) -> None:
        self.unknown = ""
        self._on_event, self._on_change = on_event, on_change
        self._server = NcclServer()
        self._server.on_event, self._server.on_unknown = on_event, self._is_unknown
        self._key: bytes | None = None
        self._stock = False
        self._ranks_per_root = 1
        # Of the user's environment, for events: once, and not before there is somebody to hear of them.
        self._untold: list[tuple[str, str]] = []

    async def start(self, address: str, env: Mapping[str, str]) -> int:
        """Listen; the port. `env`: the ranks' environment as the user has it. Raises OSError, UsageError."""
        if NCCL_COMM_ID in env:
            text = f"{NCCL_COMM_ID} is not passed on to the ranks: it would tie the job to one node"
            self._untold.append(("nccl-comm-id", text))
        self._ranks_per_root = own_ranks_per_root(env) or 1
        if self._ranks_per_root > 1:
            text = (
                f"{RANKS_PER_ROOT}={self._ranks_per_root} is the job's own: where a communicator has no more "
            )
            self._untold.append(("nccl-ranks-per-root", text + "ranks than that, one of them is NCCL's root"))
        return await self._server.start(address)

    def learn_key(self, key: bytes) -> None:
        """The job's key, from the daemon."""
        self._key = key
        self._server.learn_key(key)

    def follow(self, assignment: Assignment) -> NcclIds | None:
        """A new generation's ids; None where NCCL is left to make its own and the store to pass them on."""
        self._server.follow(assignment.generation)
        for event in self._untold:
            self._on_event(*event)
        self._untold.clear()
        if assignment.stock_roots:
            if not self._stock:
                self._on_event("nccl-stock-roots", "NCCL has roots of its own from this generation on")
            self._stock = True
            return None
        infos = {info.node: info for info in assignment.nodes}
        homes = [infos[place.node] for place in assignment.places]
        if self._key is None or not all(info.nccl_port for info in homes):
            return None
        addresses = [Address(info.address, info.nccl_port) for info in homes]
        return NcclIds(self._key, assignment.generation, addresses, self._ranks_per_root)

    def _is_unknown(self, text: str) -> None:
        if not self.unknown:
            self.unknown = text
            self._on_change()

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._server.close()
