"""An agent whose node is lost at a point of the protocol: `struck_agent.py PLAN WORD --local CONFIG`.

PLAN is a file of JSON, [[point, step, node], ...]: a node is lost at the first point by whoever comes there
first, as soon as it has taken a commit of that step (node -1: any node); then at the second, and so on. What
it does is the shipped agent's: its functions are wrapped here, and nowhere else.
"""

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from points import Point  # type: ignore[import-not-found]  # run as a script, beside it

from ckptless.daemon.agent import main
from ckptless.daemon.agent.core.replication import Replication, ReReplication
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.proxy import Proxy
from ckptless.daemon.agent.kvstore.service import StoreService
from ckptless.daemon.agent.kvstore.wire import Ask, Told
from ckptless.daemon.agent.versions.connections import TensorConnection
from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.agent.versions.state_service import StateService
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import Pump
from ckptless.daemon.transport.link import Link

PLAN = Path(sys.argv[1])
CONFIG = Path(sys.argv[sys.argv.index("--local") + 1])
NODE = int(CONFIG.parent.name.removeprefix("node-"))
STRIKES = [(Point[name], int(step), int(node)) for name, step, node in json.loads(PLAN.read_text())]
# What the task is doing: "give" or "hold" a copy, "serve" or "fetch" chunks.
DOING: ContextVar[str] = ContextVar("doing", default="")
newest = -1


def reached(point: Point) -> None:
    """The node is lost here if it is the plan's turn."""
    for number, (wanted, step, node) in enumerate(STRIKES):
        struck = PLAN.with_suffix(f".{number}")
        if struck.exists():
            continue
        if wanted is point and newest >= step and node in (-1, NODE):
            with contextlib.suppress(FileExistsError), struck.open("x") as file:
                file.write(str(NODE))
                file.flush()
                lose_node()
        return


def lose_node() -> None:
    """The daemon goes first, so that nobody can say goodbye; the agent's death takes its ranks."""
    daemon = os.fsencode(CONFIG.with_name("daemon.json"))
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if daemon in process.read_bytes().split(b"\0"):
                os.kill(int(process.parent.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put `function(original, *args)` in the place of a method."""

    def put(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kw: Any) -> Any:
            return function(functools.partial(original, self), *args, **kw)

        setattr(owner, name, call)

    return put


def doing(owner: Any, name: str, what: str, first: Point | None = None) -> None:
    """While a coroutine method runs, its task does that; `first`: a point before anything of it."""

    @wrap(owner, name)
    async def run(original: Any, *args: Any, **kw: Any) -> Any:
        token = DOING.set(what)
        try:
            if first is not None:
                reached(first)
            return await original(*args, **kw)
        finally:
            DOING.reset(token)


doing(TensorConnection, "_give", "give")
doing(Serving, "_hold_tensors", "hold")
doing(Serving, "_consider", "", Point.OFFER_HEARD)
doing(Serving, "_hold_record", "", Point.RECORD_CAME)
doing(Serving, "_give_chunks", "serve", Point.GIVING_ASKED)
doing(TensorsFetch, "_receive", "fetch")


@wrap(Link, "send")
def send(original: Any, message: Any) -> None:
    """What was said is with the kernel, if it was idle."""
    original(message)
    if isinstance(message, p.TensorsAnswer):
        if message.answer == "held" and DOING.get() == "hold":
            reached(Point.ACK_SENT)
        return
    if isinstance(message, p.Held) and not message.held:
        return
    points: dict[Any, Point] = {
        p.PutRecord: Point.RECORD_SENT,
        p.Held: Point.RECORD_HELD,
        p.OfferTensors: Point.OFFER_SENT,
        p.GetRecord: Point.RECORD_ASKED,
        p.GetChunks: Point.FETCH_ASKED,
    }
    if type(message) in points:
        reached(points[type(message)])


@wrap(TensorConnection, "_next_answer")
async def next_answer(original: Any) -> Any:
    """Whether it is wanted, and that it is held."""
    answer = await original()
    if answer.answer in ("wanted", "held"):
        reached(Point.WANTED_HEARD if answer.answer == "wanted" else Point.ACK_HEARD)
    return answer


@wrap(Pump, "send")
async def pump_send(original: Any, data: memoryview, pace: Any) -> None:
    """In parts, where the node may be lost between them."""
    points = {
        "give": (
            (len(data) // 4, Point.BEGIN_SENT),
            (len(data) // 2, Point.HALF_SENT),
            (None, Point.ALL_SENT),
        ),
        "serve": ((len(data) // 2, Point.GIVING_HALF),),
    }
    start = 0
    for end, point in points.get(DOING.get(), ()):
        await original(data[start:end], pace)
        reached(point)
        start = len(data) if end is None else end
    await original(data[start:], pace)


@wrap(Link, "receive_bulk")
async def receive_bulk(original: Any, into: memoryview, came: Any) -> None:
    """In parts, as above."""
    points = {
        "hold": ((len(into) // 4, Point.BEGIN_CAME), (len(into) // 2, Point.HALF_CAME)),
        "fetch": ((len(into) // 2, Point.FETCH_HALF),),
    }
    start = 0
    for end, point in points.get(DOING.get(), ()):
        with into[start:end] as part:
            await original(part)
        reached(point)
        start = end
    with into[start:] as part:
        await original(part)
    came(len(into))
    last = {"hold": Point.ALL_CAME, "fetch": Point.FETCH_CAME}.get(DOING.get())
    if last is not None:
        reached(last)


@wrap(VersionStore, "put_tensors")
def put_tensors(original: Any, *args: Any) -> None:
    """The oldest goes when the newest comes."""
    if DOING.get() == "hold":
        reached(Point.VERIFIED)
    original(*args)
    if DOING.get() == "hold":
        reached(Point.DISCARDED)


@wrap(StateService, "_commit")
def commit(original: Any, slot: Any, message: Any) -> None:
    """Whatever is to be sent is sent by other tasks, later."""
    global newest
    newest = max(newest, message.step)
    original(slot, message)
    reached(Point.COMMIT_TAKEN)


@wrap(StateService, "_acked")
def acked(original: Any, rank: int, step: int, what: str) -> None:
    """Of the record or of the tensors: of what comes last the rank would be told."""
    reached(Point.ALL_ACKED)
    original(rank, step, what)


@wrap(Replication, "_remake")
def remake(original: Any, *args: Any) -> None:
    """The offer is the work of another task."""
    original(*args)
    reached(Point.REMAKE_BEGUN)


@wrap(ReReplication, "end")
def remade(original: Any, key: Any) -> None:
    """A holder has it."""
    reached(Point.REMADE)
    original(key)


@wrap(TensorsFetch, "_check_complete")
def finish(original: Any) -> Any:
    """All chunks have come, or nobody gives them."""
    reached(Point.FETCH_VERIFIED)
    return original()


@wrap(StoreService, "serve")
async def serve_store(original: Any, *args: Any) -> None:
    """It has connected, and proved who it is."""
    reached(Point.STORE_OPENED)
    await original(*args)


@wrap(Home, "heard")
def serve_key(original: Any, node: int, item: Any) -> None:
    """Of another node, but for cancellations."""
    asked = node != NODE and isinstance(item, Ask)
    if asked:
        reached(Point.STORE_ASKED)
    original(node, item)
    if asked:
        reached(Point.STORE_WAITED)


@wrap(Proxy, "heard")
def told(original: Any, item: Any) -> None:
    """By the home, also by one beside it."""
    if isinstance(item, Told):
        reached(Point.STORE_TOLD)
    original(item)


if __name__ == "__main__":
    del sys.argv[1:3]
    main.main()
