"""What parts make of what they have measured: ratios of pairs, bars, and what grows faster than it may."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest

from ckptless.daemon.protocol.records import FaultRecord
from tests.bench import data, hangs, init, replication, scale
from tests.bench.figures import cpu_s, grouped, ratios, table


@pytest.mark.parametrize(
    ("ones", "others", "told"),
    [
        ([2.0], [1.0], "2.00 (2.00 to 2.00)"),
        # Not the ratio of the medians: each is compared with the one of its turn.
        ([2.0, 30.0, 4.0], [1.0, 10.0, 1.0], "3.00 (2.00 to 4.00)"),
        ([], [], ""),
    ],
)
def test_a_ratio_is_of_pairs(ones: list[float], others: list[float], told: str) -> None:
    assert ratios(ones, others) == told


def test_a_pair_without_its_other_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_runs_are_grouped_in_the_order_in_which_they_come() -> None:
    runs = [{"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]
    assert list(grouped(runs, "a", "b")) == [(2, 1), (1, 1)]
    assert len(grouped(runs, "a")[2,]) == 2


def test_a_table_of_markdown() -> None:
    assert table(("a", "b"), [(1, "x")]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 | x |"]


def test_the_cpu_time_of_a_process_grows() -> None:
    before = cpu_s(os.getpid())
    math.factorial(20_000)
    assert cpu_s(os.getpid()) > before > 0


# ------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize(
    ("of", "small", "large", "times"),
    [("other", 256, 65536, 2.0), ("leader", 256, 65536, 512.0), ("all", 16, 256, 32.0)],
)
def test_what_a_figure_may_grow(of: str, small: int, large: int, times: float) -> None:
    assert scale.bound(of, small, large) == pytest.approx(times)


@pytest.mark.parametrize(
    ("of", "power", "verdict"),
    [("other", 0.0, "no"), ("other", 1.0, "**faster**"), ("leader", 1.0, "no"), ("all", 2.0, "**faster**")],
)
def test_what_grows_faster(of: str, power: float, verdict: str) -> None:
    figure = scale.Figure("a figure", of, "scale", ("x",))
    values = {n: 3.0 * n**power for n in (16, 256, 1024, 12500)}
    assert scale.growth(figure, values)[2] == verdict


def test_memory_is_told_without_what_there_is_before() -> None:
    figure = scale.Figure("memory", "other", "scale_memory", ("other_nbytes",), "B", "bare_nbytes")
    assert figure.value({"other_nbytes": 150, "bare_nbytes": 100}) == 50


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (1.5238, "s", "1.52 s"),
        (0.0551, "s", "55.1 ms"),
        (9e-6, "s", "9 us"),
        (522, "B", "522 B"),
        (11_802_756, "B", "11.8 MB"),
        (144.0, "", "144"),
    ],
)
def test_how_a_value_is_shown(value: float, unit: str, told: str) -> None:
    assert scale.shown(value, unit) == told


# ------------------------------------------------------------------------------------- replication


def line(took_s: float, rate_mbit: int = 1000, interfaces: int = 1) -> dict[str, Any]:
    """A transfer of 125 MB: a second of a line of 1 Gbit/s."""
    where = {"kind": "line", "rate_mbit": rate_mbit, "interfaces": interfaces, "nbytes": 125_000_000}
    return {**where, "s": took_s, "cpu_s": 0.1, "plain_s": 1.0, "plain_cpu_s": 0.1, "load": 1.0}


@pytest.mark.parametrize(
    ("run", "share", "bar"),
    [
        (line(1.0), "100%", "kept"),
        (line(1.25), "80%", "missed"),
        (line(0.5, interfaces=2), "100%", "kept"),
        (line(1.0, rate_mbit=10_000), "10%", ""),
        (line(1.0, rate_mbit=5_000, interfaces=2), "10%", ""),
    ],
)
def test_the_bar_is_for_lines_below_ten(run: dict[str, Any], share: str, bar: str) -> None:
    row = next(iter(replication.line_rows([run])))
    assert (row[2], row[4]) == (share, bar)


# --------------------------------------------------------------------------------- data and init


def test_a_loader_is_compared_with_the_dataloader_of_its_turn() -> None:
    run = {"kind": "loader", "shared": True, "batches_nbytes": 1 << 20, "own_nbytes": 1 << 20, "cpu_s": 0.001}
    run |= {"first_s": 0.5, "heirs_s": [], "load": 1.0}
    rates = {("DataLoader", 0): 10.0, ("DataLoader", 1): 100.0, ("ckptless", 0): 30.0, ("ckptless", 1): 100.0}
    runs = [
        {**run, "system": name, "turn": turn, "batches_per_s": rate} for (name, turn), rate in rates.items()
    ]
    theirs, ours = data.loader_rows(runs)
    assert (theirs[6], ours[6]) == ("", "2.00 (1.00 to 3.00)")


def test_a_store_without_its_peer_has_no_ratio() -> None:
    run = {"kind": "store", "ranks": 16, "turn": 0, "load": 1.0, "cold_cpu_s": 0.1, "again_cpu_s": 0.1}
    ours = {**run, "system": "ckptless", "cold_s": 0.2, "again_s": 0.1, "asked": 5}
    theirs = {**run, "system": "TCPStore", "pattern": "lazy", "cold_s": 0.1, "again_s": 0.1}
    of, lazy, own = init.store_rows([theirs, {**ours, "pattern": "lazy"}, {**ours, "pattern": "ckptless"}])
    assert (of[6], lazy[6], own[6]) == ("", "2.00 (2.00 to 2.00)", "")


# ------------------------------------------------------------------------------------------- hangs


def fault(kind: str, rank: int | None, detail: str) -> FaultRecord:
    return FaultRecord(
        job="a", fault="f1", kind=kind, node=0, slot=0, rank=rank, generation=1, seen_s=1.0, detail=detail
    )


IN_LOCK = fault("hung", 2, "3 other ranks wait: it sleeps in lock (hangs_script.py, line 72)")
APART = "all ranks wait in collectives that do not fit: {} in barrier of 1 elements, ranks 0, 1 in allreduce"
HALF = fault("stall", None, APART.format("ranks 2, 3"))
ONE = fault("hung", 2, APART.format("rank 2"))


@pytest.mark.parametrize(
    ("kind", "faults", "right"),
    [
        ("lock", [IN_LOCK], True),
        ("lock@commit", [IN_LOCK], True),
        ("file", [IN_LOCK], False),
        ("lock", [], False),
        ("lock", [IN_LOCK, IN_LOCK], False),
        ("lock", [fault("hung", 1, IN_LOCK.detail)], False),
        ("lock", [fault("died", 2, IN_LOCK.detail)], False),
        ("other_collective", [ONE], True),
        ("other_collective", [HALF], False),
        ("half", [HALF], True),
        ("half", [ONE], False),
        ("half", [fault("stall", None, APART.format("rank 2"))], False),
    ],
)
def test_who_is_named_rightly(kind: str, faults: list[FaultRecord], right: bool) -> None:
    assert hangs.is_right(hangs.Planned(40, 2, kind), faults) is right


def test_all_kinds_come_in_turn_each_after_its_rhythm() -> None:
    found = hangs.plan(["lock", "half"], 5, random.Random(1))
    assert [one.kind for one in found] == ["lock", "half", "lock", "half", "lock"]
    assert [one.step for one in found] == [40, 80, 120, 160, 200]
    assert hangs.Planned(40, 3, "half").words == ["40:3:other_collective", "40:0:other_collective"]


def test_what_is_named_too_late_is_right_but_not_in_time() -> None:
    late = hangs.Hang("lock", 1, True, 5.5, 6.0, "", 1.0)
    run = hangs.run_of("hangs", [late, replace(late, found_s=4.0)], 0.05, 0)
    assert hangs.told([run]).splitlines()[-1] == "| all | 2 | 2 | 1 | 4.75 | 5.50 | 5.50 | 6.00 |"
    # Three steps, where those are longer.
    assert [one["in_time"] for one in hangs.run_of("hangs", [late], 2.0, 0)["hangs"]] == [True]
