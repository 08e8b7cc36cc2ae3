"""The keys of a generation, at the one agent that keeps them, for the ranks of all. Pure.

A value that is given to a node may stay there (`Reply.keep`) until it is recalled. A change of such a key
waits until every node that has it has dropped it: so no two clients can see the new value and then, somewhere
else, the old one. A key that was recalled once is not remembered by anybody any more in this generation.
"""

from collections.abc import Callable, Sequence

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Keys
from ckptless.daemon.agent.kvstore.state import Registration, StoreState
from ckptless.daemon.agent.kvstore.wire import (
    Ask,
    Askable,
    Cancel,
    Drop,
    Dropped,
    FromHome,
    Refusal,
    Reply,
    ToHome,
    Told,
)
from ckptless.daemon.protocol.errors import ProtocolError

# Of one node, at one time; its clients are as many as it has ranks, and a few threads of these.
MAX_ASKED = 65536
# Larger values are neither remembered nor brought along by the end of a wait.
KEEP_NBYTES = 64 << 10
# What the end of one wait brings along.
BRING_NBYTES = 4 << 20


class Home:
    """`heard(node, item)` takes what a node's proxy says; `send(node, item)` must deliver in order, or never.

    `asked` counts the requests.
    """

    def __init__(self, send: Callable[[int, FromHome], None]) -> None:
        self._send, self._state = send, StoreState()
        self.asked = 0
        # What each node has asked and not been told; of a wait, how to cancel it.
        self._serving: dict[int, dict[int, Registration | None]] = {}
        # Who may remember the value of a key, and which keys they have been told to drop.
        self._known: dict[bytes, set[int]] = {}
        self._recalled: set[bytes] = set()
        # Changes that wait until others have dropped their keys, in the order in which they came.
        self._delayed: list[tuple[int, Ask]] = []
        self._lost: set[int] = set()

    def heard(self, node: int, item: ToHome) -> None:
        """Take what a node says. Raises ProtocolError for what it may not say."""
        match item:
            case Ask():
                serving = self._serving.setdefault(node, {})
                if item.number in serving or len(serving) >= MAX_ASKED:
                    raise ProtocolError(f"its request {item.number}, with {len(serving)} not answered")
                serving[item.number] = None
                self.asked += 1
                self._do(node, item)
            case Cancel(number):
                registration = self._serving.get(node, {}).pop(number, None)
                if registration is not None:
                    self._state.cancel(registration)
            case Dropped(key):
                self._dropped(node, key)

    def lost(self, node: int) -> None:
        """Hear of this node no more: keys that it may remember stay as they are, in this generation."""
        self._lost.add(node)
        for registration in self._serving.pop(node, {}).values():
            if registration is not None:
                self._state.cancel(registration)
        self._do_delayed()

    def waits_for(self, node: int) -> bool:
        """Return whether something waits until this node has dropped it."""
        return any(
            node in self._known.get(key, ()) for _, ask in self._delayed for key in _changed(ask.request)
        )

    # ---------------------------------------------------------------------------------- requests

    def _do(self, node: int, ask: Ask) -> None:
        """Do what is asked, or begin to."""
        try:
            if self._must_wait(node, ask):
                return
            match ask.request:
                case protocol.Wait(keys):
                    over = lambda: self._tell(node, ask, self._brought(node, keys))  # noqa: E731
                    self._wait(node, ask, self._state.wait(keys, over), over)
                case protocol.Barrier(key, world_size):
                    over = lambda: self._tell(node, ask, Reply(protocol.STOP_WAITING))  # noqa: E731
                    self._wait(node, ask, self._state.barrier(key, world_size, over), over)
                case protocol.MultiGet(keys):
                    self._tell(node, ask, self._found(node, keys))
                case request:
                    self._tell(node, ask, Reply(_apply(self._state, request)))
        except ProtocolError as error:
            self._tell(node, ask, Refusal(str(error), hostile=True))

    def _tell(self, node: int, ask: Ask, answer: Reply | Refusal) -> None:
        """Answer, unless that is not wanted any more."""
        serving = self._serving.get(node, {})
        if ask.number in serving:
            del serving[ask.number]
            self._send(node, Told(ask.number, answer))

    def _wait(self, node: int, ask: Ask, registration: Registration | None, over: Callable[[], None]) -> None:
        """Be ready to cancel it. A barrier may have been canceled before it was come to; that counts."""
        serving = self._serving.get(node, {})
        if registration is None:
            over()
        elif ask.number in serving:
            serving[ask.number] = registration
        else:
            self._state.cancel(registration)

    def _found(self, node: int, keys: Keys) -> Reply:
        values = tuple(map(self._state.find, keys))
        if sum(len(value) for value in values if value is not None) > protocol.MAX_REPLY_NBYTES:
            raise ProtocolError(f"an answer of more than {protocol.MAX_REPLY_NBYTES} bytes")
        return Reply(values=values, keep=self._let_keep(node, keys, values))

    def _brought(self, node: int, keys: Keys) -> Reply:
        """Return the small ones among the values: a client that has waited for keys asks for them next."""
        left_nbytes = BRING_NBYTES
        values = []
        for key in keys:
            value = self._state.find(key)
            if value is not None and len(value) > min(KEEP_NBYTES, left_nbytes):
                value = None
            left_nbytes -= len(value or b"")
            values.append(value)
        return Reply(protocol.STOP_WAITING, tuple(values), self._let_keep(node, keys, values))

    # ------------------------------------------------------------------- what nodes may remember

    def _let_keep(self, node: int, keys: Keys, values: Sequence[bytes | None]) -> tuple[int, ...]:
        kept = []
        for place, (key, value) in enumerate(zip(keys, values, strict=True)):
            if value is not None and len(value) <= KEEP_NBYTES and key not in self._recalled:
                self._known.setdefault(key, set()).add(node)
                kept.append(place)
        return tuple(kept)

    def _must_wait(self, node: int, ask: Ask) -> bool:
        """Recall what others may remember of the keys that a request changes; it is done when they have."""
        remembered = [key for key in _changed(ask.request) if key in self._known]
        if not remembered:
            return False
        for key in remembered:
            if lost := self._known[key] & self._lost:
                text = f"node-{min(lost)} is lost and may remember the key's value"
                self._tell(node, ask, Refusal(text, hostile=False))
                return True
        self._delayed.append((node, ask))
        for key in remembered:
            if key not in self._recalled:
                self._recalled.add(key)
                for holder in sorted(self._known[key]):
                    self._send(holder, Drop(key))
        return True

    def _dropped(self, node: int, key: bytes) -> None:
        holders = self._known.get(key, set())
        if key not in self._recalled or node not in holders:
            raise ProtocolError("it drops a key that it was not asked to")
        holders.discard(node)
        if not holders:
            del self._known[key]
            self._do_delayed()

    def _do_delayed(self) -> None:
        """Try again; who still has to wait keeps its place."""
        delayed, self._delayed = self._delayed, []
        for node, ask in delayed:
            self._do(node, ask)


def _changed(request: Askable) -> Sequence[bytes]:
    """Return the keys whose values a request may change."""
    match request:
        case protocol.MultiSet(items):
            return [key for key, _value in items]
        case (
            protocol.Set(key)
            | protocol.Append(key)
            | protocol.CompareSet(key)
            | protocol.Add(key)
            | protocol.Delete(key)
            | protocol.Barrier(key)
        ):
            return (key,)
        case _:
            return ()


def _apply(state: StoreState, request: Askable) -> bytes:
    """Do what ends at once; return what its client gets. Raises ProtocolError."""
    match request:
        case protocol.CompareSet(key, expected, desired):
            return protocol.encode_value(state.compare_set(key, expected, desired))
        case protocol.Add(key, amount):
            return protocol.encode_number(state.add(key, amount))
        case protocol.Delete(key):
            return protocol.encode_number(state.delete(key))
        case protocol.Check(keys):
            return protocol.encode_check(state.check(keys))
        case protocol.NumKeys():
            return protocol.encode_number(state.num_keys())
        case protocol.ListKeys():
            return protocol.encode_keys(state.list_keys())
        case protocol.QueuePop(key):
            return protocol.encode_popped(*state.queue_pop(key))
        case protocol.QueueLen(key):
            return protocol.encode_number(state.queue_len(key))
    _put(state, request)
    return b""


def _put(state: StoreState, request: Askable) -> None:
    """Do what has no answer. Raises ProtocolError."""
    match request:
        case protocol.Set(key, value):
            state.set(key, value)
        case protocol.MultiSet(items):
            state.multi_set(items)
        case protocol.Append(key, value):
            state.append(key, value)
        case protocol.QueuePush(key, value):
            state.queue_push(key, value)
