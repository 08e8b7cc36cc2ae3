"""Failures on real Slurm: the job goes on, bit for bit, and Slurm is told what it should be."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.recovery.losses import DARK_FOR_GOOD_S

from .cluster.api import Cluster
from .conftest import require, require_slurm
from .training import DEADLINE_S, USER, Training, make_site

NODES = 6


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    with make_site(
        tmp_path_factory.mktemp("site") / "cluster", tmp_path_factory.mktemp("spank"), NODES
    ) as up:
        yield up


@pytest.fixture(autouse=True)
def whole(site: Cluster) -> None:
    site.restore()


def recovered_to(job: Training, generation: int) -> None:
    def told() -> bool:
        rows = [r for r in job.ledger().recoveries if r.job == job.run_name and r.outcome == "recovered"]
        return generation in {r.generation for r in rows}

    job.wait(told, f"the ledgers have the recovery to generation {generation}")


def node_of(job: Training, rank: int) -> str:
    """The node that a rank has in the newest generation."""
    newest = max((g for g in job.ledger().generations if g.job == job.run_name), key=lambda g: g.generation)
    return f"node{newest.places[rank][0] + 1:02d}"


def is_down(site: Cluster, node: str) -> bool:
    """Whether Slurm has it down: of one that was drained before, sinfo shows only that."""
    return "State=DOWN" in site.run("ctl", "scontrol", "show", "node", node).stdout


def sources(job: Training) -> list[str | None]:
    """Return who told of the nodes that it lost, in the order of time."""
    faults = [f for f in job.ledger().faults if f.job == job.run_name and f.kind == "node-lost"]
    return [fault.source for fault in faults]


def reason(job: Training) -> str:
    """Return what users are told of its end."""
    outcome = job.outcome()
    assert outcome is not None
    return str(outcome["reason"])


def test_a_node_that_dies_before_training_begins(site: Cluster) -> None:
    """Slurm's word is enough to begin without it; until then the job's output says whom it waits for."""
    job = Training(site).submit()
    output = job.home / f"slurm-{job.job_id}.out"
    job.wait(lambda: output.exists() and "job " in output.read_text(), "the launcher runs")
    site.power_off("node04")
    # Others may have come later than its first such line.
    said = r"waiting for node04 [^;]*; 4 of 5 nodes are up"
    job.wait(lambda: re.search(said, output.read_text()), "it says whom it waits for")

    def told(node: str) -> bool:
        """Its user, without root, sees the job there; daemons meet after the agents' files are written."""
        # Without a row yet it is no job there.
        shown = site.run(node, "ckptctl", "status", str(job.job_id), user=USER, check=False).stdout
        return shown.startswith(f"job {job.job_id}: forming, waiting for node04, world 4\n")

    for node in ("node01", "node02"):
        job.wait(partial(told, node), f"{node} says whom it waits for")
    # Another user does not.
    other = site.run("node01", "ckptctl", "status", str(job.job_id), user="other", check=False)
    assert (other.returncode, other.stdout) == (4, "")
    site.run("ctl", "scontrol", "update", "nodename=node04", "state=down", "reason=power")
    job.trains()
    assert node_of(job, 3) == "node05"
    job.wait(lambda: "training begins without node04" in output.read_text(), "its output says so, too")
    # Nobody here has met its daemon, and the reason stays that of whoever gave it.
    assert site.run("ctl", "sinfo", "-h", "-R", "-o", "%E %N").stdout == "power node04\n"
    job.ended()
    job.same_bits()


def test_a_rank_is_killed(site: Cluster) -> None:
    faults = [{"where": "backward", "kind": "kill", "rank": 2, "step": 7}]
    job = Training(site, faults).submit()
    job.ended()
    job.same_bits()
    recovered_to(job, 2)
    assert job.slurm("ExitCode") == "0:0"


def test_a_node_loses_power(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.power_off("node02")
    job.trains(2)
    assert node_of(job, 1) == "node05"
    job.wait(lambda: is_down(site, "node02"), "Slurm has it down", DARK_FOR_GOOD_S + DEADLINE_S)
    reason = site.run("ctl", "sinfo", "-h", "-R", "-o", "%E %N").stdout
    assert re.search(rf"ckptless: job {job.job_id}: .*node0\d has heard nothing of it for \d+\.\d s", reason)
    assert "never met" not in reason
    job.ended()
    job.same_bits()
    recovered_to(job, 2)


def test_a_node_is_power_cycled_before_slurm_notices(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.cycle("node03")
    job.trains(2)
    job.ended()
    job.same_bits()


def test_a_cable_is_pulled_and_put_back(site: Cluster) -> None:
    job = Training(site, steps=100).submit()
    job.trains()
    site.unplug("node04")
    job.trains(2)

    def ranks_there() -> str:
        return site.run("node04", "pgrep", "-u", USER, check=False).stdout

    # The node that is cut off ends its ranks by itself: nobody could tell it to.
    job.wait(lambda: not ranks_there(), "node04 has ended its ranks")
    site.plug("node04")

    def returned() -> list[str]:
        events = job.ledger().of_job(job.run_name).events
        return [event.text.split(" ")[0] for event in events if event.kind == "node-returned"]

    job.wait(lambda: returned() == ["node-3"], "its daemon is heard again")

    def told() -> bool:
        reason = site.run("ctl", "sinfo", "-h", "-R", "-o", "%E %N").stdout
        return f"ckptless: job {job.job_id}: nothing on it answered" in reason and "and it lives" in reason

    job.wait(told, "Slurm has it drained, and why")
    assert not is_down(site, "node04")
    job.ended()
    job.same_bits()
    fenced = [e for e in job.ledger().events if e.kind == "fenced" and e.job == job.run_name]
    assert len(fenced) == 1
    # Its daemon has lived through all of it, and takes the next job.
    assert site.service("node04", "ckptlessd").pid is not None


@pytest.fixture
def blocked(site: Cluster) -> Iterator[tuple[str, str]]:
    """Two nodes, of which the first one's words do not reach the other; each reaches all others."""
    pair = ("node02", "node03")
    yield pair
    site.unblock(*pair)


def test_two_nodes_cannot_hear_each_other_one_way(site: Cluster, blocked: tuple[str, str]) -> None:
    """Everybody else hears both, so neither is lost; their ranks would wait until max_stall."""
    job = Training(site, options=("--nodelist=node[01-05]",), steps=80).submit()
    job.trains()
    site.block(*blocked)
    job.trains(2)
    job.ended()
    job.same_bits()
    (fault,) = (f for f in job.ledger().faults if f.job == job.run_name and f.kind == "node-lost")
    assert (fault.node, fault.source) == (2, "leader")
    assert "it and node-1 cannot reach each other, though others see both" in (fault.detail or "")
    # It lives: nobody marks it for the fault of a cable.
    assert not any(state.startswith("down") for state in site.node_states().values())


@pytest.mark.slow  # 20 s of a bad cable, and what follows
def test_a_cable_flaps(site: Cluster) -> None:
    job = Training(site, steps=200).submit()
    job.trains()
    limit = time.monotonic() + 20.0
    while time.monotonic() < limit:
        site.unplug("node04")
        time.sleep(2.5)
        site.plug("node04")
        time.sleep(0.5)
    job.trains(2)
    job.wait(lambda: "drain" in site.node_states()["node04"], "Slurm has it drained")
    time.sleep(DARK_FOR_GOOD_S)  # when one that stayed silent would be down
    assert not is_down(site, "node04")
    job.ended()
    job.same_bits()


@pytest.mark.parametrize("gone", [True, False], ids=["is gone", "is stopped"])
def test_a_node_whose_daemon_is_silent_is_cut_off(site: Cluster, *, gone: bool) -> None:
    """Nobody is left there to say so: its agent asks the others, and ends its ranks.

    Before it is cut off the silence changes nothing, however long it is: the lease of this site is 2 s.
    """
    job = Training(site, steps=150).submit()
    job.trains()
    if gone:
        site.service_stop("node04", "ckptlessd")
    else:
        site.service_kill("node04", "ckptlessd", signal.SIGSTOP)
    time.sleep(5.0)
    job.trains(1)
    assert max(job.result().generations) == 1
    site.unplug("node04")
    job.trains(2)
    job.wait(
        lambda: not site.run("node04", "pgrep", "-u", USER, check=False).stdout, "it has ended its ranks"
    )
    site.plug("node04")
    if gone:
        site.service_start("node04", "ckptlessd")
    else:
        site.service_kill("node04", "ckptlessd", signal.SIGCONT)
    job.ended()
    job.same_bits()


def test_the_batch_host_loses_power(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.power_off("node01")
    job.trains(2)
    # Slurm leaves a job without its batch script running for ever; our daemons end it.
    job.ended(0, "CANCELLED")
    job.same_bits()


def test_the_leaders_node_and_a_rank_elsewhere_at_once(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    pid = (job.home / "out" / "pid-2.txt").read_text().split()[0]
    site.power_off("node01")
    site.run("node03", "kill", "-KILL", pid)
    job.trains(2)
    job.ended(0, "CANCELLED")
    job.same_bits()
    assert (node_of(job, 0), node_of(job, 2)) == ("node05", "node03")


def test_a_minority_of_two_is_cut_off_and_comes_back(site: Cluster) -> None:
    job = Training(site, nodes=6, spares=2, steps=100).submit()
    job.trains()
    for node in ("node02", "node04"):
        site.unplug(node)
    job.trains(2)
    assert {node_of(job, rank) for rank in (1, 3)} == {"node05", "node06"}

    def ranks_there() -> str:
        return "".join(
            site.run(node, "pgrep", "-u", USER, check=False).stdout for node in ("node02", "node04")
        )

    job.wait(lambda: not ranks_there(), "those that are cut off have ended their ranks")
    for node in ("node02", "node04"):
        site.plug(node)
    job.trains(2)
    job.ended()
    job.same_bits()
    fenced = [e for e in job.ledger().events if e.kind == "fenced" and e.job == job.run_name]
    assert len(fenced) == 2
    assert {g.generation for g in job.ledger().generations if g.job == job.run_name} == {1, 2}


def test_slurmctld_is_down_during_a_recovery(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.stop_slurmctld()
    site.power_off("node02")
    job.trains(2)
    job.wait(
        lambda: [e for e in job.ledger().events if e.kind == "slurm-away" and e.job == job.run_name],
        "the event that Slurm could not be told",
    )
    site.start_slurmctld()
    job.wait(lambda: is_down(site, "node02"), "Slurm has it down", DARK_FOR_GOOD_S + DEADLINE_S)
    job.ended()
    job.same_bits()


def test_slurmd_is_killed(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.stop_slurmd("node02", 9)
    job.trains()
    assert job.result().generations == {1}
    site.start_slurmd("node02")
    job.ended()
    job.same_bits()


def test_a_node_is_set_down_while_it_lives(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scontrol", "update", "nodename=node02", "state=down", "reason=fan")
    job.trains(2)
    assert node_of(job, 1) == "node05"
    job.ended()
    job.same_bits()
    recovered_to(job, 2)
    # Slurm ends the agent there at once, which is seen before Slurm is asked again.
    assert sources(job) in (["agent"], ["slurm"]), job.story()


def test_a_node_is_set_down_that_nobody_else_misses(site: Cluster) -> None:
    """Its slurmd is dead, so nobody ends what runs there: only Slurm's word tells that it left the job."""
    job = Training(site, steps=80).submit()
    job.trains()
    site.stop_slurmd("node03", 9)
    site.run("ctl", "scontrol", "update", "nodename=node03", "state=down", "reason=fan")
    job.trains(2)
    assert node_of(job, 2) == "node05"
    job.ended()
    job.same_bits()
    recovered_to(job, 2)
    assert sources(job) == ["slurm"], job.story()
    (fault,) = (f for f in job.ledger().faults if f.job == job.run_name and f.kind == "node-lost")
    assert fault.detail == "Slurm has it down: fan (rank 2)"


def test_nodes_are_taken_out_by_their_users_and_the_site(site: Cluster) -> None:
    job = Training(site, nodes=6, spares=2, steps=200).submit()
    job.trains()

    def evict(node: str, *words: str, user: str = USER) -> tuple[int, str]:
        command = ("ckptctl", "evict", "--yes", *words, str(job.job_id), node)
        done = site.run("node04", *command, user=user, check=False)
        return done.returncode, done.stdout + done.stderr

    assert evict("node02", user="other")[0] == 4
    assert evict("node02", "--source", "health")[0] == 1
    assert evict("node02", "--reason", "ECC errors") == (0, f"node02 is taken out of job {job.job_id}\n")
    job.trains(2)
    # The batch host, on which the daemon leads.
    words = ("--source", "health", "--reason", "GPU 3 is gone")
    assert evict("node01", *words, user="root")[0] == 0
    job.trains(3)
    assert {node_of(job, 0), node_of(job, 1)} == {"node05", "node06"}
    code, text = evict("node03")
    assert code == 1
    assert "no spare" in text
    # What Slurm does with such a node is the operator's business.
    assert not any(state.startswith(("down", "drain")) for state in site.node_states().values())
    job.ended()
    job.same_bits()
    assert sources(job) == ["operator", "health"], job.story()


def test_drills_of_its_user(site: Cluster) -> None:
    job = Training(site, steps=200).submit()
    job.trains()

    def drill(*words: str, user: str = USER) -> tuple[int, str]:
        command = ("ckptctl", "drill", "--yes", str(job.job_id), *words)
        done = site.run("node04", *command, user=user, check=False)
        return done.returncode, done.stdout + done.stderr

    assert drill("--kill-rank", "1", user="other")[0] == 4
    code, text = drill("--kill-rank", "1", "--when", f"step={job.newest() + 10}")
    assert code == 0, text
    job.trains(2)
    lost = ("--kill-agent", "node02")
    job.wait(lambda: drill(*lost, user="root")[0] == 0, "the drill before it is over", 20.0)
    job.trains(3)
    assert node_of(job, 1) == "node05"
    code, text = drill("--kill-agent", "node03")
    assert code == 1
    assert "no spare" in text
    # The node answers, and nobody drains it.
    assert not any(state.startswith(("down", "drain")) for state in site.node_states().values())
    job.ended()
    job.same_bits()
    faults = [fault for fault in job.ledger().faults if fault.job == job.run_name]
    assert {fault.source for fault in faults} == {"drill"}, job.story()
    assert {"died", "node-lost"} <= {fault.kind for fault in faults}


def test_a_node_is_cut_off_by_a_drill(site: Cluster) -> None:
    """No cable is pulled: its own daemon has the kernel drop what comes and goes."""
    if site.run("node02", "sh", "-c", "command -v nft", check=False).returncode:
        require("nft(8) is not installed")
    job = Training(site, steps=200).submit()
    job.trains()
    words = ("ckptctl", "drill", "--yes", str(job.job_id), "--cut", "node02", "--for", "8")
    refused = site.run("node04", *words, user=USER, check=False)
    assert refused.returncode == 1
    assert "only root may cut a node off" in refused.stderr
    site.run("node04", *words, user="root")
    job.trains(2)
    assert node_of(job, 1) == "node05"
    # Slurm hears of nothing, and the node comes back.
    back = lambda: not site.run("node02", "nft", "list ruleset").stdout  # noqa: E731
    job.wait(back, "the cut is over", 30.0)
    assert not any(state.startswith(("down", "drain")) for state in site.node_states().values())
    job.ended()
    job.same_bits()
    faults = [fault for fault in job.ledger().faults if fault.job == job.run_name]
    assert {fault.source for fault in faults} == {"drill"}, job.story()
    assert "node-lost" in {fault.kind for fault in faults}


def test_our_daemons_are_killed_in_training_and_in_a_recovery(site: Cluster) -> None:
    faults = [{"where": "forward", "kind": "kill", "rank": 1, "step": 30}]
    job = Training(site, faults, steps=80).submit()
    job.trains()
    for node in ("node01", "node03"):
        before = site.service_pid(node, "ckptlessd")
        site.service_kill(node, "ckptlessd")
        job.wait(lambda: site.service_pid(node, "ckptlessd") not in (None, before), "it is back")  # noqa: B023
        job.trains()
    assert job.result().generations == {1}
    job.wait(lambda: job.result().struck, "the fault")
    site.service_kill("node01", "ckptlessd")
    job.trains(2)
    job.ended()
    # The toy wrote 80 steps; their like is made once more, without faults.
    job.same_bits()


def test_two_nodes_at_once(site: Cluster) -> None:
    job = Training(site, nodes=6, spares=2).submit()
    job.trains()
    site.power_off("node02", "node03")
    job.trains(2)
    job.ended()
    job.same_bits()
    assert {node_of(job, rank) for rank in (1, 2)} == {"node05", "node06"}


def test_half_of_the_nodes_at_once(site: Cluster) -> None:
    """slurmctld has the casting vote, and has not noticed anything by itself."""
    lease = ("--max-stall", "300")  # it follows from that, and is 10 s
    job = Training(site, nodes=4, spares=2, options=("--ntasks-per-node=2",), run_options=lease).submit()
    job.trains()
    site.power_off("node01", "node03")
    job.trains(2)
    job.hurry()
    job.wait(lambda: job.outcome() is not None, "its end")
    job.same_bits()
    assert {node_of(job, rank) for rank in range(4)} == {"node02", "node04"}
    ledger = job.ledger().of_job(job.run_name)
    events = [event.text for event in ledger.events if event.kind == "witness"]
    assert "half of the voters is silent: node-0, node-2" in events, job.story()
    assert "node-0, node-2 are dead by the cluster's word" in events, job.story()
    assert is_down(site, "node01")
    assert is_down(site, "node03")
    job.nothing_left()


@pytest.fixture
def in_halves(site: Cluster) -> Iterator[Callable[[], None]]:
    """Nodes 1 and 3 do not reach 2 and 4, nor these them; all reach slurmctld."""
    pairs = [(a, b) for a in ("node01", "node03") for b in ("node02", "node04")]
    ways = [way for a, b in pairs for way in ((a, b), (b, a))]

    def cut() -> None:
        for way in ways:
            site.block(*way)

    yield cut
    for way in ways:
        site.unblock(*way)


def test_two_halves_live_and_one_of_them_goes_on(site: Cluster, in_halves: Callable[[], None]) -> None:
    """That of the lowest voter asks slurmctld first; the other one is told no, and does it no harm."""
    lease = ("--max-stall", "300")  # it follows from that, and is 10 s
    job = Training(site, nodes=4, spares=2, options=("--ntasks-per-node=2",), run_options=lease).submit()
    job.trains()
    in_halves()
    job.trains(2)
    job.hurry()
    job.wait(lambda: job.outcome() is not None, "its end")
    job.same_bits()
    assert {node_of(job, rank) for rank in range(4)} == {"node01", "node03"}
    assert is_down(site, "node02")
    assert is_down(site, "node04")
    assert not is_down(site, "node01")
    assert not is_down(site, "node03")
    job.nothing_left()


def closed_by_slurm(job: Training, state: str, word: str) -> None:
    """No daemon has decided how it ended; each that lives learns it from Slurm."""

    def rows() -> set[tuple[str, str | None]]:
        return {(row.state, row.reason) for row in job.ledger().jobs if row.job == job.run_name}

    job.wait(lambda: rows() == {(state, f"over by Slurm's word: {word}")}, "its row is closed", 60.0)


def test_a_job_is_cancelled_while_the_daemons_are_down(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    for node in site.plan.node_names:
        site.service_stop(node, "ckptlessd")
    site.run("ctl", "scancel", str(job.job_id), user=USER)
    job.wait(lambda: job.slurm("JobState") == "CANCELLED", "Slurm has ended it", 60.0)
    job.nothing_left()
    (row,) = {row.state for row in job.ledger().jobs if row.job == job.run_name}
    assert row == "running"
    for node in site.plan.node_names:
        site.service_start(node, "ckptlessd")
    closed_by_slurm(job, "stopped", "CANCELLED")


@pytest.mark.slow  # the row is closed as in the test before
def test_all_agents_are_killed(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    for node in site.plan.node_names:
        site.run(node, "pkill", "-KILL", "ckptless-agent", check=False)
    job.wait(lambda: job.slurm("JobState") == "FAILED", "Slurm has ended it", 120.0)
    job.nothing_left()
    closed_by_slurm(job, "failed", "FAILED")


def test_more_than_half_of_the_nodes_at_once(site: Cluster) -> None:
    """Those that are left cannot know that it is not they who are cut off: they end, and say why."""
    job = Training(site, nodes=4, spares=2, options=("--ntasks-per-node=2",)).submit()
    job.trains()
    site.power_off("node02", "node03", "node04")

    def fenced() -> list[str]:
        ledger = job.ledger().of_job(job.run_name)
        return [event.text for event in ledger.events if event.kind == "fenced"]

    job.wait(fenced, "node-0 ends its ranks")
    assert fenced() == ["node-0 ends its ranks: it heard 1 of 4 voters for 2.0 s"], job.story()
    assert [row.generation for row in job.ledger().of_job(job.run_name).generations] == [1]
    site.run("ctl", "scancel", str(job.job_id), user=USER)
    # Until the dead nodes are down for Slurm, too, it calls the job COMPLETING.
    site.run("ctl", "scontrol", "update", "NodeName=node[02-04]", "State=DOWN", "Reason=no power")
    closed_by_slurm(job, "stopped", "CANCELLED")


def test_scancel(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scancel", str(job.job_id), user=USER)
    job.wait(lambda: job.slurm("JobState") == "CANCELLED", "Slurm has ended it", 45.0)
    job.nothing_left()
    site.wait_idle()
    job.wait(lambda: job.row() == ("stopped", 143), "its row is closed")
    assert reason(job) == "cancelled (scancel)"


@pytest.mark.slow  # a minute is the least that Slurm knows of, and it looks twice a minute
def test_the_time_limit(site: Cluster) -> None:
    job = Training(site, steps=2000, options=("--time=1",)).submit()
    job.trains()
    job.wait(lambda: job.slurm("JobState") == "TIMEOUT", "Slurm has ended it", 240.0)
    job.nothing_left()
    site.wait_idle()
    job.wait(lambda: job.row() == ("stopped", 143), "its row is closed")
    assert reason(job) == "Slurm's time limit for the job"


@pytest.mark.slow  # Slurm itself waits two minutes before it starts a job again
def test_requeue_by_the_user(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scontrol", "requeue", str(job.job_id), user=USER)
    again = job.home / f"ckptless-{job.job_id}.1"
    job.wait(again.exists, "its second start", 200.0)
    job.hurry()
    job.wait((again / "outcome.json").exists, "its second end")
    job.nothing_left()
    job.wait(lambda: job.row() == ("stopped", 143), "the row of its first start is closed")
    job.wait(lambda: job.row(f"{job.job_id}.1") == ("done", 0), "and that of its second")
    assert reason(job) == "put back into Slurm's queue (scontrol requeue)"


@pytest.mark.slow  # Slurm itself waits two minutes before it starts a job again
def test_a_job_without_spares_left_goes_back_into_the_queue(site: Cluster) -> None:
    job = Training(site, run_options=("--requeue", "1")).submit()
    job.trains()
    for node in ("node02", "node03"):
        site.power_off(node)
    first = job.log_dir / "outcome.json"
    job.wait(first.exists, "its first end")
    assert json.loads(first.read_text())["why"] == "no-spare"
    for node in ("node02", "node03"):
        site.boot(node)
        site.wait_state(node, "down", "drained")
        site.resume(node)
    site.wait_registered()
    again = job.home / f"ckptless-{job.job_id}.1"
    job.wait(again.exists, "its second start", 240.0)
    job.hurry()
    job.wait((again / "outcome.json").exists, "its second end")
    job.nothing_left()
    assert json.loads((again / "outcome.json").read_text())["why"] == "done"
    job.wait(lambda: job.row() == ("failed", 4), "the row of its first start is closed")
    job.wait(lambda: job.row(f"{job.job_id}.1") == ("done", 0), "and that of its second")
    # What the lost nodes had is with the others, whose daemons have kept it.
    (start,) = {e.text for e in job.ledger().events if e.kind == "start" and e.job == f"{job.job_id}.1"}
    assert start.endswith(f"from the memory of run {job.job_id}, kept on 3 nodes"), start
    job.same_bits()


def test_a_node_is_drained_by_the_admin(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scontrol", "update", "nodename=node02", "state=drain", "reason=fan")
    job.trains()
    assert job.result().generations == {1}
    job.ended()
    job.same_bits()
    site.wait_state("node02", "drained")


def test_two_users_at_once_and_a_thief(site: Cluster) -> None:
    # The thief takes some seconds to come, on a busy machine many.
    mine = Training(site, nodes=5, steps=200, options=("--cpus-per-task=2",)).submit()
    theirs = Training(site, nodes=5, steps=200, options=("--cpus-per-task=2",), user="other").submit()
    mine.trains()
    theirs.trains()
    # Somebody else's agent says that it is of my job, on one of my nodes.
    config = "import base64, os, msgspec; from ckptless.daemon.settings.agent_config import *; "
    config += "from ckptless.daemon.protocol.model import *; "
    config += "n = tuple('node%02d' % i for i in range(1, 6)); "
    config += f"s = JobSpec(job='{mine.job_id}', command=('x',), nodes=4, spares=1, slots_per_node=1, "
    config += "limits=Limits.from_max_stall(60), names=n); "
    config += "c = SharedConfig(spec=s, argv=('x',), module=False, cwd='/tmp', log_dir='/tmp', preload=(), "
    config += "daemon_socket='/run/ckptless/ckptlessd.sock'); "
    config += "os.environ[AGENT_CONFIG] = base64.b64encode(msgspec.json.encode(c)).decode(); "
    config += "import sys; me = sys.executable; "
    config += "os.execv(me, [me, '-m', 'ckptless.daemon.agent.main', '--slurm'])"
    thief = site.run(
        "node02",
        str(Path(sys.prefix) / "bin/python"),
        "-c",
        config,
        user="other",
        check=False,
        timeout_s=DEADLINE_S,
    )
    assert thief.returncode == 3, thief.stderr
    assert "is not of uid" in thief.stderr
    start = time.monotonic()
    mine.trains()
    assert mine.result().generations == {1}, f"{time.monotonic() - start}"
    for job in (mine, theirs):
        job.ended()
        job.same_bits()
