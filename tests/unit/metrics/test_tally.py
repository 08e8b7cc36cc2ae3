"""What a daemon counts: what it tells the others itself, and the steps of jobs that it leads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs

import ckptless.daemon
from ckptless.daemon.ckptlessd.metrics.tally import FAULTS, Histogram, Tally
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.plan import RUNGS
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import PHASES, FaultSource

from .jobs import STEP, fault, job, recovery, tell


def test_a_histogram_counts_up_to_and_with_each_bound() -> None:
    found = Histogram((1.0, 2.0))
    assert found.buckets == [("1.0", 0.0), ("2.0", 0.0), ("+Inf", 0.0)]
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        found.add(value)
    assert found.buckets == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert found.total == 14.0


def test_a_recovery_counts_once_it_is_over() -> None:
    tally = Tally()
    tally.told([recovery(None), recovery("superseded"), recovery("failed")])
    assert not any(one.total for one in (*tally.recoveries.values(), *tally.phases.values()))
    assert tally.outcomes == {("superseded",): 1, ("failed",): 1}
    tally.told([recovery(took_s=0.7)])
    assert tally.outcomes[("recovered",)] == 1
    assert tally.recoveries[("process",)].total == pytest.approx(0.7)
    counted = {key for key, one in tally.phases.items() if one.total}
    assert counted == {("process", phase) for phase in PHASES}
    assert tally.phases[("process", "agree")].buckets[:2] == [("0.1", 1.0), ("0.5", 1.0)]


def test_words_of_others_make_no_series_of_their_own() -> None:
    tally = Tally()
    tally.told([fault("died"), fault("made up"), fault("as well"), recovery(rung="made up")])
    tally.told([structs.replace(fault(), source=None)])
    assert +tally.faults == {("died", "process"): 1, ("other", "process"): 2, ("died", "other"): 1}
    assert [key for key, one in tally.recoveries.items() if one.total] == [("other",)]


def test_what_may_come_is_there_from_the_beginning() -> None:
    """Else increase() would not see the first fault of a kind, nor the first recovery of a rung."""
    tally = Tally()
    assert {kind for kind, _ in tally.faults} == FAULTS
    assert {source for _, source in tally.faults} == {*get_args(FaultSource)}
    assert {("died", "process"), ("node-lost", "slurm"), ("stall", "leader"), ("hung", "drill")} <= {
        *tally.faults
    }
    assert tally.recoveries.keys() == {(rung,) for rung in RUNGS}
    assert tally.phases.keys() == {(rung, phase) for rung in RUNGS for phase in PHASES}
    assert not any(tally.faults.values())
    before = {*tally.faults}, {*tally.recoveries}, {*tally.phases}
    tally.told([fault(), *(recovery(rung=rung) for rung in RUNGS)])
    assert ({*tally.faults}, {*tally.recoveries}, {*tally.phases}) == before


def test_every_kind_of_fault_is_known() -> None:
    planning = Path(ckptless.daemon.__path__[0]) / "ckptlessd" / "planning"
    text = "".join(path.read_text() for path in sorted(planning.glob("*.py")))
    said = set(re.findall(r'(?:Finding\(|kind=)"([a-z-]+)"', text))
    assert {"node-lost", "silent-corruption", "nccl-unknown"} <= said <= FAULTS
    assert m.Cause.__doc__ is not None
    causes = re.search(r"kind: ([a-z, -]+)\.", m.Cause.__doc__)
    assert causes is not None
    assert {*causes[1].split(", ")} - {"stop"} <= FAULTS


def test_events_and_ends_count_by_a_word_of_few() -> None:
    tally = Tally()
    spec = m.JobSpec(
        job="4711",
        command=("secret",),
        nodes=1,
        spares=0,
        slots_per_node=1,
        limits=m.Limits.from_max_stall(60),
    )
    said = Line("warning", "secret", "secret")
    tally.told([ledger_rows.event("1", "4711", 0, said, (1.0, None)), ledger_rows.job(spec, "running", 1.0)])
    tally.told([ledger_rows.job(spec, "done", 1.0, m.Outcome(state="done", exit_code=0, reason="x"), 2.0)])
    assert tally.events == {("warning",): 1}
    assert tally.ended == {("done",): 1}


def test_steps_count_while_the_job_is_led_from_here() -> None:
    tally, led = Tally(), job(step=None)

    def look(step: int | None, *, leads: bool = True) -> int:
        led.agreement.elected = leads
        tell(led, 0, 2, step)
        tally.look("4711", led)
        return tally.steps

    assert [look(None), look(1), look(4), look(4)] == [0, 1, 4, 4]
    # A new process has done none yet, and then some of them again.
    assert [look(None), look(2), look(5)] == [4, 4, 7]
    # Another one leads meanwhile, and counts.
    assert [look(50, leads=False), look(60), look(61)] == [7, 7, 8]
    led.ended_here = m.Outcome(state="failed", exit_code=4, reason="x")
    assert look(70) == 8


def test_a_job_that_goes_on_begins_where_it_is() -> None:
    tally, led = Tally(), job(step=None, generation=3)
    tally.look("4711", led)
    tell(led, 0, 2, STEP)
    tally.look("4711", led)
    assert tally.steps == 0
    tell(led, 0, 2, STEP + 2)
    tally.look("4712", led)
    tally.look("4711", led)
    assert tally.steps == 2
