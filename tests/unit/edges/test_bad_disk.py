"""A daemon whose disk is full, read-only, or gives back other bytes than it was given."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.recovery.events import NotSaved
from ckptless.daemon.ckptlessd.session import is_as_new
from ckptless.daemon.ledger.aside import MOST_KEPT
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.ledger.writer import MOST_SET_ASIDE, LedgerWriter
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import LedgerError
from ckptless.daemon.protocol.peers.agreement import Ballot, Decree, Durable, Vote
from ckptless.daemon.protocol.records import EventRecord

from .test_service import Client, Site, hello

DEADLINE_S = 60.0
JOB = "4711"
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


def promised(number: int) -> Durable:
    """In a job of one node, as all are here; a daemon promises nothing of nodes that its job has not."""
    ballot = Ballot(number=number, node=0)
    vote = Vote(ballot=ballot, decree=Decree(index=1, voters=(0,)))
    return Durable(promised=ballot, vote=vote, known=Decree(index=0, voters=(0,)))


def event(number: int) -> EventRecord:
    return EventRecord(
        event=str(number),
        job=JOB,
        node=0,
        at_s=float(number),
        level="info",
        kind="k",
        generation=1,
        text="x" * 300,
    )


def again(identity: str) -> m.AgentHello:
    """The hello of an agent that has been admitted before."""
    first = hello(JOB)
    return m.AgentHello(
        protocol=m.PROTOCOL, spec=first.spec, info=first.info, pid=os.getpid(), identity=identity
    )


async def until(what: object, holds: object) -> None:
    """Wait until `holds()`; `what` is said where it never does."""
    assert callable(holds)
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110  # files and queues of others have no event
            await asyncio.sleep(0.02)
    assert what


async def vote_of(writer: LedgerWriter, job: str) -> tuple[str, Durable]:
    """Once it is there: after a ledger was replaced, it is told again."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := await writer.vote(job)) is None:  # noqa: ASYNC110  # each look is a look at the disk
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bad-disk-") as name:
        yield Path(name)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """Take all that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def is_idle(ledger: LedgerWriter) -> bool:
    return not (ledger._rows or ledger._saving) and (ledger._task is None or ledger._task.done())


# ------------------------------------------------------------------------------------------- full


@root
def test_a_full_disk_gives_no_vote_is_said_once_and_votes_when_it_is_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def work(disk: Path) -> None:
        async with Site(folder).running() as site:
            agent = await site.trains(JOB)
            # Not in the middle of a write: in what that has taken of the disk there is room for a vote.
            await until("all is written", lambda: is_idle(site.service.ledger))
            fill(disk)
            (runtime,) = site.service.jobs
            control = runtime.session.control
            told: list[int] = []
            why: list[str] = []
            for number in (1, 2, 3):
                runtime.save(promised(number), lambda n=number: told.append(n), why.append)  # type: ignore[misc]
            await until("they are refused", lambda: len(why) == 3)
            assert all("database or disk is full" in text for text in why)
            site.service.ledger.write([event(number) for number in range(40)])
            # A job that is not here yet is refused, and its user hears why.
            other = await site.client(hello("4712"))
            refused = await other.hears(m.Denied)
            assert "database or disk is full" in refused.reason
            assert str(disk) in refused.reason
            runtime.session.feed(NotSaved(why[0]))
            await asyncio.sleep(2.0)  # many tries
            assert told == []
            assert not control.agreement.able
            assert site.jobs == [JOB]
            (disk / "filler").unlink()
            await until("it votes again", lambda: control.agreement.able)
            await until("it is over", lambda: not site.service.ledger.trouble)
            assert await site.service.ledger.vote(JOB) == (runtime.identity, control.agreement.durable)
            await site.client(hello("4712"))
            await until("the other is let in", lambda: "4712" in site.jobs)
            agent.hang_up()

    with small_disk(folder / "state") as disk:
        asyncio.run(asyncio.wait_for(work(disk), DEADLINE_S))
        with Ledger.open_readonly(disk / "ledger.db") as ledger:
            kinds = [one.kind for one in ledger.rows(EventRecord, JOB)]
            assert kinds.count("k") == 40  # rows waited, too
            assert kinds.count("vote-lost") == kinds.count("vote-again") == 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in line and "tried again" in line for line in lines) == 1
    assert sum("can be written again" in line for line in lines) == 1
    assert not any(record.exc_info for record in caplog.records)


@root
@pytest.mark.parametrize("way", ["full", "read-only"])
def test_at_the_start_such_a_disk_ends_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """The daemon serves: running jobs have it without its vote, new ones are refused."""

    async def identity() -> str:
        async with Site(folder).running() as site:
            return str((await (await site.client(hello(JOB))).hears(m.Admitted)).identity)

    async def work(known: str) -> None:
        async with Site(folder).running() as site:
            admitted = await (await site.client(again(known))).hears(m.Admitted)
            assert admitted.identity == known
            assert not site.service.jobs[0].session.control.agreement.may_vote
            refused = await (await site.client(hello("4712"))).hears(m.Denied)
            assert "ledger cannot be" in refused.reason

    async def later(known: str) -> bool:
        async with Site(folder).running() as site:
            await (await site.client(again(known))).hears(m.Admitted)
            return site.service.jobs[0].session.control.agreement.may_vote

    with small_disk(folder / "state") as disk:
        known = asyncio.run(asyncio.wait_for(identity(), DEADLINE_S))
        assert known
        if way == "full":
            fill(disk)
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        asyncio.run(asyncio.wait_for(work(known), DEADLINE_S))
        lines = [record.getMessage() for record in caplog.records]
        assert sum("tried again" in line for line in lines) == 1, lines
        assert sum("does not vote" in line and JOB in line for line in lines) >= 1
        # Nothing was promised in that life: with its disk back, the daemon has its memory back.
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        (disk / "filler").unlink(missing_ok=True)
        assert asyncio.run(asyncio.wait_for(later(known), DEADLINE_S))


@contextmanager
def a_real_disk(folder: Path) -> Iterator[Path]:
    """An ext4 file system, on a loop device; it is whole again for each time."""
    folder.mkdir(exist_ok=True)
    image = folder.with_name("image")
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(16 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["e2fsck", "-fp", image], check=False, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("no loop device here")
    try:
        folder.chmod(0o700)
        with suppress(FileNotFoundError):
            (folder / "lost+found").rmdir()
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fail(disk: Path) -> None:
    """As the kernel does with one that has errors: what is not on it by now never is."""
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)


@root
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4 here")
def test_a_disk_that_becomes_read_only_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays so until it is mounted again, for another life of the daemon."""
    caplog.set_level(logging.INFO)

    async def work(disk: Path) -> str:
        async with Site(folder).running() as site:
            agent = await site.trains(JOB)
            (runtime,) = site.service.jobs
            await asyncio.to_thread(fail, disk)
            told: list[int] = []
            why: list[str] = []
            for number in (1, 2, 3):
                runtime.save(promised(number), lambda n=number: told.append(n), why.append)  # type: ignore[misc]
            site.service.ledger.write([event(number) for number in range(40)])
            await until("they are refused", lambda: len(why) == 3)
            refused = await (await site.client(hello("4712"))).hears(m.Denied)
            assert "the ledger cannot be written" in refused.reason
            assert str(disk) in refused.reason
            await asyncio.sleep(2.0)  # many tries
            assert told == []
            assert site.jobs == [JOB]
            agent.hang_up()
            return runtime.identity

    async def later(known: str) -> bool:
        async with Site(folder).running() as site:
            await (await site.client(again(known))).hears(m.Admitted)
            await (await site.client(hello("4712"))).hears(m.Admitted)
            (run,) = (job for job in site.service.jobs if job.job == JOB)
            return run.session.control.agreement.may_vote

    with a_real_disk(folder / "state") as disk:
        identity = asyncio.run(asyncio.wait_for(work(disk), DEADLINE_S))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in line and "tried again" in line for line in lines) == 1, lines
    assert not any(record.exc_info for record in caplog.records)
    with a_real_disk(folder / "state"):
        assert asyncio.run(asyncio.wait_for(later(identity), DEADLINE_S))


@root
def test_a_state_directory_that_cannot_be_made_yet_is_tried_again(folder: Path) -> None:
    """A disk that was full before the daemon was there for the first time."""

    async def work(disk: Path) -> None:
        async with Site(folder).running() as site:
            refused = await (await site.client(hello(JOB))).hears(m.Denied)
            assert "No space left" in refused.reason
            assert (disk / "state" / "FORMAT").read_text() == ""
            (disk / "filler").unlink()
            await (await site.client(hello(JOB))).hears(m.Admitted)

    with small_disk(folder / "disk") as disk:
        (disk / "state").mkdir(mode=0o700)
        (folder / "state").symlink_to(disk / "state")
        fill(disk)
        asyncio.run(asyncio.wait_for(work(disk), DEADLINE_S))


def test_what_waits_for_a_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.daemon.ledger.writer.MOST_ROWS", 10)

    async def work() -> None:
        writer = LedgerWriter(tmp_path / "nowhere" / "ledger.db")
        await writer.start()
        assert "No such file" in writer.trouble
        for number in range(100):
            writer.write([event(number)])
        assert (writer.waiting, writer.lost, writer.nbytes) == (10, 90, 0)
        await asyncio.sleep(0.3)
        (tmp_path / "nowhere").mkdir()
        await until("it is over", lambda: not writer.trouble and not writer._rows)
        # What is lost stays lost, for those who look later.
        assert (writer.waiting, writer.lost) == (0, 90)
        path = tmp_path / "nowhere" / "ledger.db"
        assert writer.nbytes >= path.stat().st_size > 0
        await writer.close()
        with Ledger.open_readonly(tmp_path / "nowhere" / "ledger.db") as ledger:
            assert [one.event for one in ledger.rows(EventRecord, JOB)] == [str(n) for n in range(90, 100)]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_the_end_does_not_wait_for_a_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        writer = LedgerWriter(tmp_path / "nowhere" / "ledger.db")
        writer.write([event(1)])
        await until("it is seen", lambda: writer.trouble)
        await writer.close()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    assert "1 rows were not written" in caplog.text


def test_a_row_that_no_ledger_takes_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        writer = LedgerWriter(tmp_path / "ledger.db")
        bad = EventRecord(
            event="bad",
            job=JOB,
            node=1 << 70,
            at_s=0.0,
            level="info",
            kind="k",
            generation=1,
            text="",
        )
        writer.write([event(1), event(2), bad, event(3)])
        await until("they are written", lambda: writer._task is not None and writer._task.done())
        assert writer.trouble == ""
        await writer.close()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    with Ledger.open_readonly(tmp_path / "ledger.db") as ledger:
        assert [one.event for one in ledger.rows(EventRecord, JOB)] == ["1", "2", "3"]
    assert "1 rows were refused" in caplog.text


# ---------------------------------------------------------------------------------------- damaged


def damaged(chance: random.Random, whole: bytes) -> bytes:
    """As disks and their users do it."""
    spoilt = bytearray(whole)
    at = chance.randrange(len(spoilt))
    match chance.randrange(6):
        case 0:
            for _ in range(chance.choice([1, 1, 5, 50])):
                spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        case 1:
            spoilt[at & ~511 : (at & ~511) + 512] = chance.randbytes(512)
        case 2:
            spoilt[at & ~4095 : (at & ~4095) + 4096] = bytes(4096)
        case 3:
            del spoilt[at:]
        case 4:
            return b"this is no database, says the one who put it there\n" * 200
        case 5:
            spoilt[chance.randrange(100)] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


def slow(monkeypatch: pytest.MonkeyPatch, begun: list[int], done: threading.Event) -> None:
    """Each write of a vote waits until `done`; `begun` has what was to be written, by number."""
    save = Ledger.save_vote

    def save_late(ledger: Ledger, job: str, identity: str, durable: Durable) -> None:
        begun.append(durable.promised.number)
        assert done.wait(DEADLINE_S)
        save(ledger, job, identity, durable)

    monkeypatch.setattr(Ledger, "save_vote", save_late)


def test_one_write_takes_all_votes_that_came_during_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five a second, of whoever asks again, would be more than a disk can take that is slow."""
    begun, done, told = list[int](), threading.Event(), list[int]()
    slow(monkeypatch, begun, done)

    async def ask() -> None:
        writer = LedgerWriter(tmp_path / "ledger.db")
        for number in range(1, 30):
            memory = ("id", promised(number))
            writer.save_vote(JOB, memory, lambda number=number: told.append(number), pytest.fail)  # type: ignore[misc]
            if number == 1:
                await until("it is being written", lambda: begun == [1])
        assert told == []
        done.set()
        await until("all are told", lambda: len(told) == 29)
        assert begun == [1, 29]
        assert told == sorted(told)
        assert await writer.vote(JOB) == ("id", promised(29))
        writer.save_vote(JOB, ("id", promised(30)), lambda: told.append(30), pytest.fail)
        await until("the next one is written by itself", lambda: told[-1] == 30)
        await writer.close()

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_a_vote_that_the_disk_does_not_answer_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of it later is told to nobody; the next one is written once the disk is back."""
    monkeypatch.setattr("ckptless.daemon.ledger.writer.VOTE_DEADLINE_S", 0.1)
    begun, done, told = list[int](), threading.Event(), list[object]()
    slow(monkeypatch, begun, done)

    async def ask() -> None:
        writer = LedgerWriter(tmp_path / "ledger.db")
        writer.save_vote(JOB, ("id", promised(1)), lambda: pytest.fail("told"), told.append)
        await until("it has failed", lambda: told)
        assert told == [f"{tmp_path / 'ledger.db'}: the disk has not taken a vote in 0 s"] == [writer.trouble]
        monkeypatch.setattr("ckptless.daemon.ledger.writer.VOTE_DEADLINE_S", DEADLINE_S)
        writer.save_vote(JOB, ("id", promised(2)), lambda: told.append(2), pytest.fail)
        done.set()
        await until("the next one is told", lambda: told[-1] == 2)
        assert begun == [1, 2]
        assert writer.trouble == ""
        await writer.close()

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_where_the_write_fails_each_vote_of_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LedgerError("full")

    monkeypatch.setattr(Ledger, "save_vote", fail)
    failed: list[str] = []

    async def ask() -> None:
        writer = LedgerWriter(tmp_path / "ledger.db")
        for number in (1, 2, 3):
            writer.save_vote(JOB, ("id", promised(number)), lambda: pytest.fail("told"), failed.append)
        await until("all have failed", lambda: len(failed) == 3)
        monkeypatch.undo()
        writer.save_vote(JOB, ("id", promised(4)), lambda: failed.append("no"), pytest.fail)
        await until("it goes on", lambda: failed[-1] == "no")
        await writer.close()

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))
    assert failed == ["full"] * 3 + ["no"]


ROUNDS = 150


def test_whatever_became_of_the_file_a_vote_is_the_one_that_was_given_or_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    chance = random.Random(5)

    async def made() -> None:
        writer = LedgerWriter(path)
        for number in range(200):
            writer.write([event(number)])
            memory = (f"id-{number % 9}", promised(number))
            writer.save_vote(str(number % 9), memory, lambda: None, pytest.fail)
        await until("it is written", lambda: writer._task is not None and writer._task.done())
        await writer.close()

    async def reopened() -> str:
        """Return what the daemon's next life finds."""
        writer = LedgerWriter(path)
        try:
            await writer.start()
        except LedgerError as error:
            return str(error)
        found = ""
        for number in range(191, 200):
            vote = await writer.vote(str(number % 9))
            assert vote in (None, (f"id-{number % 9}", promised(number)))
            found += "-" if vote is None else "+"
        done: list[bool] = []

        def save(_: str = "") -> None:
            writer.save_vote("new", ("id", promised(1)), lambda: done.append(True), pytest.fail)

        writer.on_set_aside = save  # as the service does
        save()
        writer.write([event(1000)])
        await until("it goes on", lambda: done and not writer._rows)
        assert await vote_of(writer, "new") == ("id", promised(1))
        await writer.close()
        return found

    asyncio.run(asyncio.wait_for(made(), DEADLINE_S))
    whole = path.read_bytes()
    seen: dict[str, int] = {}
    for _ in range(ROUNDS):
        for left in tmp_path.iterdir():
            left.unlink()
        path.write_bytes(damaged(chance, whole))
        found = asyncio.run(asyncio.wait_for(reopened(), DEADLINE_S))
        if "newer" in found:
            assert "use the ckptless that wrote it" in found  # its version is what was flipped
            found = "newer"
        seen[found] = seen.get(found, 0) + 1
        aside = list(tmp_path.glob("ledger.db.corrupt-*"))
        assert len(aside) <= MOST_SET_ASIDE
        assert (found == "-" * 9) <= bool(aside) or not path.read_bytes()
    assert seen["-" * 9] > ROUNDS / 5, seen
    assert seen["+" * 9] > ROUNDS / 20, seen


def test_a_log_that_lost_its_end_is_known_by_what_the_agent_has_heard(folder: Path) -> None:
    """To SQLite that is a log which a power failure cut off: it reads the vote before, and says nothing."""
    state = folder / "state"

    async def work() -> tuple[str, bytes]:
        async with Site(folder).running() as site:
            agent = await site.client(hello(JOB))
            await agent.hears(m.Admitted)
            await agent.hears(m.Assign)
            (runtime,) = site.service.jobs
            heard = ""
            for number in (11, 12):
                runtime.save(promised(number), lambda: None, pytest.fail)
                heard = (await agent.hears(m.Admitted)).identity
                while heard != runtime.next_identity:
                    heard = (await agent.hears(m.Admitted)).identity
                if number == 11:
                    older = (heard, (state / "ledger.db-wal").read_bytes())
            assert is_as_new(heard, older[0])
            assert not is_as_new(older[0], heard)
            return heard, older[1]

    async def votes(said: str) -> bool:
        async with life(folder, again(said)) as (site, _, _):
            return site.service.jobs[0].session.control.agreement.may_vote

    heard, older = asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    assert asyncio.run(asyncio.wait_for(votes(heard), DEADLINE_S))
    (state / "ledger.db").unlink()
    (state / "ledger.db-wal").write_bytes(older)
    (state / "ledger.db").touch()
    assert not asyncio.run(asyncio.wait_for(votes(heard), DEADLINE_S))


@pytest.mark.parametrize(
    ("kept", "agents", "new"),
    [
        ("abc", "", True),
        ("abc", "abc", True),
        ("abc.3", "abc.3", True),
        ("abc.4", "abc.3", True),
        ("abc.2", "abc.3", False),
        ("abc", "abc.1", False),
        ("abc.10", "abc.9", True),
        ("abd.4", "abc.3", False),
        ("abc.4", "abc.x", False),
        ("abc.-4", "abc.3", False),
    ],
)
def test_what_is_as_new_as_the_agent_knows(kept: str, agents: str, new: bool) -> None:
    assert is_as_new(kept, agents) is new


@pytest.mark.parametrize("log", [b"x" * 5000, b"\x37\x7f\x06\x82" + b"\xff" * 9000])
def test_a_log_of_garbage_is_no_log(tmp_path: Path, log: bytes) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.save_vote(JOB, "abc", promised(3))
    (tmp_path / "ledger.db-wal").write_bytes(log)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert ledger.vote(JOB) == ("abc", promised(3))


def test_a_flipped_bit_in_a_vote_is_no_vote(tmp_path: Path) -> None:
    """SQLite has no checksums of its own."""
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.save_vote(JOB, "abc", promised(3))
    data = path.read_bytes()
    assert data.count(b'"number":3') == 2
    path.write_bytes(data.replace(b'"number":3', b'"number":1'))
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="is not as it was written"):
        ledger.vote(JOB)


@asynccontextmanager
async def life(folder: Path, first: m.AgentHello) -> AsyncIterator[tuple[Site, Client, m.Admitted]]:
    async with Site(folder).running() as site:
        agent = await site.client(first)
        yield site, agent, await agent.hears(m.Admitted)


def test_after_a_damaged_ledger_the_daemon_follows_and_does_not_vote(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "state" / "ledger.db"

    async def work() -> None:
        async with life(folder, hello(JOB)) as (_, _, admitted):
            known = admitted.identity
        path.write_bytes(b"not a database at all, not any more\n" * 100)
        for _ in range(2):  # nor in a later life
            async with life(folder, again(known)) as (site, _, admitted):
                assert admitted.identity == known
                (runtime,) = site.service.jobs
                assert not runtime.session.control.agreement.may_vote
                await until("it is written", lambda: not site.service.ledger._rows)
                assert await site.service.ledger.vote(JOB) is None
        async with life(folder, hello("4712")) as (site, _, _):
            assert site.service.jobs[0].session.control.agreement.may_vote

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    (aside,) = path.parent.glob("ledger.db.corrupt-*")
    assert aside.read_bytes().startswith(b"not a database")
    assert "file is not a database: the ledger is set aside as ledger.db.corrupt-" in caplog.text
    with Ledger.open_readonly(path) as ledger:
        assert [one.kind for one in ledger.rows(EventRecord, JOB)].count("no-vote") == 2


def test_a_ledger_that_is_damaged_while_it_is_open_is_replaced_with_every_promise(folder: Path) -> None:
    """Its daemon knows what it has promised; only the story begins anew, and says so."""
    path = folder / "state" / "ledger.db"

    async def work() -> str:
        async with Site(folder).running() as site:
            agent = await site.client(hello(JOB))
            await agent.hears(m.Assign)
            (runtime,) = site.service.jobs
            site.service.ledger.write([event(number) for number in range(200)])
            await until("written", lambda: site.service.ledger._task.done())  # type: ignore[union-attr]
            # Checkpoint, spoil everything but the header, and have SQLite read it again.
            await site.service.ledger.call(spoil)
            site.service.ledger.write([event(1000)])
            await until("it is replaced", lambda: list(path.parent.glob("*.corrupt-*")))
            identity, durable = await vote_of(site.service.ledger, JOB)
            assert site.service.ledger.trouble == ""
            # A new name is in the ledger before the daemon goes by it.
            await until("it goes by its name", lambda: runtime.identity == identity)
            assert durable == runtime.session.control.agreement.durable
            return runtime.identity

    def spoil(ledger: Ledger) -> None:
        with ledger._engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with path.open("r+b") as file:
                file.seek(200)
                file.write(os.urandom(path.stat().st_size - 200))
            raw.execute("PRAGMA cache_size = 1")
            raw.execute("PRAGMA shrink_memory")

    async def next_life(identity: str) -> bool:
        async with life(folder, again(identity)) as (site, _, _):
            return site.service.jobs[0].session.control.agreement.may_vote

    identity = asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    assert asyncio.run(asyncio.wait_for(next_life(identity), DEADLINE_S))
    with Ledger.open_readonly(path) as ledger:
        assert "ledger-damaged" in [one.kind for one in ledger.rows(EventRecord, JOB)]


def test_set_aside_copies_do_not_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    async def work() -> None:
        for number in range(MOST_KEPT + 3):
            path.write_bytes(b"garbage %d\n" % number * 100)
            writer = LedgerWriter(path)
            await writer.start()
            assert writer.trouble == ""
            await writer.close()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    kept = sorted(p.read_bytes().splitlines()[0] for p in tmp_path.glob("ledger.db.corrupt-*"))
    assert kept == [b"garbage 3", b"garbage 4", b"garbage 5"]


def test_a_disk_that_spoils_every_ledger_ends_in_trouble_not_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    opened: list[int] = []
    sound = Ledger.open

    def spoilt(at: Path) -> Ledger:
        opened.append(1)
        at.write_bytes(b"garbage\n" * 100)
        return sound(at)

    async def work() -> None:
        monkeypatch.setattr(Ledger, "open", spoilt)
        writer = LedgerWriter(path)
        await writer.start()
        assert "not a database" in writer.trouble
        assert len(opened) == MOST_SET_ASIDE + 1
        await writer.close()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


# ------------------------------------------------------------------------------------------ modes


def test_a_ledger_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    before = os.umask(0)
    try:
        for _ in range(2):
            with Ledger.open(path) as ledger:
                ledger.write([event(1)])
                files = list(tmp_path.iterdir())
                assert len(files) == 3
                assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
            path.chmod(0o644)  # as an earlier ckptless left it
    finally:
        os.umask(before)
