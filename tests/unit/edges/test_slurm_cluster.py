"""Whose a job is and where it runs, by Slurm's word or the prolog's; what Slurm is told of a job's fate."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.ckptlessd import slurm_cluster as module
from ckptless.daemon.ckptlessd.clock import Clock
from ckptless.daemon.ckptlessd.recovery.events import DarkState, NodeLost
from ckptless.daemon.ckptlessd.requeue_memory import RequeueMemory
from ckptless.daemon.ckptlessd.requeue_table import Entry
from ckptless.daemon.ckptlessd.slurm_cluster import SlurmCluster
from ckptless.daemon.ledger.precedence import precedence
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, UsageError
from ckptless.daemon.protocol.messages import PROTOCOL, AgentHello, Cancel, JobEnded, JobStarted, Outcome
from ckptless.daemon.protocol.records import BY_SLURM, JobRecord, JobState
from ckptless.daemon.settings.bind import Interface
from ckptless.daemon.settings.config import KeepConfig
from ckptless.daemon.slurm.adapter import Job, Node, check_text
from ckptless.daemon.slurm.cached import CachedSlurm, Reading
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import SlurmNotFoundError, SlurmRefusedError, SlurmUnreachableError
from ckptless.daemon.slurm.reason import reason_text
from ckptless.daemon.slurm.run_name import slurm_job_id

from .fake_slurm import ADDRESS, NAMES, OWNER, FakeRuntime, FakeSlurm, hello, job

PORT = 6821
LOOK_UP = module._look_up
DEADLINE_S = 30.0
DONE = Outcome(state="done", exit_code=0, reason="every rank ended by itself")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every node's name has an address here, and n2 its own; returns what was looked up."""
    lo, eth0 = (ipaddress.ip_address(text) for text in ("127.0.0.1", ADDRESS))
    monkeypatch.setattr(module, "interfaces", lambda: (Interface("lo", lo), Interface("eth0", eth0)))
    asked: list[str] = []

    def look_up(name: str) -> str:
        asked.append(name)
        return f"10.0.0.{len(asked)}"

    monkeypatch.setattr(module, "_look_up", look_up)
    return asked


def cluster(slurm: CachedSlurm, on_node_lost: Literal["down", "drain", "none"] = "down") -> SlurmCluster:
    return SlurmCluster(slurm, "n2", PORT, on_node_lost)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work()

    asyncio.run(limited())


async def until(true: Callable[[], object]) -> None:
    """The timeout around the test is its deadline."""
    while not true():  # noqa: ASYNC110  # what is waited for is in fakes, which know of no event
        await asyncio.sleep(0.001)


def refused(slurm: FakeSlurm, said: AgentHello, uid: int = OWNER) -> str:
    found: list[str] = []

    async def work() -> None:
        with pytest.raises(PeerError) as caught:
            await cluster(slurm).admit(said, uid)
        found.append(str(caught.value))

    run(work)
    assert "\n" not in found[0]
    return found[0]


# ------------------------------------------------------------------------------------------ who may


@pytest.mark.parametrize("run_name", ["4711", "4711.1", "4711.9999", "4711.s0", "4711.s3r2"])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED"])
def test_the_owner_on_a_node_of_the_job(run_name: str, state: str) -> None:
    async def work() -> None:
        slurm = FakeSlurm(job(1), job(state=state))
        roster = await cluster(slurm).admit(hello(run_name), OWNER)
        assert roster.me == 1
        assert [(p.node, p.name, p.address, p.port) for p in roster.peers] == [
            (0, "n1", "10.0.0.1", PORT),
            (1, "n2", "10.0.0.2", PORT),
            (2, "n3", "10.0.0.3", PORT),
        ]
        assert slurm.asked == [4711]

    run(work)


def test_a_name_is_looked_up_once(names: list[str]) -> None:
    async def work() -> None:
        edge = cluster(FakeSlurm(job(), job(4712)))
        first = await edge.admit(hello(), OWNER)
        again = await edge.admit(hello("4712"), OWNER)
        assert first.peers == again.peers
        assert sorted(names) == sorted(NAMES)

    run(work)


def test_the_prologs_word_spares_the_question() -> None:
    async def work() -> None:
        slurm = FakeSlurm(trouble="slurmctld is away")
        edge = cluster(slurm)
        edge.notice(JobStarted(protocol=PROTOCOL, job_id=4711, uid=OWNER))
        assert (await edge.admit(hello(), OWNER)).me == 1
        with pytest.raises(PeerError, match="is not of uid 1002"):
            await edge.admit(hello(), OWNER + 1)
        assert slurm.asked == []
        # The epilog takes it back.
        edge.notice(JobEnded(protocol=PROTOCOL, job_id=4711, uid=OWNER))
        with pytest.raises(PeerError, match="Slurm cannot say whose job 4711 is: slurmctld is away"):
            await edge.admit(hello(), OWNER)
        assert slurm.asked == [4711]

    run(work)


def test_an_epilog_without_a_prolog_is_no_matter() -> None:
    cluster(FakeSlurm()).notice(JobEnded(protocol=PROTOCOL, job_id=1, uid=0))


# ---------------------------------------------------------------------------------------- who may not


@pytest.mark.parametrize(
    ("slurm", "says"),
    [
        (FakeSlurm(), "it knows none"),
        (FakeSlurm(job(4712)), "it knows none"),
        (FakeSlurm(trouble="connection refused"), "connection refused"),
        (FakeSlurm(job(state="PENDING", nodes=())), "(PENDING) does not have n2"),
        (FakeSlurm(job(state="COMPLETED")), "(COMPLETED) does not have n2"),
        (FakeSlurm(job(state="CANCELLED")), "(CANCELLED) does not have n2"),
        (FakeSlurm(job(nodes=("n1", "n3"))), "does not have n2"),
        (FakeSlurm(job(user_id=1002)), "is not of uid 1001"),
        (FakeSlurm(job(user_id=0)), "is not of uid 1001"),
    ],
)
def test_by_slurms_word(slurm: FakeSlurm, says: str) -> None:
    assert says in refused(slurm, hello())


def test_root_is_not_the_owner() -> None:
    """It needs no admission: it could do anything anyway, but not by mistake."""
    assert "is not of uid 0" in refused(FakeSlurm(job()), hello(), uid=0)


@pytest.mark.parametrize(
    "name",
    [
        *("", "x", "local-1", "-4711", "4711.", ".1", "4711.s", "4711.sr1", "4711.s1r", "4711.1.1", "4711 "),
        *("4711\n", "4711.x", "12345678901", "4711.123456", "4711/1", "../4711", "4711.s1R1", "0x10"),
    ],
)
def test_names_that_are_no_run(name: str) -> None:
    slurm = FakeSlurm(job())
    assert "is not the name of a run" in refused(slurm, hello(name))
    assert slurm.asked == []


@settings(max_examples=2000, deadline=None)
@given(
    number=st.integers(1, 2**32 - 11),
    rest=st.sampled_from(["", ".1", ".9999", ".s0", ".s12", ".s0r1", ".s4294967279r77"]),
)
def test_the_number_of_a_run(number: int, rest: str) -> None:
    assert slurm_job_id(f"{number}{rest}") == number


@settings(max_examples=2000, deadline=None)
@given(st.text("0123456789.sr-x \n", max_size=15))
def test_other_texts_are_runs_of_their_first_number_or_none(text: str) -> None:
    try:
        found = slurm_job_id(text)
    except PeerError:
        return
    assert int(text.partition(".")[0]) == found


@pytest.mark.parametrize(
    ("said", "says"),
    [
        pytest.param(hello(names=("n1", "n2", "n2")), "names 3 nodes for 3 places", id="a name twice"),
        pytest.param(hello(nodes=3), "names 3 nodes for 4 places", id="a name too few"),
        pytest.param(hello(nodes=1), "names 3 nodes for 2 places", id="a name too many"),
        pytest.param(hello(names=(), nodes=0, spares=0), "", id="none at all"),
        pytest.param(hello(node=0), "takes n2 for number 0", id="another node's number"),
        pytest.param(hello(node=3), "takes n2 for number 3", id="a number too high"),
        pytest.param(hello(name="n3"), "takes n2 for number 1, n3", id="another node's name"),
        pytest.param(hello(node=2, name="n3"), "takes n2 for number 2, n3", id="another node"),
        pytest.param(hello(address="192.0.2.1"), "192.0.2.1 is not an address of n2", id="address"),
        pytest.param(hello(address="no such host"), "is not an address of n2", id="no address"),
    ],
)
def test_what_the_agent_says_of_itself(said: AgentHello, says: str) -> None:
    assert says in refused(FakeSlurm(job()), said)


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 3)
    assert "names 4 nodes for 4 places" in refused(FakeSlurm(job()), hello(names=(*NAMES, "n4")))
    assert names == []


def test_a_number_below_none() -> None:
    refused(FakeSlurm(job()), hello(node=-2))


@pytest.mark.parametrize(("nodes", "spares"), [(0, 3), (-1, 4), (4, -1)])
def test_a_sum_of_nodes_that_hides_what_is_none(nodes: int, spares: int) -> None:
    refused(FakeSlurm(job()), hello(nodes=nodes, spares=spares))


@pytest.mark.parametrize(
    "address", ["", "0.0.0.0", "127.0.0.1", "224.0.0.1", "localhost", "010.0.0.2", "10.0.0.3"]
)
def test_addresses_that_are_no_nodes(address: str) -> None:
    """Any, none, many; or a name, which nobody may look up here, in the daemon's event loop."""
    refused(FakeSlurm(job()), hello(address=address))


@pytest.mark.parametrize("address", ["ä..b", "127.0.0.1\0"])
def test_addresses_that_break_the_socket_module(address: str) -> None:
    refused(FakeSlurm(job()), hello(address=address))


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_look_up", LOOK_UP)
    strange = ("n1.invalid", "n2", "x y")
    slurm = FakeSlurm(job(nodes=strange))
    slurm.have = tuple(Node(name=name, address="", state="MIXED") for name in strange)
    assert "has no address here" in refused(slurm, hello(names=strange))


def test_only_slurms_own_nodes_are_looked_up(names: list[str]) -> None:
    """A user could have anything looked up, else, and as much of it as he likes."""
    many = ("n1", "n2", *(f"www{number}.example.org" for number in range(1000)))
    slurm = FakeSlurm(job())
    assert "'www0.example.org' is no node of Slurm's" in refused(slurm, hello(names=many))
    assert names == []
    slurm.trouble, slurm.have = "slurmctld is away", ()
    assert "slurmctld is away" in refused(slurm, hello())


def test_a_name_server_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that fails ends it for all, and MUNGE has threads of its own."""
    nodes = ("n1", "n2", *(f"slow{number}" for number in range(100)))
    asked: list[str] = []
    go_on = threading.Event()

    def look_up(name: str) -> str:
        asked.append(name)
        if name == "n1":
            raise PeerError("the node 'n1' of the job has no address here")
        assert go_on.wait(DEADLINE_S)
        return "10.0.0.9"

    monkeypatch.setattr(module, "_look_up", look_up)

    async def work() -> None:
        slurm = FakeSlurm(job(nodes=nodes))
        slurm.have = tuple(Node(name=name, address="", state="MIXED") for name in nodes)
        edge = cluster(slurm)
        with pytest.raises(PeerError, match="'n1' of the job has no address"):
            await edge.admit(hello(names=nodes), OWNER)
        assert await asyncio.to_thread(lambda: "at once") == "at once"
        go_on.set()
        await edge.aclose()

    run(work)
    assert len(asked) <= 2 * module.LOOKUP_THREADS


# ---------------------------------------------------------------------------------- what Slurm is told


@pytest.mark.parametrize(
    ("way", "state", "word"),
    [
        ("down", "dark", "drain"),
        ("down", "gone", "down"),
        ("down", "back", "drain"),
        ("drain", "dark", "drain"),
        ("drain", "back", "drain"),
    ],
)
def test_a_dark_node(way: Literal["down", "drain"], state: DarkState, word: str) -> None:
    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        edge = cluster(slurm, way)
        edge.node_is_dark(runtime.it, 2, "node-1 hears nothing of it", state)
        await until(lambda: runtime.notes)
        # By the names that Slurm has for nodes.
        assert slurm.told == [(word, "n3", "ckptless: job 4711: n2 hears nothing of it")]
        assert runtime.notes == [("info", "slurm-told", f"mark {word} n3")]
        await edge.aclose()
        assert slurm.closed

    run(work)


def test_a_node_that_was_set_down_and_lives_is_drained_instead() -> None:
    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await until(lambda: runtime.notes)
        # Slurm has taken it out of the job, which is nobody's reason to leave it down.
        slurm.known = [job(nodes=("n1", "n2"))]
        edge.node_is_dark(runtime.it, 2, "it lives", "back")
        await until(lambda: len(runtime.notes) == 2)
        assert [told[0] for told in slurm.told] == ["down", "undrain", "drain"]
        assert slurm.told[2] == ("drain", "n3", "ckptless: job 4711: it lives")
        await edge.aclose()

    run(work)


def test_a_dark_node_where_the_site_wants_nothing() -> None:
    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        edge = cluster(slurm, "none")
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await asyncio.sleep(0.01)
        await edge.aclose()
        assert slurm.told == []
        assert runtime.notes == []

    run(work)


@pytest.mark.parametrize("had", [job(nodes=("n1", "n2")), job(state="COMPLETED"), job(state="CANCELLED")])
@pytest.mark.parametrize("state", ["dark", "gone"])
def test_a_node_that_the_job_does_not_have_now_is_not_marked(had: Job, state: DarkState) -> None:
    """Not given to it, or of a job that is over by then: the node may be back, and another job's."""

    async def work() -> None:
        slurm, runtime = FakeSlurm(had), FakeRuntime()
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", state)
        await until(lambda: runtime.notes)
        await edge.aclose()
        assert slurm.told == []

    run(work)


def test_slurm_that_is_away_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)

    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        slurm.answers = iter([SlurmUnreachableError("away")] * 3)
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await until(lambda: len(runtime.notes) == 2)
        assert len(slurm.told) == 4
        assert [note[:2] for note in runtime.notes] == [("warning", "slurm-away"), ("info", "slurm-told")]
        await edge.aclose()

    run(work)


def test_slurm_that_stays_away_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(module, "RETRIES", 5)

    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        slurm.answers = iter([SlurmUnreachableError("away")] * 99)
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await until(lambda: len(runtime.notes) == 2)
        assert runtime.notes[1] == ("error", "slurm-away", "mark down n3: given up after 5 tries")
        assert len(slurm.told) == 5
        await edge.aclose()

    run(work)


@pytest.mark.parametrize(
    "error",
    [SlurmRefusedError("Invalid user id"), SlurmNotFoundError("Invalid node name"), UsageError("the reason")],
)
def test_a_refusal_is_an_event(error: CkptlessError) -> None:
    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        slurm.answers = iter([error])
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await until(lambda: runtime.notes)
        assert runtime.notes == [("warning", "slurm-refused", f"mark down n3: {error}")]
        assert len(slurm.told) == 1
        await edge.aclose()

    run(work)


def test_what_is_under_way_ends_with_the_daemon() -> None:
    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime()
        slurm.answers = iter([SlurmUnreachableError("away")] * 99)
        edge = cluster(slurm)
        edge.node_is_dark(runtime.it, 2, "silent", "gone")
        await until(lambda: slurm.told)
        await edge.aclose()  # in the pause between two tries
        assert len(asyncio.all_tasks()) == 1

    run(work)


@pytest.mark.parametrize(
    ("leads", "lost", "words"),
    [
        (True, (), ["comment"]),
        (True, (1, 2), ["comment"]),
        (True, (0,), ["cancel", "comment"]),
        (True, (0, 2), ["cancel", "comment"]),
        (False, (), []),
        (False, (0,), []),
    ],
)
def test_the_end_of_a_job(leads: bool, lost: tuple[int, ...], words: list[str]) -> None:
    """Where the batch host is lost nobody else ends it; else its script does, with its own exit code."""

    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime(job="4711.1", leads=leads, lost=lost)
        edge = cluster(slurm)
        edge.ended(runtime.it, DONE)
        await until(lambda: len(runtime.notes) == (leads + bool(lost) if leads else 0))
        await asyncio.sleep(0.01)
        await edge.aclose()
        assert sorted(told[0] for told in slurm.told) == words
        assert {told[1] for told in slurm.told} <= {"4711"}
        if words:
            told = dict((one[0], one) for one in slurm.told)["comment"]
            assert told[2] == "ckptless: done, exit code 0: every rank ended by itself"

    run(work)


def test_an_end_that_is_not_agreed_on_is_nothing_for_slurm() -> None:
    """Its user has stopped this node, which could not ask the others: these may say that the job is done."""

    async def work() -> None:
        slurm, runtime = FakeSlurm(job()), FakeRuntime(job="4711.1", lost=(0,), agreed=False)
        edge = cluster(slurm)
        edge.ended(runtime.it, Outcome(state="stopped", exit_code=143, reason="SIGTERM", why="cancelled"))
        await asyncio.sleep(0.05)
        await edge.aclose()
        assert (slurm.told, runtime.notes) == ([], [])

    run(work)


@pytest.mark.parametrize(
    ("batch_host", "nodes", "host", "cancelled"),
    [
        # Its script lives, and ends the job with its own exit code.
        ("n1", NAMES, {}, False),
        ("n1", NAMES, {"flags": frozenset(("DRAIN",))}, False),
        # It was taken out, and died afterwards; or an admin marked it down in Slurm, and it may be back.
        ("n1", NAMES, {"state": "DOWN"}, True),
        ("n1", NAMES, {"flags": frozenset(("NOT_RESPONDING",))}, True),
        ("n1", ("n2", "n3"), {}, True),
        # Nothing has happened to it; or there is no script.
        ("n2", NAMES, {"state": "DOWN"}, False),
        ("", NAMES, {}, False),
    ],
)
def test_a_batch_host_that_was_taken_out_may_live(
    batch_host: str, nodes: tuple[str, ...], host: dict[str, Any], cancelled: bool
) -> None:
    async def work() -> None:
        slurm = FakeSlurm(job(nodes=nodes, batch_host=batch_host))
        slurm.have = (Node(**{"name": "n1", "address": "", "state": "MIXED", **host}), *slurm.have[1:])
        runtime = FakeRuntime(evicted=(0,))
        edge = cluster(slurm)
        edge.ended(runtime.it, DONE)
        await until(lambda: len(runtime.notes) == 2)
        await edge.aclose()
        assert sorted(told[0] for told in slurm.told) == (["cancel"] if cancelled else []) + ["comment"]

    run(work)


def test_a_step_that_lost_its_first_node_does_not_cancel_the_job() -> None:
    """The batch script runs on n0, and goes on to its next step."""

    async def work() -> None:
        slurm = FakeSlurm(job(nodes=("n0", *NAMES), batch_host="n0"))
        runtime = FakeRuntime(job="4711.s3", lost=(0,))
        edge = cluster(slurm)
        edge.ended(runtime.it, DONE)
        await until(lambda: runtime.notes)
        await asyncio.sleep(0.01)
        await edge.aclose()
        assert [told[0] for told in slurm.told] == ["comment"]

    run(work)


@settings(max_examples=2000, deadline=None)
@given(st.text(max_size=400))
def test_any_reason_is_fit_for_slurm(reason: str) -> None:
    text = reason_text(reason)
    assert check_text(text) == text
    assert text.startswith("ckptless: ")


# ------------------------------------------------------------------------------- jobs that Slurm has ended


def watched(slurm: CachedSlurm, runs: list[FakeRuntime], looks: Callable[[], bool]) -> None:
    async def work() -> None:
        edge = cluster(slurm)
        task = asyncio.create_task(edge.watch(lambda: [one.it for one in runs], 0.005))
        await until(looks)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(work)


def test_runs_of_jobs_that_slurm_has_ended_are_cut_short() -> None:
    slurm = FakeSlurm(job(1), job(2, "CANCELLED"), job(3, "COMPLETING"), job(4, "TIMEOUT"))
    runs = [FakeRuntime(job=name) for name in ("1.s0", "2.1", "3", "4", "5.s1r1")]
    runs.append(FakeRuntime(job="6", outcome=DONE))
    watched(slurm, runs, lambda: len(slurm.asked) > 3)
    assert [bool(one.cut) for one in runs] == [False, True, False, True, True, False]
    assert runs[1].cut[0] == "Slurm has ended the job (CANCELLED)"
    assert runs[4].cut[0] == "Slurm has ended the job (no such job)"


def test_what_is_kept_of_jobs_that_are_over_is_dropped() -> None:
    """And nothing that came after Slurm was asked, or while it is away."""

    async def look(*known: Job, trouble: str = "", age_s: float = 5.0) -> list[str]:
        requeue_memory = RequeueMemory(KeepConfig(nbytes=100), lambda: 10.0)
        for number, name in enumerate(("1", "2", "3", "4"), 1):
            fields: dict[str, Any] = {"uid": OWNER, "node": 0, "program": "p", "restarts": 0, "since_s": 8.0}
            one = Entry(number=number, job=name, run=name, nbytes=1, pieces=1, **fields)
            requeue_memory.table.put(one)
            requeue_memory.table.settled(one)
        slurm = FakeSlurm(*known, trouble=trouble)
        slurm.age_s = 10.0 - age_s
        await cluster(slurm)._look_at_kept(requeue_memory, 1.0)
        return [entry.job for entry in requeue_memory.table.entries]

    known = (job(1), job(2, "PENDING"), job(3, "CANCELLED"))

    async def work() -> None:
        assert await look(*known, age_s=9.0) == ["1", "2"]
        assert await look(*known, age_s=7.0) == ["1", "2", "3", "4"]
        assert await look(trouble="away", age_s=9.0) == ["1", "2", "3", "4"]

    run(work)


def test_while_slurm_is_away_nothing_is_cut_short() -> None:
    slurm = FakeSlurm(trouble="away")
    runs = [FakeRuntime()]
    watched(slurm, runs, lambda: len(slurm.asked) > 3)
    assert runs[0].cut == []


def test_without_a_run_slurm_is_not_asked() -> None:
    slurm, runs = FakeSlurm(), [FakeRuntime(outcome=DONE)]
    looks = iter(range(10))
    watched(slurm, runs, lambda: next(looks, None) is None)
    assert slurm.asked == []


class OneAnswer:
    """A backend behind the real cache: it says what runs when it is asked."""

    def __init__(self) -> None:
        self.running: tuple[Job, ...] = (job(1),)
        self.have: tuple[Node, ...] = ()
        self.asked_nodes = 0

    async def nodes(self, **_: Any) -> tuple[Node, ...]:
        self.asked_nodes += 1
        return self.have

    async def jobs(self, **_: Any) -> tuple[Job, ...]:
        return self.running

    async def aclose(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_job_that_is_younger_than_the_last_answer_is_not_cut_short() -> None:
    """The last answer was for another job's agent; this one began since, and the prolog spoke for it."""

    async def work() -> None:
        backend = OneAnswer()
        slurm = CachedSlurm(cast(Commands, backend), Clock())
        edge = cluster(slurm)
        runs = [FakeRuntime(job="4711", age_s=0.1), FakeRuntime(job="4712")]
        task = asyncio.create_task(edge.watch(lambda: [one.it for one in runs], 0.5))
        await asyncio.sleep(0.2)
        await slurm.job(1)
        backend.running = (job(1), job(4711))
        await asyncio.sleep(0.6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await edge.aclose()
        assert [bool(one.cut) for one in runs] == [False, True]

    run(work)


# ------------------------------------------------------------------------------- nodes that Slurm has down


FAN = (Node(name="n1", address="", state="IDLE"), Node(name="n3", address="", state="DOWN", reason="fan"))


def lost(node: int, reason: str) -> NodeLost:
    return NodeLost(node, reason, 0.0, source="slurm")


@pytest.mark.parametrize(
    ("state", "flags", "is_lost"),
    [
        ("DOWN", (), True),
        ("DOWN", ("NOT_RESPONDING",), True),
        ("DOWN", ("DRAIN",), True),
        # The job goes on there.
        ("ALLOCATED", ("DRAIN",), False),
        ("MIXED", ("FAIL",), False),
        ("ALLOCATED", ("NOT_RESPONDING",), False),
        # slurmctld has just started; or the node is back.
        ("UNKNOWN", (), False),
        ("IDLE", (), False),
    ],
)
def test_what_takes_a_node_from_its_jobs(state: str, flags: tuple[str, ...], is_lost: bool) -> None:
    slurm, runs = FakeSlurm(job()), [FakeRuntime()]
    slurm.have = (Node(name="n3", address="", state=state, flags=frozenset(flags), reason="fan"),)
    watched(slurm, runs, lambda: slurm.asked_nodes > 2)
    assert runs[0].losses == ([lost(2, "Slurm has it down: fan")] if is_lost else [])


def test_each_run_that_is_led_from_here_hears_of_its_own_nodes_once() -> None:
    slurm = FakeSlurm(*(job(number) for number in range(1, 8)))
    slurm.have = (*FAN, Node(name="n9", address="", state="DOWN"))
    runs = [
        FakeRuntime(job="1"),
        FakeRuntime(job="2.1", names=("n9", "n1", "n3"), lost=(2,)),
        FakeRuntime(job="3", names=("n1", "n2")),
        # Another daemon leads it; it is over; ckptless itself knew before Slurm did.
        FakeRuntime(job="4", leads=False),
        FakeRuntime(job="5", outcome=DONE),
        FakeRuntime(job="6", lost=(2,)),
    ]
    watched(slurm, runs, lambda: slurm.asked_nodes > 3)
    fan = [lost(2, "Slurm has it down: fan")]
    assert [one.losses for one in runs] == [fan, [lost(0, "Slurm has it down")], [], [], [], []]
    assert all(one.cut == [] for one in runs)
    # One question each time, however many runs there are.
    assert slurm.asked_nodes <= len(slurm.asked)


def test_the_own_node_is_no_exception() -> None:
    slurm, runs = FakeSlurm(job()), [FakeRuntime()]
    slurm.have = (Node(name="n2", address="", state="DOWN", reason="Not responding"),)
    watched(slurm, runs, lambda: slurm.asked_nodes > 2)
    assert runs[0].losses == [lost(1, "Slurm has it down: Not responding")]


def test_without_a_run_that_it_leads_a_daemon_asks_for_no_nodes() -> None:
    slurm, runs = FakeSlurm(job()), [FakeRuntime(leads=False)]
    watched(slurm, runs, lambda: len(slurm.asked) > 3)
    assert slurm.asked_nodes == 0


def test_an_answer_that_is_stale_or_older_than_the_run_takes_no_node() -> None:
    for trouble, age_s in (("away", 0.0), ("", 60.0), ("", 61.0)):
        slurm, runs = FakeSlurm(job(), trouble=trouble), [FakeRuntime(age_s=60.0)]
        slurm.have, slurm.age_s = FAN, age_s
        watched(slurm, runs, lambda slurm=slurm: slurm.asked_nodes > 2)  # type: ignore[misc]
        assert runs[0].losses == []


def test_the_cache_asks_for_nodes_once_a_look() -> None:
    async def work() -> None:
        backend = OneAnswer()
        backend.running, backend.have = (job(1), job(2)), FAN
        edge = cluster(CachedSlurm(cast(Commands, backend), Clock()))
        runs = [FakeRuntime(job="1"), FakeRuntime(job="2")]
        task = asyncio.create_task(edge.watch(lambda: [one.it for one in runs], 0.2))
        await until(lambda: all(one.losses for one in runs))
        assert backend.asked_nodes == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await edge.aclose()

    run(work)


# ------------------------------------------------------------------------------ why it is signalled


def explained(slurm: FakeSlurm) -> list[tuple[int, int, str]]:
    runtime = FakeRuntime()

    async def work() -> None:
        cancel = Cancel(exit_code=143, reason="SIGTERM", restarts=0)
        edge = cluster(slurm)
        edge.explain(runtime.it, 2, cancel)
        await until(lambda: runtime.reasons)
        await edge.aclose()

    run(work)
    return runtime.reasons


def test_slurm_says_why_a_job_is_signalled() -> None:
    slurm = FakeSlurm()
    slurm.end = Ending(state="RUNNING", preempt_s=1.8e9)
    assert explained(slurm) == [(2, 143, "preempted by Slurm")]
    assert slurm.asked == [4711]


def test_where_slurm_does_not_say_why_the_signal_is_all_there_is() -> None:
    assert explained(FakeSlurm(trouble="no slurmctld")) == [(2, 143, "SIGTERM (no slurmctld)")]


def test_slurm_has_a_second_to_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeSlurm):
        async def ending(self, job_id: int, *, deadline_s: float = 10.0) -> Ending:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(module, "EXPLAIN_S", 0.05)
    assert explained(Silent()) == [(2, 143, "SIGTERM (Slurm does not answer)")]


@pytest.mark.parametrize(("state", "held_s"), [("SUSPENDED", 8.0), ("RUNNING", 0.0), ("", 0.0)])
def test_only_what_slurm_has_suspended_is_held_up(state: str, held_s: float) -> None:
    slurm, runtime = FakeSlurm(trouble="" if state else "no slurmctld"), FakeRuntime()
    slurm.end = Ending(state=state)

    async def work() -> None:
        edge = cluster(slurm)
        edge.ask_suspended(runtime.it, 8.0)
        await until(lambda: not edge._tasks)
        await edge.aclose()

    run(work)
    assert runtime.stopped_s == held_s


@pytest.mark.parametrize(
    ("stage", "leads", "leader", "lost"),
    [("forming", True, 1, True), ("forming", False, -1, True), ("forming", False, 0, False)],
)
def test_a_job_that_waits_for_its_nodes_hears_soon_which_are_down(
    monkeypatch: pytest.MonkeyPatch, stage: str, leads: bool, leader: int, lost: bool
) -> None:
    """Long before `slurm.poll`; and by each daemon itself where none can lead."""
    monkeypatch.setattr(module, "FORMING_POLL_S", 0.005)
    slurm = FakeSlurm()
    slurm.have = (Node(name="n3", address="", state="DOWN", reason="power"), *slurm.have[:2])
    waits = FakeRuntime(stage=stage, leads=leads, leader=leader)
    trains = FakeRuntime(job="4712")

    async def work() -> None:
        edge = cluster(slurm)
        task = asyncio.create_task(edge.watch(lambda: [waits.it, trains.it], 3600.0))
        if lost:
            await until(lambda: waits.losses)
        else:
            await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work)
    assert [(loss.node, loss.reason, loss.source) for loss in waits.losses] == (
        [(2, "Slurm has it down: power", "slurm")] if lost else []
    )
    assert trains.losses == []


# --------------------------------------------------------------------------- rows that nobody has closed


def row(run: str, state: JobState = "running") -> JobRecord:
    return JobRecord(
        job=run, command=("t",), world_size=4, nodes=2, spares=0, state=state, started_s=time.time() - 900
    )


@pytest.mark.parametrize(
    ("run_name", "known", "state", "reason"),
    [
        ("4711", job(state="COMPLETED"), "done", "COMPLETED"),
        ("4711", job(state="NODE_FAIL"), "failed", "NODE_FAIL"),
        ("4711.s2", job(state="TIMEOUT"), "stopped", "TIMEOUT"),
        ("4711", job(4712), "stopped", "it knows the job no more (see sacct)"),
        ("4711", job(restarts=1), "stopped", "it has started the job again"),
        ("4711.s0r1", job(restarts=2), "stopped", "it has started the job again"),
        ("4711", job(start_s=840.0), "stopped", "another job has its number"),
        ("4711.1", job(restarts=1), "running", None),
        ("4711", job(), "running", None),
        ("4711", job(start_s=30.0), "running", None),  # by a clock that differs
        ("4711", job(state="COMPLETING"), "running", None),
        ("local-7", job(state="COMPLETED"), "running", None),
    ],
)
def test_a_row_is_closed_when_slurm_says_so(
    run_name: str, known: Job, state: str, reason: str | None, tmp_path: Path
) -> None:
    """Its agents are gone, or its quorum is, or the daemon was started again: no run of it is here.

    `start_s` of what Slurm knows is seconds after the row's start.
    """
    of_run = row(run_name)
    if known.start_s is not None:
        known = dataclasses.replace(known, start_s=of_run.started_s + known.start_s)

    async def work() -> None:
        ledger, slurm = await opened(tmp_path), FakeSlurm(known)
        ledger.write((of_run, row("1", "done")))
        await passes(cluster(slurm), ledger, [])
        await ledger.close()

    run(work)
    with Ledger.open_readonly(tmp_path / "ledger.db") as kept:
        (found,) = (one for one in kept.rows(JobRecord) if one.job == run_name)
    assert found.state == state
    assert found.reason == (None if reason is None else f"over by Slurm's word: {reason}")
    assert (found.ended_s is None) == (reason is None)


def test_a_row_whose_run_is_still_decided_on_here_stays_open(tmp_path: Path) -> None:
    async def work() -> None:
        ledger, slurm, runtime = await opened(tmp_path), FakeSlurm(job(state="FAILED")), FakeRuntime()
        ledger.write((row("4711"),))
        await passes(cluster(slurm), ledger, [runtime])
        assert runtime.cut
        await ledger.close()

    run(work)
    with Ledger.open_readonly(tmp_path / "ledger.db") as kept:
        assert [one.state for one in kept.rows(JobRecord)] == ["running"]


def test_what_the_daemons_have_decided_counts_for_more_than_slurms_word(tmp_path: Path) -> None:
    def end(reason: str, ended_s: float) -> JobRecord:
        return structs.replace(row("4711"), state="failed", ended_s=ended_s, reason=reason)

    ours, slurms = end("no spare left", 10.0), end(f"{BY_SLURM}: FAILED", 99.0)
    assert max((slurms, ours), key=precedence) is ours
    # Nor does one that was stopped alone know more than those who have agreed on the end.
    stopped = structs.replace(end("SIGINT from the user", 50.0), state="stopped")
    assert max((stopped, ours), key=precedence) is ours
    assert max((stopped, slurms), key=precedence) is stopped


async def opened(folder: Path) -> LedgerWriter:
    ledger = LedgerWriter(folder / "ledger.db")
    await ledger.start()
    return ledger


async def passes(edge: SlurmCluster, ledger: LedgerWriter, runs: list[FakeRuntime]) -> None:
    """A few looks at Slurm."""
    looks, whole = 0, ledger.call

    async def counted(work: Callable[[Ledger], Any]) -> Any:
        nonlocal looks
        looks += 1
        return await whole(work)

    ledger.call = counted  # type: ignore[method-assign]
    task = asyncio.create_task(edge.watch(lambda: [one.it for one in runs], 0.005, ledger=ledger))
    # One look reads, and may write; the fourth is after one whole.
    await until(lambda: task.done() or looks >= 4)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await edge.aclose()


# ------------------------------------------------------------------------------------------- two halves


class Marking(FakeSlurm):
    """It does what it is told, one thing after the other, each after so many turns of the loop."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__(job(nodes=HALVES[0] + HALVES[1]))
        self.have = tuple(Node(name=name, address="", state="MIXED") for name in HALVES[0] + HALVES[1])
        self._turns = iter(turns)

    async def _reached(self) -> None:
        for _ in range(next(self._turns, 0)):
            await asyncio.sleep(0)

    async def nodes(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Node, ...]]:
        await self._reached()
        reading = await super().nodes(max_age_s=max_age_s, wait_s=wait_s)
        await self._reached()
        return reading

    async def job(self, job_id: int, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[Job]:
        await self._reached()
        names = tuple(name for name in HALVES[0] + HALVES[1] if name not in self.down)
        self.known = [dataclasses.replace(self.known[0], nodes=names)]
        reading = await super().job(job_id, max_age_s=max_age_s, wait_s=wait_s)
        await self._reached()
        return reading

    def _set(self, name: str, **more: Any) -> None:
        self.have = tuple(dataclasses.replace(n, **more) if n.name == name else n for n in self.have)

    async def drain(self, name: str, reason: str, *, deadline_s: float = 5.0) -> None:
        await self._reached()
        self._set(name, flags=frozenset({"DRAIN"}), reason=reason)

    async def mark_down(self, name: str, reason: str, *, deadline_s: float = 5.0) -> None:
        await self._reached()
        self._set(name, state="DOWN", reason=reason)

    async def undrain(self, name: str, *, deadline_s: float = 5.0) -> None:
        await self._reached()
        self._set(name, flags=frozenset(), reason="")

    @property
    def down(self) -> set[str]:
        return {node.name for node in self.have if node.down}


HALVES = (("n1", "n2"), ("n3", "n4"))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 20))
def test_of_two_halves_that_ask_at_most_one_goes_on_and_is_not_marked_down(
    turns: list[int], later: int
) -> None:
    slurm = Marking(turns)

    async def ask(half: int, after: int) -> bool:
        for _ in range(after):
            await asyncio.sleep(0)
        return await cluster(slurm)._are_down("4711", [*HALVES[1 - half]], [*HALVES[half]])

    async def both() -> tuple[bool, bool]:
        return await asyncio.gather(ask(0, 0), ask(1, later))

    words = asyncio.run(both())
    down = [slurm.down.issuperset(half) for half in HALVES]
    assert words.count(True) <= 1
    # Who has the word is not down, and the other half is; without a word nobody is.
    assert down == [words[1], words[0]]
    if any(words):
        # Who was told no asks again: what it has done to the other half meanwhile is taken back.
        assert not asyncio.run(ask(1 - words.index(True), 0))
        assert {node.name for node in slurm.have if node.reason} == {*HALVES[1 - words.index(True)]}


def test_a_half_that_asks_later_does_the_other_one_no_harm() -> None:
    async def work() -> None:
        slurm = Marking([])
        edge = cluster(slurm)
        for _ in range(2):
            assert await edge._are_down("4711", ["n3", "n4"], ["n1", "n2"])
            assert not await edge._are_down("4711", ["n1", "n2"], ["n3", "n4"])
            assert slurm.down == {"n3", "n4"}
            assert [node.name for node in slurm.have if node.reason] == ["n3", "n4"]

    run(work)
