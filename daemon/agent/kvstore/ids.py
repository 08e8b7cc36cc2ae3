"""NCCL's ids in the store: who asks for them gets computed ones, and those that ranks put there are not used.

With scalable initialization torch has every root of a group set `<group>UniqueNCCLID:<i>` to an id of its
own; then every rank waits for all of them, and asks for all of them at once.
"""

import re
from typing import TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.state import StoreState
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.protocol.errors import ProtocolError

_KEY = re.compile(rb"(.*)UniqueNCCLID:(0|[1-9][0-9]{0,6})", re.DOTALL)
# Of one client: more than any process has.
MAX_GROUPS = 65536

Left: TypeAlias = Request | bytes


class ClientIds:
    """One client's calls of the store that are about ids.

    A group may have several communicators in one generation, one after the other, and torch gives them the
    same keys. Which one a client means follows from how often the root that it is has set its own; or, where
    it is none, from how often it has asked.
    """

    def __init__(self, ids: NcclIds, state: StoreState) -> None:
        self._ids, self._state = ids, state
        self._rounds: dict[bytes, int] = {}
        self._begun: set[bytes] = set()

    def take(self, request: Request) -> Left:
        """The answer (empty: there is none), or what is left of the request for the store.

        Raises ProtocolError.
        """
        match request:
            case protocol.Set(key, _):
                return b"" if self._begin(key) else request
            case protocol.MultiSet(items):
                return protocol.MultiSet(tuple(item for item in items if not self._begin(item[0])))
            case protocol.Wait(keys):
                return protocol.Wait(_others(keys))
            case protocol.Check(keys):
                return protocol.Check(_others(keys))
            case protocol.MultiGet(keys) if any(map(_KEY.fullmatch, keys)):
                return self._computed(keys)
            case protocol.Get(key) if _KEY.fullmatch(key):
                raise ProtocolError("a single one of a communicator's NCCL ids: they are computed together")
        return request

    def _begin(self, key: bytes) -> bool:
        """A root begins with a communicator. What it has set is not kept, only how often it did."""
        found = _KEY.fullmatch(key)
        if found is None:
            return False
        group = found[1]
        self._remember(group, self._state.add(key, 1) - 1)
        self._begun.add(group)
        return True

    def _computed(self, keys: tuple[bytes, ...]) -> bytes:
        found = _KEY.fullmatch(keys[0])
        group = found[1] if found is not None else b""
        if keys != tuple(b"%sUniqueNCCLID:%d" % (group, root) for root in range(len(keys))):
            raise ProtocolError("NCCL ids that are not those of one communicator, in order")
        if len(keys) > self._ids.ranks:
            raise ProtocolError(f"{len(keys)} NCCL ids in a job of {self._ids.ranks} ranks")
        if group not in self._begun:
            self._remember(group, self._rounds.get(group, -1) + 1)
        self._begun.discard(group)
        return protocol.encode_values(self._ids.ids(group, self._rounds[group], len(keys)))

    def _remember(self, group: bytes, round_: int) -> None:
        if len(self._rounds) >= MAX_GROUPS and group not in self._rounds:
            raise ProtocolError(f"NCCL ids of more than {MAX_GROUPS} groups")
        self._rounds[group] = round_


def _others(keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Computed ones are always there."""
    return tuple(key for key in keys if not _KEY.fullmatch(key))
