"""How the generators' memory is looked for, and what is done where it is not found."""

import logging
import random
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.random.mtrand as mtrand
import pytest

from ckptless.pytorch_hooks.state import codec, rng, rng_memory


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Readers are looked for anew, and the generators are put back."""
    monkeypatch.setattr(rng._Readers, "python", None)
    monkeypatch.setattr(rng._Readers, "numpy", None)
    python, bits, numpy = random.getstate(), mtrand.get_bit_generator(), np.random.get_state()
    yield
    random.setstate(python)
    mtrand.set_bit_generator(bits)
    np.random.set_state(numpy)


def asked() -> bytes:
    """The global generators' own answer."""
    python = rng_memory.AskedPython(random)
    read = python.read()
    assert read is not None
    return codec.pack([python.state(read), np.random.get_state(legacy=False)])


def captured() -> bytes:
    tree = rng.capture()
    return codec.pack([tree["python"], tree["numpy"]])


def move() -> None:
    """Leave a deviate kept in both."""
    random.gauss(0, 1)
    np.random.standard_normal(3)


def test_memory_is_found_in_what_is_installed() -> None:
    """Else each batch that is fetched in the process costs 0.1 ms more."""
    move()
    assert captured() == asked()
    assert type(rng._Readers.python) is rng_memory.PythonMemory
    assert type(rng._Readers.numpy) is rng_memory.NumpyMemory


def test_the_search_touches_no_global_generator() -> None:
    move()
    before = asked()
    rng_memory._python_layout.__wrapped__()
    rng_memory._numpy_layout.__wrapped__(np)
    assert asked() == before


def test_readers_are_looked_for_once() -> None:
    rng.capture()
    readers = rng._Readers.python, rng._Readers.numpy
    move()
    rng.capture()
    assert (rng._Readers.python, rng._Readers.numpy) == readers


# ---- others than the usual generators


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937])
def test_other_bits(bits: type[np.random.BitGenerator]) -> None:
    captured()
    mtrand.set_bit_generator(bits(5))
    for _ in range(2):
        move()
        assert captured() == asked()
    in_memory = type(rng._Readers.numpy) is rng_memory.NumpyMemory
    assert in_memory is (bits is np.random.MT19937)


def test_other_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script puts its own behind the modules' functions."""

    class Own(random.Random):
        pass

    class Odd(np.random.RandomState):
        pass

    captured()
    for python, numpy in ((Own(3), Odd(3)), (random.Random(4), np.random.RandomState(4))):
        monkeypatch.setattr(random, "getstate", python.getstate)
        monkeypatch.setattr(np.random, "get_state", numpy.get_state)
        for _ in range(2):
            python.gauss(0, 1)
            numpy.standard_normal()
            assert captured() == asked()
        in_memory = isinstance(rng._Readers.python, rng_memory.PythonMemory)
        assert in_memory is (type(python) is random.Random)
        assert isinstance(rng._Readers.numpy, rng_memory.NumpyMemory) is in_memory


def test_functions_without_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    getstate, get_state = random.getstate, np.random.get_state
    monkeypatch.setattr(random, "getstate", lambda: getstate())
    monkeypatch.setattr(np.random, "get_state", lambda legacy: get_state(legacy=legacy))
    move()
    assert captured() == asked()


# ---- where the memory is not what it should be


def broken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    match how:
        case "other layout":
            monkeypatch.setattr(rng_memory, "_python_layout", lambda: (20, 24))
            monkeypatch.setattr(rng_memory, "_numpy_layout", lambda _: (8, 16))
        case "other interpreter":
            monkeypatch.setattr(rng_memory.sys, "implementation", SimpleNamespace(name="pypy"))  # type: ignore[attr-defined]
        case "search fails":

            def fails(*_: object) -> tuple[int, int]:
                raise OverflowError("no such field")

            monkeypatch.setattr(rng_memory, "_python_layout", fails)
            monkeypatch.setattr(rng_memory, "_numpy_layout", fails)


@pytest.mark.parametrize("how", ["other layout", "other interpreter", "search fails"])
def test_generators_are_asked(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, rng_memory.__name__)
    broken(monkeypatch, how)
    for _ in range(3):
        move()
        assert captured() == asked()
    assert type(rng._Readers.python) is rng_memory.AskedPython
    assert type(rng._Readers.numpy) is rng_memory.AskedNumpy
    assert [record.getMessage().split("'")[0] for record in caplog.records] == ["Python", "numpy"]


def test_a_deviate_that_is_kept_elsewhere() -> None:
    class Elsewhere(np.random.RandomState):
        """As a later numpy might be: what it is set to is not in the object itself."""

        kept: tuple[int, float] = (0, 0.0)

        def set_state(self, state: Any) -> None:
            self.kept = state["has_gauss"], state["gauss"]
            super().set_state({**state, "has_gauss": 0, "gauss": 0.0})

        def get_state(self, legacy: Any = False) -> Any:
            flag, gauss = self.kept
            return {**super().get_state(legacy=False), "has_gauss": flag, "gauss": gauss}

    own = Elsewhere(np.random.MT19937(3))
    numpy: Any = ModuleType("numpy")
    numpy.random = SimpleNamespace(RandomState=Elsewhere, MT19937=np.random.MT19937, get_state=own.get_state)
    numpy.frombuffer, numpy.uint32 = np.frombuffer, np.uint32
    with pytest.raises(LookupError, match="0 places"):
        rng_memory._numpy_layout(numpy)
    own.set_state({**own.get_state(), "has_gauss": 1, "gauss": 2.5})
    reader = rng_memory.numpy_reader(numpy)
    read = reader.read()
    assert read is not None
    assert reader.state(read)["gauss"] == 2.5


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ([(b"abcd", b"b"), (b"cbad", b"d")], "0 places"),
        ([(b"abab", b"b"), (b"acac", b"c")], "2 places"),
        ([(b"ab", b"b"), (b"cb", b"b")], "does not keep"),
    ],
)
def test_a_field_has_one_place(seen: list[tuple[bytes, bytes]], why: str) -> None:
    with pytest.raises(LookupError, match=why):
        rng_memory._place(seen)
    assert rng_memory._place([(b"xabx", b"ab"), (b"xbax", b"ba")]) == 1


def test_memory_that_stops_to_be_right_is_not_taken() -> None:
    """The comparison sees each field: all wrong places but those that hold the same bytes by chance."""
    own = np.random.RandomState(np.random.MT19937(1))
    own.standard_normal()
    at = SimpleNamespace(get_state=own.get_state)
    flag_at, gauss_at = rng_memory._numpy_layout(np)
    rng_memory.NumpyMemory(np, at, (flag_at, gauss_at))
    for layout in (
        (flag_at + 1, gauss_at),
        (flag_at, gauss_at + 8),
        (gauss_at, gauss_at),
        (flag_at, flag_at),
    ):
        with pytest.raises(LookupError, match="not what it says"):
            rng_memory.NumpyMemory(np, at, layout)
    index_at, words_at = rng_memory._python_layout()
    python = SimpleNamespace(getstate=random.Random(1).getstate)
    rng_memory.PythonMemory(python, (index_at, words_at))
    for layout in ((index_at + 4, words_at), (index_at, words_at + 4), (index_at, words_at - 4)):
        with pytest.raises(LookupError, match="not what it says"):
            rng_memory.PythonMemory(python, layout)
