"""The power goes while a vote is being written: what is read later is that vote or the one before, no mix.

A disk writes sectors whole, but in any order, and a file that grew may end in what was there before. So the
files of a real ledger are kept before and after each vote, and put together again sector by sector.
"""

import random
from pathlib import Path

from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.peers.agreement import Ballot, Decree, Durable, Vote

VOTES = 40
TEARS = 6  # of each
SECTOR = 512
# Pages until the log is copied to the database and written from its beginning again: often, here.
PAGES = 12
JOB = "4711"


def durable(number: int) -> Durable:
    ballot = Ballot(number=number, node=1)
    decree = Decree(index=1, voters=tuple(range(1 + number % 7)))
    return Durable(
        promised=ballot, vote=Vote(ballot=ballot, decree=decree), known=Decree(index=0, voters=(0,))
    )


def torn(chance: random.Random, before: bytes, after: bytes) -> bytes:
    """Take of what differs each sector or not; a new end may be missing, zero, or anything."""
    end = chance.randint(min(len(before), len(after)), max(len(before), len(after)))
    found = bytearray()
    for at in range(0, end, SECTOR):
        new, old = after[at : at + SECTOR], before[at : at + SECTOR]
        strange = [bytes(len(new)), chance.randbytes(len(new))] if not old else []
        found += chance.choice([new, old or new, *strange])
    return bytes(found)


def test_it_is_the_new_one_or_the_one_before(tmp_path: Path) -> None:
    chance = random.Random(4)
    files = (tmp_path / "ledger.db", tmp_path / "ledger.db-wal")
    read, copied = {"old": 0, "new": 0}, 0
    with Ledger.open(files[0]) as ledger:
        with ledger._engine.begin() as connection:
            connection.exec_driver_sql(f"PRAGMA wal_autocheckpoint = {PAGES}")
        ledger.save_vote(JOB, "abc", durable(0))
        before = [file.read_bytes() for file in files]
        for number in range(1, VOTES):
            ledger.save_vote(JOB, "abc", durable(number))
            after = [file.read_bytes() for file in files]
            # The log is on the disk before any of it is copied to the database.
            into_database = after[0] != before[0]
            copied += into_database
            for _ in range(TEARS):
                database, log = after if not into_database else (torn(chance, before[0], after[0]), after[1])
                log = log if into_database else torn(chance, before[1], after[1])
                found = reopened(tmp_path / "torn", database, log)
                which = {durable(number): "new", durable(number - 1): "old"}[found]
                assert which == "new" or not into_database
                read[which] += 1
            before = after
    assert min(read.values()) >= VOTES / 2, read
    assert copied >= 2


def reopened(folder: Path, database: bytes, log: bytes) -> Durable:
    """Return what a daemon that starts with these files knows of its votes."""
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    (folder / "ledger.db").write_bytes(database)
    (folder / "ledger.db-wal").write_bytes(log)
    with Ledger.open(folder / "ledger.db") as ledger:
        with ledger._engine.begin() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
        found = ledger.vote(JOB)
    assert found is not None
    assert found[0] == "abc"
    return found[1]
