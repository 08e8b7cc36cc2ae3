"""What could not be cut for another number of ranks is refused by name, before a node is lost."""

from __future__ import annotations

import math

import pytest
import torch

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.elastic import cut
from ckptless.pytorch_hooks.elastic.boxes import Box
from ckptless.pytorch_hooks.state import TensorSet, layout
from ckptless.pytorch_hooks.state.catalog import Catalog
from ckptless.pytorch_hooks.state.record import Described

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


def rows(dims: list[int], ranks: int, rank: int) -> Described:
    """What a rank says of tensors of one dimension each, cut as FSDP2 cuts them."""
    boxes = []
    for n in dims:
        each = -(-n // ranks)
        start, end = min(rank * each, n), min((rank + 1) * each, n)
        boxes.append(Box((start if end > start else 0,), (end - start,)))
    forms = [layout.Form(f"p:{i}", "float32", box.shape, "cpu", "") for i, box in enumerate(boxes)]
    parts = tuple((i, (n,), box.start) for i, (n, box) in enumerate(zip(dims, boxes, strict=True)))
    return Described(layout.lay(forms), Catalog(parts, {}, ()), {})


@pytest.mark.parametrize(
    "sizes", [(1024, 1016), (1016, 1024), (1024, 512), (512, 1024), (4096, 4088), (7, 1)]
)
@pytest.mark.parametrize("dims", [[768, 3072, 50257, 2304], [1024, 4096, 32000], [4096, 11008, 128256, 1]])
def test_of_many_shards_few_are_asked_for(sizes: tuple[int, int], dims: list[int]) -> None:
    """Of each tensor the rank's rows, all of them, from whom has them, and hardly anybody else is asked."""
    before, after = sizes
    for rank in range(0, after, max(1, after // 16)):
        asked: set[int] = set()

        def describe(shard: int, asked: set[int] = asked) -> Described:
            asked.add(shard)
            return rows(dims, before, shard)

        mine = rows(dims, after, rank)
        new = cut.NewCut(mine.layout, cut.boxes_of(mine))
        found = cut.sources(new, range(before), rank % before, describe)
        for entry in mine.layout.entries:
            boxes = [box for taken in found.values() for box in taken.get(entry.name, [])]
            assert sum(math.prod(box.shape) for box in boxes) == math.prod(new.boxes[entry.name].shape)
        needed = {shard for shard, taken in found.items() if taken}
        assert len(asked - needed) <= 4
        assert len(asked) <= 10


def test_what_nobody_has_is_refused() -> None:
    mine = rows([40], 2, 1)
    new = cut.NewCut(mine.layout, cut.boxes_of(mine))
    with pytest.raises(
        ProtocolError, match=r"nobody has the elements of p:0 from \(20,\) on, \(20,\) of them"
    ):
        cut.sources(new, [0, 1], 0, lambda shard: rows([40], 4, shard))
