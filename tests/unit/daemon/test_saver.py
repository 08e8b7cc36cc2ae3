"""What an agent hears from the process that writes a step: in its turn, early, from strangers, or nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest

from ckptless.daemon.agent.saving.saver import Hold, Saver
from ckptless.daemon.agent.saving.service import SaveService
from ckptless.daemon.protocol import saving as w
from ckptless.daemon.protocol.codec import PROTOCOL
from ckptless.daemon.protocol.errors import CkptlessError, MismatchError
from ckptless.daemon.protocol.messages import Assignment, Holdings, NodeInfo
from ckptless.daemon.protocol.model import Place

PID, STRANGER = 17, 18
HELLO = w.WriterHello(protocol=PROTOCOL)
PART = w.WritePart(
    job="j",
    step=7,
    generation=1,
    world_size=1,
    folder="/nowhere/.saving-7",
    directory="/nowhere",
    node=0,
    parts=(0,),
    finishes=True,
    keep=3,
    deadline_s=20.0,
)

ONE_NODE = Assignment(
    job="j",
    generation=1,
    term=1,
    leader=0,
    places=(Place(node=0, slot=0),),
    nodes=(NodeInfo(node=0, name="n0", address="a", agent_port=1),),
    restore_step=None,
)


class Writer:
    """A process that says what it is told to when it is spawned, and when it has been sent its part."""

    def __init__(self, at_birth: Callable[[Writer], None], at_part: Callable[[Writer], None]) -> None:
        self.pid, self.returncode, self.killed = PID, 3, False
        self.dead = asyncio.Event()
        self._at_birth, self._at_part = at_birth, at_part
        config: Any = SimpleNamespace(
            save=None, env={}, rank_socket="", cwd="/", log_dir=gettempdir(), name="n0"
        )
        zygote: Any = SimpleNamespace(spawn=self._spawn)
        store: Any = None
        self.saver = Saver(config, store, zygote)

    def says(self, message: w.FromWriter, pid: int = PID) -> None:
        link: Any = SimpleNamespace(pid=pid, send=lambda message, _fd=None: self._sent(message))
        self.saver.says(link, message)

    def _sent(self, message: w.ToWriter) -> None:
        if isinstance(message, w.WritePart):
            self._at_part(self)

    async def _spawn(self, _spec: object, _output: int) -> Writer:
        self._at_birth(self)
        return self

    async def wait(self) -> None:
        await self.dead.wait()

    def kill(self) -> None:
        self.killed = True

    async def write(self) -> str:
        try:
            async with asyncio.timeout(10):
                return await self.saver._write(PART, Hold((), ()))
        finally:
            assert self.killed


def play(at_birth: Callable[[Writer], None], at_part: Callable[[Writer], None]) -> str:
    async def run() -> str:
        return await Writer(at_birth, at_part).write()

    return asyncio.run(run())


def done(writer: Writer) -> None:
    writer.says(w.Written(path="/nowhere/step-00000007"))


def test_it_may_say_hello_before_its_birth_is_known() -> None:
    assert play(lambda one: one.says(HELLO), done) == "/nowhere/step-00000007"


def test_it_may_be_slow() -> None:
    def later(writer: Writer, message: w.FromWriter) -> None:
        asyncio.get_running_loop().call_later(0.05, writer.says, message)

    path = play(lambda one: later(one, HELLO), lambda one: later(one, w.Written(path="p")))
    assert path == "p"


def test_another_ones_words_are_not_its_own() -> None:
    """One that was given up has still something to say."""

    def birth(writer: Writer) -> None:
        writer.says(w.Written(path="old"), STRANGER)
        writer.says(HELLO)

    def part(writer: Writer) -> None:
        writer.says(w.Written(error="old"), STRANGER)
        done(writer)

    assert play(birth, part) == "/nowhere/step-00000007"


def test_one_that_ends_before_it_is_done() -> None:
    with pytest.raises(CkptlessError, match="its writer has ended with 3"):
        play(lambda one: one.dead.set(), done)
    with pytest.raises(CkptlessError, match="its writer has ended with 3"):
        play(lambda one: one.says(HELLO), lambda one: one.dead.set())


def test_what_went_wrong_is_said() -> None:
    with pytest.raises(CkptlessError, match="the disk is full"):
        play(lambda one: one.says(HELLO), lambda one: one.says(w.Written(error="the disk is full")))
    with pytest.raises(CkptlessError, match="in place of what became of it"):
        play(lambda one: one.says(HELLO), lambda one: one.says(HELLO))


def test_another_version_is_refused() -> None:
    with pytest.raises(MismatchError):
        Writer(done, done).says(w.WriterHello(protocol=PROTOCOL + 1))


def until_decided(directory: Path) -> None:
    """Wait until the nodes have agreed on the last step; for 10 s."""
    limit = time.monotonic() + 10
    while not list(directory.glob(".ending-*/decision.json")):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_what_is_still_being_written_keeps_no_node_from_saying_what_it_holds(tmp_path: Path) -> None:
    """At a job's end others wait for that a few seconds, and then decide without it."""
    config: Any = SimpleNamespace(
        save=w.SaveConfig(directory=str(tmp_path)), spec=SimpleNamespace(job="j"), node=0
    )
    store: Any = SimpleNamespace(holdings=lambda: Holdings(tensors=(), records=()))
    replicas: Any = SimpleNamespace(serving=SimpleNamespace())
    zygote: Any = None

    async def run() -> None:
        service = SaveService(config, store, zygote, replicas)
        service.follow(ONE_NODE)
        written = asyncio.Event()

        async def older_step() -> None:
            await written.wait()

        service.saver._tasks.spawn(older_step())
        ending = asyncio.create_task(service.at_end())
        await asyncio.to_thread(until_decided, tmp_path)
        assert not ending.done()
        written.set()
        await ending

    asyncio.run(run())
