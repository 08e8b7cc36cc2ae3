"""Stores of several nodes on one machine, each at a port of its own; also as a process, without torch.

`python facades.py N` prints N ports, serves until its input ends, and says how many clients it has refused.
"""

import asyncio
import sys
from typing import Self

from ckptless.daemon.agent.kvstore.service import StoreService
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.transport.credentials import KeyCredentials

HOST = "127.0.0.1"
KEY = b"the job's key"


class Facade:
    """What an agent has for the store: connections to other agents, and its ranks' end."""

    def __init__(self, number: int, silence_s: float) -> None:
        self.number = number
        self.vault = VersionStore()
        self.replicas = Replicas(number, Origin("job"), 0, self.vault)
        self.replicas.credentials = KeyCredentials(KEY)
        self.store = StoreService(number, self.replicas.dial, silence_s)
        self.replicas.serving.on_store = self.store.serve
        self.events: list[tuple[str, str]] = []
        self.port = 0
        self.info = NodeInfo(node=number, name=f"n{number}", address=HOST, agent_port=0)

    async def start(self) -> None:
        """Listen."""

        def on_event(kind: str, text: str) -> None:
            self.events.append((kind, text))

        self.replicas.on_event = on_event
        agent_port = await self.replicas.start(HOST)
        self.info = NodeInfo(node=self.number, name=f"n{self.number}", address=HOST, agent_port=agent_port)
        self.port = (await self.store.start(on_event))[1]

    async def close(self) -> None:
        """Hang up on everybody."""
        await self.store.close()
        await self.replicas.close()
        self.vault.close()


class Facades(list[Facade]):
    """So many nodes, each with `ranks` of the job's; in `async with`. They begin in generation 1."""

    def __init__(self, count: int, ranks: int = 1, silence_s: float = 10.0) -> None:
        super().__init__(Facade(number, silence_s) for number in range(count))
        self._ranks = ranks

    def assignment(self, generation: int, nodes: "list[int] | None" = None) -> Assignment:
        """A generation with ranks on these nodes (None: on all)."""
        nodes = nodes if nodes is not None else [facade.number for facade in self]
        return Assignment(
            job="job",
            generation=generation,
            term=1,
            leader=0,
            places=tuple(Place(node=node, slot=slot) for node in nodes for slot in range(self._ranks)),
            nodes=tuple(self[node].info for node in nodes),
            restore_step=None,
        )

    def follow(self, generation: int, nodes: "list[int] | None" = None) -> None:
        """All of them at once."""
        assignment = self.assignment(generation, nodes)
        for info in assignment.nodes:
            self[info.node].store.follow(assignment, None)

    async def __aenter__(self) -> Self:
        for facade in self:
            await facade.start()
        self.follow(1)
        return self

    async def __aexit__(self, *_error: object) -> None:
        for facade in self:
            await facade.close()


async def main() -> None:
    """See the module."""
    async with Facades(int(sys.argv[1])) as facades:
        print(*(facade.port for facade in facades), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    print(sum(facade.store.server.refused for facade in facades), "torch" in sys.modules)


if __name__ == "__main__":
    asyncio.run(main())
