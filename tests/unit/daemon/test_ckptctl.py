"""ckptctl: what it prints, the JSON that scripts rely on, and its exit codes."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from ckptless import __version__
from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptctl.shared import options, source
from ckptless.daemon.ckptctl.timeline import p99
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.limits import size_text
from ckptless.daemon.protocol.model import Pace, ReaderState, RingState, StreamState
from ckptless.daemon.protocol.records import (
    PHASES,
    EventRecord,
    FaultRecord,
    GenerationRecord,
    HoldingRecord,
    JobRecord,
    NodeRecord,
    Record,
    RecoveryRecord,
    SlotRecord,
)
from ckptless.daemon.protocol.ring import STREAMS
from ckptless.daemon.settings.site import load_settings

Run = Callable[..., Result]

OLD = JobRecord(
    job="6",
    command=("old.py",),
    world_size=1,
    nodes=1,
    spares=0,
    state="failed",
    started_s=10.0,
    ended_s=70.0,
    exit_code=3,
    reason="no spare",
)
JOB = JobRecord(job="7", command=("t.py",), world_size=2, nodes=3, spares=1, state="running", started_s=20.0)


def node(number: int, **more: Any) -> NodeRecord:
    fields = {"state": "up", "daemon_pid": 1, "agent_pid": 2, "updated_s": 50.0, **more}
    return NodeRecord(job="7", node=number, name=f"n{number}", address="a", **fields)


def slot(number: int, rank: int | None, generation: int = 2, **more: Any) -> SlotRecord:
    fields = {"pid": 100 + number, "phase": "training", "step": 41, "loss": 0.25, "updated_s": 50.0, **more}
    return SlotRecord(job="7", node=number, slot=0, rank=rank, generation=generation, **fields)


def recovery(generation: int, each_s: float, outcome: str | None = "recovered") -> RecoveryRecord:
    return RecoveryRecord(
        job="7",
        generation=generation,
        rung="process",
        faults=(f"f{generation}",),
        restore_step=40,
        started_s=30.0,
        phases=dict.fromkeys(PHASES, each_s),
        outcome=outcome,
    )


def fault(number: int, detail: str = "SIGKILL") -> FaultRecord:
    return FaultRecord(
        fault=f"f{number}",
        job="7",
        kind="process-died",
        node=1,
        slot=0,
        rank=1,
        generation=1,
        detail=detail,
        seen_s=30.0 + number,
        source="process" if number > 1 else None,
    )


def holding(number: int, tensors: dict[int, tuple[int, ...]], records: dict[int, int]) -> HoldingRecord:
    return HoldingRecord(
        job="7",
        node=number,
        tensors=tuple((shard, steps, 1500 * len(steps)) for shard, steps in tensors.items()),
        records=tuple((rank, rank, (step - 1, step), 700) for rank, step in records.items()),
        nbytes=6000,
        seq=number,
        updated_s=50.0,
    )


def event(number: int, text: str = "all well", job: str = "7") -> EventRecord:
    return EventRecord(
        event=f"e{number}",
        job=job,
        node=0,
        at_s=30.0 + number,
        level="info",
        kind="note",
        generation=1,
        text=text,
    )


# Node 1 was lost: rank 1 now lives on node 2, which was a spare; node 3 still is one.
STORY: tuple[Record, ...] = (
    OLD,
    JOB,
    node(0),
    node(1, state="lost"),
    node(2),
    node(3),
    node(4),
    slot(0, 0),
    slot(1, 1, generation=1, step=39),
    slot(2, 1),
    slot(3, None, step=None, loss=None, phase="spare"),
    GenerationRecord(
        job="7",
        generation=2,
        places=((0, 0), (2, 0)),
        restore_step=40,
        rung="spare",
        faults=("f2",),
        leader=0,
        agreed_s=31.0,
    ),
    *(fault(number) for number in (1, 2, 3, 4)),
    recovery(2, 0.01),
    event(1),
    event(2),
)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "node-0").mkdir()
    write(tmp_path / "node-0" / "ledger.db", *STORY)
    return tmp_path


@pytest.fixture
def run(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("CKPTLESS_STATE_DIR", str(state_dir))
    return invoke


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(ckptctl, arguments, catch_exceptions=False)


def write(path: Path, *records: Record) -> None:
    with Ledger.open(path) as ledger:
        ledger.write(records)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["meta"] == {"schema": 1}
    return found


WATCHED = ("jobs", "status", "replicas", "data", "timeline", "stragglers", "goodput")


@pytest.mark.parametrize("command", WATCHED)
def test_it_is_shown_again_and_again(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Until Ctrl-C, which is no error; without a terminal one after the other."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    # The very same text each time: nothing of it is an age.
    monkeypatch.setattr(time, "time", lambda: 100.0)
    once = run(command)
    monkeypatch.setattr(time, "sleep", sleep)
    again = run(command, "--watch", "1.5")
    assert (once.exit_code, again.exit_code, slept) == (0, 0, [1.5] * 3)
    assert once.output
    assert again.stdout == once.stdout * 3
    assert run(command, "--watch", "0").exit_code == 2


def test_what_ends_with_an_exit_code_is_shown_before() -> None:
    """As `ckptctl health --exit-code` does."""

    @click.command()
    @options.common
    @options.watched
    def unwell(_asked: options.Asked) -> None:
        click.echo("a lamp is red")
        sys.exit(1)

    found = CliRunner().invoke(unwell, ["--watch", "1"])
    assert (found.exit_code, found.stdout) == (1, "a lamp is red\n")


# jobs


def test_jobs_newest_last(run: Run) -> None:
    header, old, new = lines(run("jobs"))
    assert header.split()[:3] == ["job", "state", "ranks"]
    assert old.split()[:5] == ["6", "failed", "1", "1", "0"]
    assert old.endswith("60.0 s     3  no spare")
    assert new.split()[:5] == ["7", "running", "2", "3", "1"]
    assert len(lines(run("jobs", "-j", "6"))) == 2


def test_jobs_json_is_the_records(run: Run) -> None:
    found = document(run("jobs", "--json"))
    assert set(found) == {"meta", "jobs"}
    assert [msgspec.convert(job, JobRecord) for job in found["jobs"]] == [OLD, JOB]


def test_what_befell_each(run: Run) -> None:
    told = document(run("jobs", "--history", "--json"))["history"]
    assert told["6"] == {
        "faults": 0, "drills": 0, "nodes_lost": 0, "recoveries": 0,
        "without_steps_s": 0.0, "longest_s": 0.0, "step": None,
    }  # fmt: skip
    assert told["7"] == {
        "faults": 4, "drills": 0, "nodes_lost": 1, "recoveries": 1,
        "without_steps_s": pytest.approx(0.01 * len(PHASES)),
        "longest_s": pytest.approx(0.01 * len(PHASES)),
        "step": 41,
    }  # fmt: skip
    header, _, new = lines(run("jobs", "--history"))
    assert header.split()[:5] == ["job", "state", "started", "ran", "step"]
    assert new.split()[0] == "7"


def test_no_job_yet(tmp_path: Path) -> None:
    write(tmp_path / "ledger.db")
    result = invoke("--state-dir", str(tmp_path), "jobs")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no job yet\n")
    assert document(invoke("--state-dir", str(tmp_path), "jobs", "--json"))["jobs"] == []


# status


def test_status_of_the_newest_job(run: Run) -> None:
    head, columns, *rest = lines(run("status"))
    assert head == "job 7: running, generation 2, step 41, world 2, 1 spare left"
    assert columns.split() == ["node", "name", "state", "slot", "rank", "pid", "phase", "step", "loss", "age"]
    table, below = rest[:5], rest[5:]
    assert [row.split()[:9] for row in table[:3]] == [
        ["0", "n0", "up", "0", "0", "100", "training", "41", "0.25"],
        ["1", "n1", "lost", "0", "-", "101", "training", "39", "0.25"],
        ["2", "n2", "up", "0", "1", "102", "training", "41", "0.25"],
    ]
    assert table[3].split()[:7] == ["3", "n3", "up", "0", "spare", "103", "spare"]
    assert table[4].split() == ["4", "n4", "up"]
    assert below[0] == "last recovery: generation 2, process, 70.0 ms, recovered"
    assert len(below) == 4
    assert below[-1].endswith("process-died (process)  node 1 slot 0 rank 1: SIGKILL")


def test_status_of_a_job_that_is_over(run: Run) -> None:
    assert lines(run("status", "-j", "6"))[0] == (
        "job 6: failed, generation none, no step yet, world 1, 0 spares left, exit code 3, no spare"
    )


def test_a_job_that_forms_is_there_with_whom_it_waits_for(run: Run, state_dir: Path) -> None:
    forming = structs.replace(JOB, job="9", state="forming", started_s=99.0, reason="waiting for n3")
    write(state_dir / "node-0" / "ledger.db", forming)
    assert lines(run("status", "9"))[0] == "job 9: forming, waiting for n3, world 2"
    assert document(run("status", "9", "--json"))["job"]["state"] == "forming"
    assert run("jobs", "9").stdout.split()[-3:] == ["waiting", "for", "n3"]
    for command in ("events", "timeline", "replicas", "data"):
        assert run(command, "9").exit_code == 0, command
    write(state_dir / "node-0" / "ledger.db", structs.replace(forming, reason=None))
    assert lines(run("status", "9"))[0] == "job 9: forming, every node is there, world 2"
    # Whoever knows more of it is believed.
    (state_dir / "node-7").mkdir()
    write(
        state_dir / "node-7" / "ledger.db",
        structs.replace(forming, state="running", reason=None, started_s=98.0),
    )
    assert lines(run("status", "9"))[0].startswith("job 9: running, ")


def test_status_json(run: Run, state_dir: Path) -> None:
    write(state_dir / "node-0" / "ledger.db", slot(0, 0, loss=math.nan, updated_s=60.0))
    found = document(run("status", "--json"))
    assert set(found) == {
        *("meta", "job", "generation", "step", "spares_left", "nodes", "slots"),
        *("recovery", "recovery_total_s", "faults", "refused", "voteless", "safety", "commits"),
        *("returned_early", "drill"),
    }
    assert found["job"]["job"] == "7"
    assert found["generation"]["places"] == [[0, 0], [2, 0]]
    assert (found["step"], found["spares_left"]) == (41, 1)
    assert (len(found["nodes"]), len(found["slots"])) == (5, 4)
    assert found["slots"][0]["loss"] is None
    assert found["recovery_total_s"] == pytest.approx(0.07)
    assert [each["fault"] for each in found["faults"]] == ["f2", "f3", "f4"]
    assert document(run("status", "--json", "-j", "6"))["recovery"] is None


def test_status_says_what_could_be_lost_now(run: Run, state_dir: Path) -> None:
    path = state_dir / "node-0" / "ledger.db"
    assert not [line for line in lines(run("status")) if line.startswith(("held", "at risk"))]
    write(path, *HELD)
    held, risk = [line for line in lines(run("status")) if line.startswith(("held", "at risk"))]
    assert held == "held: step 41 can be restored, the newest; 40 after any one node's loss"
    assert risk == "at risk: only nodes 0 and 2 have shard 1 and the record of rank 1"
    found = document(run("status", "--json"))["safety"]
    nothing: dict[str, list[int]] = {"shards": [], "records_of_ranks": []}
    assert found == {
        "complete": True,
        "unknown_nodes": [],
        "watermark": 41,
        "newest_step": 41,
        "behind": 0,
        "after_one_node": 40,
        "after_two_nodes": None,
        "gone": nothing,
        "lost_with_one": [],
        "lost_with_two": [{"nodes": [0, 2], "shards": [1], "records_of_ranks": [1]}],
    }
    assert document(run("replicas", "--json"))["safety"] == found
    write(path, node(2, state="lost", updated_s=60.0), holding(5, {0: (42,)}, {0: 42}))
    assert lines(run("status"))[7:9] == [
        "held: step 40 can be restored, 2 behind the newest",
        "at risk: node 0 alone has shard 1 and the record of rank 1",
    ]
    write(path, node(0, state="lost", updated_s=60.0))
    assert "held: no step could be restored: nobody has the record of rank 1" in lines(run("status"))
    write(path, msgspec.structs.replace(JOB, state="failed", ended_s=70.0))
    assert document(run("status", "--json"))["safety"] is None


def test_what_only_follows_from_a_fault_is_told_with_it(run: Run, state_dir: Path) -> None:
    """A collective of every rank fails when one of them dies; what Gloo says of that helps nobody."""

    def broken(number: int, rank: int) -> FaultRecord:
        gloo = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        return structs.replace(
            fault(number, gloo), fault=f"b{number}", kind="broken", node=rank, rank=rank, generation=5
        )

    died = structs.replace(fault(12, "was ended by SIGKILL"), kind="died", generation=5)
    write(state_dir / "node-0" / "ledger.db", broken(10, 0), broken(11, 2), died, broken(13, 3))
    shown = [line for line in lines(run("status")) if line.startswith("fault: ")]
    assert len(shown) == 3
    assert shown[-1].endswith(
        "died (process)  node 1 slot 0 rank 1: was ended by SIGKILL; noticed by ranks 0, 2, 3"
    )
    assert not [line for line in shown if "gloo" in line]
    found = document(run("status", "--json"))["faults"][-1]
    assert (found["kind"], found["noticed"]) == ("died", [0, 2, 3])
    # Nobody knows of a cause: then it is told what there is.
    write(state_dir / "node-0" / "ledger.db", structs.replace(broken(14, 0), generation=6))
    assert lines(run("status"))[-1].endswith(
        "rank 0: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )


def test_status_says_who_has_returned_while_others_train(run: Run, state_dir: Path) -> None:
    path = state_dir / "node-0" / "ledger.db"
    write(path, slot(0, 0, phase="finished", updated_s=60.0), slot(2, 1, phase="restored", updated_s=60.0))
    line = "rank 0 has returned from the training function after step 41, while rank 1 still trains"
    assert lines(run("status"))[-1] == f"{line}, and may wait for it"
    assert document(run("status", "--json"))["returned_early"] == f"{line}, and may wait for it"
    write(path, slot(2, 1, phase="finished", updated_s=61.0))
    assert document(run("status", "--json"))["returned_early"] is None


@pytest.mark.parametrize(
    "command", ["jobs", "status", "replicas", "data", "events", "stragglers", "timeline"]
)
def test_the_job_is_the_first_argument(run: Run, state_dir: Path, command: str) -> None:
    assert run(command, "6").stdout == run(command, "-j", "6").stdout == run("-j", "6", command).stdout
    assert run(command, "7", "-j", "6").exit_code == 2
    assert run(command, "8").exit_code == 4
    assert run(command, "a\nb").exit_code == 2
    # The number of a Slurm job means its newest run, unless a run has just this name.
    later = [structs.replace(JOB, job=f"9.{number}", started_s=50.0 + number) for number in (1, 2)]
    write(state_dir / "node-0" / "ledger.db", *later, structs.replace(JOB, job="7.1", started_s=60.0))
    if command != "jobs":
        assert run(command, "9").output == run(command, "9.2").output
        assert run(command, "7").stderr.startswith("ckptctl: job 7 has a newer run: 7.1\n")
    else:
        assert [line.split()[0] for line in lines(run(command, "9"))[1:]] == ["9.1", "9.2"]


def test_status_says_how_often_is_committed_and_what_that_costs(run: Run, state_dir: Path) -> None:
    path = state_dir / "node-0" / "ledger.db"
    assert document(run("status", "--json"))["commits"] is None
    elsewhere = slot(1, 1, generation=1, every=9, share=0.9, updated_s=60.0)
    write(path, slot(0, 0, every=1, updated_s=60.0), elsewhere)
    assert "commits: every step" in lines(run("status"))
    write(
        path,
        slot(0, 0, every=4, share=0.0071, updated_s=61.0),
        slot(2, 1, every=4, share=0.0083, updated_s=61.0),
    )
    line = "commits: every 4 steps, 0.83% of the time of rank 1, which it costs most"
    assert line in lines(run("status"))
    assert document(run("status", "--json"))["commits"] == {"every": 4, "share": 0.0083, "rank": 1}


def test_where_not_all_is_known_it_says_who_knows(run: Run, state_dir: Path) -> None:
    write(state_dir / "node-0" / "ledger.db", HELD[0], node(5, updated_s=60.0))
    assert "held: it is not known here what nodes 2-5 hold: ask on node 0, whose daemon leads" in lines(
        run("status")
    )
    found = document(run("status", "--json"))["safety"]
    assert (found["complete"], found["unknown_nodes"]) == (False, [2, 3, 4, 5])


def test_a_jobs_words_do_not_drive_the_terminal(run: Run, state_dir: Path) -> None:
    write(state_dir / "node-0" / "ledger.db", fault(9, "\x1b[2J[red]two\nlines"), event(9, "\x1b]0;x\x07[b]"))
    assert lines(run("status"))[-1].endswith("rank 1: \\x1b[2J[red]two\\nlines")
    assert lines(run("events"))[-1].endswith("\\x1b]0;x\\x07[b]")


# replicas

# Shard 0 is on nodes 0, 2 and 3; of rank 1's there is one copy beside its own, and what lost node 1 had.
HELD: tuple[Record, ...] = (
    holding(0, {0: (39, 40, 41), 1: (38, 39, 40)}, {0: 41, 1: 40}),
    holding(1, {0: (38, 39), 1: (38, 39)}, {0: 39, 1: 39}),
    holding(2, {1: (39, 40, 41), 0: (39, 40)}, {1: 41, 0: 40}),
    holding(3, {0: (38, 39, 40)}, {0: 40}),
    holding(4, {}, {}),
)


def test_replicas(run: Run, state_dir: Path) -> None:
    write(state_dir / "node-0" / "ledger.db", *HELD)
    head, *table = lines(run("replicas"))[:6]
    assert head.split() == ["shard", "ranks", "node", "name", "as", "steps", "bytes", "records", "age"]
    assert [row.split()[:9] for row in table] == [
        ["0", "0", "0", "n0", "owner", "39-41", "4.5", "kB", "1"],
        ["2", "n2", "copy", "39,", "40", "3.0", "kB", "1", table[1].split()[-2]],
        ["3", "n3", "copy", "38-40", "4.5", "kB", "1", *table[2].split()[-2:]],
        ["1", "1", "0", "n0", "copy", "38-40", "4.5", "kB", "1"],
        ["2", "n2", "owner", "39-41", "4.5", "kB", "1", *table[4].split()[-2:]],
    ]
    assert lines(run("replicas"))[6] == "memory: 24.0 kB on 4 nodes"
    assert run("replicas").stdout == run("replicas", "7").stdout == run("-j", "7", "replicas").stdout


def test_replicas_json(run: Run, state_dir: Path) -> None:
    write(state_dir / "node-0" / "ledger.db", *HELD)
    found = document(run("replicas", "--json"))
    assert set(found) == {"meta", "job", "safety", "shards", "nodes"}
    assert [(s["shard"], s["ranks"]) for s in found["shards"]] == [(0, [0]), (1, [1])]
    assert [[h["node"] for h in shard["holders"]] for shard in found["shards"]] == [[0, 2, 3], [0, 2]]
    own = found["shards"][1]["holders"][1]
    assert own.pop("age_s") > 0
    assert own == {
        "node": 2,
        "name": "n2",
        "as": "owner",
        "step": 41,
        "steps": [39, 40, 41],
        "nbytes": 4500,
        "records": [{"rank": 1, "old": False, "step": 41, "steps": [40, 41], "nbytes": 700}],
        "updated_s": 50.0,
    }
    assert [node["node"] for node in found["nodes"]] == [0, 2, 3, 4]


def test_replicas_of_two_jobs_or_of_none(run: Run) -> None:
    assert run("replicas", "7", "-j", "6").exit_code == 2
    assert run("replicas", "8").exit_code == 4
    result = run("replicas", "7")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nothing is held yet\n")


# data


def ring(share: float | None, **more: Any) -> RingState:
    """Of two replicas: both lie there, one of them is taken."""
    fields = {"budget_nbytes": 9000, "prefetch": 8, "made": 30, "given": 40}
    return RingState(
        loader="batches",
        manifest="ab" * 16,
        nbytes=5000,
        **{**fields, "producer": 77, **more},
        streams=(StreamState(stream=1, ready=5, ahead=3), StreamState(stream=0, ready=2, ahead=2)),
        readers=(
            ReaderState(slot=0, stream=STREAMS + 1, taken=20, waits=7, waited_s=3.25, share=share),
            ReaderState(slot=5, stream=1, taken=20, waits=1, waited_s=1.0),
        ),
    )


def data_of(state_dir: Path, *rings: tuple[int, RingState]) -> None:
    held = [structs.replace(holding(number, {}, {}), rings=(found,)) for number, found in rings]
    write(state_dir / "node-0" / "ledger.db", *held)


def test_data(run: Run, state_dir: Path) -> None:
    data_of(state_dir, (0, ring(0.004)), (1, ring(0.9)), (2, ring(0.31)))
    head, *table, last = lines(run("data"))
    assert head.split()[:9] == [
        *("loader", "node", "name", "replica", "ready", "ahead", "waits", "waited", "lately")
    ]
    # Node 1 was lost.
    assert [row.split()[:18] for row in table[:2]] == [
        [*("batches", "0", "n0", "0", "2", "2", "0", "0.0", "s"), *table[0].split()[9:]],
        ["1", "5", "3", "8", "4.2", "s", "0.4", "%"],
    ]
    assert table[0].split()[9:15] == ["5.0", "kB", "9.0", "kB", "30", "77"]
    assert [row.split()[:2] for row in table[2:]] == [["batches", "2"], ["1", "5"]]
    assert last == (
        "ranks wait for 'batches' on n2 31 % of their time: give the loader more workers, or its transform "
        "less to do"
    )
    assert run("data").stdout == run("data", "7").stdout == run("-j", "7", "data").stdout


def test_data_that_holds_nobody_up(run: Run, state_dir: Path) -> None:
    data_of(state_dir, (0, ring(0.09)), (2, ring(None)), (3, ring(1.0, closed=True, producer=None)))
    assert not [line for line in lines(run("data")) if "ranks wait" in line]
    assert lines(run("data"))[5].split()[14] == "closed"


def test_data_json(run: Run, state_dir: Path) -> None:
    data_of(state_dir, (2, ring(0.31)))
    found = document(run("data", "--json"))
    assert set(found) == {"meta", "job", "rings"}
    (told,) = found["rings"]
    assert told.pop("age_s") > 0
    streams, readers = told.pop("streams"), told.pop("readers")
    assert told == {
        **{"node": 2, "name": "n2", "loader": "batches", "manifest": "ab" * 16, "replicas": [0, 1]},
        **{"nbytes": 5000, "budget_nbytes": 9000, "prefetch": 8, "made": 30, "given": 40},
        **{"producer": 77, "closed": False, "updated_s": 50.0},
    }
    assert streams[0] == {"replica": 1, "stream": 1, "ready": 5, "ahead": 3}
    assert [one["rank"] for one in readers] == [1, None]
    assert readers[0] == {
        **{"rank": 1, "replica": 1, "slot": 0, "stream": STREAMS + 1, "taken": 20, "waits": 7},
        **{"waited_s": 3.25, "share": 0.31, "starved": False},
    }


def test_data_of_two_jobs_or_of_none(run: Run) -> None:
    assert run("data", "7", "-j", "6").exit_code == 2
    assert run("data", "8").exit_code == 4
    result = run("data", "7")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no batches lie on any node" in result.stderr


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_951, "100 kB")),
        *((999_499, "999 kB"), (999_500, "1.0 MB"), (268_435_456, "268 MB"), (1e18, "1000000 TB")),
    ],
)
def test_bytes_are_told_in_words(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


# events


def test_events(run: Run) -> None:
    first, second = lines(run("events"))
    assert first.split()[2:] == ["node", "0", "gen", "1", "info", "note", "all", "well"]
    assert first < second
    assert [each["event"] for each in document(run("events", "--json"))["events"]] == ["e1", "e2"]


def test_following_tells_each_event_once_and_ends_in_peace(
    run: Run, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state_dir / "node-1").mkdir()
    (state_dir / "node-2").mkdir()
    steps: list[Callable[[], object]] = [
        lambda: write(state_dir / "node-1" / "ledger.db", event(2), event(3), event(8, job="6")),
        lambda: (state_dir / "node-2" / "ledger.db").write_bytes(b"rubbish" * 1000),
        lambda: None,
        lambda: write(state_dir / "node-0" / "ledger.db", event(3), event(4)),
    ]

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    result = run("events", "--job", "7", "-f", "--json")
    assert [json.loads(line)["event"] for line in lines(result)] == ["e1", "e2", "e3", "e4"]
    assert result.stderr.count("file is not a database") == 1


def test_ctrl_c_ends_following_with_0(state_dir: Path) -> None:
    # A shell that starts something in the background has it ignore Ctrl-C: maybe these tests.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", code, "--state-dir", str(state_dir), "events", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline().endswith("all well\n")
        assert follower.stdout.readline().endswith("all well\n")
        follower.send_signal(signal.SIGINT)
        rest, words = follower.communicate(timeout=10)
    assert (follower.returncode, rest, words) == (0, "", "")


# timeline


def test_timeline(run: Run) -> None:
    header, row = lines(run("timeline"))
    assert [name for name in PHASES if name in header] == list(PHASES)
    assert row.split() == ["2", "process", "process-died", "40", *["10.0"] * 7, "70.0", "recovered"]


def test_a_drill_is_told_as_one(run: Run, state_dir: Path) -> None:
    assert "drill" not in run("status").stdout
    assert document(run("status", "--json"))["drill"] is None
    told = [structs.replace(event(n, text), kind="drill") for n, text in ((7, "asks"), (9, "done"), (8, "x"))]
    drilled = structs.replace(fault(9), source="drill")
    write(state_dir / "node-0" / "ledger.db", drilled, recovery(9, 0.01), *told)
    shown = run("status").stdout
    assert re.search(r"^last drill: \S+ \S+  done$", shown, re.MULTILINE)
    assert "process-died (drill)  node 1 slot 0 rank 1: SIGKILL" in shown
    assert document(run("status", "--json"))["drill"]["text"] == "done"
    first, second = lines(run("timeline"))[1:]
    assert "(drill)" not in first
    assert "process-died (drill)" in second
    assert document(run("timeline", "--json"))["recoveries"][1]["fault_sources"] == ["drill"]


def test_timeline_sums_up_the_recoveries_that_succeeded(run: Run, state_dir: Path) -> None:
    ledger = state_dir / "node-0" / "ledger.db"
    write(ledger, recovery(3, 9.0, outcome="superseded"), recovery(4, 0.02))
    assert "median" not in run("timeline").stdout
    assert document(run("timeline", "--json"))["summary"] is None
    write(ledger, recovery(5, 0.06), recovery(6, 0.5, outcome=None))
    shown = lines(run("timeline"))
    assert shown[-1].split() == ["median/p99", "of", "3", "recovered", *["20.0/60.0"] * 7, "140/420"]
    assert shown[-2].split()[-1] == "running"
    found = document(run("timeline", "--json"))
    assert set(found) == {"meta", "job", "recoveries", "summary"}
    assert found["summary"] == pytest.approx({"count": 3, "median_s": 0.14, "p99_s": 0.42})
    first = found["recoveries"][0]
    assert first["fault_kinds"] == ["process-died"]
    assert first["fault_sources"] == ["process"]
    assert first["total_s"] == pytest.approx(0.07)
    assert first["phases"] == dict.fromkeys(PHASES, 0.01)


def test_timeline_png_is_a_png(run: Run, tmp_path: Path) -> None:
    result = run("timeline", "--png", str(tmp_path / "t.picture"))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "wrote" in result.stderr
    assert (tmp_path / "t.picture").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_timeline_png_that_cannot_be_had(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("timeline", "--png", str(tmp_path / "no" / "t.png"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert run("timeline", "-j", "6", "--png", str(tmp_path / "t.png")).exit_code == 1
    monkeypatch.delitem(sys.modules, "ckptless.daemon.ckptctl.shared.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("timeline", "--png", str(tmp_path / "t.png"))
    assert result.exit_code == 2
    assert result.stderr == "ckptctl: error: pictures need matplotlib: pip install 'ckptless[plot]'\n"


def test_no_recovery_is_no_error(run: Run) -> None:
    result = run("timeline", "-j", "6")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "job 6 has had no recovery\n"


# ------------------------------------------------------------------------------------------------
# stragglers


def pace(own_s: float, data_s: float = 0.02) -> Pace:
    return Pace(step=41, took_s=0.15, own_s=own_s, waited_s=0.14 - own_s, data_s=data_s, commit_s=0.01)


def test_stragglers(run: Run, state_dir: Path, tmp_path: Path) -> None:
    told = EventRecord(
        event="s", job="7", node=0, at_s=80.0, level="warning", kind="straggler", generation=2, text="rank 1"
    )
    slots = slot(0, 0, pace=pace(0.1), updated_s=60.0), slot(2, 1, pace=pace(0.13, 0.05), updated_s=60.0)
    write(state_dir / "node-0" / "ledger.db", *slots, slot(3, 2, 1, pace=pace(0.12), updated_s=60.0), told)
    header, first, second, where, line = lines(run("stragglers"))
    assert header.split() == [
        *("rank", "node", "name", "step", "took", "own", "over", "data", "waited", "commit", "slow")
    ]
    assert first.split()[0] == "1"
    assert second.split()[0] == "0"
    assert where.startswith("of a step of 150 ms, on average: ")
    assert where.endswith("; bound by compute")
    assert line.endswith("rank 1")
    found = document(run("stragglers", "--json"))
    assert set(found) == {"meta", "job", "ranks", "shares", "bound", "events"}
    assert [(one["rank"], one["own_s"]) for one in found["ranks"]] == [(0, 0.1), (1, 0.13)], "of generation 2"
    assert [event["text"] for event in found["events"]] == ["rank 1"]
    result = run("stragglers", "--png", str(tmp_path / "s.png"))
    assert result.exit_code == 0
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_of_many_ranks_the_slowest_are_shown(run: Run, state_dir: Path) -> None:
    generation = GenerationRecord(
        job="7",
        generation=3,
        places=tuple((node, 0) for node in range(40)),
        restore_step=41,
        rung="process",
        faults=(),
        leader=0,
        agreed_s=70.0,
    )
    slots = [slot(node, node, 3, pace=pace(0.1 + 0.001 * node), updated_s=60.0) for node in range(40)]
    write(state_dir / "node-0" / "ledger.db", generation, *slots)
    shown = lines(run("stragglers"))
    assert [line.split()[0] for line in shown[1:3]] == ["39", "38"]
    assert "and 8 faster ones (--all)" in shown
    assert len(lines(run("stragglers", "--all"))) == 1 + 40 + 1


def test_without_paces_it_says_what_it_takes(run: Run, tmp_path: Path) -> None:
    result = run("stragglers")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "has told of no steps yet" in result.stderr
    assert run("stragglers", "--png", str(tmp_path / "s.png")).exit_code == 1


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (100, 98), (200, 197), (1000, 989)])
def test_p99_is_the_nearest_rank(count: int, expected: int) -> None:
    assert p99(list(range(count))) == expected


# The command


@pytest.mark.parametrize("command", ["status", "events", "timeline", "jobs"])
def test_exit_codes(run: Run, tmp_path: Path, command: str) -> None:
    assert run(command).exit_code == 0
    usage = run(command, "--nonsense")
    assert (usage.exit_code, usage.stdout) == (2, "")
    missing = run(command, "--state-dir", str(tmp_path / "nowhere"))
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert missing.stderr == (
        f"ckptctl: error: there is no ledger in {tmp_path}/nowhere: give the right --state-dir\n"
    )
    unknown = run(command, "-j", "99")
    assert (unknown.exit_code, unknown.stdout) == (4, "")
    assert unknown.stderr.startswith("ckptctl: error: there is no job 99 in the ledgers in ")


def test_a_ledger_that_cannot_be_read(run: Run, state_dir: Path) -> None:
    """Alone it is an error; beside a good one, a warning."""
    bad = state_dir / "node-9" / "ledger.db"
    bad.parent.mkdir()
    bad.write_bytes(b"rubbish" * 1000)
    result = run("jobs", "--json")
    assert len(document(result)["jobs"]) == 2
    assert result.stderr.startswith(f"ckptctl: warning: {bad}: ")
    alone = run("--state-dir", str(bad.parent), "jobs")
    assert (alone.exit_code, alone.stdout) == (3, "")
    assert alone.stderr == f"ckptctl: error: {bad}: the ledger cannot be opened: file is not a database\n"


def test_options_before_and_behind_the_command(run: Run, tmp_path: Path, state_dir: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert document(run("--json", "-j", "6", "status"))["job"]["job"] == "6"
    assert run("--state-dir", nowhere, "jobs").exit_code == 3  # outranks the environment
    assert run("--state-dir", nowhere, "jobs", "--state-dir", str(state_dir)).exit_code == 0


def test_the_default_is_the_newest_local_run(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTLESS_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg" / "ckptless").mkdir(parents=True)
    (tmp_path / "xdg" / "ckptless" / "latest").symlink_to(state_dir)
    assert len(lines(invoke("jobs"))) == 3


def test_without_a_daemon_root_reads_what_it_has_left_and_others_are_told_where_to_ask(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTLESS_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    site = dataclasses.replace(
        load_settings().daemon, socket=str(tmp_path / "none.sock"), state_dir=str(tmp_path / "site")
    )
    settings = dataclasses.replace(load_settings(), daemon=site)
    monkeypatch.setattr(source, "load_settings", lambda: settings)
    nothing = invoke("jobs")
    assert (nothing.exit_code, nothing.stdout) == (3, "")
    assert f"no ckptlessd answers at {tmp_path / 'none.sock'}" in nothing.stderr
    assert "ask on a node of the job, or give --state-dir for a local run" in nothing.stderr
    (tmp_path / "site").mkdir()
    write(tmp_path / "site" / "ledger.db", OLD)
    left = invoke("jobs")
    assert [line.split()[0] for line in lines(left)] == ["job", "6"]
    assert f"reading {tmp_path / 'site' / 'ledger.db'} as it was left" in left.stderr
    (tmp_path / "site" / "ledger.db").unlink()
    # A laptop has no daemon, and nobody misses it.
    (tmp_path / "xdg" / "ckptless").mkdir(parents=True)
    (tmp_path / "xdg" / "ckptless" / "latest").symlink_to(state_dir)
    own = invoke("status")
    assert (own.exit_code, own.stderr) == (0, "")


@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [("ckptctl", "ckptctl g", "plain,goodput"), ("ckptless-run", "ckptless-run --spa", "plain,--spares")],
)
def test_shells_complete_commands_and_options(program: str, typed: str, offered: str) -> None:
    """As docs/admin.md says, of the scripts that pip has installed."""
    asked = f"_{program.upper().replace('-', '_')}_COMPLETE"
    env = {**os.environ, asked: "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).parent / program],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert offered in done.stdout.splitlines(), done.stderr
    source = subprocess.run(
        [Path(sys.executable).parent / program],
        env={**os.environ, asked: "bash_source"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert f"{asked}=bash_complete" in source


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (("--version",), {"yaml"}),
        (("plan", "--gpus", "8", "--params", "1e9", "--json"), {"yaml"}),
        (("--socket", "/nowhere", "events"), {"yaml", "asyncio"}),
    ],
)
def test_a_command_loads_only_what_it_needs(words: tuple[str, ...], loaded: set[str]) -> None:
    """Or each waits for what another one needs: SQLAlchemy is a quarter of a second."""
    slow = ("asyncio", "matplotlib", "numpy", "rich", "sqlalchemy", "torch", "yaml")
    program = f"""
import sys
from ckptless.daemon.ckptctl.main import ckptctl
try:
    ckptctl({list(words)!r})
finally:
    print(*(name for name in {slow!r} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert set(done.stderr.splitlines()[-1].split()) <= loaded, done.stderr


def test_help_teaches_and_version_tells() -> None:
    top = invoke("--help")
    assert top.exit_code == 0
    for word in ("Exit codes:", "3  the ledger", "4  no such job", "Example"):
        assert word in top.stdout
    context = click.Context(ckptctl)
    for name in ckptctl.list_commands(context):
        command = ckptctl.get_command(context, name)
        assert command is not None
        assert "Example" in invoke(name, "--help").stdout
        # What plans a job asks about none that there is.
        if not isinstance(command, click.Group) and name != "plan":
            assert {"state_dir", "job", "as_json"} <= {parameter.name for parameter in command.params}
    assert invoke("-V").stdout == f"ckptctl {__version__}\n"


def test_ages_are_told_in_words(run: Run, state_dir: Path) -> None:
    now = time.time()
    write(state_dir / "node-0" / "ledger.db", slot(0, 0, updated_s=now - 600), slot(2, 1, updated_s=now + 5))
    rows = [line for line in lines(run("status")) if " training " in line]
    assert rows[0].endswith("10 min")
    assert rows[-1].endswith("0.0 s")  # a leader whose clock is ahead of ours


def test_a_terminal_gets_a_table_that_fits(state_dir: Path) -> None:
    """In a pseudo-terminal of 60 columns no line of the table is longer, and its head has a rule under it."""
    code = (
        "import os, pty, sys, termios; from ckptless.daemon.ckptctl.main import ckptctl\n"
        "main, side = pty.openpty(); termios.tcsetwinsize(side, (20, 60)); os.dup2(side, 1)\n"
        "ckptctl(['status'], standalone_mode=False); sys.stdout.flush(); print('the end', flush=True)\n"
        "found = b''\n"
        "while b'the end' not in found: found += os.read(main, 65536)\n"
        "os.write(2, found)"
    )
    environment = {**os.environ, "CKPTLESS_STATE_DIR": str(state_dir), "TERM": "xterm", "PYTHONUTF8": "1"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    table = re.sub(r"\x1b\[\d*m", "", shown[: shown.index("last recovery")]).splitlines()[1:]
    assert any("───" in line for line in table)
    assert max(map(len, table)) <= 60
