"""A job's number that comes again: a run gets nothing of another one of its name, whatever is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from ckptless.daemon.ckptlessd import job_host
from ckptless.daemon.ckptlessd.peer_links import PeerLinks
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.ckptlessd.service import LEDGER_FILE
from ckptless.daemon.ledger import store
from ckptless.daemon.ledger.store import Ledger, Owner, Retention
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decree, Durable
from ckptless.daemon.protocol.records import EventRecord, JobRecord, JobState
from ckptless.daemon.protocol.requests import TABLES, Read
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.credentials import KeyCredentials

from .test_service import CANCEL, DEADLINE_S, STATE, Site, hello, until

A, B = "a" * 32, "b" * 32
Life = Callable[[Site], Awaitable[None]]


def live(folder: Path, *lives: Life) -> None:
    """One daemon after the other, with the same disk."""

    async def main() -> None:
        for life in lives:
            async with asyncio.timeout(DEADLINE_S), Site(folder).running() as site:
                await life(site)

    asyncio.run(main())


async def is_over(site: Site, launch: str = A) -> None:
    """A run that trains, and ends."""
    agent = await site.client(hello(launch=launch), STATE)
    await agent.hears(m.Assign)
    agent.say(CANCEL)
    assert (await agent.hears(m.End)).outcome.exit_code == 130
    agent.hang_up()


async def begins(site: Site, launch: str = B) -> None:
    """A run that hears of its own first generation, as nothing was ever decided."""
    agent = await site.client(hello(launch=launch), STATE)
    first = await agent.hears((m.Assign, m.End))
    assert isinstance(first, m.Assign), first
    (job,) = site.service.jobs
    assert job.launch == launch
    assert job.session.control.agreement.may_vote
    # One decree, not one more after those of another run.
    assert job.session.control.agreement.known.index == 1


def rows(folder: Path) -> list[tuple[str, str]]:
    with Ledger.open_readonly(folder / "state" / LEDGER_FILE) as ledger:
        page = ledger.page(Read(protocol=m.PROTOCOL, job="4711", tables=TABLES), None, 1000, 1 << 20)
        return [(type(row).__name__, getattr(row, "text", "")) for row in page.records]


def test_a_run_that_is_over_does_not_end_the_next_one_of_its_name(tmp_path: Path) -> None:
    async def life(site: Site) -> None:
        await is_over(site)
        await begins(site)

    live(tmp_path, life)


def test_after_a_restart_neither_its_vote_nor_its_rows_are_the_next_ones(tmp_path: Path) -> None:
    live(tmp_path, is_over)
    assert ("EventRecord", "stopped: by the user") in rows(tmp_path)
    live(tmp_path, begins)
    assert [text for kind, text in rows(tmp_path) if kind == "EventRecord" and "by the user" in text] == []
    assert [kind for kind, _ in rows(tmp_path)].count("GenerationRecord") == 1


def test_the_same_run_is_bound_to_what_was_promised_for_it(tmp_path: Path) -> None:
    """Its agent may not have heard the daemon's answer before that died."""

    promised = [NO_BALLOT]

    async def first(site: Site) -> None:
        agent = await site.client(hello(launch=A), STATE)
        await agent.hears(m.Assign)
        promised.append(site.service.jobs[0].session.control.agreement.durable.promised)

    async def then(site: Site) -> None:
        agent = await site.client(hello(launch=A), STATE)
        await agent.hears(m.Admitted)
        assert site.service.jobs[0].session.control.agreement.durable.promised >= promised[-1] > NO_BALLOT

    live(tmp_path, first, then)


def test_two_runs_of_one_name_at_once(tmp_path: Path) -> None:
    async def life(site: Site) -> None:
        agent = await site.client(hello(launch=A), STATE)
        await agent.hears(m.Assign)
        (denied,) = await (await site.client(hello(launch=B))).rest()
        assert denied == m.Denied(
            reason="another run called 4711 goes on here: give all runs of a job one --log-dir"
        )
        agent.say(CANCEL)
        await agent.hears(m.End)

    live(tmp_path, life)


def test_an_agent_that_is_left_of_an_older_run_takes_nothing_from_a_later_one(tmp_path: Path) -> None:
    identities: list[str] = []

    async def older(site: Site) -> None:
        agent = await site.client(hello(launch=A), STATE)
        identities.append((await agent.hears(m.Admitted)).identity)

    async def left(site: Site) -> None:
        (denied,) = await (await site.client(hello(launch=A, identity=identities[0]))).rest()
        assert denied == m.Denied(reason="a later run has the name 4711 here")
        assert await site.service.ledger.vote("4711") is not None

    live(tmp_path, older, begins, left)


def test_a_vote_that_nobody_owns_is_still_of_its_run_alone(tmp_path: Path) -> None:
    """A ledger that took the vote, and had no room for the owner."""

    async def life(site: Site) -> None:
        known = Durable(promised=NO_BALLOT, vote=None, known=Decree(index=7, voters=(0,)))
        await site.service.ledger.save_now("4711", A + "0" * 16, known)
        await begins(site)

    live(tmp_path, life)


def test_owners(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        one, other = Owner(1001, A), Owner(1001, B)
        assert ledger.own("4711", one, anew=True) is None
        assert ledger.own("4711", one, anew=True) is None
        assert ledger.own("4711", other, anew=False) == one
        assert ledger.own("4711", one, anew=False) is None
        assert ledger.own("4711", other, anew=True) == one
        assert ledger.own("4711", Owner(1002, B), anew=True) == other


def test_what_waits_for_the_disk_is_not_the_next_ones(tmp_path: Path) -> None:
    def event(launch: str) -> EventRecord:
        return EventRecord(
            event=launch, job="4711", node=0, at_s=0.0, level="info", kind="k", generation=1, text="t"
        )

    async def work() -> None:
        writer = LedgerWriter(tmp_path / LEDGER_FILE)
        await writer.start()
        await writer.own("4711", Owner(1001, A), anew=True)
        writer._rows.append(event(A))  # as while a disk is full
        await writer.own("4711", Owner(1001, B), anew=True)
        writer.write((event(B),))
        await writer.close()

    asyncio.run(work())
    with Ledger.open_readonly(tmp_path / LEDGER_FILE) as ledger:
        assert [one.event for one in ledger.rows(EventRecord, "4711")] == [B]


def test_what_is_of_jobs_that_are_long_over_is_removed(tmp_path: Path) -> None:
    known = Durable(promised=NO_BALLOT, vote=None, known=Decree(index=7, voters=(0,)))
    ends = {"runs": None, "just": 990.0, "over": 900.0, "old": 1000.0 - Retention().keep_s - 1}
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        for job, ended_s in ends.items():
            state: JobState = "running" if ended_s is None else "done"
            row = JobRecord(
                job=job,
                command=("t",),
                world_size=1,
                nodes=1,
                spares=0,
                state=state,
                started_s=0.0,
                ended_s=ended_s,
            )
            event = EventRecord(
                event=job, job=job, node=0, at_s=0.0, level="info", kind="k", generation=1, text="t"
            )
            ledger.write((row, event))
            ledger.own(job, Owner(1001, A), anew=True)
            ledger.save_vote(job, A, known)
        ledger.prune(1000.0)
        assert [job for job in ends if ledger.vote(job)] == ["runs", "just"]
        assert {row.job for row in ledger.rows(JobRecord)} == {"runs", "just", "over"}
        assert [job for job in ends if ledger.rows(EventRecord, job)] == ["runs", "just", "over"]
        assert [job for job in ends if ledger.own(job, Owner(1, A), anew=False)] == ["runs", "just", "over"]


def test_who_forgets_a_job_removes_its_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_host, "LINGER_S", 0.0)
    monkeypatch.setattr(store, "VOTE_S", -1.0)

    async def life(site: Site) -> None:
        await is_over(site)
        await until(lambda: not site.service.jobs)
        while await site.service.ledger.vote("4711") is not None:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)

    live(tmp_path, life)
    assert ("EventRecord", "stopped: by the user") in rows(tmp_path)


@pytest.mark.parametrize(("theirs", "met"), [(B, True), (A, False)])
def test_daemons_meet_for_one_run(
    tmp_path: Path, theirs: str, met: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that has not let go of the old run would tell the new one how that has ended."""
    caplog.set_level("DEBUG", "ckptless.daemon.ckptlessd.service")

    async def life(site: Site) -> None:
        sock = site.service._listener._sock
        assert sock is not None
        port = sock.getsockname()[1]
        peers = tuple(Peer(node=n, name=f"n{n}", address="127.0.0.1", port=port) for n in range(2))
        site.cluster.peers = peers
        agent = await site.client(hello(launch=theirs, nodes=2))
        await agent.hears(m.Admitted)
        mesh = PeerLinks(("4711", B), Roster(1, peers), KeyCredentials(b"k" * 32))
        ups: list[int] = []
        mesh.start(cast(Peering, Mock(linked=ups.append)))
        mesh.want(frozenset({0}))
        await until(lambda: ups or "is not known here (yet)" in caplog.text)
        await mesh.close()
        assert bool(ups) is met

    live(tmp_path, life)
