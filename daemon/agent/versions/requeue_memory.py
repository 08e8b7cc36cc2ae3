"""Memory over a requeue: what an ending agent holds it leaves with its daemon, for the job's next start.

Both are of one user and one Slurm job, whose next start is another run: versions get its name when they are
adopted. Until then they are of the run that made them, as their headers say.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec
import xxhash
from msgspec import structs

from ckptless.daemon.agent.versions.store import (
    SIZE_SEALS,
    HeldRecord,
    Region,
    VersionStore,
    digest,
    header_of,
)
from ckptless.daemon.protocol import keeping as k
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, CkptlessError, PeerError, ProtocolError
from ckptless.daemon.protocol.fdsocket import FdSocket
from ckptless.daemon.protocol.messages import PROTOCOL, Assignment, Brought, Denied, Holdings, Outcome, Why
from ckptless.daemon.settings.agent_config import AgentConfig

logger = logging.getLogger(__name__)

# A daemon that was restarted just now is there again by then.
CLAIM_DEADLINE_S = 20.0
KEEP_DEADLINE_S = 5.0
GIVEN_DEADLINE_S = 2.0
RETRY_S = 0.2
CATALOG_LIMIT = 1 << 30
_DIGEST_NBYTES = 16
# Ends after which Slurm may start the job again, and its training could go on.
WORTH_KEEPING: frozenset[Why] = frozenset({"cancelled", "no-spare", "never-formed"})

Level: TypeAlias = Literal["info", "warning", "error"]


@dataclass
class _Kept:
    """The kept memory: its catalog, as a file and as it reads, and the regions in its order."""

    file: int
    catalog: k.Catalog
    regions: list[Region]

    def close(self) -> None:
        os.close(self.file)
        for region in self.regions:
            region.close()


class RequeueClient:
    """Owned by the agent's event loop. `holdings`: of the store, with what twins are compared by."""

    def __init__(self, config: AgentConfig, store: VersionStore, holdings: Callable[[], Holdings]) -> None:
        self._config, self._store, self._holdings = config, store, holdings
        self._kept: _Kept | None = None
        # What is to be told, once there is somebody to hear it.
        self._news: list[tuple[Level, str, str]] = []
        self._generation: int | None = None
        self._ranks = self._former_ranks = config.spec.world_size
        self.on_event: Callable[[Level, str, str], None] = lambda _level, _kind, _text: None

    @property
    def _program(self) -> str:
        """The digest of what the run is of: another command is another program.

        So is another number of ranks, where the job is not elastic.
        """
        config = self._config
        ranks = 0 if config.spec.elastic else config.spec.world_size
        what = (config.argv, config.module, config.cwd, ranks)
        return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).hexdigest()

    def _origin(self, run: str) -> version.Origin:
        """Return the origin of runs of this Slurm job: all have the same run id."""
        return version.Origin(run, self._config.spec.run_id)

    # ----------------------------------------------------------------------------------- at first

    async def claim(self) -> Brought | None:
        """Get what is kept here for this job, every byte verified: for the control plane, which chooses."""
        restarts = self._config.restarts
        if not restarts:
            return None
        claim = k.Claim(
            protocol=PROTOCOL, run=self._config.spec.job, program=self._program, restarts=restarts
        )
        try:
            async with asyncio.timeout(CLAIM_DEADLINE_S):
                fds = await self._claimed(claim)
            if fds:
                self._kept = await asyncio.to_thread(self._opened, fds)
            else:
                self._news.append(("info", "memory-not-there", "this node keeps nothing of an earlier start"))
        except (OSError, ValueError, CkptlessError) as error:
            self._news.append(("warning", "memory-not-taken", str(error) or type(error).__name__))
        if self._kept is None:
            return None
        kept = self._kept.catalog
        return Brought(run=kept.run, generation=kept.generation, ranks=kept.ranks, holdings=_holdings(kept))

    async def _claimed(self, claim: k.Claim) -> list[int]:
        """The memfds, which are the caller's. Raises OSError, CkptlessError."""
        kind = k.Claimed | Denied
        while True:
            try:
                link: FdSocket[k.Claimed | Denied] = await FdSocket.connect(self._config.daemon_socket, kind)
                break
            except OSError:
                await asyncio.sleep(RETRY_S)
        fds: list[int] = []
        try:
            await link.send(claim)
            answer = await link.receive()
            if isinstance(answer, Denied):
                raise PeerError(answer.reason)
            for _ in answer.nbytes:
                fds.append(await link.receive_fd())
            if fds:
                await link.send(k.Taken())
                # Until the daemon has closed it holds that it gives this away, and takes nothing of this job.
                with contextlib.suppress(TimeoutError, OSError, CkptlessError):
                    async with asyncio.timeout(GIVEN_DEADLINE_S):
                        await link.receive()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        finally:
            link.close()
        return fds

    def _opened(self, fds: Sequence[int]) -> _Kept:
        """Run in a thread. Raises ProtocolError, ValueError, OSError, and has closed all of it then."""
        regions: list[Region] = []
        try:
            catalog = _read_catalog(fds[0])
            if len(catalog.regions) != len(fds) - 1:
                raise ProtocolError(f"{len(fds) - 1} memfds for {len(catalog.regions)} regions")
            for told, fd in zip(catalog.regions, fds[1:], strict=True):
                regions.append(Region(0, told.shard, told.slot_nbytes, told.slots, fd))
        except BaseException:
            for region in regions:
                region.close()
            for fd in (fds[0], *fds[1 + len(regions) :]):
                os.close(fd)
            raise
        kept = _Kept(fds[0], catalog, regions)
        kept.catalog = self._sound_part(kept)
        return kept

    def _sound_part(self, kept: _Kept) -> k.Catalog:
        """The catalog without what does not verify."""
        catalog = kept.catalog
        tensors = [told for told in catalog.tensors if self._is_sound(kept, told)]
        records = [told for told in catalog.records if digest(told.record) == told.digest]
        for bad in {told.rank for told in catalog.records} - {told.rank for told in records}:
            self._news.append(("warning", "bad-version", f"a kept record of rank {bad}"))
        return structs.replace(catalog, tensors=tuple(tensors), records=tuple(records))

    def _is_sound(self, kept: _Kept, told: k.KeptTensors) -> bool:
        at, run = told.at, kept.catalog.run
        try:
            region = kept.regions[at.region] if at.region < len(kept.regions) else None
            if region is None or region.shard != told.shard or not region.has_slot(at.offset, at.nbytes):
                raise BadVersionError("it lies in a place that was not kept")
            with region.view(at.offset, at.nbytes) as view:
                header = version.verify(view, at.digest)
            header.check(self._origin(run), told.shard, told.step, kept.catalog.generation)
        except BadVersionError as error:
            text = f"kept of run {run}: shard {told.shard}, step {told.step}: {error}"
            self._news.append(("warning", "bad-version", text))
            return False
        return True

    # ----------------------------------------------------------------------------- the first generation

    def follow(self, assignment: Assignment) -> None:
        """A generation. Of the first one: put into the store what it goes on from, and let go of the rest."""
        self._generation, self._ranks = assignment.generation, len(assignment.places)
        former = assignment.former
        if former is not None:
            self._former_ranks = len(former.shards)
        kept, self._kept = self._kept, None
        for level, kind, text in self._news:
            self.on_event(level, kind, text)
        self._news.clear()
        if kept is None:
            return
        step, me, chosen = assignment.restore_step, self._config.node, former or assignment
        named = any(me in nodes for _, nodes in chosen.tensor_nodes) or any(
            me in nodes for nodes in chosen.record_nodes
        )
        # Where it is of another run or generation than what was chosen, this node is not named.
        if assignment.generation == 1 and step is not None and named:
            self._adopt(kept, step, self._store if former is None else self._store.begin_former(former.cut))
        kept.close()

    def _adopt(self, kept: _Kept, newest: int, store: VersionStore) -> None:
        """Put all up to this step into a store, as this run's own, of before its first generation.

        Every node makes the same of the same version, so that copies stay copies.
        """
        regions, kept.regions = kept.regions, []
        by_region: dict[int, list[k.KeptTensors]] = {}
        for told in kept.catalog.tensors:
            if told.step <= newest:
                by_region.setdefault(told.at.region, []).append(told)
        for index, region in enumerate(regions):
            if index not in by_region:
                region.close()
                continue
            store.adopt(region)
            for told in sorted(by_region[index], key=lambda told: told.step):
                at = structs.replace(told.at, region=region.number)
                header = replace(header_of(region, at), job=self._config.spec.job, generation=0)
                with region.view(at.offset, at.nbytes) as view:
                    at = structs.replace(at, digest=version.write_header(view, header))
                store.put_tensors(told.shard, told.step, at)
        for one in kept.catalog.records:
            if one.step <= newest:
                store.put_record(one.rank, one.step, HeldRecord(one.record, one.digest, one.shard))

    # -------------------------------------------------------------------------------- at the end

    async def at_end(self, outcome: Outcome | None) -> None:
        """Leave with the daemon what the job's next start could go on from; None: this node's user ended it.

        The ranks have ended, and nothing is taken from other nodes any more.
        """
        if self._config.restarts is None or (outcome and outcome.why not in WORTH_KEEPING):
            return
        try:
            fds, mine = self._to_keep()
            try:
                if fds:
                    async with asyncio.timeout(KEEP_DEADLINE_S):
                        await self._hand_over(fds, self._config.restarts)
            finally:
                for fd in mine:
                    os.close(fd)
        except (OSError, CkptlessError) as error:
            self.on_event("warning", "memory-not-kept", str(error) or type(error).__name__)
        finally:
            if self._kept is not None:
                self._kept.close()
                self._kept = None

    def _to_keep(self) -> tuple[list[int], list[int]]:
        """The memfds, the catalog's first, and which of them are to be closed. Raises OSError."""
        if self._kept is not None:
            # Nothing has become of what an earlier start had left: the next one may have it as it is.
            return [self._kept.file, *(region.fd for region in self._kept.regions)], []
        # As long as there is something of another number of ranks, of that alone everything is there.
        former = self._store.former
        store, ranks = (self._store, self._ranks) if former is None else (former, self._former_ranks)
        regions, tensors, records = store.contents()
        if self._generation is None or not (tensors or records):
            return [], []
        places = {region.number: index for index, region in enumerate(regions)}
        catalog = k.Catalog(
            run=self._config.spec.job,
            generation=self._generation,
            cut=store.cut,
            ranks=ranks,
            regions=tuple(
                k.KeptRegion(shard=r.shard, slot_nbytes=r.slot_nbytes, slots=r.slots) for r in regions
            ),
            tensors=tuple(
                k.KeptTensors(shard=shard, step=step, at=structs.replace(at, region=places[at.region]))
                for shard, step, at in tensors
            ),
            records=tuple(
                k.KeptRecord(rank=rank, shard=h.shard, step=step, record=h.record, digest=h.digest)
                for rank, step, h in records
            ),
            digests=self._holdings().digests if former is None else (),
        )
        file = _write_catalog(catalog)
        return [file, *(region.fd for region in regions)], [file]

    async def _hand_over(self, fds: Sequence[int], restarts: int) -> None:
        """Raises OSError, CkptlessError."""
        kind = k.KeepAnswer | Denied
        link: FdSocket[k.KeepAnswer | Denied] = await FdSocket.connect(self._config.daemon_socket, kind)
        keep = k.Keep(
            protocol=PROTOCOL,
            run=self._config.spec.job,
            program=self._program,
            restarts=restarts,
            nbytes=tuple(os.fstat(fd).st_size for fd in fds),
        )
        try:
            await link.send(keep)
            if _is(await link.receive(), "go"):
                for fd in fds:
                    await link.send_fd(fd)
                _is(await link.receive(), "kept")
        finally:
            link.close()


def _is(answer: k.KeepAnswer | Denied, wanted: str) -> bool:
    """Raises PeerError where it is another one."""
    if isinstance(answer, Denied):
        raise PeerError(answer.reason)
    if answer.verdict != wanted:
        raise PeerError(answer.text or f"the daemon says {answer.verdict}")
    return True


def _holdings(catalog: k.Catalog) -> Holdings:
    tensors: dict[int, list[int]] = {}
    records: dict[tuple[int, int], list[int]] = {}
    for told in catalog.tensors:
        tensors.setdefault(told.shard, []).append(told.step)
    for one in catalog.records:
        records.setdefault((one.rank, one.shard), []).append(one.step)
    return Holdings(
        tensors=tuple((shard, tuple(sorted(steps))) for shard, steps in sorted(tensors.items())),
        records=tuple((*key, tuple(sorted(steps))) for key, steps in sorted(records.items())),
        digests=tuple(one for one in catalog.digests if one[1] in tensors.get(one[0], ())),
        cut=catalog.cut,
    )


def _write_catalog(catalog: k.Catalog) -> int:
    """A memfd of it that nobody can change any more. Raises OSError."""
    body = msgspec.msgpack.encode(catalog)
    fd = os.memfd_create("ckptless-catalog", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(xxhash.xxh3_128_digest(body) + body)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_catalog(fd: int) -> k.Catalog:
    """Raises ProtocolError, OSError."""
    nbytes = os.fstat(fd).st_size
    if not _DIGEST_NBYTES < nbytes <= CATALOG_LIMIT:
        raise ProtocolError(f"a catalog of {nbytes} bytes")
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read(nbytes)
    if xxhash.xxh3_128_digest(data[_DIGEST_NBYTES:]) != data[:_DIGEST_NBYTES]:
        raise ProtocolError("the catalog of what was kept does not match its digest")
    try:
        return msgspec.msgpack.decode(data[_DIGEST_NBYTES:], type=k.Catalog)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the catalog of what was kept is of another version: {error}") from error
