"""The keys that one agent keeps: answers for them, and calls back what others remember of them. Pure.

A value that is given to another node may stay there (`Reply.keep`), until this one says `drop`. A change of
such a key waits until every node that has it has dropped it: so no two clients can see the new value and
then, somewhere else, the old one. Until then the old one is what the key has. A key that was changed once is
not remembered by anybody any more: it would be called back again and again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import DONE, Answer, Done, Join, Refusal, Reply, nothing
from ckptless.daemon.agent.kvstore.protocol import ReadRequest, Request, WaitRequest, WriteRequest
from ckptless.daemon.agent.kvstore.state import Registration, StoreState
from ckptless.daemon.api.errors import ProtocolError

# Larger ones are neither remembered nor brought along by the end of a wait.
KEEP_NBYTES = 64 << 10
# What the end of one wait brings along.
BRING_NBYTES = 4 << 20


class _Change(NamedTuple):
    """`apply` does it, and may raise ProtocolError; `done` hears what came of it."""

    apply: Callable[[], Answer]
    done: Done


class _Delayed(NamedTuple):
    """Changes of a key that wait, in order, until these nodes have dropped it."""

    nodes: set[int]
    changes: deque[_Change]


Cancel: TypeAlias = Callable[[], None]


class Owner:
    """`drop(node, key)`: node must forget the key and say so (`dropped`).

    `changes` counts what has been done to keys that had a value.
    """

    def __init__(self, state: StoreState, drop: Callable[[int, bytes], None]) -> None:
        self._state, self._drop = state, drop
        self.changes = 0
        self._known: dict[bytes, set[int]] = {}
        self._delayed: dict[bytes, _Delayed] = {}
        self._changed: set[bytes] = set()
        self._fixed: set[bytes] = set()
        self._lost: set[int] = set()

    def ask(self, request: Request, asker: int | None, done: Done) -> Cancel:
        """Do what `request` asks, for node `asker` (None: this one); how to cancel a wait that goes on."""
        try:
            if isinstance(request, WaitRequest):
                return self._wait(request, asker, done)
            if isinstance(request, WriteRequest):
                self._write(request, done)
            elif isinstance(request, ReadRequest):
                done(self._read(request, asker))
            else:
                done(self._queue(request))
        except ProtocolError as error:
            done(Refusal(str(error), hostile=True))
        return nothing

    # ------------------------------------------------------------------------------------- reads

    def _read(self, request: ReadRequest, asker: int | None) -> Reply:
        match request:
            case protocol.Get(key):
                return self._values((key,), asker)
            case protocol.MultiGet(keys):
                return self._values(keys, asker)
            case protocol.Check(keys):
                return Reply(int(self._state.check(keys)))
            case protocol.NumKeys():
                return Reply(self._state.num_keys())
            case protocol.ListKeys():
                return Reply(values=tuple(self._state.list_keys()))
            case protocol.Ping():
                raise ProtocolError("a ping is nobody's to keep")

    def _values(self, keys: Sequence[bytes], asker: int | None) -> Reply:
        values = tuple(self._state.find(key) for key in keys)
        if sum(len(value) for value in values if value is not None) > protocol.MAX_REPLY_NBYTES:
            raise ProtocolError(f"an answer of more than {protocol.MAX_REPLY_NBYTES} bytes")
        return Reply(values=values, keep=self._let_keep(keys, values, asker))

    def _let_keep(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], asker: int | None
    ) -> tuple[int, ...]:
        if asker is None or asker in self._lost:
            return ()
        kept = []
        for place, (key, value) in enumerate(zip(keys, values, strict=True)):
            if value is None or len(value) > KEEP_NBYTES or key in self._delayed or key in self._changed:
                continue
            self._known.setdefault(key, set()).add(asker)
            kept.append(place)
        return tuple(kept)

    # ------------------------------------------------------------------------------------ writes

    def _write(self, request: WriteRequest, done: Done) -> None:
        state = self._state
        match request:
            case protocol.Set(key, value):
                self._change(key, _doing(lambda: state.set(key, value)), done)
            case protocol.MultiSet(items):
                join = Join(len(items), lambda found: done(found if isinstance(found, Refusal) else DONE))
                for place, (key, value) in enumerate(items):
                    self._change(key, _setter(state, key, value), join.part(place))
            case protocol.Append(key, value):
                self._change(key, _doing(lambda: state.append(key, value)), done)
            case protocol.CompareSet(key, expected, desired):
                self._change(key, lambda: Reply(values=(state.compare_set(key, expected, desired),)), done)
            case protocol.Add(key, amount):
                self._change(key, lambda: Reply(state.add(key, amount)), done)
            case protocol.Delete(key):
                self._change(key, lambda: Reply(int(state.delete(key))), done)

    def _change(self, key: bytes, apply: Callable[[], Answer], done: Done) -> None:
        """Now, or as soon as nobody remembers what the key has."""
        if key in self._fixed:
            done(Refusal("every node has got this address, which therefore stays", hostile=True))
            return
        change = _Change(apply, done)
        delayed = self._delayed.get(key)
        if delayed is not None:
            delayed.changes.append(change)
            return
        known = self._known.get(key)
        if known is None:
            self._apply(key, change)
        elif known & self._lost:
            done(_unknown(min(known & self._lost)))
        else:
            self._delayed[key] = _Delayed(set(known), deque([change]))
            for node in sorted(known):
                self._drop(node, key)

    def _apply(self, key: bytes, change: _Change) -> None:
        was = self._state.find(key) is not None
        self.changes += was
        try:
            answer = change.apply()
        except ProtocolError as error:
            answer = Refusal(str(error), hostile=True)
        if self._state.find(key) is None:
            self._changed.discard(key)
        elif was:
            self._changed.add(key)
        change.done(answer)

    def dropped(self, node: int, key: bytes) -> None:
        """A node has forgotten the key. Raises ProtocolError where nobody asked it to."""
        delayed = self._delayed.get(key)
        if delayed is None or node not in delayed.nodes:
            raise ProtocolError("it drops a key that it was not asked to")
        delayed.nodes.discard(node)
        known = self._known[key]
        known.discard(node)
        if not known:
            del self._known[key]
        if not delayed.nodes:
            del self._delayed[key]
            for change in delayed.changes:
                self._change(key, change.apply, change.done)

    def lost(self, node: int) -> None:
        """What this node remembers it will never drop: these keys stay as they are, in this generation."""
        self._lost.add(node)
        for key, delayed in list(self._delayed.items()):
            if node in delayed.nodes:
                delayed.nodes.discard(node)
                if not delayed.nodes:
                    del self._delayed[key]
                refused = list(delayed.changes)
                delayed.changes.clear()
                for change in refused:
                    change.done(_unknown(node))

    def fix(self, keys: Sequence[bytes]) -> None:
        """Others get their values by way of others again: they stay as they are, in this generation."""
        self._fixed.update(keys)

    def find(self, key: bytes) -> bytes | None:
        """Its value."""
        return self._state.find(key)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether each of them has a value."""
        return all(self._state.find(key) is not None for key in keys)

    def waits_for(self, node: int) -> bool:
        """Whether something waits until this node has dropped it."""
        return any(node in delayed.nodes for delayed in self._delayed.values())

    # ------------------------------------------------------------------------------ waits, queues

    def _wait(self, request: WaitRequest, asker: int | None, done: Done) -> Cancel:
        match request:
            case protocol.Wait(keys):
                return self._wait_for(keys, asker, done)
            case protocol.Barrier(key, world_size):
                barrier = _Barrier(self._state, key, world_size, done)
                self._change(key, barrier.come, barrier.came)
                return barrier.cancel
            case protocol.CancelWait():
                raise ProtocolError("a wait is canceled where it began")

    def _wait_for(self, keys: Sequence[bytes], asker: int | None, done: Done) -> Cancel:
        def over() -> None:
            done(self._brought(keys, asker))

        registration = self._state.wait(keys, over)
        if registration is None:
            over()
            return nothing
        return lambda: self._state.cancel(registration)

    def _brought(self, keys: Sequence[bytes], asker: int | None) -> Reply:
        """Who has waited asks for the values next."""
        if asker is None:
            return DONE
        left_nbytes = BRING_NBYTES
        values = []
        for key in keys:
            value = self._state.find(key)
            if value is not None and len(value) > min(KEEP_NBYTES, left_nbytes):
                value = None
            left_nbytes -= len(value or b"")
            values.append(value)
        return Reply(values=tuple(values), keep=self._let_keep(keys, values, asker))

    def _queue(self, request: protocol.QueueRequest) -> Reply:
        match request:
            case protocol.QueuePush(key, value):
                self._state.queue_push(key, value)
                return DONE
            case protocol.QueuePop(key):
                length, popped = self._state.queue_pop(key)
                return Reply(length, (popped,))
            case protocol.QueueLen(key):
                return Reply(self._state.queue_len(key))


class _Barrier:
    """One who comes to a barrier. The coming is a change of its key, which may have to wait."""

    def __init__(self, state: StoreState, key: bytes, world_size: int, done: Done) -> None:
        self._state, self._key, self._world_size, self._done = state, key, world_size, done
        self._registration: Registration | None = None
        self._canceled = False

    def come(self) -> Answer:
        """Count one more. The answer's count: 0 where others are waited for."""
        self._registration = self._state.barrier(self._key, self._world_size, lambda: self._done(DONE))
        if self._registration is not None and self._canceled:
            self.cancel()
        return Reply(int(self._registration is None))

    def came(self, answer: Answer) -> None:
        if isinstance(answer, Refusal):
            self._done(answer)
        elif answer.count and not self._canceled:
            self._done(DONE)

    def cancel(self) -> None:
        """The count stays."""
        self._canceled = True
        if self._registration is not None:
            self._state.cancel(self._registration)


def _doing(change: Callable[[], None]) -> Callable[[], Answer]:
    def apply() -> Answer:
        change()
        return DONE

    return apply


def _setter(state: StoreState, key: bytes, value: bytes) -> Callable[[], Answer]:
    return _doing(lambda: state.set(key, value))


def _unknown(node: int) -> Refusal:
    return Refusal(f"node-{node} is lost and may remember the key's value", hostile=False)
