"""The health of a node in its daemon: from a probe to jobs, Slurm, the ledger and whoever asks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.health import acting, looking, watch
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.ckptlessd.health.watch import Health
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.ledger.store import Ledger, Retention
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.health import HealthReport, VerdictRecord, WhatIsWell
from ckptless.daemon.protocol.records import EventRecord
from ckptless.daemon.settings.options import HealthSettings
from tests.unit.edges.test_service import Client, Serve, Site, as_stranger, folder, serve, until

from .test_acting import Controller, Own

__all__ = ("folder", "serve")

XID = Finding(code="xid-79", where="GPU 0000:4e:00", evidence="NVRM: Xid 79, secret")
SENTENCE = "n0: xid-79 (GPU 0000:4e:00): the GPU has fallen off the bus"


class Lamp:
    """Shows what a test has put there."""

    interval_s = deadline_s = 1.0

    def __init__(self, *shown: Finding) -> None:
        self.shown = list(shown)

    def missing(self) -> str:
        return ""

    def look(self) -> Sequence[Finding]:
        return self.shown

    def close(self) -> None:
        pass


class Now(Controller):
    """slurmctld, by the clock of this machine."""

    def drain(self, name: str, reason: str) -> None:
        super().drain(name, reason)
        self.nodes[name] = replace(self.nodes[name], reason_s=time.time())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LEAST_INTERVAL_S", 0.01)
    monkeypatch.setattr(Lamp, "interval_s", 0.02)
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    monkeypatch.setattr(acting, "SETTLED_S", 0.1)


@asynccontextmanager
async def looked_after(
    site: Site, *shown: Finding, controller: Controller | None = None, **settings: Any
) -> AsyncIterator[tuple[Lamp, Own]]:
    """A daemon whose node has one probe."""
    if controller is None:
        controller = Now()
        controller.add("n0", "n1")
    own, lamp = Own(controller, "n0"), Lamp(*shown)
    service = site.service
    health = Health("n0", HealthSettings(**settings), own, service.ledger, service.now)
    health.jobs, service.health = lambda: service.jobs, health
    task = asyncio.create_task(health.run({"lamp": lamp}))
    try:
        yield lamp, own
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def asked(client: Client) -> HealthReport:
    client.say(WhatIsWell(protocol=m.PROTOCOL))
    decoder: Decoder[HealthReport] = Decoder(HealthReport, CONTROL_LIMIT)
    while True:
        data = await client._reader.read(1 << 16)
        assert data, "the daemon hung up"
        for answer in decoder.feed(data):
            return answer


def ledger(folder: Path) -> Ledger:
    return Ledger.open_readonly(folder / "state" / "ledger.db")


def test_a_finding_reaches_slurm_the_job_and_whoever_asks(serve: Serve, folder: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        (run,) = site.service.jobs
        async with looked_after(site) as (lamp, own):
            report = await asked(await site.client())
            assert (report.node, report.act, report.verdicts) == ("n0", "evict", ())
            lamp.shown = [XID]
            await until(lambda: run.session.control.unwell)
            reason = f"unwell (lamp: {SENTENCE.removeprefix('n0: ')})"
            assert run.session.control.unwell == {0: Leave(reason, "health", at_once=True, shrink=True)}
            assert own.controller.drained() == ["n0"]
            (said,) = (await asked(await site.client())).verdicts
            assert (said.probe, said.code, said.action, said.evidence) == (
                "lamp",
                "xid-79",
                "evict",
                XID.evidence,
            )
            assert said.done == "drained, and jobs leave it"
            # A job that comes later hears of it, too.
            await site.trains("4712")
            late = site.service.jobs[1]
            await until(lambda: late.session.control.unwell)

    serve(scenario)
    with ledger(folder) as kept:
        told = [row.text for row in kept.rows(EventRecord, "4711") if row.kind == "health"]
        assert told == [SENTENCE, f"{SENTENCE}: drained", f"{SENTENCE}: drained, and jobs leave it"]
        ((_, record),) = kept.verdicts()
        assert (record.code, record.ended_s, record.done) == ("xid-79", None, "drained, and jobs leave it")


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot act as another user")
def test_another_user_learns_what_it_is_and_not_what_was_read(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        async with looked_after(site, XID, act="note") as (_, own):
            await until(lambda: site.service.health is not None and _verdicts(site))
            words = encode(WhatIsWell(protocol=m.PROTOCOL))
            answer = await asyncio.to_thread(as_stranger, site.socket, words)
            # It says nothing more, and is let go in the end.
            decoder: Decoder[Any] = Decoder(HealthReport | m.Denied, CONTROL_LIMIT)
            report = decoder.feed(answer)[0]
            assert [(one.code, one.evidence) for one in report.verdicts] == [("xid-79", "")]
            assert own.orders == []

    serve(scenario)


def _looks(site: Site) -> int:
    assert site.service.health is not None
    return site.service.health.report(evidence=True).probes[0].looks


def _verdicts(site: Site) -> tuple[VerdictRecord, ...]:
    assert site.service.health is not None
    return site.service.health.report(evidence=True).verdicts


def test_a_daemon_without_probes_says_so(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        report = await asked(await site.client())
        assert (report.act, report.probes) == (None, ())

    serve(scenario)


def test_what_stood_is_known_again_unless_the_node_has_booted(serve: Serve, monkeypatch: Any) -> None:
    async def scenario(site: Site) -> None:
        async with looked_after(site, XID) as (_, own):
            await until(lambda: any("leave" in one.done for one in _verdicts(site)))
        async with looked_after(site, controller=own.controller) as (_, own):
            await until(lambda: own.controller.asked and _verdicts(site))
            assert own.orders == []
            (again,) = _verdicts(site)
            assert (again.code, again.ended_s) == ("xid-79", None)
        monkeypatch.setattr(watch, "BOOT_ID", Path("/proc/sys/kernel/random/uuid"))
        async with looked_after(site) as (_, own):
            await until(lambda: _verdicts(site))
            (over,) = _verdicts(site)
            assert over.ended_s is not None
            assert own.orders == []

    serve(scenario)


def test_what_is_over_may_stay_and_is_told_as_over(serve: Serve, monkeypatch: Any) -> None:
    async def scenario(site: Site) -> None:
        await site.trains()
        (run,) = site.service.jobs
        async with looked_after(site, Finding(code="link-down", where="ib0")) as (lamp, _):
            await until(lambda: run.session.control.unwell)
            lamp.shown = []
            # What a look has found that was under way is heard before the clock goes on.
            looks = _looks(site)
            await until(lambda: _looks(site) > looks + 1)
            later = site.service.now() + 3600.0
            assert site.service.health is not None
            monkeypatch.setattr(site.service.health, "_now", lambda: later)
            await until(lambda: not run.session.control.unwell)
            (over,) = _verdicts(site)
            assert (over.code, over.ended_s) == ("link-down", later)

    serve(scenario)


def test_verdicts_in_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as kept:
        fields = {"probe": "p", "code": "disk-full", "action": "drain", "text": "x", "first_s": 1.0}
        for begun_s in range(300):
            record = VerdictRecord(
                where=f"/{begun_s}",
                count=1,
                last_s=1.0,
                begun_s=float(begun_s),
                **fields,  # type: ignore[arg-type]
            )
            kept.save_verdict("boot-1", record.ended(float(begun_s)) if begun_s > 2 else record)
        kept.save_verdict("boot-2", record)  # the same again
        found = kept.verdicts()
        assert len(found) == 256
        # All that stand, whatever their age, and the newest others.
        assert [r.where for _, r in found if r.ended_s is None] == ["/299", "/0", "/1", "/2"] or {
            r.where for _, r in found if r.ended_s is None
        } == {"/0", "/1", "/2", "/299"}
        assert found[0][1].begun_s < found[100][1].begun_s
        assert ("boot-2", record) in found
        kept.prune(Retention().keep_s + 150.0)
        assert min(r.ended_s for _, r in kept.verdicts() if r.ended_s is not None) == 150.0
