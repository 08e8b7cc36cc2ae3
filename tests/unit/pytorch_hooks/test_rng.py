"""The process's random generators: read, compared, and put back, whichever generator numpy draws from."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.random.mtrand as mtrand
import pytest
import torch

from ckptless.pytorch_hooks.state import codec, rng


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    python, bits, numpy, cpu = (
        random.getstate(),
        mtrand.get_bit_generator(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    yield
    random.setstate(python)
    mtrand.set_bit_generator(bits)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def drawn() -> tuple[Any, ...]:
    """Normal deviates are made in pairs, of which Python's and numpy's generators keep one."""
    return random.gauss(0, 1), random.random(), np.random.standard_normal(3).tobytes(), torch.rand(3).tolist()


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_what_was_read_is_put_back(bits: type[np.random.BitGenerator]) -> None:
    mtrand.set_bit_generator(bits(5))
    drawn()
    taken = rng.capture()
    record = codec.pack(taken)
    want = [drawn() for _ in range(3)]
    assert codec.pack(taken) == record, "what was read moves with the generators"
    rng.restore(codec.unpack(record))
    assert [drawn() for _ in range(3)] == want


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: np.random.randint(9),
        np.random.standard_normal,
        lambda: torch.rand(1),
        lambda: mtrand.set_bit_generator(np.random.PCG64(1)),
    ],
)
def test_any_draw_makes_another_state(draw: Callable[[], object]) -> None:
    before = rng.capture()
    assert rng.equal(before, rng.capture())
    draw()
    assert not rng.equal(before, rng.capture())


@pytest.mark.parametrize("drawing", [lambda: random.gauss(0, 1), np.random.standard_normal])
def test_the_kept_deviate_counts(drawing: Callable[[], object]) -> None:
    """The second one of a pair moves nothing but that it is kept no more."""
    random.seed(1)
    np.random.seed(1)
    drawing()
    before = rng.capture()
    drawing()
    assert not rng.equal(before, rng.capture())


def test_states_of_another_shape_differ() -> None:
    state = rng.capture()
    assert not rng.equal(state, {**state, "numpy": None})
    assert not rng.equal(state, {**state, "cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert not rng.equal(state, {key: value for key, value in state.items() if key != "cuda"})
