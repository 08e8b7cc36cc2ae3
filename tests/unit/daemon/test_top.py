"""`ckptctl top`: which nodes come first, what is folded, and the live view in a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptctl.shared.board import TROUBLES, NodeLine, Rate, folded, in_order, node_lines
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.model import Pace
from ckptless.daemon.protocol.records import (
    EventRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    Record,
    SlotRecord,
)

NOW_S = 5000.0
DEADLINE_S = 30.0


def job(nodes: int, **changed: Any) -> JobRecord:
    whole = JobRecord(
        job="4711",
        command=("train.py",),
        world_size=2 * nodes,
        nodes=nodes,
        spares=1,
        state="running",
        started_s=NOW_S - 600,
    )
    return structs.replace(whole, **changed)


def rows(nodes: int, now_s: float = NOW_S) -> list[Any]:
    """A job of so many nodes of two ranks, and a spare, in which all is well."""
    made: list[Any] = [
        GenerationRecord(
            job="4711",
            generation=1,
            places=tuple((node, slot) for node in range(nodes) for slot in range(2)),
            restore_step=None,
            rung="start",
            faults=(),
            leader=0,
            agreed_s=now_s - 600,
        )
    ]
    for node in range(nodes + 1):
        made.append(
            NodeRecord(
                job="4711",
                node=node,
                name=f"node{node:04}",
                address="",
                state="up",
                daemon_pid=1,
                agent_pid=2,
                updated_s=now_s,
            )
        )
        made += [
            SlotRecord(
                job="4711",
                node=node,
                slot=slot,
                rank=2 * node + slot if node < nodes else None,
                generation=1,
                pid=10,
                phase="restored" if node < nodes else "waiting",
                step=812 if node < nodes else None,
                loss=0.5,
                updated_s=now_s,
                pace=Pace(step=800, took_s=0.1, own_s=0.05, waited_s=0.04, data_s=0.01, commit_s=0.01),
            )
            for slot in range(2)
        ]
    return made


def snapshot(made: list[Any]) -> Snapshot:
    return Snapshot(
        nodes=tuple(row for row in made if isinstance(row, NodeRecord)),
        slots=tuple(row for row in made if isinstance(row, SlotRecord)),
        generations=tuple(row for row in made if isinstance(row, GenerationRecord)),
    )


def change(made: list[Any], kind: type[Any], node: int, **changed: Any) -> None:
    for at, row in enumerate(made):
        if isinstance(row, kind) and row.node == node:
            made[at] = structs.replace(row, **changed)


def test_nodes_with_trouble_come_first_by_how_bad_it_is() -> None:
    made = rows(8)
    change(made, NodeRecord, 6, state="lost")
    change(made, NodeRecord, 5, state="daemon-away")
    change(made, SlotRecord, 4, updated_s=NOW_S - 60)
    change(made, SlotRecord, 3, phase="joined")
    slow = Pace(step=800, took_s=0.1, own_s=0.09, waited_s=0.0, data_s=0.05, commit_s=0.01)
    change(made, SlotRecord, 2, pace=slow, step=811)
    lines = in_order(node_lines(snapshot(made), NOW_S), "trouble")
    assert [(one.node, one.trouble) for one in lines[:5]] == [
        (6, "lost"),
        (5, "daemon away"),
        (4, "silent"),
        (3, "not training"),
        (2, "slow"),
    ]
    assert [one.node for one in lines[5:]] == [0, 1, 7, 8]
    assert {one.trouble for one in lines} == {*TROUBLES}
    by_node = {one.node: one for one in lines}
    assert (by_node[2].behind, by_node[2].own_s) == (1, 0.09)
    assert by_node[2].data == pytest.approx(0.5)
    assert by_node[2].over == pytest.approx(0.8)
    assert (by_node[0].ranks, by_node[6].ranks, by_node[8].ranks) == ("0, 1", "12, 13", "spare")
    assert [one.node for one in in_order(lines, "node")] == [*range(9)]
    assert in_order(lines, "step")[0].node == 2
    assert in_order(lines, "own")[0].node == 2


def test_a_thousand_nodes_fit_on_a_screen() -> None:
    made = rows(1000)
    draw = random.Random(1)
    for node in draw.sample(range(1000), 30):
        change(made, NodeRecord, node, state="lost")
    lines = in_order(node_lines(snapshot(made), NOW_S), "trouble")
    shown, rest = folded(lines, 20)
    assert len(shown) == 19
    assert {one.trouble for one in shown} == {"lost"}
    assert rest == "and 982 more: 11 lost, 971 well"
    for most in range(1, 40):
        some, words = folded(lines[:20], most)
        assert len(some) + bool(words) <= max(most, 1)
        assert len(some) + (int(words.split()[1]) if words else 0) == 20


def test_no_rows_make_no_line() -> None:
    assert node_lines(Snapshot(), NOW_S) == []
    assert folded([], 5) == ([], "")


def test_steps_a_second_are_those_of_the_last_while() -> None:
    rate = Rate(window_s=10.0)
    assert rate.see(0, 0.0) is None
    assert [rate.see(2 * second, float(second)) for second in range(1, 20)][-1] == pytest.approx(2.0)
    # Then it stands still, and a fault takes steps back.
    assert rate.see(38, 28.0) == pytest.approx(0.2)
    assert rate.see(30, 29.0) is None
    assert rate.see(31, 30.0) == pytest.approx(1.0)


def write(folder: Path, made: list[Record]) -> None:
    with Ledger.open(folder / "ledger.db") as ledger:
        ledger.write(made)


def event(at_s: float, text: str) -> EventRecord:
    return EventRecord(
        event=text,
        job="4711",
        node=0,
        at_s=at_s,
        level="warning",
        kind="died",
        generation=1,
        text=text,
    )


def test_without_a_terminal_it_is_printed_once(tmp_path: Path) -> None:
    now_s = time.time()
    write(tmp_path, [job(3, started_s=now_s - 600), *rows(3, now_s), event(now_s, "rank 1 \x1b[2J died")])
    result = CliRunner().invoke(ckptctl, ["--state-dir", str(tmp_path), "top"])
    assert result.exit_code == 0, result.output
    assert "job 4711: running for 10 min, generation 1, step 812, 6 ranks" in result.stdout
    assert "\x1b" not in result.stdout
    assert "sorted by trouble" in result.stdout
    told = CliRunner().invoke(ckptctl, ["--state-dir", str(tmp_path), "top", "--json", "--sort", "node"])
    assert [one["node"] for one in json.loads(told.stdout)["nodes"]] == [0, 1, 2, 3]
    nobody = CliRunner().invoke(ckptctl, ["--state-dir", str(tmp_path), "top", "x"])
    assert nobody.exit_code == 4


class Terminal:
    """`ckptctl top` in a terminal of 40 lines."""

    def __init__(self, folder: Path) -> None:
        self.here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 40, 140, 0, 0))
        self.there, self.before = there, termios.tcgetattr(there)
        code = "from ckptless.daemon.ckptctl.main import main; main()"
        command = [sys.executable, "-c", code, "--state-dir", str(folder), "top", "--interval", "0.2"]
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env={**os.environ, "TERM": "xterm"}
        )
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until this is on the screen; what came before it is forgotten."""
        limit = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            ready, _, _ = select.select([self.here], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{text!r} does not come: {self.seen[-2000:]!r}"
            self.seen += os.read(self.here, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def press(self, key: str) -> None:
        os.write(self.here, key.encode())

    def ended(self) -> int:
        """Its exit code; all that it writes is read meanwhile, as a terminal would."""
        limit = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < limit:
            if select.select([self.here], [], [], 0.05)[0]:
                self.seen += os.read(self.here, 65536).decode(errors="replace")
        return self.process.wait(0)


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    made = Terminal(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(DEADLINE_S)
        os.close(made.here)
        os.close(made.there)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    now_s = time.time()
    write(tmp_path, [job(3, started_s=now_s - 600), *rows(3, now_s)])
    return tmp_path


@pytest.mark.parametrize("end", ["q", "\x03"])
def test_it_goes_on_until_a_key_ends_it_and_leaves_the_terminal_as_it_was(ledger: Path, end: str) -> None:
    with terminal(ledger) as screen:
        screen.until("step 812")
        now_s = time.time()
        made = rows(3, now_s)
        change(made, SlotRecord, 1, step=813)
        write(ledger, [*made, event(now_s, "rank 2 was ended by SIGKILL")])
        screen.until("step 813")
        screen.until("rank 2 was ended by SIGKILL")
        screen.press("s")
        screen.until("sorted by node")
        screen.press("o")
        screen.until("sorted by own")
        screen.press(end)
        assert screen.ended() == 0
        # The other screen is left, the cursor is there again.
        assert "\x1b[?1049l" in screen.seen
        assert "\x1b[?25h" in screen.seen
        assert termios.tcgetattr(screen.there) == screen.before


def test_a_ledger_that_is_away_is_said_and_waited_for(ledger: Path) -> None:
    with terminal(ledger) as screen:
        screen.until("step 812")
        (ledger / "ledger.db").rename(ledger / "away")
        screen.until("there is no ledger")
        (ledger / "away").rename(ledger / "ledger.db")
        screen.until("step 812")
        screen.press("q")
        assert screen.ended() == 0


def test_sigterm_leaves_the_terminal_as_it_was(ledger: Path) -> None:
    with terminal(ledger) as screen:
        screen.until("step 812")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.ended() == 128 + signal.SIGTERM
        assert termios.tcgetattr(screen.there) == screen.before
        assert "\x1b[?1049l" in screen.seen


def test_lines_are_values() -> None:
    (line,) = node_lines(snapshot(rows(0)), NOW_S)
    assert isinstance(line, NodeLine)
    assert line.ranks == "spare"
