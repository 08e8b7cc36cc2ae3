"""What a State takes, what its record holds, and what a broken record does."""

import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks.state import State, codec, read, restore, rng
from ckptless.pytorch_hooks.torch_private.calls import HashStore

from .captured import capture


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def make(**extra: Any) -> State:
    model = nn.Linear(2, 2)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **extra)


@pytest.mark.parametrize("quiet", [False, True])
def test_whether_a_ddp_shares_its_buffers_next_is_part_of_a_step(quiet: bool) -> None:
    """It does not after a forward pass under no_sync(): what a BatchNorm has afterwards depends on that."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if quiet:
            with model.no_sync():
                model(torch.ones(2, 2))
        assert model.require_forward_param_sync is not quiet
        kept = capture(state, 1)
        # As a new process's is, or one that was cut off elsewhere.
        model.require_forward_param_sync = quiet
        restore(kept, state)
        assert model.require_forward_param_sync is not quiet
    finally:
        dist.destroy_process_group()


# ---- State


def test_attributes() -> None:
    loader = [1, 2]
    counter = Counter()
    state = make(loader=loader, best_loss=9.0, seen={"a": [1]}, counter=counter)
    assert isinstance(state.model, nn.Linear)
    assert state.scheduler is None
    assert state.loader is loader
    assert state.counter is counter
    state.best_loss = 3.0
    state.seen["b"] = (2,)
    counter.n = 4
    kept = capture(state, 7, cursor={"epoch": 1})
    state.best_loss, counter.n = 0.0, 0
    state.seen.clear()
    view = restore(kept, state)
    assert (view.step, view.cursor, view.ddp_layouts) == (7, {"epoch": 1}, {})
    assert (state.best_loss, state.seen, counter.n) == (3.0, {"a": [1], "b": (2,)}, 4)
    assert {"model", "best_loss", "counter"} <= set(dir(state))
    with pytest.raises(UsageError, match=r"state\.model is an object"):
        state.model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="no 'other'"):
        state.other = 1
    assert not hasattr(state, "other")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "state.model must be a torch.nn.Module, not int"),
        ({"model": [nn.Linear(1, 1), None]}, "state.model[1] must be a torch.nn.Module, not NoneType"),
        ({"optimizer": nn.Linear(1, 1)}, "state.optimizer must be a torch.optim.Optimizer, not Linear"),
        ({"scheduler": {"a": 1}}, "state.scheduler['a'] must be a scheduler with state_dict"),
        ({"scaler": "x"}, "state.scaler must be a GradScaler"),
        ({"model": {1: nn.Linear(1, 1)}}, "keys must be strings"),
        ({"fn": lambda: 0}, "state.fn: cannot be saved: function"),
        ({"x": [0, {"y": object()}]}, "state.x[1]['y']: cannot be saved: object"),
        ({"_x": 1}, "choose another name"),
    ],
)
def test_wrong_types(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        State(**given)
    assert message in str(caught.value)


def test_what_cannot_be_saved_is_named_by_its_place() -> None:
    state = make(note=1)
    state.optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UsageError, match=r"state\.optimizer\['groups'\]\[0\]\['hook'\]: cannot be saved"):
        capture(state, 1)
    del state.optimizer.param_groups[0]["hook"]
    state.note = {"f": partial(print)}
    with pytest.raises(UsageError, match=r"state\.note\['f'\]: cannot be saved: functools\.partial"):
        capture(state, 1)
    state.note = 1

    class Scale:
        def __init__(self) -> None:
            self.base: Any = lambda _epoch: 1.0

        def __call__(self, epoch: int) -> float:
            return float(self.base(epoch))

    bad = State(model=state.model, scheduler=LambdaLR(state.optimizer, Scale()))
    with pytest.raises(UsageError, match=r"state\.scheduler\['lr_lambdas'\]\[0\]\['base'\]: cannot be saved"):
        capture(bad, 1)
    with pytest.raises(UsageError, match=r"cursor\[0\]"):
        capture(state, 1, cursor=[object()])


# ---- records


def test_a_record_of_something_else() -> None:
    kept = capture(make(a=1), 1)
    with pytest.raises(RecoveryError, match=r"\['a'\]"):
        restore(kept, make(b=1))
    two = make(a=1)
    two.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RecoveryError, match="groups"):
        restore(kept, two)


def test_a_broken_record_changes_nothing() -> None:
    state = make(a=1)
    kept = capture(state, 1)
    state.a = 2
    before = torch.get_rng_state()
    rnd = random.Random(0)
    for _ in range(200):
        bad = bytearray(kept)
        bad[rnd.randrange(len(bad))] ^= 1 << rnd.randrange(8)
        with pytest.raises(ProtocolError):
            restore(bad, state)
    for size in (0, 10, 24, len(kept) - 1):
        with pytest.raises(ProtocolError):
            read(kept[:size])
    with pytest.raises(ProtocolError):
        read(codec.encode({"step": 1}))
    assert state.a == 2
    assert torch.get_rng_state().equal(before)


def test_a_checksummed_record_of_nonsense() -> None:
    state = make(a=1)
    payload = bytes(codec.unseal(capture(state, 1)))
    rnd = random.Random(1)
    for _ in range(300):
        bad = bytearray(payload)
        for _ in range(rnd.randrange(1, 4)):
            bad[rnd.randrange(len(bad))] = rnd.randrange(256)
        # Anything but these is a bug: it may decode, it may not fit, it may be malformed.
        try:
            read(codec.seal(bytes(bad)))
            restore(codec.seal(bytes(bad)), state)
        except (ProtocolError, RecoveryError):
            pass


# ---- random numbers


def test_generators() -> None:
    random.gauss(0, 1)
    kept = codec.decode(codec.encode(rng.capture()))
    drawn = (random.gauss(0, 1), random.random(), float(np.random.randn()), torch.rand(3).tolist())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    rng.restore(kept)
    assert drawn == (random.gauss(0, 1), random.random(), float(np.random.randn()), torch.rand(3).tolist())


def test_generators_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    full = rng.capture()
    monkeypatch.setitem(sys.modules, "numpy", None)
    kept = rng.capture()
    assert kept["numpy"] is None
    rng.restore(kept)
    with pytest.raises(RecoveryError, match="numpy"):
        rng.restore(full)


@pytest.mark.parametrize(
    "change",
    [
        {"python": (3, b"123", None)},
        {"python": (9, b"", None)},
        {"torch_cpu": torch.zeros(3, dtype=torch.uint8)},
        {"torch_cpu": 1},
        {"numpy": {"bit_generator": "MT19937"}},
        {"surplus": 1},
    ],
)
def test_malformed_generators(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        rng.restore({**rng.capture(), **change})


def test_cuda_generators_need_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(RecoveryError, match="cuda"):
        rng.restore({**rng.capture(), "cuda": [torch.zeros(16, dtype=torch.uint8)]})
