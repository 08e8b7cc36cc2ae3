"""What goes into the control plane and comes out: values that nobody changes on their way."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass
from typing import get_args

import pytest

from ckptless.daemon.control import edges as e

KINDS = sorted((kind for kind in vars(e).values() if is_dataclass(kind)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_changes_on_its_way(kind: type) -> None:
    value = object.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        value.node = 7  # type: ignore[attr-defined]


def test_each_value_goes_in_or_comes_out() -> None:
    assert {*get_args(e.Input), *get_args(e.Output), e.Standing} == set(KINDS)
