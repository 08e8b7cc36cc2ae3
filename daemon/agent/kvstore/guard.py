"""Lets processes of this job on this node use the agent's store, and nobody else.

The store listens on loopback, which every process of the node can reach: those of other users, and those of
the same user's other jobs. Neither knows a secret that could be asked for, since torch's clients send none.
So the kernel is asked, at each connection, whose its other end is.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptless.daemon.agent.kvstore.sock_owner import Asker, Endpoint, best_asker
from ckptless.daemon.transport.bucket import TokenBucket

# Events that a stranger can cause: some at once, then few, or the ledger is full of nothing else.
TOLD_AT_ONCE = 20
TOLD_PER_S = 1 / 60
_SOCKET = "socket:[{}]"


class StoreGuard:
    """Decides for each connection. Owned by the agent's event loop.

    It holds that up for 0.1 ms where the process is much like the one before; else it looks through the
    descriptors of all of the job's processes here: some ms.

    `on_event(kind, text)` hears of refusals ("store-refused"), and once if the kernel cannot be asked at all
    ("store-unguarded"): everybody is let in then. `root` is the process whose descendants belong to the job:
    the agent, which adopts whatever its ranks leave behind.
    """

    def __init__(
        self,
        on_event: Callable[[str, str], None],
        *,
        ask: Asker | None = None,
        root: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event, self._clock = on_event, clock
        self._ask = ask or best_asker()
        self._root = os.getpid() if root is None else root
        self._uid = os.getuid()
        self._events = TokenBucket(TOLD_PER_S, TOLD_AT_ONCE)
        self._untold = 0
        self._said = False
        self._likely = ""

    def refuses(self, own: Endpoint, peer: Endpoint) -> str | None:
        """Return why the process at `peer`, connected to us at `own`, may not come in; None where it may."""
        why = self._why(own, peer)
        if why is not None:
            self._tell(f"{why}, from {peer[0]} port {peer[1]}")
        return why

    def _why(self, own: Endpoint, peer: Endpoint) -> str | None:
        if self._ask is None:
            if not self._said:
                self._said = True
                self._on_event(
                    "store-unguarded", "the kernel does not say whose a connection is: the store takes any"
                )
            return None
        try:
            owner = self._ask(peer, own)
        except OSError as error:
            return f"the kernel does not say whose a connection to the store is ({error.strerror})"
        if owner is None:
            return "a process has connected to the store that is gone already"
        if owner.uid != self._uid:
            return f"a process of uid {owner.uid} has connected to the store of uid {self._uid}"
        if not self._is_ours(_SOCKET.format(owner.inode)):
            return "a process that is none of this job's on this node has connected to the store"
        return None

    def _is_ours(self, wanted: str) -> bool:
        # Ranks are much alike: what was the socket's number in one of them is it in the next, too.
        for pid in _children(self._root):
            if _link_of(pid, self._likely) == wanted:
                return True
        # While the first look goes on a process may be adopted by one that was looked at before.
        for look in (descendants, descendants_by_parents):
            for pid in look(self._root):
                if (fd := _find(pid, wanted)) is not None:
                    self._likely = fd
                    return True
        return False

    def _tell(self, text: str) -> None:
        if self._events.take(1, self._clock()) > 0:
            self._events.take(-1, self._clock())
            self._untold += 1
            return
        more = f" (and {self._untold} others before, untold)" if self._untold else ""
        self._untold = 0
        self._on_event("store-refused", text + more)


def _link_of(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115 - this is faster
    except OSError:
        return ""  # closed or ended, or somebody else's


def _find(pid: int, wanted: str) -> str | None:
    """The descriptor of a process that is this socket."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - the names are all that is wanted
    except OSError:
        return None
    return next((fd for fd in reversed(names) if _link_of(pid, fd) == wanted), None)


def descendants(root: int) -> Iterator[int]:
    """`root` and what descends from it, nearest first; read as it goes: a child may be missed meanwhile."""
    level = [root]
    while level:
        yield from level
        level = [child for pid in level for child in _children(pid)]


def _children(pid: int) -> list[int]:
    """Children are those of a thread; the kernel may be built without this file."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants_by_parents(root: int) -> Iterator[int]:
    """The same from every process's own word on its parent: slower, and complete."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - as above
        if name.isdecimal():
            with contextlib.suppress(OSError):
                # Behind the command's name, which may have anything in it: state, then the parent.
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    level = [root]
    while level:
        yield from level
        level = [child for pid in level for child in children.get(pid, ())]
