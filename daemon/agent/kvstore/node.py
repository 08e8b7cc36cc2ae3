"""One node's part of the store of a generation: the keys that it keeps, and its clients' way to all others.

Every request goes to the agents that keep its keys, and its client's next one waits for their answers: so
what a client does is done in its order, wherever the keys are, and each key is at one place. That is all that
one server for all would promise, but that requests of several keys are not one step. Pure: what is to be sent
to other nodes goes to `send(node, item)`, which must deliver in order or not at all.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import DONE, Answer, Done, Join, Refusal, Reply, by_home, nothing
from ckptless.daemon.agent.kvstore.cache import Cache
from ckptless.daemon.agent.kvstore.gather import Gathering
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.owner import Owner
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.sharing import Memo, Turns
from ckptless.daemon.agent.kvstore.state import StoreState
from ckptless.daemon.agent.kvstore.wire import Ask, Askable, Drop, Dropped, Gather, Item, Told
from ckptless.daemon.agent.kvstore.wire import Cancel as CancelAsk
from ckptless.daemon.api.errors import ProtocolError

# Of one other node, at one time; its clients are as many as it has ranks, and a few threads of these.
MAX_ASKED = 65536

Cancel: TypeAlias = Callable[[], None]
_Requests: TypeAlias = dict[int, Askable]


class StoreNode:
    """`ask` for this node's clients, `heard` and `lost` for what comes of other nodes.

    `asked` counts the requests of other nodes.
    """

    def __init__(self, me: int, homes: Homes, send: Callable[[int, Item], None]) -> None:
        self._me, self._homes, self._send = me, homes, send
        self.asked = 0
        self._owner = Owner(StoreState(), lambda node, key: send(node, Drop(key)))
        self._cache = Cache()
        # How often something in it was forgotten.
        self._forgotten = 0
        self._homed: Memo[dict[int, protocol.Keys]] = Memo()
        self._there: Memo[bool] = Memo()
        self._got: Memo[Reply] = Memo()
        self._turns = Turns()
        self._number = 0
        self._asking: dict[int, dict[int, tuple[Askable, Done]]] = {}
        self._serving: dict[int, dict[int, Cancel]] = {}
        self._lost: set[int] = set()
        self._gathering = Gathering(me, homes, self._owner, self._cache, self._ask_one)

    # --------------------------------------------------------------------------------- for clients

    def ask(self, request: Request, done: Done) -> Cancel:
        """Do what a client asks; `done` hears of it once, maybe at once. How to cancel a wait."""
        try:
            match request:
                case protocol.Wait(keys):
                    return self._wait(keys, done)
                case protocol.Get(key):
                    self._get((key,), done)
                case protocol.MultiGet(keys):
                    self._get(keys, done)
                case protocol.Check(keys):
                    self._check(keys, done)
                case protocol.MultiSet(items):
                    for key, _value in items:
                        self._homes.admit(key)
                    self._multi_set(items, done)
                case protocol.NumKeys() | protocol.ListKeys():
                    self._ask_all(dict.fromkeys(self._homes.nodes, request), done)
                case protocol.CancelWait() | protocol.Ping():
                    raise ProtocolError("not a question to the store")
                case _:
                    self._homes.admit(request.key)
                    return self._ask_one(self._homes.of(request.key), request, done)
        except ProtocolError as error:
            done(Refusal(str(error), hostile=True))
        return nothing

    def _by_home(self, keys: protocol.Keys) -> dict[int, protocol.Keys]:
        """Each once, by the node that keeps it. Raises ProtocolError for keys of another generation."""
        found = self._homed.get(keys)
        if found is None:
            for key in keys:
                self._homes.admit(key)
            found = by_home(dict.fromkeys(keys), self._homes.of)
            self._homed.put(keys, found)
        return found

    @property
    def _stamp(self) -> int:
        """Another one as soon as a value that is known here may be another."""
        return self._forgotten + self._owner.changes

    def _ask_one(self, node: int, request: Askable, done: Done) -> Cancel:
        if node == self._me:
            assert not isinstance(request, Gather)
            return self._owner.ask(request, None, done)
        if node in self._lost:
            done(_gone(node))
            return nothing
        number = self._number = self._number + 1
        self._asking.setdefault(node, {})[number] = (request, done)
        self._send(node, Ask(number, request))
        return lambda: self._cancel(node, number)

    def _cancel(self, node: int, number: int) -> None:
        if self._asking.get(node, {}).pop(number, None) is not None:
            self._send(node, CancelAsk(number))

    def _ask_all(self, requests: _Requests, done: Done) -> Cancel:
        """Each node its own; the counts are added up, the values put together."""

        def over(found: list[Reply] | Refusal) -> None:
            if isinstance(found, Refusal):
                done(found)
                return
            values = tuple(value for reply in found for value in reply.values)
            done(Reply(sum(reply.count for reply in found), values))

        join = Join(len(requests), over)
        cancels = [
            self._ask_one(node, request, join.part(place))
            for place, (node, request) in enumerate(requests.items())
        ]

        def cancel() -> None:
            for one in cancels:
                one()

        return cancel

    def _unknown(self, keys: protocol.Keys) -> dict[int, protocol.Keys]:
        """Those that nobody here has a value of, by the node to be asked; and all that are kept here."""
        found = {}
        for node, theirs in self._by_home(keys).items():
            mine = node == self._me
            unknown = theirs if mine else tuple(k for k in theirs if self._cache.get(node, k) is None)
            if unknown:
                found[node] = unknown
        return found

    def _wait(self, keys: protocol.Keys, done: Done, *, alone: bool = False) -> Cancel:
        if self._there.get(keys, self._stamp):
            done(DONE)
            return nothing
        gathered = self._gathering.wait(keys, done)
        if gathered is not None:
            return gathered
        behind = self._turns.stand_behind(keys, lambda: self._wait(keys, done, alone=True))
        if behind is not None:
            return behind.cancel
        unknown = self._unknown(keys)
        only_mine = unknown.keys() <= {self._me}
        if only_mine and self._owner.has(unknown.get(self._me, ())):
            self._there.put(keys, True, self._stamp)
        if only_mine or alone:
            return self._ask_waits(unknown, done)
        cancel_lead = self._ask_waits(unknown, self._turns.lead(keys, done))

        def cancel() -> None:
            cancel_lead()
            self._turns.let_go(keys)

        return cancel

    def _ask_waits(self, unknown: dict[int, protocol.Keys], done: Done) -> Cancel:
        requests: _Requests = {node: protocol.Wait(theirs) for node, theirs in unknown.items()}
        return self._ask_all(requests, lambda answer: done(answer if isinstance(answer, Refusal) else DONE))

    def _check(self, keys: protocol.Keys, done: Done) -> None:
        requests: _Requests = {node: protocol.Check(theirs) for node, theirs in self._unknown(keys).items()}

        def over(answer: Answer) -> None:
            done(answer if isinstance(answer, Refusal) else Reply(int(answer.count == len(requests))))

        self._ask_all(requests, over)

    def _multi_set(self, items: protocol.Items, done: Done) -> None:
        found: dict[int, list[tuple[bytes, bytes]]] = {}
        for item in items:
            found.setdefault(self._homes.of(item[0]), []).append(item)
        requests: _Requests = {node: protocol.MultiSet(tuple(theirs)) for node, theirs in found.items()}
        self._ask_all(requests, done)

    def _get(self, keys: protocol.Keys, done: Done) -> None:
        """What is remembered is taken at once: another node's answer may come after it was dropped."""
        known = self._got.get(keys, self._stamp)
        if known is not None:
            done(known)
            return
        values: dict[bytes, bytes | None] = {}
        asked: dict[int, protocol.Keys] = {}
        for node, theirs in self._by_home(keys).items():
            if node == self._me:
                asked[node] = theirs
                continue
            found = [(key, self._cache.get(node, key)) for key in theirs]
            values.update(found)
            if unknown := tuple(key for key, value in found if value is None):
                asked[node] = unknown
        stamp = self._stamp

        def over(found: list[Reply] | Refusal) -> None:
            if isinstance(found, Refusal):
                done(found)
                return
            for theirs, reply in zip(asked.values(), found, strict=True):
                values.update(zip(theirs, reply.values, strict=True))
            answer = Reply(values=tuple(values[key] for key in keys))
            if not asked.keys() - {self._me} and None not in answer.values:
                self._got.put(keys, answer, stamp)
            done(answer)

        join = Join(len(asked), over)
        for place, (node, theirs) in enumerate(asked.items()):
            self._ask_one(node, protocol.MultiGet(theirs), join.part(place))

    # ----------------------------------------------------------------------------- for other nodes

    def heard(self, node: int, item: Item) -> None:
        """What another node's store says. Raises ProtocolError."""
        match item:
            case Ask(number, request):
                self._serve(node, number, request)
            case CancelAsk(number):
                cancel = self._serving.get(node, {}).pop(number, None)
                if cancel is not None:
                    cancel()
            case Told(number, answer):
                self._told(node, number, answer)
            case Drop(key):
                self._forgotten += 1
                self._cache.drop(node, key)
                self._send(node, Dropped(key))
            case Dropped(key):
                self._owner.dropped(node, key)

    def _serve(self, node: int, number: int, request: Askable) -> None:
        serving = self._serving.setdefault(node, {})
        if number in serving or len(serving) >= MAX_ASKED:
            raise ProtocolError(f"its request {number}, with {len(serving)} others that are not answered")
        for key in _keys(request):
            if self._homes.of(key) != self._me:
                raise ProtocolError("it asks for a key that is not kept here")
        self.asked += 1
        serving[number] = nothing

        def done(answer: Answer) -> None:
            if serving.pop(number, None) is not None:
                self._send(node, Told(number, answer))

        if isinstance(request, Gather):
            cancel = self._gathering.serve(node, request.where, done)
        else:
            cancel = self._owner.ask(request, node, done)
        if number in serving:
            serving[number] = cancel

    def _told(self, node: int, number: int, answer: Answer) -> None:
        if number > self._number:
            raise ProtocolError(f"an answer to {number}, which was not asked")
        asked = self._asking.get(node, {}).get(number)
        if asked is None:
            return  # a wait that was canceled meanwhile
        request, done = asked
        if isinstance(answer, Reply):
            # Until then it is still asked: where that is no answer, the node is lost, and `done` hears of it.
            self._check_reply(node, request, answer)
            if isinstance(request, protocol.MultiGet | protocol.Wait):
                for place in answer.keep:
                    value = answer.values[place]
                    assert value is not None
                    self._cache.put(node, request.keys[place], value)
        del self._asking[node][number]
        done(answer)

    def _check_reply(self, node: int, request: Askable, answer: Reply) -> None:
        match request:
            case protocol.MultiGet(keys) | protocol.Wait(keys):
                fits = len(answer.values) == len(keys)
            case Gather():
                fits = len(answer.values) == self._gathering.count(node)
            case protocol.CompareSet():
                fits = len(answer.values) == 1 and answer.values[0] is not None
            case protocol.QueuePop():
                fits = len(answer.values) == 1 and (answer.values[0] is None) == (answer.count == 0)
            case protocol.ListKeys():
                fits = None not in answer.values
            case _:
                fits = not answer.values
        if not fits or any(
            place not in range(len(answer.values)) or answer.values[place] is None for place in answer.keep
        ):
            raise ProtocolError(f"no answer to {type(request).__name__}")

    def lost(self, node: int) -> None:
        """Nothing of this node will be heard in this generation any more: who needs it is refused."""
        self._lost.add(node)
        self._forgotten += 1
        self._cache.drop_owner(node)
        for cancel in self._serving.pop(node, {}).values():
            cancel()
        self._owner.lost(node)
        for _request, done in self._asking.pop(node, {}).values():
            done(_gone(node))

    def waits_for(self, node: int) -> bool:
        """Whether it is to say something: so that it is looked at whether it still can."""
        return bool(self._asking.get(node)) or self._owner.waits_for(node)


def _keys(request: Askable) -> Sequence[bytes]:
    match request:
        case protocol.MultiGet(keys) | protocol.Check(keys) | protocol.Wait(keys):
            return keys
        case protocol.MultiSet(items):
            return [key for key, _value in items]
        case protocol.NumKeys() | protocol.ListKeys() | Gather():
            return ()
        case _:
            return (request.key,)


def _gone(node: int) -> Refusal:
    return Refusal(f"node-{node} does not answer", hostile=False)
