"""Which groups a script is given for those that it asks for, without any group."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.process_groups.work import Early
from ckptless.pytorch_hooks.torch_private.asked import Standing


def standing() -> Standing:
    return Standing(3, 8, "ckptless", {"cpu": "gloo", "cuda": "nccl"})


def asks(name: str, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    return inspect.signature(getattr(dist, name)).bind(*args, **kwargs)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"backend": "nccl"},
        {"backend": "GLOO"},
        {"backend": "cpu:gloo,cuda:nccl", "rank": 3, "world_size": 8},
        {"rank": -1, "world_size": -1, "init_method": "env://"},
    ],
)
def test_a_default_group_that_is_there_is_taken(words: dict[str, Any]) -> None:
    standing().join(asks("init_process_group", **words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"backend": "mpi"}, "init_process_group asks for mpi, and groups .* over cpu:gloo,cuda:nccl: leave"),
        ({"backend": "cpu:gloo,cuda:ucc"}, "asks for cpu:gloo,cuda:ucc"),
        ({"rank": 2, "world_size": 8}, "asks for rank 2, which is 3 under ckptless.run: leave it out"),
        ({"rank": 3, "world_size": 4}, "asks for world_size 4, which is 8"),
    ],
)
def test_another_one_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        standing().join(asks("init_process_group", **words))


def test_groups_are_known_by_the_names_that_they_were_asked_for_by() -> None:
    here = standing()
    assert here.known_as("1") == "nccl"
    here.named["1"] = "gloo"
    assert (here.known_as("1"), here.known_as("2")) == ("gloo", "nccl")
    assert Standing(0, 1, "ckptless", {"cpu": "gloo"}).known_as("0") == "gloo"


def test_a_new_group_is_made_over_all_there_is() -> None:
    made: list[Any] = []

    def stock(ranks: Any = None, timeout: Any = None, backend: Any = None) -> object:
        made.append(backend)
        return object()

    for backend in ("gloo", "nccl", "ckptless", None, "cpu:gloo"):
        standing().make(stock, inspect.signature(stock).bind([0], backend=backend))
    assert made == [None] * 5
    # Of nobody: it stays torch's.
    standing().make(stock, inspect.signature(stock).bind([0], backend="fake"))
    assert made.pop() == "fake"
    with pytest.raises(UsageError, match="new_group asks for ucc, and groups"):
        standing().make(stock, inspect.signature(stock).bind([0], backend="ucc"))


def test_before_keep_everybody_may_meet_and_nobody_may_sum() -> None:
    anew = Early(anew=True)
    assert not anew.leaves_out("barrier")
    anew.refuse()
    # Done, as there is everybody; but run.keep refuses it then.
    assert not anew.leaves_out("allreduce")
    with pytest.raises(UsageError, match=r"^allreduce before run\.keep: "):
        anew.refuse()
    later = Early(anew=False)
    assert later.leaves_out("barrier")
    with pytest.raises(UsageError, match=r"^broadcast before run\.keep: "):
        later.leaves_out("broadcast")
