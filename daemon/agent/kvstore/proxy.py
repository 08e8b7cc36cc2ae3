"""The way of one agent's ranks to the home of their generation's keys, and what is remembered of it. Pure.

Every request goes to the home, and its client's next one waits for the answer: so what a client does is done
in its order. Values that the home lets this agent keep are asked for once, and given to all of its ranks
until the home recalls them; of clients that wait for the same keys one asks.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.protocol import Keys, Request
from ckptless.daemon.agent.kvstore.wire import (
    Ask,
    Askable,
    Drop,
    Dropped,
    FromHome,
    Refusal,
    Reply,
    ToHome,
)
from ckptless.daemon.agent.kvstore.wire import Cancel as CancelAsk
from ckptless.daemon.protocol.errors import ProtocolError

# Of all values that are remembered, with their keys.
MAX_NBYTES = 256 << 20
LENGTH_NBYTES = 8
NO_VALUES = Reply()
# The names of ckptless's own keys say of which generation they are.
_OURS = re.compile(rb"ckptless/([0-9]{1,18})/")

Cancel: TypeAlias = Callable[[], None]
Done: TypeAlias = Callable[[bytes | Refusal], None]
"""Hears once, maybe at once, what a client is to be sent, or why it is hung up on."""


def nothing() -> None:
    """Cancel what cannot be, or has ended."""


class _Waiter:
    """A client that waits for keys: it has asked for them itself, or stands behind one that has."""

    def __init__(self, keys: Keys, done: Done) -> None:
        self.keys, self.done = keys, done
        self.cancel: Cancel = nothing


class Proxy:
    """`ask` is for the ranks of this agent's node; `heard(item)` takes what the home says, see `Home`.

    `asks` counts what it has asked the home.
    """

    def __init__(self, generation: int, send: Callable[[ToHome], None], max_nbytes: int = MAX_NBYTES) -> None:
        self._generation, self._send, self._left_nbytes = generation, send, max_nbytes
        self._prefix = b"ckptless/%d/" % generation
        self.asks = 0
        # As clients get them: each with its length before it.
        self._cache: dict[bytes, bytes] = {}
        self._asking: dict[int, tuple[Askable, Callable[[Reply | Refusal], None]]] = {}
        # By the keys that one client has asked for, and others wait for, too.
        self._behind: dict[Keys, list[_Waiter]] = {}
        self._lost = ""

    @property
    def expects(self) -> bool:
        """Whether the home is to say something: so that it is looked at whether it still can."""
        return bool(self._asking)

    # -------------------------------------------------------------------------------- for clients

    def ask(self, request: Request, done: Done) -> Cancel:
        """Do what a client asks; return how to cancel a wait."""
        try:
            self._admit(request)
            match request:
                case protocol.Wait(keys):
                    waiter = _Waiter(keys, done)
                    self._wait(waiter)
                    return lambda: waiter.cancel()
                case protocol.Get(key):
                    self._get((key,), done)
                case protocol.MultiGet(keys):
                    self._get(keys, done)
                case protocol.Check(keys) if all(key in self._cache for key in keys):
                    done(protocol.encode_check(True))
                case protocol.CancelWait() | protocol.Ping():
                    raise ProtocolError("not a question to the store")
                case _:
                    return self._ask(request, lambda answer: done(_data(answer)))
        except ProtocolError as error:
            done(Refusal(str(error), hostile=True))
        return nothing

    def _admit(self, request: Request) -> None:
        """Raise ProtocolError for a key that says that it is of another generation."""
        for key in _keys(request):
            if key.startswith(b"ckptless/") and not key.startswith(self._prefix) and self._generation:
                found = _OURS.match(key)
                if found is not None:
                    text = f"a key of generation {int(found[1])}, in generation {self._generation}"
                    raise ProtocolError(text)

    def _ask(self, request: Askable, done: Callable[[Reply | Refusal], None]) -> Cancel:
        if self._lost:
            done(Refusal(self._lost, hostile=False))
            return nothing
        number = self.asks = self.asks + 1
        self._asking[number] = (request, done)
        self._send(Ask(number, request))
        return lambda: self._cancel(number)

    def _cancel(self, number: int) -> None:
        if self._asking.pop(number, None) is not None:
            self._send(CancelAsk(number))

    def _get(self, keys: Keys, done: Done) -> None:
        """Take what is remembered at once: the home's answer may come after it was dropped."""
        known = {key: self._cache.get(key) for key in keys}
        unknown = tuple(key for key, value in known.items() if value is None)

        def over(answer: Reply | Refusal) -> None:
            if isinstance(answer, Refusal):
                done(answer)
                return
            known.update(zip(unknown, map(_encoded, answer.values), strict=True))
            try:
                data = protocol.join_values([known[key] or b"" for key in keys])
            except ProtocolError as error:
                done(Refusal(str(error), hostile=True))
            else:
                done(data)

        if unknown:
            self._ask(protocol.MultiGet(unknown), over)
        else:
            over(NO_VALUES)

    def _wait(self, waiter: _Waiter, *, alone: bool = False) -> None:
        """Ask for what is not known to be there, or stand behind who has. `alone`: not that again."""
        keys = waiter.keys
        unknown = tuple(key for key in dict.fromkeys(keys) if key not in self._cache)
        if not unknown:
            waiter.cancel = nothing
            waiter.done(protocol.STOP_WAITING)
            return
        behind = self._behind.get(keys)
        if behind is not None and not alone:
            behind.append(waiter)
            waiter.cancel = lambda: behind.remove(waiter)
            return
        mine: list[_Waiter] = []
        if not alone:
            self._behind[keys] = mine

        def over(answer: Reply | Refusal) -> None:
            waiter.cancel = nothing
            waiter.done(_data(answer))
            follow()

        def follow() -> None:
            """Let the others look: what this one was told may be of a time before they came."""
            if self._behind.get(keys) is mine:
                del self._behind[keys]
            for other in mine:
                self._wait(other, alone=True)

        def cancel() -> None:
            cancel_ask()
            follow()

        waiter.cancel = cancel
        cancel_ask = self._ask(protocol.Wait(unknown), over)

    # ------------------------------------------------------------------------------ from the home

    def heard(self, item: FromHome) -> None:
        """Take what the home says. Raises ProtocolError."""
        if isinstance(item, Drop):
            value = self._cache.pop(item.key, None)
            if value is not None:
                self._left_nbytes += len(item.key) + len(value)
            self._send(Dropped(item.key))
            return
        if item.number > self.asks:
            raise ProtocolError(f"an answer to {item.number}, which was not asked")
        asked = self._asking.get(item.number)
        if asked is None:
            return  # a wait that was canceled meanwhile
        request, done = asked
        if isinstance(item.answer, Reply):
            # Until then it is still asked: where that is no answer, the home is lost, and `done` hears of it.
            self._keep(request, item.answer)
        del self._asking[item.number]
        done(item.answer)

    def _keep(self, request: Askable, reply: Reply) -> None:
        """Remember what may be, if there is room. Raises ProtocolError for values of other keys."""
        keys = request.keys if isinstance(request, protocol.MultiGet | protocol.Wait) else ()
        if len(reply.values) != len(keys):
            raise ProtocolError(f"{len(reply.values)} values for {len(keys)} keys")
        for place in reply.keep:
            value = reply.values[place] if place in range(len(keys)) else None
            if value is None:
                raise ProtocolError("it lets a value be kept that it has not given")
            size = len(keys[place]) + len(value) + LENGTH_NBYTES
            if size <= self._left_nbytes and keys[place] not in self._cache:
                self._cache[keys[place]] = _encoded(value)
                self._left_nbytes -= size

    def lost(self, why: str) -> None:
        """Refuse all who need the home: nothing of it will be heard in this generation any more."""
        self._lost = why
        self._cache.clear()
        asking, self._asking = self._asking, {}
        for _request, done in asking.values():
            done(Refusal(why, hostile=False))


def _encoded(value: bytes | None) -> bytes:
    return protocol.encode_value(value or b"")


def _data(answer: Reply | Refusal) -> bytes | Refusal:
    return answer.data if isinstance(answer, Reply) else answer


def _keys(request: Request) -> Iterable[bytes]:
    match request:
        case protocol.MultiGet(keys) | protocol.Check(keys) | protocol.Wait(keys):
            return keys
        case protocol.MultiSet(items):
            return [key for key, _value in items]
        case protocol.NumKeys() | protocol.ListKeys() | protocol.Ping() | protocol.CancelWait():
            return ()
        case _:
            return (request.key,)
