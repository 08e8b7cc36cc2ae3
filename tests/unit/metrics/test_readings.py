"""From the state of a daemon to series: which there are, how many at most, and what they do not say."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptless.daemon.ckptlessd.metrics.catalog import METRICS, MOST_JOBS
from ckptless.daemon.ckptlessd.metrics.exposition import encode, families
from ckptless.daemon.ckptlessd.metrics.readings import OUTCOMES, Facts, Parts, held, parts, readings
from ckptless.daemon.ckptlessd.metrics.tally import Tally
from ckptless.daemon.ckptlessd.recovery.events import NodeLost
from ckptless.daemon.protocol import messages as m

from .jobs import NOW_S, PACE, STEP, copies, facts, health, job, lived, recovery, tell

# What the metrics of one node may have, with thousands of jobs behind it: text that is no burden to scrape.
MOST_SERIES, MOST_NBYTES = 800, 100_000


def text_of(given: Facts, *, per_job: bool = False) -> str:
    return encode(families(readings(given, {}, per_job=per_job)), open_metrics=False).decode()


def series_of(text: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(text)
    return [(one.name, tuple(sorted(one.labels.items()))) for found in families for one in found.samples]


def test_an_idle_daemon_tells_all_that_has_no_labels_of_others() -> None:
    values = readings(facts(), {}, per_job=True)
    assert values.keys() == {one.name for one in METRICS}
    assert values["ckptless_build"] == {("1.2.3", str(m.PROTOCOL)): 1.0}
    assert values["ckptless_recoveries"] == {(outcome,): 0 for outcome in OUTCOMES}
    assert values["ckptless_ledger_size_bytes"] == {(): 1 << 20}
    assert values["ckptless_ledger_lost_rows"] == {(): 2}
    assert set(values["ckptless_jobs"].values()) == {0}
    assert values["ckptless_job_step"] == values["ckptless_probe_duration_seconds"] == {}


def test_every_outcome_of_a_recovery_is_told() -> None:
    tally = Tally()
    tally.told([recovery(outcome) for outcome in OUTCOMES])
    assert readings(facts(tally=tally), {}, per_job=False)["ckptless_recoveries"] == dict.fromkeys(
        ((outcome,) for outcome in OUTCOMES), 1
    )


def test_what_is_led_from_here_is_told_of_here_alone() -> None:
    led, other = job(), job("4712", leads=False)
    values = readings(facts(("4711", led), ("4712", other)), {"4711": Parts(3, 1)}, per_job=True)
    assert values["ckptless_jobs"][("running",)] == 1
    assert values["ckptless_node_jobs"][("running",)] == 2
    assert values["ckptless_ranks"] == {(): 6}
    assert values["ckptless_spare_nodes"] == {(): 1}
    assert values["ckptless_state_parts_on_one_node"] == {(): 3}
    assert values["ckptless_state_parts_lost"] == {(): 1}
    assert values["ckptless_job_step"] == {("4711",): STEP}
    assert values["ckptless_job_state_parts_lost"] == {("4711",): 1}
    # Of this node's own two ranks of each.
    assert values["ckptless_node_slots"][("restored",)] == 4
    assert values["ckptless_node_held_bytes"] == {(): 2 * 4 * 1010}
    assert values["ckptless_node_commit_ratio"] == {(): 0.02}


def test_a_job_that_recovers() -> None:
    led = job(stage="restoring", generation=3)
    led.lose(NodeLost(3, "secret", 0.0, source="slurm"))
    led.held_up_by = frozenset({1, 2})
    values = readings(facts(("4711", led)), {}, per_job=True)
    assert values["ckptless_jobs"][("restoring",)] == 1
    assert values["ckptless_lost_nodes"] == {(): 1}
    assert values["ckptless_spare_nodes"] == {(): 0}, "it was the spare"
    assert values["ckptless_stragglers"] == {(): 2}
    assert values["ckptless_job_training"] == {("4711",): 0.0}
    assert values["ckptless_job_generation"] == {("4711",): 3}


def test_a_node_whose_ranks_have_left_spends_nothing_on_commits() -> None:
    left = job(leads=False)
    left.me = 3
    tell(left, 3, 2, STEP)
    assert readings(facts(("1", left)), {}, per_job=False)["ckptless_node_commit_ratio"] == {(): 0}


def test_a_job_without_a_generation_or_a_word_of_its_ranks() -> None:
    led = job(stage="forming", step=None)
    values = readings(facts(("4711", led)), {}, per_job=True)
    assert values["ckptless_job_step"] == values["ckptless_job_step_duration_seconds"] == {}
    assert values["ckptless_job_commit_ratio"] == {}
    bare = job(leads=False)
    bare.agreement.durable = bare.agreement.durable.__class__(
        promised=bare.agreement.durable.promised,
        vote=None,
        known=bare.known.__class__(index=0, voters=(0, 1)),
    )
    assert readings(facts(("4711", bare)), {}, per_job=False)["ckptless_ranks"] == {(): 0}


def test_a_job_that_is_over_is_in_its_nodes_stages_alone() -> None:
    over = job(stage="ended")
    over.ended_here = m.Outcome(state="done", exit_code=0, reason="x")
    values = readings(facts(("4711", over)), {}, per_job=True)
    assert values["ckptless_node_jobs"][("ended",)] == 1
    assert set(values["ckptless_jobs"].values()) == {0}
    assert values["ckptless_job_step"] == {}
    assert values["ckptless_node_jobs_without_leader"] == {(): 0}


def test_the_control_plane_says_what_it_lacks() -> None:
    alone = job(leads=False)
    assert readings(facts(("1", alone)), {}, per_job=False)["ckptless_node_jobs_without_leader"] == {(): 0}
    alone.reachable, alone.lease.since = {0}, NOW_S - 5
    alone.agreement.not_saved("the disk is full", NOW_S)
    values = readings(facts(("1", alone)), {}, per_job=False)
    assert values["ckptless_node_jobs_without_lease"] == {(): 1}
    assert values["ckptless_node_jobs_without_leader"] == {(): 1}
    assert values["ckptless_node_jobs_without_vote"] == {(): 1}


def test_the_parts_of_a_step_are_the_step() -> None:
    values = readings(facts(("1", job())), {}, per_job=True)["ckptless_job_step_duration_seconds"]
    found = {part: one for (_, part), one in values.items() if isinstance(one, float)}
    assert found == {"work": pytest.approx(0.1), "data": 0.02, "waiting": 0.05, "commit": 0.03}
    assert sum(found.values()) == pytest.approx(PACE.took_s)


def test_health_is_told_by_probe_and_action() -> None:
    report = health(2, findings=3)
    ended = report.verdicts[0].ended(NOW_S)
    report = type(report)(
        node="n0", act="evict", probes=report.probes, verdicts=(*report.verdicts[1:], ended)
    )
    values = readings(facts(report=report), {}, per_job=False)
    assert values["ckptless_probes"] == {("looks",): 2, ("off",): 0, ("hangs",): 0, ("failed",): 0}
    assert values["ckptless_health_findings"] == {("probe-0", "evict"): 2, ("probe-1", "evict"): 3}
    assert values["ckptless_probe_last_look_timestamp_seconds"][("probe-0",)] == NOW_S - 5
    assert values["ckptless_probe_duration_seconds"][("probe-1",)] == 0.25


# ------------------------------------------------------------------------- who holds what of the state


def parts_of(led: object) -> Parts:
    what = held("4711", led)  # type: ignore[arg-type]
    assert what is not None
    return parts(what)


def test_parts_that_few_hold_are_those_of_ckptctl_replicas() -> None:
    led = job()
    assert parts_of(led) == Parts(0, 0)
    led.lose(NodeLost(1, "x", 0.0, source="slurm"))
    # It had ranks 2 and 3, and copies of 4 and 5: of each the tensors and the record.
    assert parts_of(led) == Parts(8, 0)
    led.lose(NodeLost(2, "x", 0.0, source="slurm"))
    # Node 0 has its own, and those of ranks 2 and 3. Which shards the others had nobody knows any more.
    assert parts_of(led) == Parts(8, 2)


def test_nothing_is_missed_before_there_is_a_step_or_in_a_recovery() -> None:
    begun = job()
    for node in range(4):
        begun.nodes[node].copies = (copies(), 1, NOW_S)
    assert held("4711", begun) is None
    assert held("4711", job(stage="restoring")) is None
    assert held("4711", job(leads=False)) is None


# --------------------------------------------------------------------------------- bounds and privacy


def test_series_are_bounded_after_a_thousand_jobs() -> None:
    """A thousand jobs of history, 8 that run with 64 ranks on 8 nodes; with and without single jobs."""
    running = [(f"{number}", job(f"{number}", nodes=8, slots=8)) for number in range(8)]
    given = facts(*running, tally=lived(1000), report=health(20))
    text = text_of(given)
    assert len(series_of(text)) < MOST_SERIES
    assert len(text) < MOST_NBYTES
    assert len(series_of(text)) == len(set(series_of(text)))
    more = text_of(given, per_job=True)
    assert len(series_of(more)) - len(series_of(text)) == 8 * 14 + 1
    assert len(more) < MOST_NBYTES


def test_a_thousand_jobs_at_once_have_no_more_series_than_a_hundred() -> None:
    jobs = [(f"{number}", job(f"{number}")) for number in range(1000)]
    for number, (_, one) in enumerate(jobs):
        one.started = NOW_S + number
    given = facts(*jobs, tally=lived(), report=health(20))
    values = readings(given, {}, per_job=True)
    assert values["ckptless_jobs_without_series"] == {(): 1000 - MOST_JOBS}
    assert values["ckptless_job_step"].keys() == {(str(number),) for number in range(900, 1000)}
    assert values["ckptless_jobs"][("running",)] == 1000
    assert len(series_of(text_of(given))) < MOST_SERIES
    assert len(text_of(given, per_job=True)) < 2 * MOST_NBYTES


def test_nothing_is_said_of_whose_job_it_is_unless_the_site_wants_it() -> None:
    led = job("private-name")
    led.lose(NodeLost(2, "secret", 0.0, source="slurm"))
    led.ended_here = None
    text = text_of(facts(("private-name", led), tally=lived(), report=health()))
    for word in ("private-name", "secret", "GPU 0", "xid-79", "n0", "127.0.0.1"):
        assert word not in text
    assert 'run="private-name"' in text_of(facts(("private-name", led)), per_job=True)


def test_names_that_a_user_chose_break_nothing() -> None:
    odd = ['a"} 1\n#', "\\", "x" * 256, "x" * 255 + "y", "é\u2028"]
    text = text_of(facts(*((name, job(name)) for name in odd)), per_job=True)
    runs = {dict(labels)["run"] for name, labels in series_of(text) if name == "ckptless_job_step"}
    assert runs == {'a"} 1\n#', "\\", "x" * 64, "é\u2028"}
    assert len(series_of(text)) == len(set(series_of(text)))


def test_no_rank_zero_no_step() -> None:
    led = job()
    tell(led, 0, 0, STEP)
    assert readings(facts(("1", led), tally=Tally()), {}, per_job=True)["ckptless_job_step"] == {}
