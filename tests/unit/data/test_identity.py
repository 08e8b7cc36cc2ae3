"""What a loader's batches depend on: the same in every process, and another one for another function."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.pytorch_hooks.data.identity import FORMAT, DataIdentity, identify

SCRIPT = """
import json
from functools import partial
from ckptless.pytorch_hooks.data.identity import identify
WORDS = {"a": 1, "b": [2, 3]}
def helper(x): return x in {"one", "two", "three", "four"}
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
class Transform:
    def __init__(self): self.names = {"x", "y", "z"}
    def __call__(self, row): return helper(row), WORDS, even(3)
print(identify(Transform()), identify(partial(Transform.__call__, None)), identify(json.loads))
"""


def test_the_same_in_every_process() -> None:
    found = set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        made = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
        )
        found.add(made.stdout)
    assert len(found) == 1


FACTOR = 2


def scale(value: int) -> int:
    return value * FACTOR


def closed_over(number: Any) -> Any:
    return lambda value: (value, number)


class Tokenizer:
    """As PyPI's tokenizers say what they are."""

    def __init__(self, words: str) -> None:
        self._words = words

    def to_str(self) -> str:
        return self._words


class Scaler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor


def test_what_a_function_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify(scale)
    assert identify(scale) == before
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert identify(scale) != before


def test_other_functions() -> None:
    pairs: list[tuple[Any, Any]] = [
        (closed_over(1), closed_over(2)),
        (closed_over(1), closed_over(1.0)),
        (closed_over(Tokenizer("a b")), closed_over(Tokenizer("a c"))),
        (closed_over([1, [2]]), closed_over([1, [3]])),
        (Scaler(1), Scaler(2)),
        (Scaler(1).__call__, Scaler(2).__call__),
        (partial(scale, 1), partial(scale, 2)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x, y=1: x + y, lambda x, y=2: x + y),
        (None, scale),
    ]
    for one, other in pairs:
        assert identify(one) == identify(one)
        assert identify(one) != identify(other)


def test_an_object_may_say_what_it_is() -> None:
    one, same = Scaler(1), Scaler(2)
    one.data_version = same.data_version = "a"  # type: ignore[attr-defined]
    assert identify(one) == identify(same)


MANIFESTS = st.builds(
    DataIdentity,
    format=st.just(FORMAT),
    order=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "1", "2"])),
    made=st.dictionaries(st.sampled_from(["d", "e", "replica"]), st.sampled_from(["", "1", "2"])),
)


@given(MANIFESTS, MANIFESTS, st.integers(1, 3), st.integers(1, 3))
def test_digests_tell_manifests_apart(
    one: DataIdentity, other: DataIdentity, replicas: int, others: int
) -> None:
    assert (one.order == other.order) == (one.order_digest == other.order_digest)
    made = [{name: what for name, what in each.made.items() if name != "replica"} for each in (one, other)]
    same = one.order == other.order and made[0] == made[1] and replicas == others
    assert same == (one.digest_of_all(replicas) == other.digest_of_all(others))
