"""Compares versions of this node's ranks with their twins'; what follows from it is in `twin_check`."""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore, header_of
from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.messages import Holdings
from ckptless.daemon.settings.options import TwinsMode


class AgentTwins:
    """Owned by the agent's event loop."""

    def __init__(self, node: int, mode: TwinsMode, store: VersionStore, replicas: Replicas) -> None:
        self.check = TwinCheck(node, mode, send=replicas.compare)
        replicas.on_compared, replicas.on_unreachable = self.check.answered, self.check.lost
        replicas.serving.on_compare = lambda link, message: self.check.asked(message, link.send)
        self._store = store

    def committed(
        self, key: tuple[int, int], rank: int, nodes: Collection[int], acked: Callable[[], None]
    ) -> None:
        """A rank has written this shard's step, which lies in the store; `acked` once it may count."""
        self.check.committed(key, rank, self._digest(*key)[1], sorted(nodes), acked)

    def holdings(self) -> Holdings:
        """The store's, with the digests of what is compared."""
        held = self._store.holdings()
        keys = [(shard, step) for shard, steps in held.tensors if self.check.tells(shard) for step in steps]
        digests = tuple((*key, *self._digest(*key)) for key in keys)
        return replace(held, digests=tuple(one for one in digests if one[3]))

    def _digest(self, shard: int, step: int) -> tuple[int, str]:
        """Return who has written a version, and the digest by which it is compared."""
        found = self._store.tensors(shard, step)
        if found is None:
            return -1, ""
        at, region = found
        try:
            header = header_of(region, at)
        except BadVersionError:
            return -1, ""  # whoever uses it finds out, and drops it
        return header.rank, header.twins
