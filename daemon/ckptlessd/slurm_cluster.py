"""Slurm as what gives out nodes: whose a job is and where it runs, and what Slurm is told of its fate."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckptless.daemon.ckptlessd.cluster import EXPLAIN_S
from ckptless.daemon.ckptlessd.down_nodes import is_dead, newly_down, newly_leaving
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.recovery.events import DarkState, Drained, Leave, NodeLost
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.ckptlessd.requeue_memory import RequeueMemory
from ckptless.daemon.ckptlessd.requeue_table import Entry
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol.errors import CkptlessError, LedgerError, PeerError, UsageError
from ckptless.daemon.protocol.messages import AgentHello, Cancel, JobEnded, JobStarted, Outcome, Wish
from ckptless.daemon.protocol.records import JobRecord
from ckptless.daemon.settings.bind import interfaces
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.slurm.adapter import Job, Node, check_node
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.closing import close
from ckptless.daemon.slurm.ending import Ending, why_signalled
from ckptless.daemon.slurm.errors import (
    SlurmError,
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from ckptless.daemon.slurm.giving_way import gives_way, waits_before
from ckptless.daemon.slurm.reason import reason_text
from ckptless.daemon.slurm.run_name import slurm_job_id
from ckptless.daemon.transport.tasks import Tasks, end_all

if TYPE_CHECKING:
    from ckptless.daemon.ckptlessd.job_host import JobHost

logger = logging.getLogger(__name__)

OnNodeLost = Literal["down", "drain", "none"]

ADMIT_S = 10.0
FRESH_S = 2.0
# Slurm's list of nodes changes that seldom.
NODES_AGE_S = 600.0
# So long after nodes were given back Slurm has them, or does not take them.
IN_VAIN_S = 30.0
LOOKUP_S, LOOKUP_THREADS = 10.0, 8
RETRY_S = 5.0
# While a job waits for its nodes: one that Slurm has down will not come.
FORMING_POLL_S = 5.0
RETRIES = 120
MAX_NODES = 65_536
_NUMBERED = re.compile(r"\bnode-(\d+)\b")


def _with_names(runtime: "JobHost", reason: str) -> str:
    """The same with the names that Slurm has for the nodes: an administrator knows no numbers of ours."""
    names = {str(peer.node): runtime.name_of(peer.node) for peer in runtime.roster.peers}
    return _NUMBERED.sub(lambda found: names.get(found[1], found[0]), reason)


def _marked(nodes: Iterable[Node], mark: str) -> set[str]:
    """Nodes that are down, or drained for a reason that begins so.

    With ReturnToService=2 a node that lives is not down for long. That it is drained stays, and why.
    """
    return {n.name for n in nodes if n.down or (n.draining and n.reason.startswith(mark))}


async def nodes_now(slurm: CachedSlurm) -> Sequence[Node]:
    """All nodes as Slurm knows them at this moment. Raises SlurmUnreachableError."""
    reading = await slurm.nodes(max_age_s=0.0, wait_s=ADMIT_S)
    return reading.require_fresh("its nodes") or ()


@dataclass(frozen=True)
class OwnNode:
    """This node in Slurm; see `health.acting.Nodes`. Every call raises SlurmError."""

    slurm: CachedSlurm
    name: str

    async def now(self) -> Sequence[Node]:
        """Return all nodes as Slurm knows them at this moment."""
        return await nodes_now(self.slurm)

    async def as_slurm_has_it(self) -> Node:
        """Return this node alone, asked at this moment."""
        return await self.slurm.direct.node(self.name)

    async def drain(self, reason: str) -> None:
        """Have no new job start here."""
        await self.slurm.order(self.slurm.direct.drain(self.name, reason))

    async def undrain(self) -> None:
        """Have jobs start here again."""
        await self.slurm.order(self.slurm.direct.undrain(self.name))


class SlurmCluster:
    """Owned by the daemon's event loop; `name` is this node's in Slurm, `port` that of every daemon."""

    def __init__(self, slurm: CachedSlurm, name: str, port: int, on_node_lost: OnNodeLost) -> None:
        self._slurm, self._name, self._port = slurm, name, port
        self.on_node_lost = on_node_lost
        # Whether elastic jobs give nodes back while one of higher priority waits for them.
        self.gives_way = False
        # Whether jobs leave a node that is drained, or under maintenance, where they can go on without it.
        self.leaves_drained = False
        # How many nodes runs had when this daemon had them give way.
        self._had: dict[str, int] = {}
        # Runs whose nodes Slurm does not take back.
        self._in_vain: set[str] = set()
        self._announced: dict[int, int] = {}
        self._hears_of_jobs = False
        self._addresses: dict[str, str] = {}
        self._marked_down: set[str] = set()
        self._tasks = Tasks()
        # Of its own: a name server that is slow must not hold up MUNGE.
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")

    @property
    def own_node(self) -> "OwnNode":
        """Return what its health is told to."""
        return OwnNode(self._slurm, self._name)

    def is_idle(self) -> bool:
        """Whether it is known, by the prolog and the epilog, that no job is on this node."""
        return self._hears_of_jobs and not self._announced

    # -------------------------------------------------------------------------- who may speak

    def notice(self, notice: JobStarted | JobEnded) -> None:
        """See `cluster.Cluster`: the prolog's word is Slurm's own, and spares a question to slurmctld."""
        self._hears_of_jobs = True
        if isinstance(notice, JobStarted):
            logger.info("job %d of uid %d begins here: %s", notice.job_id, notice.uid, notice.spec or "-")
            self._announced[notice.job_id] = notice.uid
        else:
            logger.info("job %d ends here", notice.job_id)
            self._announced.pop(notice.job_id, None)

    async def admit(self, hello: AgentHello, uid: int) -> Roster:
        """See `cluster.Cluster`: the job must be of this uid, and have this node."""
        await self.check_owner(hello.spec.job, uid)
        job_id = slurm_job_id(hello.spec.job)
        names, info = hello.spec.names, hello.info
        spec = hello.spec
        founders = spec.nodes + spec.spares
        total = founders + spec.late
        if spec.nodes < 1 or spec.spares < 0 or spec.slots_per_node < 1:
            raise PeerError(f"job {job_id} asks for {spec.nodes} nodes, {spec.spares} spares")
        begun = names[:founders]
        if not founders <= len(names) <= total or len(set(begun)) != founders or total > MAX_NODES:
            raise PeerError(f"job {job_id} names {len(names)} nodes for {total} places")
        if not 0 <= info.node < len(names) or names[info.node] != self._name or info.name != self._name:
            raise PeerError(f"the agent takes {self._name} for number {info.node}, {info.name}")
        if not _is_own(info.address):
            raise PeerError(f"{info.address} is not an address of {self._name}")
        peers = await self._peers(names)
        # Of those that may come nothing is known yet: they dial the others.
        more = (Peer(node=n, name=f"node-{n}", address="", port=0) for n in range(len(names), total))
        return Roster(info.node, (*peers, *more), spec.late)

    async def check_owner(self, run: str, uid: int) -> None:
        """See `cluster.Cluster`."""
        job_id = slurm_job_id(run)
        owner = self._announced.get(job_id)
        if owner is None:
            owner = (await self._job(job_id)).user_id
        if owner != uid:
            raise PeerError(f"job {job_id} is not of uid {uid}")

    async def has_job(self, uid: int) -> bool:
        """See `cluster.Cluster`."""
        if uid in self._announced.values():
            return True
        reading = await self._slurm.jobs(wait_s=ADMIT_S)
        return any(
            job.user_id == uid and job.holds_nodes and self._name in job.nodes for job in reading.value or ()
        )

    async def _job(self, job_id: int) -> Job:
        reading = await self._slurm.job(job_id, wait_s=ADMIT_S)
        job = reading.value
        if job is None:
            raise PeerError(f"Slurm cannot say whose job {job_id} is: {reading.trouble or 'it knows none'}")
        if not job.holds_nodes or self._name not in job.nodes:
            raise PeerError(f"job {job_id} ({job.state}) does not have {self._name}")
        return job

    async def _peers(self, names: tuple[str, ...]) -> tuple[Peer, ...]:
        missing = [name for name in names if name not in self._addresses]
        if missing:
            self._addresses.update(await self._look_up(missing))
        return tuple(
            Peer(node=number, name=name, address=self._addresses[name], port=self._port)
            for number, name in enumerate(names)
        )

    async def _look_up(self, names: list[str]) -> dict[str, str]:
        """Addresses of nodes that Slurm has; the names are a user's word. Raises PeerError."""
        for max_age_s in (NODES_AGE_S, FRESH_S):
            reading = await self._slurm.nodes(max_age_s=max_age_s, wait_s=ADMIT_S)
            known = {node.name for node in reading.value or ()}
            strange = [name for name in names if name not in known]
            if not strange:
                break
        else:
            trouble = f" (it cannot be asked: {reading.trouble})" if reading.trouble else ""
            raise PeerError(f"{strange[0]!r} is no node of Slurm's{trouble}")
        loop = asyncio.get_running_loop()
        answers = [loop.run_in_executor(self._lookups, _look_up, name) for name in names]
        try:
            async with asyncio.timeout(LOOKUP_S):
                return dict(zip(names, await asyncio.gather(*answers), strict=True))
        except TimeoutError as error:
            raise PeerError(
                f"the names of {len(names)} nodes are not resolved in {LOOKUP_S:.0f} s"
            ) from error
        finally:
            for answer in answers:
                answer.cancel()

    # ------------------------------------------------------------------------ what Slurm is told

    def node_is_dark(self, runtime: "JobHost", node: int, reason: str, state: DarkState) -> None:
        """See `cluster.Cluster`: drained, and down once it stays dark, since down ends what runs there.

        One that is back stays drained: it lives, and something is wrong with it.
        """
        slurm, name = self._slurm, runtime.name_of(node)
        text = reason_text(f"job {runtime.job}: {_with_names(runtime, reason)}")
        down = state == "gone" and self.on_node_lost == "down"
        if self.on_node_lost == "none" or (state == "gone" and not down):
            return

        async def mark() -> None:
            if state == "back" and name in self._marked_down:
                # By this daemon, which may take it back.
                await slurm.order(slurm.direct.undrain(name))
                await slurm.order(slurm.direct.drain(name, text))
                self._marked_down.discard(name)
                return
            # Which nodes a run has is its user's word; what is done to a node is Slurm's business.
            # A job that is over still names the nodes that it had: by then they may be given to another.
            job = await self._now(slurm_job_id(runtime.job), 0.0 if down else FRESH_S)
            if not job.holds_nodes or name not in job.nodes:
                raise SlurmRefusedError(f"{name} is no node of job {runtime.job} (any more)")
            if down:
                self._marked_down.add(name)
                await slurm.order(slurm.direct.mark_down(name, text))
            else:
                await slurm.order(slurm.direct.drain(name, text))

        self._tasks.spawn(self._tell(runtime, f"mark {'down' if down else 'drain'} {name}", mark))

    def witness(self, runtime: "JobHost", nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See `cluster.Cluster`. slurmctld does one thing after the other: it is the judge of two halves."""
        names = [[runtime.name_of(node) for node in half] for half in (nodes, ours)]

        async def ask() -> None:
            try:
                if await self._are_down(runtime.job, *names):
                    runtime.witnessed(nodes)
            except (SlurmError, UsageError) as error:
                runtime.note(
                    "warning", "witness", f"Slurm cannot be asked about {', '.join(names[0])}: {error}"
                )

        self._tasks.spawn(ask())

    async def _are_down(self, run: str, theirs: list[str], ours: list[str]) -> bool:
        """Whether they are down, and this is the half that goes on; where the site allows it they are marked.

        Each half drains the other, which harms nothing that runs, and sets it down only where it is not
        marked itself by then: of two that do so at once at most one sees nothing, and neither ends the other.
        """
        if self.on_node_lost != "down":
            down = {node.name for node in await nodes_now(self._slurm) if node.down}
            return down.issuperset(theirs) and down.isdisjoint(ours)
        slurm, mark, job_id = self._slurm.direct, reason_text(f"job {run}: "), slurm_job_id(run)
        reason = f"{mark}silent, as is half of its nodes"
        # no deadline: each has its own
        job, nodes = await asyncio.gather(self._now(job_id, 0.0), nodes_now(self._slurm))
        names = [name for name in theirs if name in job.nodes] if job.holds_nodes else []
        if not _marked(nodes, mark).isdisjoint(ours):
            if job.holds_nodes and not set(ours) & set(job.nodes):
                # Set down, and so out of the job: the other half goes on. What this one has done is undone.
                here = [node for node in nodes if node.name in names and node.draining]
                await self._at_once(slurm.undrain(node.name) for node in here if node.reason == reason)
            return False
        await self._at_once(slurm.drain(name, reason) for name in names)
        if not _marked(await nodes_now(self._slurm), mark).isdisjoint(ours):
            return False
        await self._at_once(slurm.mark_down(name, reason) for name in names)
        return _marked(await nodes_now(self._slurm), mark).issuperset(theirs)

    async def _at_once(self, orders: Iterable[Coroutine[Any, Any, None]]) -> None:
        # no deadline: each order has its own
        await asyncio.gather(*map(self._slurm.order, orders))

    def explain(self, runtime: "JobHost", node: int, cancel: Cancel) -> None:
        """See `cluster.Cluster`: by the one node's daemon that leads, not by each of the job's."""

        async def ask() -> None:
            try:
                found = await self._ending(runtime)
                reason = why_signalled(found, cancel.reason, cancel.restarts or 0)
            except (TimeoutError, CkptlessError) as error:
                reason = f"{cancel.reason} ({str(error) or 'Slurm does not answer'})"
            runtime.explained(node, cancel, reason)

        self._tasks.spawn(ask())

    def ask_suspended(self, runtime: "JobHost", seconds: float) -> None:
        """See `cluster.Cluster`: by one daemon of the job. Where Slurm does not answer, time goes on."""

        async def ask() -> None:
            try:
                found = await self._ending(runtime)
            except (TimeoutError, CkptlessError) as error:
                why = str(error) or "Slurm does not answer"
                logger.info("job %s is stopped, perhaps by scontrol suspend: %s", runtime.job, why)
                return
            if found.state == "SUSPENDED":
                runtime.suspended(seconds)

        self._tasks.spawn(ask())

    async def _ending(self, runtime: "JobHost") -> Ending:
        """Return what Slurm says of the job's end. Raises TimeoutError, CkptlessError."""
        async with asyncio.timeout(EXPLAIN_S):
            return await self._slurm.direct.ending(slurm_job_id(runtime.job), deadline_s=EXPLAIN_S)

    def ended(self, runtime: "JobHost", outcome: Outcome) -> None:
        """See `cluster.Cluster`: a job whose batch host is lost is ended by nobody else."""
        control = runtime.session.control
        if not control.leads or control.known.outcome is None:
            return  # it is for whoever leads to tell, once it is agreed on
        job_id = slurm_job_id(runtime.job)
        text = reason_text(f"{outcome.state}, exit code {outcome.exit_code}: {outcome.reason}")
        slurm = self._slurm
        comment = lambda: slurm.order(slurm.direct.comment(job_id, text))  # noqa: E731
        self._tasks.spawn(self._tell(runtime, "comment", comment))
        peers = runtime.roster.peers
        lost = {peers[n].name: is_dead(view) for n, view in control.nodes.items() if view.lost is not None}
        if lost:
            self._tasks.spawn(
                self._tell(runtime, "look at the batch host", lambda: self._end_orphan(job_id, lost))
            )

    async def _end_orphan(self, job_id: int, lost: dict[str, bool]) -> None:
        """`lost` tells of each node whether it is dead for sure."""
        job = await self._now(job_id)
        if job.batch_host in lost and (lost[job.batch_host] or await self._has_no_script(job)):
            await self._slurm.order(self._slurm.direct.cancel(job_id))

    async def _has_no_script(self, job: Job) -> bool:
        """Whether Slurm itself knows that its batch host is gone: a node that was taken out may die later."""
        if not job.running:
            return False
        reading = await self._slurm.node(job.batch_host, max_age_s=FRESH_S, wait_s=ADMIT_S)
        node = reading.require_fresh(job.batch_host)
        return job.batch_host not in job.nodes or node is None or node.down or not node.responding

    async def _now(self, job_id: int, max_age_s: float = FRESH_S) -> Job:
        """The job as Slurm knows it at this moment. Raises SlurmUnreachableError, SlurmNotFoundError."""
        reading = await self._slurm.job(job_id, max_age_s=max_age_s, wait_s=ADMIT_S)
        job = reading.require_fresh(f"job {job_id}")
        if job is None:
            raise SlurmNotFoundError(f"Slurm knows no job {job_id}")
        return job

    async def watch(
        self,
        jobs: Callable[[], Iterable["JobHost"]],
        poll_s: float,
        requeue_memory: RequeueMemory | None = None,
        ledger: LedgerWriter | None = None,
    ) -> None:
        """Ask Slurm now and then, until cancelled: one question about all jobs, and one about all nodes.

        An epilog may be missing, or have found nobody; and Slurm may know of a node what nobody else does.
        """
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            await asyncio.sleep(min(poll_s, FORMING_POLL_S))
            if loop.time() - looked_s < poll_s:
                forming = [run for run in _open(jobs()) if run.session.control.stage == "forming"]
                await self._look_at_nodes(forming, FORMING_POLL_S)
                continue
            looked_s = loop.time()
            await self._look_at_jobs(_open(jobs()), poll_s)
            await self._look_at_nodes(_open(jobs()), poll_s)
            if self.gives_way:
                await self._give_way([run for run in _open(jobs()) if _may_shrink(run)], poll_s)
            if requeue_memory is not None:
                await self._look_at_kept(requeue_memory, poll_s)
            if ledger is not None:
                await self._look_at_rows(ledger, _open(jobs()), poll_s)

    async def _jobs_lately(self, poll_s: float) -> tuple[dict[int, Job], float] | None:
        """All jobs by number, and how old that is in seconds.

        None where slurmctld is away, or was just told something: the next look is soon enough.
        """
        reading = await self._slurm.jobs(max_age_s=poll_s)
        if reading.value is None or not reading.fresh:
            return None
        return {job.job_id: job for job in reading.value}, reading.age_s

    async def _look_at_jobs(self, runs: "list[JobHost]", poll_s: float) -> None:
        """Runs of jobs that Slurm has ended are over."""
        if not runs or (found := await self._jobs_lately(poll_s)) is None:
            return
        known, age_s = found
        for run in runs:
            if run.age_s <= age_s:
                continue  # it is younger than Slurm's answer
            job = known.get(slurm_job_id(run.job))
            if job is None or job.over:
                state = job.state if job is not None else "no such job"
                run.cut_short(f"Slurm has ended the job ({state})")

    async def _look_at_rows(self, ledger: LedgerWriter, runs: "list[JobHost]", poll_s: float) -> None:
        """Rows of jobs are closed by Slurm's word where nobody else has closed them."""
        undecided = {run.job for run in runs}
        try:
            still_open: list[JobRecord] = []
            await ledger.call(lambda there: there.close_jobs(still_open.append))
            if not any(row.job not in undecided for row in still_open):
                return
            if (found := await self._jobs_lately(poll_s)) is None:
                return
            known, asked_s = found[0], time.time() - found[1]
            closing = lambda row: close(row, known, undecided, asked_s)  # noqa: E731
            for row in await ledger.call(lambda there: there.close_jobs(closing)):
                logger.warning("job %s: %s", row.job, row.reason)
        except LedgerError as error:
            logger.warning("no job could be closed: %s", error)

    async def _look_at_kept(self, requeue_memory: RequeueMemory, poll_s: float) -> None:
        """Drop what is kept of jobs that will not start again."""
        if not requeue_memory.table.resting or (found := await self._jobs_lately(poll_s)) is None:
            return
        known, age_s = found

        def is_over(entry: Entry) -> str:
            job = known.get(int(entry.job))
            if entry.since_s > requeue_memory.now() - age_s or not (job is None or job.over):
                return ""
            return f"the job is over ({job.state if job is not None else 'Slurm knows it no more'})"

        requeue_memory.drop(is_over)

    async def _look_at_nodes(self, runs: "list[JobHost]", poll_s: float) -> None:
        """Nodes that Slurm has down are lost to the runs that are led from here, whatever still runs there.

        Slurm has taken them from the job. Its word needs no majority: the other nodes hear it from here.
        """
        led = [run for run in runs if run.session.control.leads or _has_no_leader(run)]
        reading = await self._slurm.nodes(max_age_s=poll_s) if led else None
        if reading is None or reading.value is None or not reading.fresh:
            return
        for run in led:
            nodes = run.session.control.nodes
            lost = [number for number, view in nodes.items() if view.lost is not None]
            names = [run.name_of(number) for number in nodes]
            # Before it had them they may have been down; and it may have ended while Slurm was asked.
            if run.age_s > reading.age_s and run.session.control.outcome is None:
                for number, reason in newly_down(names, lost, reading.value):
                    run.session.lose(NodeLost(number, reason, 0.0, source="slurm"))
                leaving = newly_leaving(names, lost, reading.value, reason_text(""))
                wanted = {
                    number: Leave(reason, "operator", shrink=True)
                    for number, reason in (leaving if self.leaves_drained else ())
                }
                if wanted != run.session.control.drained:
                    run.session.feed(Drained(wanted))

    async def _give_way(self, runs: "list[JobHost]", poll_s: float) -> None:
        """Give nodes back where a job of higher priority waits for them; have them again once none waits."""
        reading = await self._slurm.nodes(max_age_s=poll_s) if runs else None
        if reading is None or reading.value is None or not reading.fresh:
            return
        try:
            queue = await self._slurm.direct.queue()
        except CkptlessError as error:
            logger.info("nobody can say which jobs wait: %s", error)
            return
        known = {one.job_id: one for one in queue}
        for run in runs:
            ours, spec = known.get(slurm_job_id(run.job)), run.session.control.spec
            if ours is None or spec is None:
                continue
            if self._is_in_vain(run, ours.nodes):
                continue
            idle = sum(node.idle and ours.partition in node.partitions for node in reading.value)
            sizes = [size + spec.spares for size in spec.sizes]
            found = gives_way(ours, queue, idle, sizes)
            if found is not None:
                first, keeps = found
                why = f"job {first.job_id} waits for {first.nodes} nodes"
                self._resize(run, keeps - spec.spares, ours.nodes, why)
            elif run.session.control.wanted.gives_way and not waits_before(ours, queue):
                self._resize(run, None, ours.nodes, "no job of higher priority waits any more")

    def _is_in_vain(self, run: "JobHost", nodes: int) -> bool:
        """Whether Slurm does not take back what a run gives: it still has as many `nodes` as before.

        Slurm 22.05 without slurmdbd refuses it for a job that has been resized before.
        """
        if run.job in self._in_vain:
            return True
        wanted, had = run.session.control.wanted, self._had.get(run.job)
        if not wanted.gives_way or had is None or time.time() - wanted.at_s < IN_VAIN_S or nodes < had:
            return False
        self._in_vain.add(run.job)
        self._resize(run, None, nodes, "Slurm does not take the nodes back")
        return True

    def _resize(self, run: "JobHost", size: int | None, had: int, why: str) -> None:
        wanted = run.session.control.wanted.nodes
        # What a person wants to be smaller still stays so.
        if wanted == size or (size is not None and wanted is not None and wanted < size):
            return
        run.note("info", "gives-way", f"{why}: {size if size is not None else 'as many'} nodes from now on")
        self._had[run.job] = had
        gives = size is not None
        run.session.resize(Wish(nodes=size, at_s=time.time(), give_back=gives, gives_way=gives))

    async def _tell(self, runtime: "JobHost", what: str, order: Any) -> None:
        """Tell Slurm; while slurmctld is away, again and again. Every end of it is an event."""
        for attempt in range(RETRIES):
            try:
                await order()
            except SlurmUnreachableError as error:
                if attempt == 0:
                    runtime.note("warning", "slurm-away", f"{what}: {error}; trying again")
                await asyncio.sleep(RETRY_S)
            except (SlurmError, UsageError) as error:
                # 22.05 without slurmdbd takes no comment for a job that has lost a node; that does no harm.
                runtime.note("info" if what == "comment" else "warning", "slurm-refused", f"{what}: {error}")
                return
            else:
                runtime.note("info", "slurm-told", what)
                return
        runtime.note("error", "slurm-away", f"{what}: given up after {RETRIES} tries")

    async def aclose(self) -> None:
        """End what is under way."""
        await end_all(self._tasks)
        self._lookups.shutdown(wait=False, cancel_futures=True)
        await self._slurm.aclose()


def _may_shrink(run: "JobHost") -> bool:
    """Whether it is led from here, and may give nodes back since it may draw others in."""
    control = run.session.control
    spec = control.spec
    return (
        control.leads and control.stage == "running" and spec is not None and spec.elastic and spec.late > 0
    )


def _has_no_leader(run: "JobHost") -> bool:
    """Whether it forms, and those that there are cannot elect one: each finds out by itself who is down."""
    control = run.session.control
    return control.stage == "forming" and control.leader == NOBODY


def _open(runs: Iterable["JobHost"]) -> "list[JobHost]":
    return [run for run in runs if run.session.control.outcome is None]


def _look_up(name: str) -> str:
    """A node's address. Raises PeerError."""
    try:
        check_node(name)
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError, UsageError) as error:
        raise PeerError(f"the node {name!r} of the job has no address here: {error}") from error


def _is_own(address: str) -> bool:
    """Whether it is this node's, and no loopback address: others are told to connect there."""
    own = {str(one.address) for one in interfaces() if not one.address.is_loopback}
    return address in own
