"""Several nodes' stores on a network that delivers when the test says; clients on them, and what they saw."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.proxy import Cancel, Proxy
from ckptless.daemon.agent.kvstore.state import StoreState
from ckptless.daemon.agent.kvstore.wire import Refusal

Answer = bytes | Refusal


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
    """Proxies of `nodes`, the first one's beside the home; each other has a queue each way, as TCP does."""

    def __init__(
        self,
        nodes: int,
        clients: int,
        make: Callable[..., Proxy] = Proxy,
        make_home: Callable[..., Home] = Home,
    ) -> None:
        # To the home where the second is 0.
        self.wires: dict[tuple[int, int], deque[bytes]] = {}
        self.home = make_home(self._from_home)
        self.proxies = [make(0, self._sender(n)) for n in range(nodes)]
        self.where = [client % nodes for client in range(clients)]
        self.current: list[Op | None] = [None] * clients
        self.history: list[Op] = []
        self._time = 0

    def _from_home(self, node: int, item: wire.FromHome) -> None:
        if node == 0:
            self.proxies[0].heard(item)
        else:
            self._put((0, node), item)

    def _sender(self, node: int) -> Callable[[wire.ToHome], None]:
        def send(item: wire.ToHome) -> None:
            if node == 0:
                self.home.heard(0, item)
            else:
                self._put((node, 0), item)

        return send

    def _put(self, pair: tuple[int, int], item: wire.Item) -> None:
        (body,) = wire.encode([item])
        self.wires.setdefault(pair, deque()).append(body)

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

        op.cancel = self.proxies[self.where[client]].ask(request, done)
        return op

    def ready(self) -> list[tuple[int, int]]:
        """Return the connections on which something is on its way."""
        return sorted(pair for pair, queue in self.wires.items() if queue)

    def deliver(self, pair: tuple[int, int]) -> None:
        """The next message of one connection."""
        body = self.wires[pair].popleft()
        if pair[0] == 0:
            for told in wire.decode(body, wire.FROM_HOME):
                self.proxies[pair[1]].heard(told)
        else:
            for said in wire.decode(body, wire.TO_HOME):
                self.home.heard(pair[0], said)

    def settle(self) -> None:
        """Deliver all that is on its way, and what follows from it."""
        while pairs := self.ready():
            self.deliver(pairs[0])


def parts(op: Op) -> list[tuple[bytes, Request, Answer | None]]:
    """An operation by its keys: (key, request of that key alone, what it answered; None: it has not)."""
    request, answer = op.request, op.answer
    match request:
        case protocol.MultiSet(items):
            return [(key, protocol.Set(key, value), answer) for key, value in items]
        case protocol.MultiGet(keys):
            values = _values(answer, len(keys))
            return [(key, protocol.Get(key), value) for key, value in zip(keys, values, strict=True)]
        case protocol.Wait(keys):
            return [(key, protocol.Wait((key,)), answer) for key in keys]
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


def _values(answer: Answer | None, count: int) -> list[Answer | None]:
    """Of a MultiGet, each as a Get would have it."""
    if not isinstance(answer, bytes):
        return [answer] * count
    values: list[Answer | None] = []
    while answer:
        end = 8 + int.from_bytes(answer[:8], "little")
        values.append(answer[:end])
        answer = answer[end:]
    return values


def is_linear(history: list[Op]) -> bool:
    """Whether each key's operations can be put in an order that one server could have done them in.

    Of a client's operations one begins after the one before has ended; and what holds for each key by itself
    holds for all of them (Herlihy and Wing 1990, locality), so this is all.
    """
    by_key: dict[bytes, list[tuple[int, int | None, Request, Answer | None]]] = {}
    for op in history:
        for key, request, answer in parts(op):
            by_key.setdefault(key, []).append((op.begin, op.end, request, answer))
    return all(_has_order(ops) for ops in by_key.values())


def _has_order(ops: list[tuple[int, int | None, Request, Answer | None]]) -> bool:
    seen: set[tuple[frozenset[int], bytes | None, tuple[bytes, ...]]] = set()

    def search(left: frozenset[int], done: list[Request]) -> bool:
        if all(ops[place][1] is None for place in left):
            return True
        known = (left, *_standing(done))
        if known in seen:
            return False
        seen.add(known)
        first_end = min(end for place in left if (end := ops[place][1]) is not None)
        for place in sorted(left):
            begin, end, request, answer = ops[place]
            if begin > first_end:
                continue
            got = _done_once(done, request)
            if got is None or (end is not None and got != answer):
                continue
            if search(left - {place}, [*done, request]):
                return True
        return False

    return search(frozenset(range(len(ops))), [])


def _standing(requests: list[Request]) -> tuple[bytes | None, tuple[bytes, ...]]:
    """Return what stands under the key of these after all of them: its value, and its queue."""
    if not requests:
        return None, ()
    request = requests[0]
    key = request.keys[0] if isinstance(request, protocol.Wait | protocol.Check) else request.key  # type: ignore[union-attr]
    _server, state = _after(requests)
    return state.find(key), tuple(state._queues.get(key, ()))


def _after(requests: list[Request]) -> tuple[Proxy, StoreState]:
    """One server that has done these."""
    home = Home(lambda _node, item: proxy.heard(item))
    proxy = Proxy(0, lambda item: home.heard(0, item))
    for request in requests:
        proxy.ask(request, lambda _answer: None)
    return proxy, home._state


def _done_once(before: list[Request], request: Request) -> Answer | None:
    """Return what one server answers after those; None where it does not, since a wait goes on."""
    server, _state = _after(before)
    got: list[Answer] = []
    server.ask(request, got.append)
    return got[0] if got else None
