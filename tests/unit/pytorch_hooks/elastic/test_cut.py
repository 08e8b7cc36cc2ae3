"""What could not be cut for another number of ranks is refused by name, before a node is lost."""

from __future__ import annotations

import pytest
import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.elastic import cut
from ckptless.pytorch_hooks.state import TensorSet

from . import worlds


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("columns", 3)])
def test_what_can_be_cut_is_taken(kind: str, ranks: int) -> None:
    for rank in range(ranks):
        with worlds.rank_of(rank, ranks):
            for trained in (False, True):
                cut.check(TensorSet(worlds.built(kind, ranks, trained=trained)))


def test_a_sharded_parameters_state_that_is_no_dtensor_is_refused() -> None:
    with worlds.rank_of(0, 3):
        state = worlds.built("fsdp", 3, trained=True)
        parameter = state.model.inner.weight
        # As an optimizer makes it that looks at local parts.
        state.optimizer.state[parameter]["row"] = torch.zeros(len(parameter.to_local()))
        with pytest.raises(UsageError, match=r"elastic, .*: o:optimizer:.*:row is of a sharded parameter"):
            cut.check(TensorSet(state))
