"""A ledger whose writer is killed at any moment: every acknowledged batch is there, and none in part."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO

from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.records import EventRecord, GenerationRecord

KILLS = 20
# A writer has at most so long, where those before it got on.
FIRST_S, DEADLINE_S = 0.15, 60.0
BATCH = 7

# For each number told on stdin: fork a writer that goes on from there until it is killed. One interpreter
# for all writers, since loading SQLAlchemy twenty times would be most of the test.
WRITER = """
import os, sys
from pathlib import Path
from ckptless.daemon.protocol.records import EventRecord, GenerationRecord
from ckptless.daemon.ledger.store import Ledger

def batch(number, size):
    for part in range(size - 1):
        yield EventRecord(event=f"{number}-{part}", job="j", node=0, at_s=float(number), level="info",
                          kind="k", generation=number, text="x" * 300)
    yield GenerationRecord(job="j", generation=number, places=((0, 0),), restore_step=None, rung="process",
                           faults=(), leader=0, agreed_s=float(number))

def write(path, number, size):
    ledger = Ledger.open(path)
    while True:
        ledger.write(tuple(batch(number, size)))
        os.write(1, b"%d\\n" % number)
        number += 1

path, size = Path(sys.argv[1]), int(sys.argv[2])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(path, int(line), size)
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    chance = random.Random(20)
    acknowledged = 0
    command = [sys.executable, "-c", WRITER, str(path), str(BATCH)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        kills, more_s = 0, 0.0
        while kills < KILLS or acknowledged <= KILLS:
            # The first kills may come while the file is being made; the later ones while it is brought back.
            writer.stdin.write(f"{acknowledged + 1}\n")
            writer.stdin.flush()
            before = acknowledged
            acknowledged = max(acknowledged, kill_after(writer.stdout, chance.uniform(0.0, FIRST_S) + more_s))
            if path.exists():
                acknowledged = check(path, acknowledged)
            kills += 1
            # On a machine that is slow a writer has more time: so that most are killed as they write.
            more_s = 0.0 if acknowledged > before else 2 * more_s + FIRST_S
            assert more_s < DEADLINE_S, "no batch is written at all"
        writer.stdin.close()
    Ledger.open(path).close()
    assert os.listdir(tmp_path) == ["ledger.db"]  # noqa: PTH208


def kill_after(lines: IO[str], seconds: float) -> int:
    """Kill the writer that the next lines tell of; the last batch it acknowledged, or 0."""
    told = []
    for line in lines:
        if line == "gone\n":
            break
        if line.startswith("pid "):
            time.sleep(seconds)
            os.kill(int(line.split()[1]), signal.SIGKILL)
        else:
            told.append(int(line))
    return max(told, default=0)


def check(path: Path, acknowledged: int) -> int:
    """What the next reader finds, with the dead writer's -wal still there. The last batch that is whole."""
    if not is_made(path):
        assert acknowledged == 0
        return 0
    with Ledger.open_readonly(path) as ledger:
        events = ledger.rows(EventRecord, "j")
        generations = [record.generation for record in ledger.rows(GenerationRecord, "j")]
    last = max(generations, default=0)
    assert generations == list(range(1, last + 1))
    assert Counter(event.generation for event in events) == dict.fromkeys(generations, BATCH - 1)
    assert acknowledged <= last <= acknowledged + 1  # killed between the commit and the word of it
    file = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        file.close()
    return last


def is_made(path: Path) -> bool:
    """Whether the writer lived to finish the first migration."""
    file = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return bool(file.execute("PRAGMA user_version").fetchone()[0])
    finally:
        file.close()
