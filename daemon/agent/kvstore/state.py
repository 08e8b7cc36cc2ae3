"""The state of a TCPStore server: keys, queues, and who waits for which key.

It answers as torch's own server does, but for what is plainly a mistake there (see `compare_set` and
`queue_push`). No input or output here. ProtocolError means that the client asked for the impossible.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ckptless.daemon.agent.kvstore.protocol import MAX_VALUE_NBYTES
from ckptless.daemon.protocol.errors import ProtocolError

# Far above what any job keeps here; a client that runs wild must not take the node's memory.
MAX_NBYTES = 1 << 30
# What an empty entry costs, roughly: without it, empty values would be free of charge.
ENTRY_NBYTES = 128

# As C's strtoll reads it, which torch's server does: spaces before, anything after.
_NUMBER = re.compile(rb"[ \t-\r]*([+-]?[0-9]{1,19})(?![0-9])")
_INT64 = range(-(1 << 63), 1 << 63)


# A name of its own, because inside StoreState `set` is a method.
_Keys: TypeAlias = set[bytes]


class Registration:
    """Somebody who waits. Got from `StoreState.wait` or `.barrier`, given back to `.cancel`."""

    __slots__ = ("missing", "on_done", "table")

    def __init__(self, missing: _Keys, on_done: Callable[[], None], table: "_Table") -> None:
        self.missing, self.on_done, self.table = missing, on_done, table


# For each key, those who wait for it, the first to come first (a dict, because it forgets in O(1)).
_Table: TypeAlias = dict[bytes, dict[Registration, None]]


class StoreState:
    """The keys of one generation. Every call is one atomic step.

    `max_nbytes` bounds keys and values together; what would pass it raises ProtocolError and changes nothing.
    """

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        # A value that was appended to is a bytearray until somebody reads it.
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: _Table = {}
        self._at_barrier: _Table = {}
        self._nbytes = 0
        self._max_nbytes = max_nbytes

    # Keys and values

    def set(self, key: bytes, value: bytes) -> None:
        """Give `key` a value; wake those who wait for it."""
        self._store(key, value)
        self._wake(key)

    def multi_set(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """`set` for each item, as one step: whoever is woken sees all of them."""
        stored = []
        try:
            for key, value in items:
                self._store(key, value)
                stored.append(key)
        finally:
            for key in stored:
                self._wake(key)

    def find(self, key: bytes) -> bytes | None:
        """Return the value, None if there is none."""
        value = self._values.get(key)
        if isinstance(value, bytearray):
            # Keep the copy: a request may ask for the same key many times.
            value = self._values[key] = bytes(value)
        return value

    def get(self, key: bytes) -> bytes:
        """Return the value, empty if there is none."""
        return self.find(key) or b""

    def add(self, key: bytes, amount: int) -> int:
        """Add to the decimal number under `key` (none: 0), and return the sum.

        Raises ProtocolError if no number stands there or the sum does not fit into 64 bits.
        """
        total = self._number(key) + amount
        if total not in _INT64:
            raise ProtocolError("a sum beyond 64 bits")
        self.set(key, b"%d" % total)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Put `value` at the end of what stands under `key`; wake those who wait for it."""
        old = self._values.get(key)
        if old is None:
            self.set(key, value)
            return
        if len(old) + len(value) > MAX_VALUE_NBYTES:
            raise ProtocolError(f"a value grown beyond {MAX_VALUE_NBYTES} bytes")
        self._charge(len(value))
        if not isinstance(old, bytearray):
            # So that many small pieces do not copy the whole each time.
            old = self._values[key] = bytearray(old)
        old += value
        self._wake(key)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value it has then.

        A key that is not there counts as empty, but if something was expected, that is what is returned.
        torch's server also wakes those who wait for a key that is still not there; this one does not.
        """
        if key not in self._values and expected:
            return expected
        if self.get(key) == expected:
            self.set(key, desired)
        return self.get(key)

    def delete(self, key: bytes) -> bool:
        """Forget a key (a queue of that name stays). Return whether it was there."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._nbytes -= ENTRY_NBYTES + len(key) + len(value)
        return True

    def check(self, keys: Iterable[bytes]) -> bool:
        """Return whether each key has a value, or something in its queue."""
        return all(self._is_there(key) for key in keys)

    def num_keys(self) -> int:
        """Return the number of keys with a value. Queues do not count."""
        return len(self._values)

    def list_keys(self) -> list[bytes]:
        """Return the keys with a value. Queues are not listed."""
        return list(self._values)

    # Queues

    def queue_push(self, key: bytes, value: bytes) -> None:
        """Put a value at the end of a queue; wake the one who has waited longest for it.

        torch's server keeps that one on its list, so a later push may end another wait of the same client.
        """
        self._charge(ENTRY_NBYTES + len(key) + len(value))
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key, only_one=True)

    def queue_pop(self, key: bytes) -> tuple[int, bytes | None]:
        """Take the first value. Return the length of the queue before that, and the value or None."""
        queue = self._queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        value = queue.popleft()
        self._nbytes -= ENTRY_NBYTES + len(key) + len(value)
        if not queue:
            del self._queues[key]
        return length, value

    def queue_len(self, key: bytes) -> int:
        """Return the length of a queue, 0 if nobody pushed."""
        return len(self._queues.get(key, ()))

    # Waits

    def wait(self, keys: Sequence[bytes], on_done: Callable[[], None]) -> Registration | None:
        """Return None if every key is there; else `on_done` is called, once, when each has come.

        A key that came counts, even if it is deleted before the others come. `on_done` runs inside the call
        that brings the last key. It must not raise.
        """
        missing = {key for key in keys if not self._is_there(key)}
        if not missing:
            return None
        return self._register(missing, on_done, self._waiting)

    def barrier(self, key: bytes, world_size: int, on_done: Callable[[], None]) -> Registration | None:
        """Count one more at the barrier; None if it is full, else `on_done` as with `wait`.

        The count is the value of `key`. It stays, also when somebody cancels: a barrier serves once.
        """
        count = self.add(key, 1)
        if count < world_size:
            return self._register({key}, on_done, self._at_barrier)
        self._complete(self._at_barrier, key)
        return None

    def cancel(self, registration: Registration) -> None:
        """Forget somebody who waits. Harmless after the end of the wait."""
        for key in registration.missing:
            there = registration.table[key]
            del there[registration]
            if not there:
                del registration.table[key]
        registration.missing.clear()

    # Inside

    def _is_there(self, key: bytes) -> bool:
        return key in self._values or key in self._queues

    def _number(self, key: bytes) -> int:
        if key not in self._values:
            return 0
        match = _NUMBER.match(self._values[key])
        if match is None:
            raise ProtocolError("an addition to something that is not a number")
        return int(match[1])

    def _charge(self, nbytes: int) -> None:
        if nbytes > 0 and self._nbytes + nbytes > self._max_nbytes:
            raise ProtocolError(f"more than {self._max_nbytes} bytes of keys and values")
        self._nbytes += nbytes

    def _store(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        self._charge(len(value) - len(old) if old is not None else ENTRY_NBYTES + len(key) + len(value))
        self._values[key] = value

    @staticmethod
    def _register(missing: _Keys, on_done: Callable[[], None], table: _Table) -> Registration:
        registration = Registration(missing, on_done, table)
        for key in missing:
            table.setdefault(key, {})[registration] = None
        return registration

    def _wake(self, key: bytes, *, only_one: bool = False) -> None:
        self._complete(self._waiting, key, only_one=only_one)

    @staticmethod
    def _complete(table: _Table, key: bytes, *, only_one: bool = False) -> None:
        """Tick `key` off for all, or for as many as it takes to end one wait; then tell whose wait ended."""
        there = table.get(key, {})
        done = []
        for registration in list(there):
            del there[registration]
            registration.missing.discard(key)
            if not registration.missing:
                done.append(registration)
                if only_one:
                    break
        if not there:
            table.pop(key, None)
        for registration in done:
            registration.on_done()
