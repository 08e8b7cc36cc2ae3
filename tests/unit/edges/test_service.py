"""A daemon on a Unix socket: who gets an answer, whose word counts, and how long a job is remembered."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptless.daemon.ckptlessd import job_host as runtime_module
from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.service import Service
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.requests import Drilled, DrillJob, Evict, Evicted, Resized, ResizeJob
from ckptless.daemon.settings.config import DaemonConfig, Peer, Timers
from ckptless.daemon.transport.credentials import KeyCredentials

DEADLINE_S = 30.0
STRANGER = 65534  # "nobody"
LIMITS = m.Limits(pong_s=30, leave_s=30, join_s=600, stall_s=600, lease_s=3.0)


def as_stranger(address: str, words: bytes, *, listens: bool = True) -> bytes:
    """What a process of another user is answered, until the daemon hangs up, which is its own business, or
    once it has nothing more to hear. It is forked: it may not read this Python to start it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(DEADLINE_S)
                sock.connect(address)
                sock.sendall(words)
                if not listens:
                    sock.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while data := sock.recv(4096):
                        os.write(writer, data)
            status = 0
        finally:
            os._exit(status)  # nothing of pytest runs in the child
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return data


class FakeCluster:
    """Gives every job of our uid one node, this one, and keeps what it is told."""

    def __init__(self) -> None:
        self.peers: tuple[Peer, ...] = (Peer(node=0, name="n0", address="127.0.0.1", port=1),)
        self.notices: list[m.Notice] = []
        self.users: set[int] = {os.getuid()}
        self.outcomes: dict[str, m.Outcome] = {}

    async def check_owner(self, run: str, uid: int) -> None:
        if uid != os.getuid():
            raise PeerError(f"job {run} is not of uid {uid}")

    async def admit(self, hello: m.AgentHello, uid: int) -> Roster:
        await self.check_owner(hello.spec.job, uid)
        return Roster(hello.info.node, self.peers)

    async def has_job(self, uid: int) -> bool:
        return uid in self.users

    def notice(self, notice: m.Notice) -> None:
        self.notices.append(notice)

    def ended(self, runtime: JobHost, outcome: m.Outcome) -> None:
        self.outcomes[runtime.job] = outcome

    def node_is_dark(self, runtime: JobHost, node: int, reason: str, state: str) -> None:
        raise AssertionError(node)

    def witness(self, runtime: JobHost, nodes: Sequence[int], ours: Sequence[int]) -> None:
        raise AssertionError(nodes)

    def explain(self, runtime: JobHost, node: int, cancel: m.Cancel) -> None:
        runtime.explained(node, cancel, f"{cancel.reason}, as it seems")

    def ask_suspended(self, runtime: JobHost, seconds: float) -> None:
        raise AssertionError(seconds)


class Client:
    """An agent's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: Decoder[m.ToAgent] = Decoder(m.ToAgent, CONTROL_LIMIT)
        self._waiting: list[m.ToAgent] = []

    def say(self, *messages: object) -> None:
        for message in messages:
            self._writer.write(message if isinstance(message, bytes) else encode(message))

    async def hears(self, kind: type[Any] | tuple[type[Any], ...]) -> Any:
        """The next message of this kind; what comes before it is passed over."""
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                if isinstance(message, kind):
                    return message
            data = await self._reader.read(1 << 16)
            assert data, f"the daemon hung up before any {kind}"
            self._waiting += self._decoder.feed(data)

    async def rest(self) -> list[m.ToAgent]:
        """Everything until the daemon hangs up."""
        with suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                self._waiting += self._decoder.feed(data)
        return self._waiting

    def hang_up(self) -> None:
        self._writer.close()

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class Site:
    """A running service."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "run" / "d.sock")
        self.cluster = FakeCluster()
        config = DaemonConfig(
            name="n0",
            address="127.0.0.1",
            port=0,
            state_dir=str(folder / "state"),
            socket=self.socket,
            socket_mode=0o666,
            timers=Timers(beat_s=0.1, dark_s=1.0),
        )
        self.service = Service(config, self.cluster, KeyCredentials(b"k" * 32))
        self.ticks = 0
        self._clients: list[Client] = []
        self.stop = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        ready = asyncio.Event()
        self.service.on_ready = ready.set
        self.service.on_tick = self._ticked
        task = asyncio.create_task(self.service.run(self.stop))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            assert ready.is_set()
            yield self
        finally:
            waiting.cancel()
            self.stop.set()
            await task
            for client in self._clients:
                await client.close()

    def _ticked(self) -> None:
        self.ticks += 1

    @property
    def jobs(self) -> list[str]:
        return [job.job for job in self.service.jobs]

    async def client(self, *first: object) -> Client:
        client = Client(*await asyncio.open_unix_connection(self.socket))
        self._clients.append(client)
        client.say(*first)
        return client

    async def trains(self, job: str = "4711") -> Client:
        """An agent whose job has its first generation."""
        agent = await self.client(hello(job))
        assert (await agent.hears(m.Admitted)).identity
        assert (await agent.hears(m.Assign)).assignment.generation == 1
        return agent

    async def stranger(self, *messages: object) -> list[m.ToAgent]:
        """Return what another user's process hears."""
        words = b"".join(one if isinstance(one, bytes) else encode(one) for one in messages)
        answers = await asyncio.to_thread(as_stranger, self.socket, words)
        decoder: Decoder[m.ToAgent] = Decoder(m.ToAgent, CONTROL_LIMIT)
        return decoder.feed(answers)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users may enter, as they may /run/ckptless."""
    with tempfile.TemporaryDirectory(prefix="service-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


Scenario = Callable[[Site], Awaitable[None]]


@pytest.fixture
def serve(folder: Path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(DEADLINE_S), Site(folder).running() as site:
                await scenario(site)

        asyncio.run(main())

    return run


Serve = Callable[[Scenario], None]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot act as another user")


async def until(true: Callable[[], object]) -> None:
    """The timeout around the test is its deadline."""
    while not true():  # noqa: ASYNC110  # the daemon tells a test of no event
        await asyncio.sleep(0.01)


def hello(job: str = "4711", node: int = 0, **more: Any) -> m.AgentHello:
    spec = m.JobSpec(
        job=job,
        command=("t",),
        nodes=more.pop("nodes", 1),
        spares=more.pop("spares", 0),
        slots_per_node=1,
        limits=LIMITS,
        names=("n0",),
        launch=more.pop("launch", NO_RUN),
    )
    info = m.NodeInfo(node=node, name="n0", address="127.0.0.1", agent_port=1)
    protocol, identity = more.pop("protocol", m.PROTOCOL), more.pop("identity", "")
    return m.AgentHello(protocol=protocol, spec=spec, info=info, pid=os.getpid(), identity=identity)


def started(job_id: int = 4711) -> m.JobStarted:
    return m.JobStarted(protocol=m.PROTOCOL, job_id=job_id, uid=1001, spec="spares=1")


def ended(job_id: int = 4711) -> m.JobEnded:
    return m.JobEnded(protocol=m.PROTOCOL, job_id=job_id, uid=1001)


CANCEL = m.Cancel(exit_code=130, reason="by the user")
STATE = m.AgentState(seq=1, slots=())


# ------------------------------------------------------------------------------------------- agents


def test_an_agent_is_admitted_and_its_job_begins(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        agent = await site.client(hello())
        assert (await agent.hears(m.Admitted)).identity
        assert len((await agent.hears(m.JobKey)).key) == 32
        assignment = (await agent.hears(m.Assign)).assignment
        assert (assignment.job, assignment.generation) == ("4711", 1)
        assert assignment.places == (m.Place(node=0, slot=0),)
        assert site.jobs == ["4711"]
        assert site.cluster.outcomes == {}

    serve(scenario)


def test_two_jobs_do_not_hear_of_each_other(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        one, other = await site.trains("1"), await site.trains("2")
        one.say(CANCEL)
        assert (await one.hears(m.End)).outcome.reason == "by the user"
        assert site.cluster.outcomes.keys() == {"1"}
        other.say(CANCEL)
        await other.hears(m.End)

    serve(scenario)


@pytest.mark.parametrize("first", [STATE, CANCEL, m.AgentEvent(level="info", kind="k", text="t")])
def test_the_hello_comes_first(serve: Serve, first: object) -> None:
    async def scenario(site: Site) -> None:
        client = await site.client(first, hello())
        (denied,) = await client.rest()
        assert denied == m.Denied(reason="the first message of an agent must be its hello")
        assert site.jobs == []

    serve(scenario)


def test_an_agent_of_another_version(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        (denied,) = await (await site.client(hello(protocol=99))).rest()
        assert isinstance(denied, m.Denied)
        assert denied.reason == (
            "the agent speaks protocol 99, this end 1: both need the same version of ckptless"
        )

    serve(scenario)


@pytest.mark.parametrize("kind", [m.JobStarted, m.JobEnded])
def test_a_prolog_of_another_version(
    serve: Serve, kind: type[m.JobStarted | m.JobEnded], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads an answer there: the daemon's log says it, and Slurm is asked instead."""

    async def scenario(site: Site) -> None:
        client = await site.client(kind(protocol=99, job_id=4711, uid=1001, spec=""))
        await client.rest()
        assert "ckptless-notify or the SPANK plugin speaks protocol 99, this end 1: both need" in caplog.text
        assert site.jobs == []

    serve(scenario)


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"\xff" * 64, id="ones"),
        pytest.param(encode({"type": "NoSuch"}), id="tag"),
        pytest.param(encode(hello()).replace(b"n0", b"\xff0"), id="no text"),
        pytest.param(b"\x20\0\0\0" + b"\xc1" * 32, id="no msgpack"),
        pytest.param((CONTROL_LIMIT + 1).to_bytes(4, "little"), id="oversized"),
        pytest.param(encode(m.Stop(generation=1, reason="x")), id="an order"),
        pytest.param(encode(m.JobKey(key=b"x" * 32)), id="a key"),
    ],
)
def test_noise_is_denied_and_nothing_else_is_touched(serve: Serve, noise: bytes) -> None:
    async def scenario(site: Site) -> None:
        agent = await site.trains()
        client = await site.client(noise)
        (denied,) = await client.rest()
        assert isinstance(denied, m.Denied)
        # Also over a connection that is an agent's: it ends, as that of a process that is gone.
        client = await site.trains("5")
        client.say(noise)
        assert [one for one in await client.rest() if isinstance(one, m.Denied)] == []
        agent.say(STATE)
        assert site.jobs == ["4711", "5"]
        assert "4711" not in site.cluster.outcomes

    serve(scenario)


def test_half_a_hello_and_the_end(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        client = await site.client(encode(hello())[:-1])
        client.hang_up()
        assert await client.rest() == []
        assert site.jobs == []

    serve(scenario)


def test_a_job_is_known_with_other_nodes(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        site.cluster.peers = (*site.cluster.peers, Peer(node=1, name="n1", address="127.0.0.1", port=1))
        (denied,) = await (await site.client(hello())).rest()
        assert denied == m.Denied(reason="job 4711 is known with other nodes or another user")

    serve(scenario)


def test_an_agent_that_comes_back_is_known(serve: Serve) -> None:
    """Its old connection may end later than the new one begins."""

    async def scenario(site: Site) -> None:
        old = await site.trains()
        new = await site.client(hello())
        await new.hears(m.Admitted)
        old.hang_up()
        new.say(CANCEL)
        outcome = (await new.hears(m.End)).outcome
        assert outcome.state == "stopped"

    serve(scenario)


def test_a_job_that_is_suspended_for_weeks_keeps_its_daemon(serve: Serve) -> None:
    """Its agents read nothing, and once they do they find the last orders."""

    async def scenario(site: Site) -> None:
        agent = await site.trains()
        (job,) = site.service.jobs
        for _ in range(1_000_000):
            job.to_agent(m.Renewed())
        job.to_agent(m.Announce(text="x"))
        assert (await agent.hears(m.Announce)).text == "x"

    serve(scenario)


def test_the_end_of_the_daemon_is_not_the_end_of_a_job(serve: Serve) -> None:
    sites: list[Site] = []

    async def scenario(site: Site) -> None:
        sites.append(site)
        agent = await site.trains()
        site.stop.set()
        assert [one for one in await agent.rest() if isinstance(one, m.End | m.Denied)] == []

    serve(scenario)
    assert sites[0].cluster.outcomes == {}
    assert not Path(sites[0].socket).exists()


# ------------------------------------------------------------------------------------- other users


@root_only
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((hello(),), id="hello"),
        pytest.param((hello(), CANCEL), id="hello and cancel"),
        pytest.param((hello("5"),), id="a job of nobody"),
        pytest.param((CANCEL,), id="cancel"),
        pytest.param((STATE,), id="state"),
        pytest.param((started(), hello()), id="notice and hello"),
        pytest.param((ended(),), id="end of the job"),
        pytest.param((b"\xff" * 99,), id="noise"),
    ],
)
def test_another_user_is_denied_and_changes_nothing(serve: Serve, words: Sequence[object]) -> None:
    async def scenario(site: Site) -> None:
        agent = await site.trains()
        answers = await site.stranger(*words)
        assert [type(one) for one in answers] == [m.Denied]
        assert site.jobs == ["4711"]
        assert site.cluster.notices == []
        assert site.cluster.outcomes == {}
        agent.say(CANCEL)  # it is still the one that the job's agent is
        assert (await agent.hears(m.End)).outcome.reason == "by the user"

    serve(scenario)


# ---------------------------------------------------------------------- the prolog's and epilog's word


def test_notices_are_passed_on(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        await site.client(started(), ended(12))
        await until(lambda: len(site.cluster.notices) == 2)
        assert site.cluster.notices == [started(), ended(12)]

    serve(scenario)


@root_only
@pytest.mark.parametrize("notice", [started(), ended()])
def test_notices_of_another_user_are_refused(serve: Serve, notice: m.Notice) -> None:
    async def scenario(site: Site) -> None:
        (denied,) = await site.stranger(notice)
        assert denied == m.Denied(reason=f"uid {STRANGER} may not say when jobs begin and end")
        assert site.cluster.notices == []

    serve(scenario)


def test_the_epilog_ends_all_runs_of_its_job_and_no_other(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        runs = ("4711", "4711.1", "4711.s3r1")
        agents = [await site.trains(run) for run in runs]
        for run in ("47", "47110", "471.1"):
            await site.trains(run)
        await site.client(ended())
        for agent in agents:
            outcome = (await agent.hears(m.End)).outcome
            assert (outcome.state, outcome.exit_code) == ("stopped", 143)
        assert site.cluster.outcomes.keys() == set(runs)

    serve(scenario)


def test_an_epilog_after_the_end_changes_nothing(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        agent = await site.trains()
        agent.say(CANCEL)
        await agent.hears(m.End)
        await site.client(ended())
        await until(lambda: site.cluster.notices)
        assert site.cluster.outcomes["4711"].reason == "by the user"

    serve(scenario)


# ----------------------------------------------------------------------------------- a node is taken out


def taken_out(**more: Any) -> Evict:
    fields = {"protocol": m.PROTOCOL, "job": "4711", "node": "n0", "source": "health", "reason": "fan"}
    return Evict(**{**fields, **more})


async def answer_to(site: Site, *words: object) -> list[Evicted | m.Denied]:
    """Return what ckptctl hears over a connection of its own."""
    reader, writer = await asyncio.open_unix_connection(site.socket)
    try:
        for word in words:
            writer.write(word if isinstance(word, bytes) else encode(word))
        decoder: Decoder[Evicted | m.Denied] = Decoder(Evicted | m.Denied, CONTROL_LIMIT)
        found: list[Evicted | m.Denied] = []
        while not found and (data := await reader.read(1 << 16)):
            found += decoder.feed(data)
        return found
    finally:
        writer.close()


def test_a_node_is_taken_out_over_the_socket(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        agent = await site.trains()
        (refused,) = await answer_to(site, taken_out())
        assert isinstance(refused, Evicted)
        assert (refused.verdict, refused.node) == ("refused", 0)
        (unknown,) = await answer_to(site, taken_out(job="4712"))
        assert isinstance(unknown, Evicted)
        assert unknown.verdict == "unknown"
        (done,) = await answer_to(site, taken_out(force=True))
        assert done == Evicted(verdict="accepted", text="n0 is taken out of job 4711", node=0)
        end = await agent.hears(m.End)
        assert end.here_only
        says = f"taken out by a health check (uid {os.getuid()}): fan"
        assert end.outcome.reason == f"node-0 counts as lost: {says}"
        (again,) = await answer_to(site, taken_out(force=True))
        assert again == Evicted(verdict="already", text=f"n0 is out already: {says}", node=0)

    serve(scenario)


def test_a_job_that_is_not_elastic_keeps_its_size(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        for job, verdict in (("4711", "refused"), ("4712", "unknown")):
            reader, writer = await asyncio.open_unix_connection(site.socket)
            writer.write(encode(ResizeJob(protocol=m.PROTOCOL, job=job, nodes=1)))
            decoder: Decoder[Resized] = Decoder(Resized, CONTROL_LIMIT)
            (answer,) = decoder.feed(await reader.read(1 << 16))
            writer.close()
            assert answer.verdict == verdict
            assert ("it is not elastic: start it with --min-nodes" in answer.text) is (job == "4711")

    serve(scenario)


@root_only
def test_another_user_has_no_drill_of_it(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        words = encode(DrillJob(protocol=m.PROTOCOL, job="4711", kind="kill-rank", target="0", step=99))
        data = await asyncio.to_thread(as_stranger, site.socket, words, listens=False)
        decoder: Decoder[Drilled] = Decoder(Drilled, CONTROL_LIMIT)
        (answer,) = decoder.feed(data)
        assert (answer.verdict, answer.text) == (
            "unknown",
            f"no job '4711' that uid {STRANGER} may touch runs here",
        )
        reader, writer = await asyncio.open_unix_connection(site.socket)
        writer.write(words)
        (answer,) = decoder.feed(await reader.read(1 << 16))
        writer.close()
        assert answer.verdict == "refused"
        assert "no drill of job 4711: it does not train" in answer.text

    serve(scenario)


@root_only
def test_another_user_takes_no_node_out(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        words = encode(taken_out(force=True, source="operator"))
        data = await asyncio.to_thread(as_stranger, site.socket, words, listens=False)
        decoder: Decoder[Evicted] = Decoder(Evicted, CONTROL_LIMIT)
        (answer,) = decoder.feed(data)
        assert answer.verdict == "unknown"
        assert site.service.jobs[0].session.control.nodes[0].lost is None

    serve(scenario)


@pytest.mark.parametrize(
    "words",
    [
        encode(taken_out())[:-1] + b"\xc1",
        encode({"type": "Evict", "protocol": 1, "job": "4711", "node": "n0", "source": "leader"}),
        encode({"type": "Evict", "protocol": 1, "job": "4711", "node": "n" * 300, "source": "health"}),
        encode(Evicted(verdict="accepted", text="")),
    ],
)
def test_what_is_no_eviction_is_denied(serve: Serve, words: bytes) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        (answer,) = await answer_to(site, words)
        assert isinstance(answer, m.Denied)
        assert site.service.jobs[0].session.control.nodes[0].lost is None

    serve(scenario)


# --------------------------------------------------------------------------------- how long it is known


def test_a_job_is_forgotten_a_while_after_its_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "LINGER_S", 0.5)

    async def scenario(site: Site) -> None:
        await site.trains("1")
        ends = await site.trains("2")
        before = asyncio.all_tasks()
        ends.say(CANCEL)
        await ends.hears(m.End)
        began = asyncio.get_running_loop().time()
        # Until then a daemon that was away, or the agent, is told how it ended.
        again = await site.client(hello("2"))
        await again.hears(m.Admitted)
        await until(lambda: site.jobs == ["1"])
        assert 0.4 < asyncio.get_running_loop().time() - began < 10.0
        await until(lambda: len(asyncio.all_tasks()) <= len(before))

    serve(scenario)


def test_a_job_whose_agent_was_killed_is_forgotten_after_its_epilog(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scancel --signal=KILL`, or a time limit: nobody is left to say how it ended."""
    monkeypatch.setattr(runtime_module, "LINGER_S", 0.2)

    async def scenario(site: Site) -> None:
        agent = await site.trains()
        agent.hang_up()
        runtime = site.service.jobs[0]
        await until(lambda: runtime.session.control.nodes[0].lost is not None)
        await site.client(ended())
        await until(lambda: site.cluster.notices)
        async with asyncio.timeout(2.0):
            await until(lambda: site.jobs == [])

    serve(scenario)


# ------------------------------------------------------------------------ what one user can do to the others


def bad_assignment() -> m.AgentState:
    """Of a node that the job does not have."""
    info = m.NodeInfo(node=9, name="x", address="127.0.0.1", agent_port=1)
    assignment = m.Assignment(
        job="1",
        generation=7,
        term=0,
        leader=0,
        places=(m.Place(node=9, slot=0),),
        nodes=(info,),
        restore_step=None,
    )
    return m.AgentState(seq=5, slots=(), assigned=assignment.generation)


@pytest.mark.parametrize("node", [0, -1])
def test_a_job_that_breaks_its_control_plane_breaks_no_other(serve: Serve, node: int) -> None:
    """Whoever has a job here may send what he likes: here, an assignment of no node, or his own is none."""

    async def scenario(site: Site) -> None:
        await site.trains("2")
        rude, again = [await site.client(hello("1", node)) for _ in range(2)]
        if node == 0:
            await again.hears(m.Admitted)
            rude.say(bad_assignment())
        await asyncio.sleep(0.3)
        ticks = site.ticks
        async with asyncio.timeout(2.0):
            await until(lambda: site.ticks > ticks + 3)

    serve(scenario)


def test_the_socket_is_for_everybody_and_its_state_for_nobody_else(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        assert Path(site.socket).stat().st_mode & 0o777 == 0o666
        assert (Path(site.socket).parent.parent / "state").stat().st_mode & 0o077 == 0

    serve(scenario)


def test_messages_that_are_split_anywhere(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        client = await site.client()
        for byte in encode(hello()) + encode(msgspec.structs.replace(STATE, seq=2)):
            client.say(bytes([byte]))
            await asyncio.sleep(0)
        await client.hears(m.Assign)

    serve(scenario)
