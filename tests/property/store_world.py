"""Several nodes' stores on a network that delivers when the test says; clients on them, and what they saw."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.agent.kvstore.answers import Answer, Refusal, Reply
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.node import Cancel, StoreNode
from ckptless.daemon.agent.kvstore.owner import Owner
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.state import StoreState


@dataclass
class Op:
    """One call of a client, and when it began and ended; `end` None: it has not."""

    client: int
    request: Request
    begin: int
    end: int | None = None
    answer: Answer | None = None
    cancel: Cancel = field(default=lambda: None)


class World:
    """`nodes` stores; pairs of them have a queue for each direction, as a TCP connection does."""

    def __init__(self, nodes: int, clients: int, make: Callable[..., StoreNode] = StoreNode) -> None:
        self.homes = Homes(list(range(nodes)))
        self.wires: dict[tuple[int, int], deque[bytes]] = {}
        self.nodes = [make(n, self.homes, self._sender(n)) for n in range(nodes)]
        self.where = [client % nodes for client in range(clients)]
        self.current: list[Op | None] = [None] * clients
        self.history: list[Op] = []
        self._time = 0

    def _sender(self, source: int) -> Callable[[int, wire.Item], None]:
        def send(target: int, item: wire.Item) -> None:
            (body,) = wire.encode([item])
            self.wires.setdefault((source, target), deque()).append(body)

        return send

    def now(self) -> int:
        self._time += 1
        return self._time

    def call(self, client: int, request: Request) -> Op:
        """Begin it. A client makes its next call when this one has ended."""
        op = Op(client, request, self.now())
        self.history.append(op)
        self.current[client] = op

        def done(answer: Answer) -> None:
            assert op.end is None, "answered twice"
            op.end, op.answer = self.now(), answer
            self.current[client] = None

        op.cancel = self.nodes[self.where[client]].ask(request, done)
        return op

    def ready(self) -> list[tuple[int, int]]:
        """Where something is on its way."""
        return sorted(pair for pair, queue in self.wires.items() if queue)

    def deliver(self, pair: tuple[int, int]) -> None:
        """The next message of one connection."""
        for item in wire.decode(self.wires[pair].popleft()):
            self.nodes[pair[1]].heard(pair[0], item)

    def settle(self) -> None:
        """Deliver all that is on its way, and what follows from it."""
        while pairs := self.ready():
            self.deliver(pairs[0])


def parts(op: Op) -> list[tuple[bytes, Request, Any]]:
    """An operation by its keys: (key, request of that key alone, what it answered; None: it has not)."""
    request, answer = op.request, op.answer
    ended = isinstance(answer, Reply)
    match request:
        case protocol.MultiSet(items):
            return [(key, protocol.Set(key, value), Reply() if ended else None) for key, value in items]
        case protocol.MultiGet(keys):
            values = answer.values if isinstance(answer, Reply) else (None,) * len(keys)
            return [
                (key, protocol.Get(key), Reply(values=(value,)) if ended else None)
                for key, value in zip(keys, values, strict=True)
            ]
        case protocol.Wait(keys):
            return [(key, protocol.Wait((key,)), Reply() if ended else None) for key in keys]
        case protocol.Check((key,)):
            return [(key, request, answer)]
        case (
            protocol.NumKeys()
            | protocol.ListKeys()
            | protocol.Check()
            | protocol.Ping()
            | protocol.CancelWait()
        ):
            return []
        case _:
            return [(request.key, request, answer)]


def is_linear(history: list[Op]) -> bool:
    """Whether each key's operations can be put in an order that one server could have done them in.

    Of a client's operations one begins after the one before has ended; and what holds for each key by itself
    holds for all of them (Herlihy and Wing 1990, locality), so this is all.
    """
    by_key: dict[bytes, list[tuple[int, int | None, Request, Any]]] = {}
    for op in history:
        for key, request, answer in parts(op):
            by_key.setdefault(key, []).append((op.begin, op.end, request, answer))
    return all(_has_order(ops) for ops in by_key.values())


def _has_order(ops: list[tuple[int, int | None, Request, Any]]) -> bool:
    seen: set[tuple[frozenset[int], bytes | None, tuple[bytes, ...]]] = set()

    def search(left: frozenset[int], done: list[Request]) -> bool:
        if all(ops[place][1] is None for place in left):
            return True
        state = _after(done)
        queue = tuple(state._queues.get(_key(done), ())) if done else ()
        known = (left, state.find(_key(done)) if done else None, queue)
        if known in seen:
            return False
        seen.add(known)
        first_end = min(end for place in left if (end := ops[place][1]) is not None)
        for place in sorted(left):
            begin, end, request, answer = ops[place]
            if begin > first_end:
                continue
            got = _done_once(done, request)
            if got is None or (end is not None and not _same(request, got, answer)):
                continue
            if search(left - {place}, [*done, request]):
                return True
        return False

    return search(frozenset(range(len(ops))), [])


def _key(requests: list[Request]) -> bytes:
    request = requests[0]
    return request.keys[0] if isinstance(request, protocol.Wait | protocol.Check) else request.key  # type: ignore[union-attr]


def _after(requests: list[Request]) -> StoreState:
    state = StoreState()
    owner = Owner(state, lambda _node, _key: None)
    for request in requests:
        owner.ask(request, None, lambda _answer: None)
    return state


def _done_once(before: list[Request], request: Request) -> Answer | None:
    """What one server answers after those; None where it does not, since a wait goes on."""
    got: list[Answer] = []
    owner = Owner(_after(before), lambda _node, _key: None)
    owner.ask(request, None, got.append)
    return got[0] if got else None


def _same(request: Request, expected: Answer, answer: Answer | None) -> bool:
    if isinstance(expected, Refusal) or isinstance(answer, Refusal):
        return isinstance(expected, Refusal) and isinstance(answer, Refusal)
    assert answer is not None
    return isinstance(request, protocol.Wait) or (expected.count, expected.values) == (
        answer.count,
        answer.values,
    )
