"""The health of this node, put together: probes look, verdicts follow, jobs and Slurm and the ledger hear."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptless.daemon.ckptlessd.health.acting import Acting, Nodes
from ckptless.daemon.ckptlessd.health.looking import Looking
from ckptless.daemon.ckptlessd.health.meanings import concerns_jobs
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.ckptlessd.health.verdicts import MOST_PER_PROBE, Key, Verdict, Verdicts
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol.errors import LedgerError
from ckptless.daemon.protocol.health import MOST_VERDICTS, HealthReport, VerdictRecord
from ckptless.daemon.settings.options import HealthSettings

if TYPE_CHECKING:
    from ckptless.daemon.ckptlessd.job_host import JobHost

logger = logging.getLogger(__name__)

LOOK_S = 2.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Health:
    """Owned by the daemon's event loop. `jobs` are the runs that this node has now; `now` is in Unix time."""

    def __init__(
        self,
        name: str,
        settings: HealthSettings,
        nodes: Nodes,
        ledger: LedgerWriter,
        now: Callable[[], float],
    ) -> None:
        self._name, self._ledger, self._now = name, ledger, now
        self._verdicts = Verdicts(settings.actions or {})
        self._acting = Acting(name, nodes, settings, self._leave, self._tell_done)
        self._looking: Looking | None = None
        self._boot = BOOT_ID.read_text().strip()
        self._done: dict[Key, str] = {}
        self._left: e.Leave | None = None
        self._old: list[VerdictRecord] = []
        self.jobs: Callable[[], Iterable[JobHost]] = lambda: ()

    def set_settings(self, settings: HealthSettings) -> None:
        """Take what a reload may change: how much is done, and when it is taken back."""
        self._acting.settings = settings

    async def run(self, probes: dict[str, Probe]) -> None:
        """Look until cancelled."""
        await self._recall(probes)
        self._looking = Looking(probes, self._hear)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._looking.run())
            tasks.create_task(self._act())

    async def _act(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for over in self._verdicts.expire(self._now()):
                logger.info("health: %s is over", over.words)
                self._keep(over, ended=True)
                self._done.pop(over.key, None)
            await self._acting.look(self._verdicts.standing)
            self._word_jobs()

    def report(self, *, evidence: bool) -> HealthReport:
        """Return how this node is; `evidence`: whoever asks may read the kernel's log as well."""
        now = [self._record(one) for one in self._verdicts.standing]
        records = [*now, *reversed(self._old)][:MOST_VERDICTS]
        return HealthReport(
            node=self._name,
            act=self._acting.settings.act,
            probes=self._looking.states() if self._looking is not None else (),
            verdicts=tuple(one if evidence else one.without_evidence() for one in records),
        )

    # ------------------------------------------------------------------------------ what is found

    def _hear(self, probe: str, findings: Sequence[Finding]) -> None:
        dropped = probe in self._verdicts.dropped
        for begun in self._verdicts.hear(probe, findings, self._now()):
            logger.warning("health: %s: %s", begun.words, begun.evidence)
            for run in self._open() if concerns_jobs(begun.key.code, begun.meaning.action) else ():
                run.note("warning", "health", f"{self._name}: {begun.words}")
            self._keep(begun)
        if not dropped and probe in self._verdicts.dropped:
            logger.warning("health: %s finds more than %d things at a time", probe, MOST_PER_PROBE)

    def _tell_done(self, verdict: Verdict, done: str) -> None:
        if self._done.get(verdict.key) != done:
            self._done[verdict.key] = done
            logger.warning("health: %s: %s", verdict.words, done)
            for run in self._open():
                run.note("warning", "health", f"{self._name}: {verdict.words}: {done}")
            self._keep(verdict)

    # -------------------------------------------------------------------------- what jobs hear

    def _leave(self, leave: e.Leave | None) -> None:
        self._left = leave
        self._word_jobs()

    def _word_jobs(self) -> None:
        """Say it to all jobs, those that have come since, too."""
        for run in self._open():
            control = run.session.control
            control.move_stragglers = self._acting.settings.move_stragglers
            if control.unwell.get(control.me) != self._left:
                run.session.feed(e.Unwell(self._left))

    def _open(self) -> Collection["JobHost"]:
        return [run for run in self.jobs() if not run.is_over]

    # ------------------------------------------------------------------------------- the ledger

    async def _recall(self, probes: Collection[str]) -> None:
        """Go on with what stood when the daemon ended, unless the node has booted since."""
        try:
            known = await self._ledger.call(lambda ledger: ledger.verdicts())
        except LedgerError as error:
            logger.warning("health: nothing is known of before: %s", error)
            return
        for boot, record in known:
            if record.ended_s is not None:
                self._old.append(record)
            elif boot == self._boot and record.probe in probes:
                verdict = self._verdicts.recall(record)
                self._done[verdict.key] = record.done
                if record.done.startswith("drained"):
                    self._acting.recall(verdict)
            else:
                self._old.append(record.ended(self._now()))
                self._write(boot, self._old[-1])

    def _keep(self, verdict: Verdict, *, ended: bool = False) -> None:
        record = self._record(verdict)
        if ended:
            record = record.ended(self._now())
            self._old = [*self._old, record][-MOST_VERDICTS:]
        self._write(self._boot, record)

    def _write(self, boot: str, record: VerdictRecord) -> None:
        self._ledger.save_verdict(boot, record)

    def _record(self, one: Verdict) -> VerdictRecord:
        return VerdictRecord(
            probe=one.key.probe,
            code=one.key.code,
            where=one.key.where,
            action=one.meaning.action,
            text=one.meaning.text,
            evidence=one.evidence,
            count=one.count,
            first_s=one.first_s,
            last_s=one.last_s,
            begun_s=one.begun_s or one.first_s,
            done=self._done.get(one.key, ""),
        )
