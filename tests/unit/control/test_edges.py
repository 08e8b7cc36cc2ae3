"""What goes into the control plane and comes out: values that nobody changes on their way."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass
from typing import Any, get_args

import pytest

from ckptless.daemon.ckptlessd.recovery import events as e

KINDS = [kind for kind in vars(e).values() if isinstance(kind, type) and is_dataclass(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_changes_on_its_way(kind: type) -> None:
    value: Any = object.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        value.node = 7


def test_each_value_goes_in_or_comes_out() -> None:
    assert {*get_args(e.Input), *get_args(e.Output), e.Standing, e.Leave} == set(KINDS)
