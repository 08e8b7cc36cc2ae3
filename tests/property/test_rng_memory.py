"""Whatever a script does with its generators, their memory says what they say when asked, bit for bit."""

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.random.mtrand as mtrand
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.pytorch_hooks.state import rng, rng_memory

Act = tuple[str, Any]

FEW = settings(max_examples=60, deadline=None)

COUNTS = st.integers(0, 700)
SEEDS = st.integers(0, 2**32 - 1)
DEVIATES = st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("=d", bits)[0]) | st.floats()
WORDS = st.integers(0, 2**32 - 1)

# Those with a list do what is in it, and go back to the state before.
NUMPY = st.recursive(
    st.one_of(
        st.tuples(st.just("normal"), COUNTS),
        st.tuples(st.just("one normal"), st.none()),
        st.tuples(st.just("integers"), COUNTS),
        st.tuples(st.just("shuffle"), COUNTS),
        st.tuples(st.just("words"), COUNTS),
        st.tuples(st.just("seed"), SEEDS),
        st.tuples(st.just("set"), st.tuples(WORDS, st.integers(0, 624), st.integers(0, 1), DEVIATES)),
        st.tuples(st.just("set words"), SEEDS),
        st.tuples(st.just("set bits"), SEEDS),
    ),
    lambda acts: st.tuples(st.sampled_from(["nested", "nested tuple"]), st.lists(acts, max_size=4)),
    max_leaves=8,
)
PYTHON = st.recursive(
    st.one_of(
        st.tuples(st.just("random"), COUNTS),
        st.tuples(st.just("gauss"), COUNTS),
        st.tuples(st.just("normal"), COUNTS),
        st.tuples(st.just("bits"), COUNTS),
        st.tuples(st.just("shuffle"), COUNTS),
        st.tuples(st.just("seed"), SEEDS),
        st.tuples(st.just("set"), st.tuples(WORDS, st.integers(0, 624), st.none() | DEVIATES)),
    ),
    lambda acts: st.tuples(st.just("nested"), st.lists(acts, max_size=4)),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    python, bits, numpy = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()
    yield
    random.setstate(python)
    mtrand.set_bit_generator(bits)
    np.random.set_state(numpy)


def double(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("=d", value)


def compare_numpy() -> None:
    found, said = rng.capture()["numpy"], np.random.get_state(legacy=False)
    assert type(rng._Readers.numpy) is rng_memory.NumpyMemory
    assert found.keys() == said.keys()
    assert found["bit_generator"] == said["bit_generator"]
    assert found["state"].keys() == said["state"].keys()
    assert found["state"]["key"].dtype == said["state"]["key"].dtype
    assert found["state"]["key"].tobytes() == said["state"]["key"].tobytes()
    for one, other in (
        (found["state"]["pos"], said["state"]["pos"]),
        (found["has_gauss"], said["has_gauss"]),
    ):
        assert type(one) is type(other) is int
        assert one == other
    assert type(found["gauss"]) is float
    assert double(found["gauss"]) == double(said["gauss"])


def compare_python() -> None:
    (version, words, gauss), said = rng.capture()["python"], random.getstate()
    assert type(rng._Readers.python) is rng_memory.PythonMemory
    assert version == said[0]
    assert words == b"".join(word.to_bytes(4, "little") for word in said[1])
    assert double(gauss) == double(said[2])


def act_numpy(act: Act) -> None:
    name, value = act
    match name:
        case "normal":
            np.random.standard_normal(value)
        case "one normal":
            np.random.randn()
        case "integers":
            np.random.randint(0, 1 << 30, value)
        case "shuffle":
            np.random.shuffle(list(range(value)))
        case "words":
            mtrand.get_bit_generator().random_raw(value)
        case "seed":
            np.random.seed(value)
        case "set":
            word, pos, has_gauss, gauss = value
            key = np.arange(word, word + 624).astype(np.uint32)
            np.random.set_state(("MT19937", key, pos, has_gauss, gauss))
        case "set words":
            # The deviate is kept, whatever becomes of the words.
            mtrand.get_bit_generator().state = np.random.MT19937(value).state
        case "set bits":
            mtrand.set_bit_generator(np.random.MT19937(value))
        case "nested" | "nested tuple":
            before: Any = (
                np.random.get_state() if name == "nested tuple" else np.random.get_state(legacy=False)
            )
            run(value, act_numpy, compare_numpy)
            # Other bits may be there by now: the state goes into those.
            np.random.set_state(before)


def act_python(act: Act) -> None:
    name, value = act
    match name:
        case "random":
            for _ in range(value):
                random.random()
        case "gauss":
            for _ in range(value):
                random.gauss(0, 1)
        case "normal":
            random.normalvariate(0, value)
        case "bits":
            random.getrandbits(value)
        case "shuffle":
            random.shuffle(list(range(value)))
        case "seed":
            random.seed(value)
        case "set":
            word, index, gauss = value
            words = [(word + n) % (1 << 32) for n in range(624)]
            random.setstate((3, (*words, index), gauss))
        case "nested":
            before = random.getstate()
            run(value, act_python, compare_python)
            random.setstate(before)


def run(acts: list[Act], act: Callable[[Act], None], compare: Callable[[], None]) -> None:
    for one in acts:
        act(one)
        compare()


@FEW
@given(st.lists(NUMPY, max_size=12))
def test_numpy(acts: list[Act]) -> None:
    run(acts, act_numpy, compare_numpy)


@FEW
@given(st.lists(PYTHON, max_size=12))
def test_python(acts: list[Act]) -> None:
    run(acts, act_python, compare_python)


@FEW
@given(st.lists(NUMPY, max_size=4), st.lists(PYTHON, max_size=4), st.lists(NUMPY, max_size=4))
def test_a_snapshot_is_of_its_moment(first: list[Act], second: list[Act], third: list[Act]) -> None:
    """Nothing in it moves with the generators, and they draw the same once it is restored."""
    run(first, act_numpy, compare_numpy)
    run(second, act_python, compare_python)

    def drawn() -> tuple[Any, ...]:
        python = [*(random.gauss(0, 1) for _ in range(3)), *(random.random() for _ in range(700))]
        return np.random.standard_normal(3).tobytes(), np.random.random_sample(700).tobytes(), python

    taken = rng.snapshot()
    want = repr(drawn())
    run(third, act_numpy, compare_numpy)
    run(second, act_python, compare_python)
    rng.restore(taken.tree())
    assert repr(drawn()) == want
