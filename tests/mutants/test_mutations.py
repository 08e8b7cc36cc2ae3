"""Each kind of mistake is made, once for each place, and nothing that only a reader is told is touched."""

from __future__ import annotations

import pytest

from .__main__ import ROOMS, equivalents
from .mutations import mutants
from .warm import ROOT


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {("a < b", "(a <= b)")}),
        ("x = 0 <= a < b", {("0 <= a < b", "(0 < a < b)"), ("0 <= a < b", "(0 <= a <= b)"), ("0", "1")}),
        (
            "x = a and b",
            {("a and b", "((a) or (b))"), ("a and b", "((a))"), ("a and b", "((b))")},
        ),
        ("x = now - a > b", {("now - a > b", "(now - a < b)"), ("now - a", "(now + a)")}),
        ("x = a >= b.limit_s", {("a >= b.limit_s", "(a < b.limit_s)")}),
        ("x = not a", {("not a", "(a)")}),
        ("x = a + b", {("a + b", "(a - b)")}),
        ("x = True", {("True", "False")}),
        ("x = min(a)", {("min", "max")}),
        ("if a:\n    b()", {("a", "True"), ("a", "False"), ("b()", "pass")}),
        ("x = [i for i in a if i]", {("i", "True"), ("i", "False")}),
        ("self.x = a", {("self.x = a", "pass")}),
        ("x += a", {("x += a", "pass")}),
    ],
)
def test_mistakes(source: str, expected: set[tuple[str, str]]) -> None:
    assert set(changes(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Says that a < b."""',
        "logger.info('%d', 3)",
        "raise ValueError(f'{a + b}')",
        "assert a < b",
        "def f(x: A | B) -> C | D: ...",
        "class A(B, frozen=True): ...",
    ],
)
def test_what_is_only_told_is_left_alone(source: str) -> None:
    assert changes(source) == []


def test_all_of_the_pure_rooms_can_be_mutated() -> None:
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            source = path.read_text()
            found = mutants(source)
            assert len({mutant.source for mutant in found}) == len(found)
            assert source not in {mutant.source for mutant in found}


def test_every_equivalent_mutant_still_stands_in_the_source() -> None:
    for path, before, _after in equivalents():
        assert before in " ".join((ROOT / path).read_text().split()), path
