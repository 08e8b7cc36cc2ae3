"""What a rehearsal finds, from what ranks have written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as _replace
from typing import Any

import msgspec
import pytest

from ckptless.daemon.launch.rehearsed import NAMED, Difference, Found, Run, compare, sentences
from ckptless.rehearsal import Fault, Line

STEPS, RANKS = 8, 2
FAULTS = (Fault(3, 1, "process"), Fault(6, 0, "node"))
OLD, NEW = 10, 20


def line(rank: int, step: int, **more: Any) -> Line:
    made: dict[str, Any] = {
        "step": step,
        "generation": 1,
        "pid": OLD + rank,
        "loss": str(1.0 / step),
        "tensors": {"state.model.weight": f"torch.float32 (2,) #{step}"},
        "values": {"state.seen": f"#{step}"},
        "beside": {"the global counter of train.py": str(step), "the local t0 of train()": "1"},
    }
    return Line(**{**made, **more})


def run(change: Callable[[int, Line], Line] = lambda _rank, one: one) -> Run:
    return {rank: [change(rank, line(rank, step)) for step in range(1, STEPS + 1)] for rank in range(RANKS)}


def with_faults(change: Callable[[int, Line], Line] = lambda _rank, one: one) -> Run:
    """Rank 1 is a new process from step 3 on, as is rank 0 from step 6 on; it has step 5 twice."""

    def new(rank: int, one: Line) -> Line:
        since = 3 if rank else 6
        return change(rank, msgspec.structs.replace(one, pid=NEW + rank) if one.step >= since else one)

    made = run(new)
    return {0: [*made[0][:5], made[0][4], *made[0][5:]], 1: made[1]}


def put(one: Line, part: str, name: str, value: str | None) -> Line:
    found = {**getattr(one, part)}
    if value is None:
        del found[name]
    else:
        found[name] = value
    return msgspec.structs.replace(one, **{part: found})


def said(found: Found) -> str:
    return "\n".join(sentences(found, FAULTS))


def test_all_is_the_same() -> None:
    found = compare(run(), run(), with_faults())
    assert found == Found(STEPS, RANKS, (2, 2), {})
    assert found.good
    assert said(found).endswith("all of it is the same, bit for bit")
    assert "rank 1's process was killed in step 3, rank 0's node was killed in step 6" in said(found)


@pytest.mark.parametrize("value", ["99", None])
@pytest.mark.parametrize("first", [1, 4])
def test_what_the_script_has_beside_the_state(first: int, value: str | None) -> None:
    """By a new process, by one that lived, and by both; a redone step counts as any."""
    name = "the global counter of train.py"

    def forgets(rank: int, one: Line) -> Line:
        return put(one, "beside", name, value) if one.step >= max(first, 3) else one

    found = compare(run(), run(), with_faults(forgets))
    assert found.wrong == ()
    (one,) = found.forgotten
    step = max(first, 3)
    assert one == Difference(name, step, (0, 1), (True, True), str(step), value or "")
    assert not found.good
    wanted = f"{name}: {value or 'not there'} instead of {step}, from step {step} on, on ranks 0, 1 (a new"
    assert wanted in said(found)


@pytest.mark.parametrize("part", ["tensors", "values"])
def test_what_the_state_has(part: str) -> None:
    name = "state.model.weight" if part == "tensors" else "state.seen"

    def differs(rank: int, one: Line) -> Line:
        return put(one, part, name, "#other") if (rank, one.step) == (0, 7) else one

    found = compare(run(), run(), with_faults(differs))
    assert [(d.name, d.step, d.ranks, d.processes) for d in found.wrong] == [(name, 7, (0,), (True, False))]
    assert f"{name}: another value, from step 7 on, on rank 0 (a new process)" in said(found)


def test_the_loss_of_a_step_that_is_done_again() -> None:
    def differs(rank: int, one: Line) -> Line:
        return msgspec.structs.replace(one, loss="0.5", tensors={}) if (rank, one.step) == (1, 5) else one

    found = compare(run(), run(), with_faults(differs))
    assert [one.name for one in found.wrong] == ["the loss", "state.model.weight"]
    # It has no such tensor at all.
    assert found.wrong[1].now == ""


def test_a_script_without_losses() -> None:
    def silent(_rank: int, one: Line) -> Line:
        return msgspec.structs.replace(one, loss=None)

    assert compare(run(silent), run(silent), with_faults(silent)).good


def test_what_is_never_the_same_is_not_told_of() -> None:
    """A time, in the script or in the State; also where it was once the same by chance."""

    def at(number: int) -> Callable[[int, Line], Line]:
        def change(_rank: int, one: Line) -> Line:
            chance = number if one.step % 2 else 0
            found = put(one, "beside", "the local t0 of train()", str(chance))
            return put(found, "values", "state.seen", f"#{chance}")

        return change

    assert compare(run(at(1)), run(at(2)), with_faults(at(3))).good


@pytest.mark.parametrize("part", ["loss", "tensors"])
def test_two_runs_without_a_fault_differ(part: str) -> None:
    def other(_rank: int, one: Line) -> Line:
        if one.step < 4:
            return one
        return msgspec.structs.replace(
            one, **{part: "0.1" if part == "loss" else {"state.model.weight": "#x"}}
        )

    found = compare(run(), run(other), with_faults())
    assert set(found.unsteady.values()) == {4}
    assert not found.good
    assert "in step 4: seed everything" in said(found)
    assert "NOT the same" not in said(found)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (({}, {}, {}), "no rank has committed a step"),
        ((run(), {0: run()[0]}, with_faults()), "the two runs without faults have not made the same steps"),
        ((run(), run(), {0: run()[0], 1: run()[1][:4]}), "the run with faults has not made the same steps"),
    ],
)
def test_steps_that_are_missing(runs: tuple[Run, Run, Run], words: str) -> None:
    found = compare(*runs)
    assert words in said(found)
    assert not found.good


def test_a_fault_that_has_not_come() -> None:
    found = compare(run(), run(), with_faults(), [FAULTS[1]])
    assert "the script has made 8 steps, and a fault was to come in step 6" in said(found)
    assert not found.good


def test_a_list_is_named_once_and_a_long_story_is_cut_short() -> None:
    def change(_rank: int, one: Line) -> Line:
        if one.step < 3:
            return one
        listed = {f"the local losses of train() in a.py[{n}]": "2" for n in range(9)}
        many = {f"the global name_{n} of a.py": "2" for n in range(NAMED)}
        return msgspec.structs.replace(one, beside={**one.beside, **listed, **many})

    found = compare(run(), run(), with_faults(change))
    assert len(found.forgotten) == NAMED + 1
    assert found.forgotten[0] == _replace(found.forgotten[0], more=8)
    text = said(found)
    assert "losses of train() in a.py[0]: 2 instead of nothing, from step 3 on" in text
    assert "and 8 more places in it" in text
    assert text.endswith("  and 1 more")
