"""Who may read what of a daemon's ledger, over its Unix socket: real users, by the kernel's word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.cluster import LocalCluster
from ckptless.daemon.ckptlessd.service import Service
from ckptless.daemon.ledger import reader as reader_module
from ckptless.daemon.ledger.merge import merge
from ckptless.daemon.ledger.store import Owner
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.daemon.protocol.records import EventRecord, JobRecord, NodeRecord, Record, printable
from ckptless.daemon.protocol.requests import TABLES, Page, Read, RowCursor
from ckptless.daemon.settings.config import DaemonConfig, Peer
from ckptless.daemon.transport.credentials import KeyCredentials

ALICE, BOB = 65533, 65534
DEADLINE_S = 60.0
CKPTCTL = "from ckptless.daemon.ckptctl.main import main; main()"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


class AnyUsers(LocalCluster):
    """One node, which is every user's."""

    async def check_owner(self, run: str, uid: int) -> None:
        pass


@contextlib.asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[tuple[Service, str]]:
    """A daemon at a socket which any user reaches, as pytest's own folders are not."""
    (folder / "state").mkdir(parents=True)
    place = Path(tempfile.mkdtemp(prefix="ckptless-test-"))
    place.chmod(0o755)
    name = str(place / "daemon")
    config = DaemonConfig(
        name="n0",
        address="127.0.0.1",
        port=0,
        state_dir=str(folder / "state"),
        socket=name,
        socket_mode=0o666,
    )
    peers = [Peer(node=0, name="n0", address="127.0.0.1", port=1)]
    service = Service(config, AnyUsers(0, peers, folder / "state"), KeyCredentials(b"0123456789abcdef"))
    ready, stop = asyncio.Event(), asyncio.Event()
    service.on_ready = ready.set
    running = asyncio.create_task(service.run(stop))
    try:
        await asyncio.wait_for(ready.wait(), DEADLINE_S)
        yield service, name
    finally:
        stop.set()
        await asyncio.wait_for(running, DEADLINE_S)
        shutil.rmtree(place)


def job(name: str, started_s: float) -> JobRecord:
    return JobRecord(
        job=name, command=("t.py",), world_size=1, nodes=1, spares=0, state="running", started_s=started_s
    )


def node(name: str) -> NodeRecord:
    return NodeRecord(
        job=name, node=0, name=f"of-{name}", address="a", state="up", daemon_pid=1, agent_pid=2, updated_s=5.0
    )


def event(name: str, number: int, kind: str = "note") -> EventRecord:
    return EventRecord(
        event=f"e{number}",
        job=name,
        node=0,
        at_s=float(number),
        level="info",
        kind=kind,
        generation=1,
        text=f"{name}, {number}",
    )


async def told(service: Service, *records: Record, **owners: int) -> None:
    """The ledger has it when this returns."""
    for name, uid in owners.items():
        await service.ledger.own(name.removeprefix("job"), Owner(uid, NO_RUN), anew=True)
    service.ledger.write([printable(record) for record in records])
    assert service.ledger._task is not None
    await service.ledger._task


async def two_users(service: Service) -> None:
    await told(
        service,
        *(job("7", 10.0), node("7"), event("7", 1), event("7", 2)),
        *(job("8", 20.0), node("8"), event("8", 1)),
        *(job("9", 5.0), event("9", 1)),
        job7=ALICE,
        job8=BOB,
    )


async def ckptctl(uid: int, where: str, *words: str) -> tuple[int, str, str]:
    """Run it as another user."""
    start = [sys.executable, "-c", CKPTCTL, "--socket", where, *words]
    if uid != os.getuid():
        start = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *start]
    env = {**os.environ, "HOME": "/nowhere"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*start, stdout=pipe, stderr=pipe, env=env, cwd="/")
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def ask(where: str, question: Read) -> Page | m.Denied:
    decoder: Decoder[Page | m.Denied] = Decoder(Page | m.Denied, CONTROL_LIMIT)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(unix_address(where))
        sock.sendall(encode(question))
        while True:
            for answer in decoder.feed(data := sock.recv(1 << 16)):
                return answer
            assert data, "it hung up"


def pages(where: str, question: Read) -> list[Page]:
    found: list[Page] = []
    while not found or found[-1].more:
        after = found[-1].next if found else question.after
        page = ask(
            where,
            Read(protocol=1, job=question.job, tables=question.tables, kinds=question.kinds, after=after),
        )
        assert isinstance(page, Page), page
        found.append(page)
    return found


@as_root
def test_everybody_sees_their_own_jobs_and_root_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await two_users(service)
            seen = {}
            for uid in (0, ALICE, BOB):
                code, out, err = await ckptctl(uid, where, "jobs", "--json")
                assert code == 0, err
                seen[uid] = [one["job"] for one in json.loads(out)["jobs"]]
            assert seen == {0: ["9", "7", "8"], ALICE: ["7"], BOB: ["8"]}
            for command in ("status", "events", "timeline", "replicas", "data"):
                code, out, err = await ckptctl(ALICE, where, command, "7", "--json")
                assert (code, json.loads(out)["meta"]) == (0, {"schema": 1}), err
                strange = await ckptctl(ALICE, where, command, "8")
                missing = await ckptctl(ALICE, where, command, "4242")
                # Another's job is as one that is not there.
                assert strange[:2] == missing[:2] == (4, "")
                assert strange[2] == missing[2].replace("4242", "8")
                # Nobody's: it is older than the ledger's word on whose it is.
                assert (await ckptctl(BOB, where, command, "9"))[0] == 4
            assert "of-7" in (await ckptctl(ALICE, where, "status"))[1]
            assert "7, 2" in (await ckptctl(ALICE, where, "events"))[1]
            assert "of-8" in (await ckptctl(0, where, "status"))[1]

    asyncio.run(scenario())


@as_root
def test_whose_a_job_is_the_daemon_knows_from_its_agents_hello(tmp_path: Path) -> None:
    spec = m.JobSpec(
        job="7",
        command=("t.py",),
        nodes=1,
        spares=0,
        slots_per_node=1,
        limits=m.Limits.from_max_stall(60.0),
        names=("n0",),
    )
    info = m.NodeInfo(node=0, name="n0", address="127.0.0.1", agent_port=1)
    hello = encode(m.AgentHello(protocol=m.PROTOCOL, spec=spec, info=info, pid=1)).hex()
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        f"s.sendall(bytes.fromhex({hello!r})); print(s.recv(100) != b'', flush=True); sys.stdin.read()"
    )

    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            # An older job of this number was Bob's.
            await told(service, job("7", 1.0), event("7", 99), job7=BOB)
            words = ["setpriv", f"--reuid={ALICE}", "--clear-groups", sys.executable, "-c", code, where]
            pipe = asyncio.subprocess.PIPE
            agent = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
            assert agent.stdout is not None
            assert await asyncio.wait_for(agent.stdout.readline(), DEADLINE_S) == b"True\n"
            async with asyncio.timeout(DEADLINE_S):
                while "agent 1 is up" not in (await ckptctl(ALICE, where, "events", "7"))[1]:
                    pass
            assert ", 99" not in (await ckptctl(0, where, "events", "7"))[1]
            assert (await ckptctl(BOB, where, "events", "7"))[0] == 4
            assert agent.stdin is not None
            agent.stdin.close()
            await asyncio.wait_for(agent.wait(), DEADLINE_S)

    asyncio.run(scenario())


def test_what_is_long_comes_in_pages_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PAGE_ROWS", 7)
    events = [event("7", number, "odd" if number % 2 else "even") for number in range(40)]
    nodes = [structs.replace(node("7"), node=number) for number in range(15)]
    records: list[Record] = [job("7", 1.0), *events, *nodes]

    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await told(service, *records, job7=ALICE)
            whole = await asyncio.to_thread(pages, where, Read(protocol=1, job="7", tables=TABLES))
            assert max(len(page.records) for page in whole) == 7
            assert len(whole) == 8
            found = [record for page in whole for record in page.records]
            assert merge([found]) == merge([records])
            assert len(found) == len(records)
            even = Read(protocol=1, job="7", tables=("event",), kinds=("even",))
            some = await asyncio.to_thread(pages, where, even)
            assert sum(len(page.records) for page in some) == 20
            # From where the last page ended only what is new.
            await told(service, event("7", 77))
            last = Read(protocol=1, job="7", tables=("event",), after=whole[-1].next)
            (new,) = await asyncio.to_thread(pages, where, last)
            assert [cast(EventRecord, one).event for one in new.records] == ["e77"]

    asyncio.run(scenario())


def test_bytes_bound_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PAGE_NBYTES", 1000)

    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await told(service, job("7", 1.0), *(event("7", number) for number in range(40)), job7=ALICE)
            found = await asyncio.to_thread(pages, where, Read(protocol=1, job="7", tables=TABLES))
            assert len(found) > 3
            assert max(len(encode(page)) for page in found) < 1500

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tables": ("job", "vote")},
        {"tables": ()},
        {"tables": TABLES * 2},
        {"job": "x" * 257},
        {"kinds": ("x" * 65,)},
        {"kinds": ("x",) * 17},
        {"after": {"table": "event", "key": (1, 2, 3)}},
        {"after": {"table": "event", "key": (-1,)}},
        {"after": {"table": "event", "key": (1 << 63,)}},
        {"protocol": 99},
    ],
)
def test_questions_have_bounds(tmp_path: Path, wrong: dict[str, Any]) -> None:
    question = {"type": "Read", "protocol": 1, "job": "7", "tables": ("event",), **wrong}

    async def scenario() -> None:
        async with daemon(tmp_path) as (_, where):
            answer = await asyncio.to_thread(ask, where, cast(Read, question))
            assert isinstance(answer, m.Denied)

    asyncio.run(scenario())


def test_a_user_who_asks_without_end_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their questions are answered one by one, and beyond a few at a time refused: the loop goes on."""

    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await told(service, job("7", 1.0), *(event("7", n) for n in range(3000)), job7=ALICE)
            question = Read(protocol=1, job="7", tables=TABLES)
            reading = service._reader
            many = [asyncio.create_task(reading.answer(question, ALICE, sees_all=False)) for _ in range(50)]
            await asyncio.sleep(0)
            other = await asyncio.wait_for(reading.answer(question, BOB, sees_all=False), DEADLINE_S)
            assert other
            done = await asyncio.gather(*many, return_exceptions=True)
            assert sum(isinstance(one, bytes) for one in done) == reader_module.MAX_WAITING
            assert not reading._waiting
            assert isinstance(await asyncio.to_thread(ask, where, question), Page)

    asyncio.run(scenario())


def test_following_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await told(service, job("7", 1.0), event("7", 1), job7=ALICE)
            words: Sequence[str] = ["--socket", where, "events", "7", "-f", "--json"]
            pipe = asyncio.subprocess.PIPE
            follower = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CKPTCTL, *words, stdout=pipe, stderr=pipe
            )
            assert follower.stdout is not None
            lines = []
            for number in (1, 2, 3):
                lines.append(json.loads(await asyncio.wait_for(follower.stdout.readline(), DEADLINE_S)))
                await told(service, event("7", number + 1))
            assert [line["event"] for line in lines] == ["e1", "e2", "e3"]
            follower.kill()
            await follower.wait()

    asyncio.run(scenario())


def test_a_cursor_that_names_no_place_begins_at_the_table(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path) as (service, where):
            await told(service, job("7", 1.0), event("7", 1), job7=ALICE)
            question = Read(protocol=1, job="7", tables=TABLES, after=RowCursor(table="event", key=("x", 2)))
            page = await asyncio.to_thread(ask, where, question)
            assert isinstance(page, Page)
            assert [type(one) for one in page.records] == [EventRecord]

    asyncio.run(scenario())
