"""Slurm's text into values: recorded of 22.05, 24.11 and 26.05, and anything at all."""

import contextlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm import text
from ckptless.daemon.slurm.adapter import OVER
from ckptless.daemon.slurm.errors import (
    SlurmError,
    SlurmNotFoundError,
    SlurmRefusedError,
    SlurmUnreachableError,
    from_message,
)
from ckptless.daemon.slurm.text import JobFormat

RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"
VERSIONS = ("22.05", "24.11", "26.05")
FORM = JobFormat("separator_of_recordings")
SPOOF = "x UserId=root(0) GroupId=root(0) JobState=RUNNING"
KINDS = {"not found": SlurmNotFoundError, "refused": SlurmRefusedError, "unreachable": SlurmUnreachableError}


def recorded(version: str, name: str) -> str:
    return (RECORDED / version / name).read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_jobs(version: str) -> None:
    jobs = {job.job_id: job for job in FORM.read(recorded(version, "jobs.txt"))}
    assert sorted(jobs) == list(range(1, 9))
    assert {job.user_id for job in jobs.values()} == {5001}
    assert {job.partition for job in jobs.values()} == {"main"}
    train = jobs[1]
    assert (train.name, train.comment, train.state) == ("train", "spares=1 run a=b", "RUNNING")
    assert (train.nodes, train.batch_host) == (("node01", "node02"), "node01")
    assert train.running
    assert train.start_s is not None
    assert 1.79e9 < train.start_s < 1.8e9
    limited = jobs[3]
    # Slurm rounds a limit up to minutes.
    assert (limited.name, limited.state, limited.restarts) == ("café", "PENDING", 1)
    assert limited.time_limit_s == 86400 + 2 * 3600 + 4 * 60
    assert (limited.nodes, limited.batch_host) == ((), "")
    assert (jobs[4].array, jobs[4].reason) == ("4_[1-9]", "Dependency")
    assert jobs[4].start_s is None
    assert jobs[4].end_s is None
    assert {jobs[5].array, jobs[7].array} == {"5_0", "5_1"}
    # An allocation has no batch script, hence no batch host, whatever squeue says.
    assert (jobs[6].name, jobs[6].batch_host, jobs[6].time_limit_s) == ("no-shell", "", 600)
    assert jobs[6].end_s is not None
    assert jobs[8].state == "CANCELLED"
    assert jobs[8].over
    assert [job.job_id for job in jobs.values() if job.over] == [8]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_users_words_are_nothing_but_words(version: str) -> None:
    hostile = next(job for job in FORM.read(recorded(version, "jobs.txt")) if job.job_id == 2)
    assert hostile.user_id == 5001
    assert hostile.name == f"one\ntwo {SPOOF}"
    assert hostile.comment == f"\n1;{SPOOF}\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_number_of_an_array_gives_all_its_tasks(version: str) -> None:
    assert {job.job_id for job in FORM.read(recorded(version, "array.txt"))} == {5, 7}


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_nodes(version: str) -> None:
    nodes = {node.name: node for node in text.read_nodes(recorded(version, "nodes.txt"))}
    assert list(nodes) == [f"node0{number}" for number in range(1, 6)]
    for name, node in nodes.items():
        assert (node.address, node.cpus, node.partitions) == (name, 8, ("main",))
        assert node.version.startswith(version)
        assert node.slurmd_start_s is not None
    one = nodes["node01"]
    assert (one.state, one.flags, one.reason) == ("ALLOCATED", frozenset(), "")
    assert one.boot_s is not None
    assert (nodes["node02"].state, nodes["node02"].reason) == ("DOWN", "first line")
    assert nodes["node03"].state == "MIXED"
    four = nodes["node04"]
    assert (four.state, four.reason, four.boot_s) == ("DOWN", "x", None)
    assert not four.responding
    five = nodes["node05"]
    assert (five.state, five.flags) == ("IDLE", frozenset({"DRAIN"}))
    assert five.reason == "ckptless: a=b, State=IDLE (gpu 3)"
    assert [node.name for node in nodes.values() if node.down] == ["node02", "node04"]
    assert [node.name for node in nodes.values() if node.draining] == ["node05"]
    assert not any(node.idle for node in nodes.values())


def test_of_a_key_that_comes_twice_the_first_counts() -> None:
    (node,) = text.read_nodes("NodeName=n1 State=IDLE CPUTot=4 OS=my State=DOWN CPUTot=8 Owner=x\n")
    assert (node.state, node.cpus) == ("IDLE", 4)


def test_what_looks_like_a_key_in_a_reason_is_none() -> None:
    reason = "slow BootTime=2026-11-21T15:09:06 CPUTot=9"
    (node,) = text.read_nodes(f"NodeName=n1 State=DOWN Reason={reason} [root@2026-11-21T15:09:06] Extra=z\n")
    assert (node.reason, node.boot_s, node.cpus) == (reason, None, 0)
    assert node.reason_s == datetime(2026, 11, 21, 15, 9, 6, tzinfo=UTC).timestamp()


def test_the_reason_of_a_state_that_is_over_is_none() -> None:
    """24.11 keeps it."""
    (node,) = text.read_nodes("NodeName=n1 State=ALLOCATED Reason=drained once [root@2026-11-21T15:09:06]\n")
    assert (node.reason, node.reason_s) == ("", None)


def said() -> list[Any]:
    return [
        pytest.param(entry, id=f"{version} {' '.join(entry['argv'])}")
        for version in VERSIONS
        for entry in json.loads(recorded(version, "errors.json"))
        if "ping" not in entry["argv"]
    ]


@pytest.mark.parametrize("entry", said())
def test_recorded_refusals(entry: dict[str, Any]) -> None:
    assert entry["status"] != 0
    error = from_message("do it", entry["err"] or entry["out"])
    assert type(error) is KINDS[entry["kind"]]
    assert str(error).startswith("Slurm could not do it: ")
    assert "error: " not in str(error)
    assert "\n" not in str(error)


def test_what_slurm_says_is_kept_short() -> None:
    assert str(from_message("do it", "")) == "Slurm could not do it: it gave no reason"
    assert len(str(from_message("do it", "word " * 10_000))) < 600


@pytest.mark.parametrize(
    ("written", "state", "flags"),
    [
        ("IDLE", "IDLE", set()),
        ("DOWN*+DRAIN", "DOWN", {"DRAIN", "NOT_RESPONDING"}),
        ("MIXED+DRAIN+NOT_RESPONDING", "MIXED", {"DRAIN", "NOT_RESPONDING"}),
        ("idle~", "IDLE", {"POWERED_DOWN"}),
        ("IDLE#", "IDLE", {"POWERING_UP"}),
        ("DOWN$*", "DOWN", {"MAINTENANCE", "NOT_RESPONDING"}),
        ("IDLE+MAINTENANCE+RESERVED", "IDLE", {"MAINTENANCE", "RESERVED"}),
        ("ALLOCATED-", "ALLOCATED", {"PLANNED"}),
    ],
)
def test_node_states(written: str, state: str, flags: set[str]) -> None:
    assert text.node_state(written) == (state, frozenset(flags))


@pytest.mark.parametrize("bad", ["", "+", "IDLE+", "*", "IDLE DOWN", "1", "IDLE\n+", "I" * 99])
def test_what_is_no_state(bad: str) -> None:
    with pytest.raises(ProtocolError):
        text.node_state(bad)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("10:00", 600),
        ("0:01", 1),
        ("1:00:00", 3600),
        ("365-00:00:00", 365 * 86400),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("N/A", None),
    ],
)
def test_durations(written: str, seconds: float | None) -> None:
    assert text.duration(written) == seconds


@pytest.mark.parametrize("bad", ["1", "1:2:3:4", "-1:00", "1-2", "1:0x", "٣:00"])
def test_what_is_no_duration(bad: str) -> None:
    with pytest.raises(ProtocolError):
        text.duration(bad)


def test_times() -> None:
    assert text.time("1970-01-02T00:00:01") == 86401
    assert text.time("2026-11-21T15:08:47") == 1795273727
    for none in ("N/A", "None", "Unknown", "NONE", "", "n/a"):
        assert text.time(none) is None
    for bad in ("now", "15:08:47", "2026-13-01T00:00:00", "2026-11-21T15:08:47Z", "0000-00-00T00:00:00"):
        with pytest.raises(ProtocolError):
            text.time(bad)


def test_a_separator_is_a_word() -> None:
    for bad in ("", "short", "1separator", ".separator", "sepa,rator", "sepa:rator", "sepa rator", "s" * 65):
        with pytest.raises(ValueError, match="separator"):
            JobFormat(bad)


# ------------------------------------------------------------------------------------- anything at all

FIELDS = ["7", "7", "1000", "RUNNING", "0", "n[1-2]", "1", "n1", "main", "N/A", "N/A", "10:00", "None"]
WORDS = st.text(max_size=60)
# What a user can make of it who knows everything but the secret.
SPOOFS = st.lists(st.sampled_from([*FIELDS, ";", ".", "\n", "separator_of_", "recordings", " UserId=0"])).map(
    "".join
)


def record(values: list[str]) -> str:
    *first, last = values
    return "".join(f"{value}{FORM.secret};" for value in first) + f"{last}{FORM.secret}.\n"


@given(name=WORDS | SPOOFS, comment=WORDS | SPOOFS)
def test_no_name_and_no_comment_touches_another_field(name: str, comment: str) -> None:
    if FORM.secret in name or FORM.secret in comment:
        return
    jobs = FORM.read(record([*FIELDS, name, comment]) * 2)
    assert len(jobs) == 2
    for job in jobs:
        assert (job.job_id, job.user_id, job.state, job.nodes) == (7, 1000, "RUNNING", ("n1", "n2"))
        assert job.name == text.something(name)
        assert job.comment == text.something(comment)


@given(st.integers(0, len(FIELDS) - 1), WORDS)
def test_jobs_with_one_strange_field(index: int, strange: str) -> None:
    values = [*FIELDS, "name", "comment"]
    values[index] = strange
    try:
        (job,) = FORM.read(record(values))
    except ProtocolError:
        return
    assert (job.state in OVER) == job.over


BITS = ["NodeName=", "n1", " State=", "IDLE", "DOWN*", "+DRAIN", " Reason=", "[root@2026-11-21T15:09:06]"]
BITS += [
    "\n",
    " ",
    " CPUTot=",
    "8",
    "9" * 20,
    " BootTime=",
    "None",
    "2026-11-21T15:09:06",
    "=",
    " NodeAddr=",
    " Comment=",
]
NOISE = st.text() | st.lists(st.sampled_from(BITS)).map("".join)


@given(NOISE)
def test_nodes_of_anything(noise: str) -> None:
    try:
        nodes = text.read_nodes(noise)
    except (ProtocolError, SlurmError):
        return
    assert len(nodes) == len(re.findall("^NodeName=", "\n".join(noise.splitlines()), re.MULTILINE))


@given(NOISE)
def test_other_readers_of_anything(noise: str) -> None:
    for reader in (FORM.read, text.duration, text.time, text.node_state, text.job_state):
        try:
            reader(noise)
        except ProtocolError:
            continue


@given(st.text(alphabet=st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=100))
def test_a_reason_comes_back(reason: str) -> None:
    reason = " ".join(reason.split())
    if not reason or re.search(r"\[\S+@|Comment=|Extra=", reason) or reason in text._NOTHING:
        return
    line = f"NodeName=n1 NodeAddr=n1 State=IDLE+DRAIN CPUTot=8  Reason={reason} [root@2026-11-21T15:09:06]\n"
    (node,) = text.read_nodes(line)
    assert (node.name, node.cpus, node.reason, node.flags) == ("n1", 8, reason, frozenset({"DRAIN"}))


# ------------------------------------------------------------------------------------------ topology

# As 22.05, 24.11 and 26.05 gave it, of a tree, and the last two of blocks.
TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[01-02]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node03,node04
SwitchName=core Level=1 LinkSpeed=1 Nodes=node[01-04] Switches=s[0-1]
"""
BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=node[01-02] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node[03-04] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-04] BlockSize=4
"""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (TREE, {"s0": ("node01", "node02"), "s1": ("node03", "node04")}),
        (BLOCK, {"b1": ("node01", "node02"), "b2": ("node03", "node04")}),
        ("BlockName=b1 BlockIndex=0 Nodes=n[1-2]\n", {"b1": ("n1", "n2")}),
        ("RingName=r1 Nodes=n[1-2] RingSize=2\n", {"r1": ("n1", "n2")}),
        ("SwitchName=empty Level=0 LinkSpeed=1\n", {"empty": ()}),
        ("SwitchName=s Level=0 LinkSpeed=1 Nodes=(null)\n", {"s": ()}),
        ("No topology information available\n", {}),
        ("", {}),
    ],
)
def test_topology(answer: str, expected: dict[str, tuple[str, ...]]) -> None:
    assert text.read_topology(answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "SwitchName= Level=0 Nodes=n1",
        "SwitchName=s0 Nodes=n1",
        "SwitchName=s0 Level=low Nodes=n1",
        "BlockName=b Nodes=n[1-",
        "BlockName=b Nodes=n[1-99999999]",
    ],
)
def test_a_topology_that_cannot_be_read(answer: str) -> None:
    with pytest.raises(ProtocolError):
        text.read_topology(answer)


@given(st.text() | st.text(alphabet="SwitchName=Level0Nodes[]-, \n"))
def test_any_topology(answer: str) -> None:
    with contextlib.suppress(ProtocolError):
        assert all(text.read_topology(answer))
