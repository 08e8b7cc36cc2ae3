"""What was refused, as of an older generation or leader, is counted: each once, whoever else tells of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from click.testing import CliRunner
from msgspec import structs

from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore, digest
from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.records import REFUSALS, EventRecord, JobRecord
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import (
    Link,
)

from .served import serve

JOB = JobRecord(
    job="7", command=("t",), world_size=2, nodes=2, spares=0, state="running", started_s=1.0, exit_code=None
)
REFUSED = EventRecord(
    event="0-1-1",
    job="7",
    node=0,
    at_s=2.0,
    level="warning",
    kind="order-refused",
    generation=2,
    text="Stop of generation 1; this is 2",
)
RECORD = structs.replace(
    REFUSED, event="0-1-2", kind="stale-record", text="the record of rank 1, generation 1"
)
OTHER = structs.replace(REFUSED, event="0-1-3", kind="recovered", text="generation 2 trains")
AGAIN = structs.replace(REFUSED, event="1-1-1", node=1)


def status(state_dir: Path, *options: str) -> str:
    found = CliRunner().invoke(ckptctl, ["--state-dir", str(state_dir), "status", *options])
    assert found.exit_code == 0, found.output
    return found.stdout


def write(folder: Path, *records: JobRecord | EventRecord) -> None:
    folder.mkdir()
    with Ledger.open(folder / "ledger.db") as ledger:
        ledger.write(records)


def test_status_counts_them(tmp_path: Path) -> None:
    write(tmp_path / "node-0", JOB, REFUSED, RECORD, OTHER)
    write(tmp_path / "node-1", JOB, REFUSED, OTHER, AGAIN)
    assert json.loads(status(tmp_path, "--json"))["refused"] == {"order-refused": 2, "stale-record": 1}
    assert (
        "refused, of an older generation or leader: 2 order-refused, 1 stale-record (ckptctl events)"
        in status(tmp_path).splitlines()
    )


def test_where_there_were_none_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path / "node-0", JOB, OTHER)
    assert json.loads(status(tmp_path, "--json"))["refused"] == {}
    assert "refused" not in status(tmp_path)


def test_other_events_are_not_even_read(tmp_path: Path) -> None:
    write(tmp_path / "node-0", JOB, REFUSED, OTHER)
    with Ledger.open_readonly(tmp_path / "node-0" / "ledger.db") as ledger:
        assert ledger.records(events={"order-refused"}) == (JOB, REFUSED)
        assert ledger.records(events=frozenset()) == (JOB,)


def test_status_names_who_cannot_vote_now(tmp_path: Path) -> None:
    """Of two whose disks were full, one has room again; its own ledger may have lost that it had none."""
    lost = structs.replace(REFUSED, event="1-1-2", node=1, kind="vote-lost", text="node-1 cannot vote: full")
    other = structs.replace(lost, event="2-1-2", node=2, text="node-2 cannot vote: full")
    again = structs.replace(other, event="2-1-3", at_s=9.0, kind="vote-again", text="node-2 can vote again")
    write(tmp_path / "node-0", JOB, other, lost)
    write(tmp_path / "node-2", JOB, again)
    assert json.loads(status(tmp_path, "--json"))["voteless"] == ["node-1 cannot vote: full"]
    assert "node-1 cannot vote: full" in status(tmp_path).splitlines()
    assert "node-2 cannot" not in status(tmp_path)


class Connected:
    """An agent that serves, and another's connection to it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.vault = VersionStore()
        self.replicas = Replicas(1, Origin("7"), 0, self.vault)
        self.serving = self.replicas.serving
        self.serving.on_event = lambda kind, text: self.events.append((kind, text))

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[Link[p.AgentMessage]]:
        credentials = KeyCredentials(bytes(32))
        tasks: list[asyncio.Task[None]] = []
        server, port = await serve(
            "127.0.0.1",
            0,
            lambda *pair: tasks.append(asyncio.create_task(self.serving.serve(pair, credentials))),
        )
        link: Link[p.AgentMessage] = await Link.dial(
            ("127.0.0.1", port), ("7", 0), credentials, p.AgentMessage, 10.0
        )
        try:
            yield link
        finally:
            link.close()
            server.close()
            await asyncio.gather(*tasks)


def record(generation: int) -> p.PutRecord:
    return p.PutRecord(generation=generation, rank=3, shard=0, step=9, record=b"r", digest=digest(b"r"))


def test_an_agent_tells_of_a_record_of_an_older_generation() -> None:
    async def main() -> None:
        agent = Connected()
        async with asyncio.timeout(20.0), agent.link() as link:
            agent.replicas.core.generation, agent.replicas.core.accepting = 2, True
            link.send(record(generation=1))
            link.send(record(generation=2))
            refused, answer = await link.receive(), await link.receive()
        assert refused == p.Held(generation=1, rank=3, step=9, held=False)
        assert answer == p.Held(generation=2, rank=3, step=9)
        assert agent.events == [("stale-record", "the record of rank 3, generation 1, here 2")]
        assert {kind for kind, _ in agent.events} <= REFUSALS

    asyncio.run(main())
