"""Python's and numpy's global generators, read where their private memory lies.

Asked for its state, numpy takes 34 us, 75 us where the caches are cold, and Python 14 and 36: they build the
624 words one by one. Here the memory is copied as it is, and looked into when somebody wants to know.

Where a field lies is not assumed but found: a generator of our own is set to states in which no two fields
are alike, and its memory searched for them. Each must be in exactly one place, and stay there. Then what is
read is compared with what the generator says when asked: our own after draws of several kinds, then the one
that is to be read. Where any of that fails, it is asked each time.
"""

import ctypes
import logging
import random
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_WORDS = 624
_WORDS_NBYTES = 4 * _WORDS
# No two bytes of these are alike, so that a field is found by its width, too.
_NUMBERS = (0x01020304, 0x15262738, 0x7B6A5948)
_INDICES = (_WORDS, 300, 1)

_R = TypeVar("_R")


class AskedPython:
    """The generator behind `random.getstate`, asked for its state; whatever it is.

    `at` is what has that function, the module `random` itself where not a test.
    """

    def __init__(self, at: Any) -> None:
        self._at = at
        self._getstate = at.getstate

    def read(self) -> tuple[Any, ...] | None:
        """What `state` makes a state of; None if the function is another one by now."""
        return tuple(self._getstate()) if self._at.getstate is self._getstate else None

    def state(self, read: tuple[Any, ...]) -> tuple[int, bytes, float | None]:
        """(version, 624 words and the index, each of 4 bytes, the kept deviate)."""
        version, words, gauss = read
        return version, array("I", words).tobytes(), gauss


class PythonMemory(AskedPython):
    """The same for a `random.Random`, from its memory. LookupError where it is anything else."""

    def __init__(self, at: Any, layout: tuple[int, int]) -> None:
        super().__init__(at)
        generator: Any = getattr(self._getstate, "__self__", None)
        if type(generator) is not random.Random:
            raise LookupError("it is no random.Random")
        self._index, self._words = layout
        self._generator: Any = generator
        self._memory = _object_memory(generator)
        self.check()

    def check(self) -> None:
        """LookupError if it is not the state that the generator says when asked."""
        read, said = self.read(), super().read()
        if read is None or said is None or self.state(read) != super().state(said):
            raise LookupError("its memory is not what it says")

    def read(self) -> tuple[Any, ...] | None:  # noqa: D102
        if self._at.getstate is not self._getstate:
            return None
        return self._memory.raw, self._generator.gauss_next

    def state(self, read: tuple[Any, ...]) -> tuple[int, bytes, float | None]:  # noqa: D102
        memory, gauss = read
        words = memory[self._words : self._words + _WORDS_NBYTES]
        return random.Random.VERSION, words + memory[self._index : self._index + 4], gauss


class AskedNumpy:
    """The generator behind `numpy.random.get_state`, asked for its state; whatever it is.

    `at` is what has that function, the module `numpy.random` itself where not a test.
    """

    def __init__(self, at: Any) -> None:
        self._at = at
        self._get_state = at.get_state

    def read(self) -> tuple[Any, ...] | None:
        """What `state` makes a state of; None if the function is another one by now."""
        return (self._get_state(legacy=False),) if self._at.get_state is self._get_state else None

    def state(self, read: tuple[Any, ...]) -> dict[str, Any]:
        """As `numpy.random.get_state(legacy=False)`."""
        state: dict[str, Any] = read[0]
        return state


class NumpyMemory(AskedNumpy):
    """The same for a RandomState over an MT19937, from its memory. LookupError where it is anything else."""

    def __init__(self, numpy: Any, at: Any, layout: tuple[int, int]) -> None:
        super().__init__(at)
        generator: Any = getattr(self._get_state, "__self__", None)
        bits = getattr(generator, "_bit_generator", None)
        if type(generator) is not numpy.random.RandomState or type(bits) is not numpy.random.MT19937:
            raise LookupError("it is no RandomState over an MT19937")
        self._numpy = numpy
        self._has_gauss, self._gauss = layout
        self._generator, self._bits = generator, bits
        self._words_memory = _words_memory(bits)
        self._memory = _object_memory(generator)
        self.check()

    def check(self) -> None:
        """LookupError if it is not the state that the generator says when asked."""
        read, said = self.read(), super().read()
        if read is None or said is None or _plain(self.state(read)) != _plain(super().state(said)):
            raise LookupError("its memory is not what it says")

    def read(self) -> tuple[Any, ...] | None:
        """As above; None also if the generator is over other bits by now (numpy.random.set_bit_generator)."""
        if self._at.get_state is not self._get_state or self._generator._bit_generator is not self._bits:
            return None
        return self._words_memory.raw, self._memory.raw

    def state(self, read: tuple[Any, ...]) -> dict[str, Any]:  # noqa: D102
        words, memory = read
        key = self._numpy.frombuffer(words, dtype=self._numpy.uint32, count=_WORDS).copy()
        return {
            "bit_generator": "MT19937",
            "state": {"key": key, "pos": struct.unpack_from("=i", words, _WORDS_NBYTES)[0]},
            "has_gauss": struct.unpack_from("=i", memory, self._has_gauss)[0],
            "gauss": struct.unpack_from("=d", memory, self._gauss)[0],
        }


def python_reader(at: Any = random) -> AskedPython:
    """The shortest way to read what is behind `random.getstate` now."""
    return _shorter(lambda: PythonMemory(at, _python_layout()), AskedPython(at), "Python")


def numpy_reader(numpy: Any) -> AskedNumpy:
    """The shortest way to read what is behind `numpy.random.get_state` now."""
    at = numpy.random
    return _shorter(lambda: NumpyMemory(numpy, at, _numpy_layout(numpy)), AskedNumpy(at), "numpy")


def _shorter(from_memory: Callable[[], _R], asked: _R, whose: str) -> _R:
    try:
        return from_memory()
    except Exception as error:  # noqa: BLE001  # whatever an unknown version makes of the search, it can be asked
        logger.info("%s's random generator is asked for its state, which takes longer: %s", whose, error)
        return asked


# ---- where memory is


def _memory(address: int, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
    return (ctypes.c_char * nbytes).from_address(address)


def _object_memory(value: object) -> "ctypes.Array[ctypes.c_char]":
    """All that lies in the object itself. It has to outlive what is returned."""
    if sys.implementation.name != "cpython":
        raise LookupError("only in CPython id() is an address")
    return _memory(id(value), type(value).__basicsize__)


def _words_memory(bits: Any) -> "ctypes.Array[ctypes.c_char]":
    """The words of an MT19937 and the position after them: numpy tells where, for those who draw from C."""
    return _memory(bits.ctypes.state_address, _WORDS_NBYTES + 4)


# ---- where fields are


@cache
def _python_layout() -> tuple[int, int]:
    """Where in a random.Random its index is and where its words."""
    own, patterns = random.Random(), random.Random(1)
    memory = _object_memory(own)
    seen: list[tuple[bytes, bytes]] = []
    for index in _INDICES:
        words = [patterns.getrandbits(32) for _ in range(_WORDS)]
        own.setstate((random.Random.VERSION, (*words, index), None))
        seen.append((memory.raw, array("I", own.getstate()[1]).tobytes()))
    index_at = _place([(was, words[_WORDS_NBYTES:]) for was, words in seen])
    layout = index_at, _place([(was, words[:_WORDS_NBYTES]) for was, words in seen])
    reader = PythonMemory(SimpleNamespace(getstate=own.getstate), layout)
    for draw in (own.random, lambda: own.gauss(0, 1), lambda: own.gauss(0, 1), own.seed):
        draw()
        reader.check()
    return layout


@cache
def _numpy_layout(numpy: Any) -> tuple[int, int]:
    """Where in a RandomState has_gauss is and where gauss."""
    bits = numpy.random.MT19937(1)
    own, patterns = numpy.random.RandomState(bits), random.Random(1)
    memory = _object_memory(own)
    seen: list[tuple[bytes, bytes, bytes]] = []
    for number in _NUMBERS:
        key = numpy.frombuffer(patterns.randbytes(_WORDS_NBYTES), dtype=numpy.uint32)
        state = {"bit_generator": "MT19937", "state": {"key": key, "pos": number // 2}}
        own.set_state({**state, "has_gauss": number, "gauss": patterns.random()})
        said = own.get_state(legacy=False)
        seen.append((memory.raw, struct.pack("=i", said["has_gauss"]), struct.pack("=d", said["gauss"])))
        words, pos = said["state"]["key"].tobytes(), struct.pack("=i", said["state"]["pos"])
        if _words_memory(bits).raw != words + pos:
            raise LookupError("the words are not where numpy says")
    flag_at = _place([(was, flag) for was, flag, _ in seen])
    layout = flag_at, _place([(was, gauss) for was, _, gauss in seen])
    own.seed(1)
    reader = NumpyMemory(numpy, SimpleNamespace(get_state=own.get_state), layout)
    for draw in (own.random_sample, own.standard_normal, own.standard_normal, own.standard_normal, own.seed):
        draw()
        reader.check()
    return layout


def _place(seen: Sequence[tuple[bytes, bytes]]) -> int:
    """The one place where each memory has the field that goes with it."""
    if len({field for _, field in seen}) != len(seen):
        raise LookupError("it does not keep what it is set to")
    memory, field = seen[0]
    places = [
        at
        for at in range(len(memory) - len(field) + 1)
        if all(memory.startswith(field, at) for memory, field in seen)
    ]
    if len(places) != 1:
        raise LookupError(f"a field of it is in {len(places)} places")
    return places[0]


def _plain(state: dict[str, Any]) -> tuple[Any, ...]:
    """All of numpy's state, to be compared bit by bit."""
    key = state["state"]["key"]
    rest = state["state"]["pos"], state["has_gauss"], struct.pack("=d", state["gauss"])
    return state["bit_generator"], str(key.dtype), key.tobytes(), *rest
