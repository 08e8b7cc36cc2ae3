"""Memory goes from an ending agent to its daemon and on to the job's next one, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from ckptless.daemon.agent.versions.requeue_memory import RequeueClient
from ckptless.daemon.agent.versions.store import (
    SIZE_SEALS,
    SLOTS,
    HeldRecord,
    VersionStore,
    digest,
    header_of,
    round_up,
)
from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.protocol import keeping as k
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.fdsocket import FdSocket
from ckptless.daemon.settings.agent_config import AgentConfig
from ckptless.daemon.settings.config import KeepConfig

from .test_service import DEADLINE_S, Site, hello

RUN, NEXT = "4711", "4711.1"
NBYTES = 20_000
CANCELLED = m.Outcome(state="stopped", exit_code=143, reason="SIGTERM", why="cancelled")


def go(folder: Path, work: Callable[[Site], Awaitable[None]], keep: KeepConfig | None = None) -> None:
    """In a running daemon that knows RUN; when it has ended, no descriptor is left."""
    before = open_fds()

    async def all_of_it() -> None:
        site = Site(folder)
        site.service.requeue_memory.limit(keep or KeepConfig(nbytes=1 << 20, ttl_s=60.0))
        async with asyncio.timeout(DEADLINE_S), site.running():
            await (await site.client(hello(RUN))).hears(m.Admitted)
            await work(site)

    asyncio.run(all_of_it())
    left = {fd: what for fd, what in open_fds().items() if "memfd" in what and fd not in before}
    assert not left


def open_fds() -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry.name] = str(entry.readlink())
    return found


async def until(what: Callable[[], object]) -> None:
    """The timeout around the test is its deadline."""
    while not what():  # noqa: ASYNC110  # it comes over real sockets
        await asyncio.sleep(0.005)


def payload_of(step: int) -> bytes:
    """Return what the tensors of a step are."""
    return random.Random(step).randbytes(NBYTES)


class Start:
    """The agent of one start of the job, as far as its memory goes."""

    def __init__(self, site: Site, run: str, restarts: int | None, **fields: Any) -> None:
        of_spec = {name: fields.pop(name) for name in ("nodes", "sizes") if name in fields}
        spec = structs.replace(hello(run).spec, **of_spec)
        told: dict[str, Any] = {"argv": ("train.py",), "module": False, "cwd": "/"}
        self.config = AgentConfig(
            **{**told, **fields},
            spec=spec,
            daemon_socket=site.socket,
            log_dir="",
            preload=(),
            node=0,
            name="n0",
            address="",
            env={},
            rank_socket="",
            restarts=restarts,
        )
        self.vault = VersionStore()
        self.events: list[tuple[str, str]] = []
        self.keeping = RequeueClient(self.config, self.vault, self.vault.holdings)
        self.keeping.on_event = lambda _level, kind, text: self.events.append((kind, text))

    def holds(self, *steps: int, generation: int = 3) -> Start:
        """Steps of shard 0, and the record of rank 0."""
        self.keeping.follow(assignment(self.config.spec.job, generation))
        region = self.vault.allocate(0, round_up(NBYTES + 2 * version.PAGE_NBYTES), SLOTS)
        for slot, step in enumerate(steps):
            payload = payload_of(step)
            chunk_nbytes = version.PAGE_NBYTES
            chunks = [version.digest_of(payload[a:b]) for a, b in version.spans(NBYTES, chunk_nbytes)]
            header = version.Header(
                job=self.config.spec.job,
                shard=0,
                rank=0,
                step=step,
                generation=generation,
                layout="00" * 16,
                nbytes=NBYTES,
                chunks=tuple(chunks),
                chunk_nbytes=chunk_nbytes,
            )
            offset = slot * region.slot_nbytes
            with region.view(offset, header.total_nbytes) as view:
                view[header.header_nbytes :] = payload
                told = version.write_header(view, header)
            at = m.TensorsAt(region=region.number, offset=offset, nbytes=header.total_nbytes, digest=told)
            self.vault.put_tensors(0, step, at)
            record = f"record {step}".encode()
            self.vault.put_record(0, step, HeldRecord(record, digest(record), 0))
        return self

    def spoil(self, step: int) -> None:
        """Flip a bit of what is held."""
        found = self.vault.tensors(0, step)
        assert found is not None
        with found[1].view(found[0].offset, found[0].nbytes) as view:
            view[-1] ^= 1

    def payload(self, step: int) -> bytes:
        """Return what is held, to its last byte verified."""
        found = self.vault.tensors(0, step)
        assert found is not None
        with found[1].view(found[0].offset, found[0].nbytes) as view:
            header = version.verify(view, found[0].digest)
            return bytes(view[header.header_nbytes :])

    async def ends(self, outcome: m.Outcome | None = CANCELLED) -> None:
        await self.keeping.at_end(outcome)
        self.vault.close()


def assignment(
    run: str, generation: int, step: int | None = None, nodes: tuple[int, ...] = ()
) -> m.Assignment:
    return m.Assignment(
        job=run,
        generation=generation,
        term=1,
        leader=0,
        places=(m.Place(node=0, slot=0),),
        nodes=(),
        restore_step=step,
        shards=(0,),
        tensor_nodes=((0, nodes),),
        record_nodes=(nodes,),
    )


def test_there_and_back(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        await Start(site, RUN, 0).holds(5, 6).ends()
        await until(lambda: site.service.requeue_memory.table.resting)
        later = Start(site, NEXT, 1)
        brought = await later.keeping.claim()
        assert brought is not None
        assert (brought.run, brought.generation) == (RUN, 3)
        assert brought.holdings == m.Holdings(tensors=((0, (5, 6)),), records=((0, 0, (5, 6)),))
        later.keeping.follow(assignment(NEXT, 1, 5, (0,)))
        # What is newer than what was chosen never happened.
        assert later.vault.holdings().tensors == ((0, (5,)),)
        assert later.payload(5) == payload_of(5)
        found = later.vault.tensors(0, 5)
        assert found is not None
        header = header_of(found[1], found[0])
        header.check(version.Origin(NEXT), 0, 5, newest=0)
        assert later.vault.record(0, 5) is not None
        assert later.events == []
        await until(lambda: not site.service.requeue_memory.table.entries)
        # And it may be kept once more.
        await later.ends()
        last = Start(site, "4711.2", 2)
        assert await last.keeping.claim() is None, "nobody may leave memory of a run that is not known"
        assert "no run" in later.events[0][1]
        await last.ends()

    go(tmp_path, work)


def test_what_was_not_used_goes_back_as_it_is(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        await Start(site, RUN, 0).holds(5).ends()
        again = Start(site, RUN, 1)
        assert await again.keeping.claim() is not None
        # The daemon has heard that it was taken.
        await until(lambda: not site.service.requeue_memory.table.entries)
        never = m.Outcome(state="failed", exit_code=4, reason="1 of 2 came up", why="never-formed")
        await again.ends(never)
        last = Start(site, NEXT, 2)
        brought = await last.keeping.claim()
        assert brought is not None
        assert (brought.run, brought.generation) == (RUN, 3)
        # It is not what was chosen.
        last.keeping.follow(assignment(NEXT, 1, 5, (1,)))
        assert last.vault.holdings().tensors == ()
        await last.ends()

    go(tmp_path, work)


def test_another_number_of_ranks_comes_for_it(tmp_path: Path) -> None:
    """An elastic job's memory is put aside for them, and kept again until they have their own."""

    async def work(site: Site) -> None:
        await Start(site, RUN, 0, sizes=(1, 2)).holds(5).ends()
        later = Start(site, NEXT, 1, nodes=2, sizes=(1, 2))
        await (await site.client(hello(NEXT))).hears(m.Admitted)
        brought = await later.keeping.claim()
        assert brought is not None
        assert (brought.ranks, brought.holdings.cut) == (1, 1)
        former = m.Former(cut=0, shards=(0,), tensor_nodes=((0, (0,)),), record_nodes=((0,),))
        begun = structs.replace(assignment(NEXT, 1, 5), shards=(), tensor_nodes=(), record_nodes=())
        begun = structs.replace(
            begun, places=(m.Place(node=0, slot=0), m.Place(node=1, slot=0)), former=former
        )
        later.keeping.follow(begun)
        later.vault.follow(begun, 0)
        aside = later.vault.of(0)
        assert aside is not None
        assert aside.holdings().tensors == ((0, (5,)),)
        assert later.vault.of(1) is later.vault
        assert later.vault.holdings().tensors == ()
        # What is allocated now is no region of those.
        regions, *_ = aside.contents()
        assert later.vault.allocate(0, round_up(NBYTES), SLOTS).number not in {one.number for one in regions}
        await later.ends()
        last = Start(site, "4711.2", 2, nodes=2, sizes=(1, 2))
        brought = await last.keeping.claim()
        assert brought is not None
        assert (brought.run, brought.ranks, brought.holdings.cut) == (NEXT, 1, 0)
        last.keeping.follow(assignment("4711.2", 1))
        await last.ends()

    go(tmp_path, work)


@pytest.mark.parametrize(
    ("run", "restarts", "fields"),
    [
        (NEXT, 0, {}),
        (NEXT, 1, {"nodes": 2}),
        ("4712", 1, {}),
        (NEXT, 1, {"argv": ("other.py",)}),
        (NEXT, 1, {"cwd": "/tmp"}),
        (NEXT, None, {}),
    ],
)
def test_who_does_not_get_it(tmp_path: Path, run: str, restarts: int | None, fields: dict[str, Any]) -> None:
    async def work(site: Site) -> None:
        await Start(site, RUN, 0).holds(5).ends()
        other = Start(site, run, restarts, **fields)
        assert await other.keeping.claim() is None
        await other.ends()
        assert len(site.service.requeue_memory.table.entries) == 1

    go(tmp_path, work)


@pytest.mark.skipif(os.getuid() != 0, reason="takes a second user")
def test_another_user_gets_and_leaves_nothing_and_sees_nothing() -> None:
    async def work(site: Site) -> None:
        start = Start(site, RUN, 0).holds(5)
        program = start.keeping._program
        await start.ends()
        fields: dict[str, Any] = {"protocol": m.PROTOCOL, "run": RUN, "program": program, "restarts": 1}
        for message in (k.Claim(**fields), k.Keep(**fields, nbytes=(4096,))):
            (answer,) = await site.stranger(message)
            assert isinstance(answer, m.Denied)
        assert len(site.service.requeue_memory.table.entries) == 1
        assert site.service.requeue_memory.shown(65534).kept == ()
        assert [one.run for one in site.service.requeue_memory.shown(0).kept] == [RUN]

    # One that other users may enter, as they may /run/ckptless.
    with tempfile.TemporaryDirectory(prefix="requeue_memory-") as name:
        Path(name).chmod(0o755)
        go(Path(name), work)


def test_nothing_is_kept_of_what_is_done_or_the_scripts_fault(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        for why in ("done", "script", "no-common-step", "after-training"):
            state: Any = "done" if why == "done" else "failed"
            start = Start(site, RUN, 0).holds(5)
            await start.ends(m.Outcome(state=state, exit_code=1, reason="", why=why))
        await Start(site, RUN, 0).ends()  # nothing is held
        await Start(site, RUN, None).holds(5).ends()  # Slurm starts it no more
        assert site.service.requeue_memory.table.entries == ()

    go(tmp_path, work)


def test_a_flipped_bit_is_found_before_anybody_hears_of_it(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        start = Start(site, RUN, 0).holds(5, 6)
        start.spoil(6)
        await start.ends()
        later = Start(site, NEXT, 1)
        brought = await later.keeping.claim()
        assert brought is not None
        assert brought.holdings.tensors == ((0, (5,)),)
        later.keeping.follow(assignment(NEXT, 1, 5, (0,)))
        assert [kind for kind, _ in later.events] == ["bad-version"]
        await later.ends()

    go(tmp_path, work)


def test_what_does_not_fit_is_refused_and_told(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        start = Start(site, RUN, 0).holds(5)
        await start.ends()
        ((kind, text),) = start.events
        assert (kind, "keep.memory is 1000" in text) == ("memory-not-kept", True)

    go(tmp_path, work, KeepConfig(nbytes=1000))


def memory(nbytes: int, seals: int = SIZE_SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("what", ["short", "unsealed", "file", "socket", "nothing"])
def test_only_sealed_memory_of_that_size_is_taken(tmp_path: Path, what: str) -> None:
    async def work(site: Site) -> None:
        kind = k.KeepAnswer | m.Denied
        link: FdSocket[k.KeepAnswer | m.Denied] = await FdSocket.connect(site.socket, kind)
        keep = k.Keep(protocol=m.PROTOCOL, run=RUN, program="p", restarts=0, nbytes=(4096, 8192))
        await link.send(keep)
        assert await link.receive() == k.KeepAnswer(verdict="go")
        pair = socket.socketpair()
        makers: dict[str, Callable[[], int]] = {
            "short": lambda: memory(4096),
            "unsealed": lambda: memory(8192, fcntl.F_SEAL_GROW),
            "file": lambda: os.open(tmp_path, os.O_RDONLY),
            "socket": lambda: os.dup(pair[0].fileno()),
            "nothing": lambda: -1,
        }
        bad = makers[what]()
        for fd in (memory(4096), bad):
            if fd >= 0:
                await link.send_fd(fd)
                os.close(fd)
        if what != "nothing":
            assert isinstance(await link.receive(), m.Denied)
        link.close()
        for end in pair:
            end.close()
        await until(lambda: not site.service.requeue_memory.table.entries)

    go(tmp_path, work)


def test_who_hangs_up_before_he_has_it_may_come_again(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        start = Start(site, RUN, 0).holds(5)
        program = start.keeping._program
        await start.ends()
        link: FdSocket[k.Claimed] = await FdSocket.connect(site.socket, k.Claimed)
        await link.send(k.Claim(protocol=m.PROTOCOL, run=NEXT, program=program, restarts=1))
        assert len((await link.receive()).nbytes) == 2
        os.close(await link.receive_fd())
        link.close()
        await until(lambda: site.service.requeue_memory.table.resting)
        later = Start(site, NEXT, 1)
        assert await later.keeping.claim() is not None
        later.keeping.follow(assignment(NEXT, 1))
        await later.ends()

    go(tmp_path, work)


def test_it_is_dropped_in_time_and_when_the_job_is_over(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        requeue_memory = site.service.requeue_memory
        told: list[str] = []
        requeue_memory.on_event = lambda _entry, kind, text: told.append(f"{kind}: {text}")
        await Start(site, RUN, 0).holds(5).ends()
        (shown,) = requeue_memory.shown(0).kept
        assert (shown.run, shown.uid, shown.restarts) == (RUN, os.getuid(), 0)
        assert 0 < shown.left_s <= 60.0
        requeue_memory.drop(lambda entry: "over" if entry.run == "4712" else "")
        assert requeue_memory.table.entries
        requeue_memory.drop(lambda _entry: "over")
        assert told[1:] == ["memory-dropped: over"]
        await Start(site, RUN, 1).holds(5).ends()
        requeue_memory.limit(KeepConfig(nbytes=1 << 20, ttl_s=1e-3))
        await until(lambda: not requeue_memory.table.entries)
        assert "nobody came for it" in told[-1]

    go(tmp_path, work)


def test_ckptctl_shows_it(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        async def shown(*words: str) -> Any:
            command = ["--json", "kept", "--socket", site.socket, *words]
            done = await asyncio.to_thread(CliRunner().invoke, ckptctl, command)
            assert done.exit_code == 0, done.output
            return json.loads(done.stdout)

        assert (await shown())["kept"] == []
        await Start(site, RUN, 2).holds(5).ends()
        found = await shown()
        (row,) = found["kept"]
        assert (row["run"], row["uid"], row["restarts"]) == (RUN, os.getuid(), 2)
        assert 3 * NBYTES < row["nbytes"] < found["limit_nbytes"] == 1 << 20
        assert (await shown("--job", "4711"))["kept"][0]["run"] == RUN
        assert (await shown("--job", "4712"))["kept"] == []
        plain = await asyncio.to_thread(CliRunner().invoke, ckptctl, ["kept", "--socket", site.socket])
        assert plain.stdout.split()[:5] == ["job", "uid", "MiB", "age", "left"]

    go(tmp_path, work)
