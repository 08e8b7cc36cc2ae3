"""Bytes from somebody else: only the project's own errors come of them, in bounded time and memory.

A short round; `make fuzz SECONDS=3600` is a long one. A case that fails is told with its seed and its bytes.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

import ckptless.daemon
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import Message

from .mutate import mutate
from .seeds import build, members
from .targets import SCRATCH, Target, covered, data_files, edges, files, texts

# Of all targets together; each has its part.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
LEAST_CASES = 40
# Of one case: CPU time, which is the same under load.
MOST_CPU_S = 2.0
# Of one target: what its peak of memory may grow by.
MOST_MIB = 300
MOST_MAPPED = 2 << 30
TARGETS = [*edges(), *files(), *data_files(), *texts()]


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    SCRATCH.mkdir(exist_ok=True)
    # A length that is believed shall be an error here and not the end of the machine.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MAPPED, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    shutil.rmtree(SCRATCH)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_comes(target: Target) -> None:
    chance = Random(f"{SEED} {target.name}")
    for _ in range(20):
        attempt(target, target.seed(chance))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + SECONDS / len(TARGETS)
    count = 0
    while count < LEAST_CASES or time.monotonic() < end:
        data = mutate(target.seed(chance), target.seed(chance), chance)
        if target.mend is not None and chance.random() < 0.7:
            data = target.mend(data)
        attempt(target, data)
        count += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MOST_MIB, f"{count} cases took {grown:.0f} MiB"


def attempt(target: Target, data: bytes, most_cpu_s: float = MOST_CPU_S) -> None:
    """One case. The error of a failure has all that it takes to try again."""
    begun, said = time.thread_time(), "taken"
    try:
        target.feed(data)
    except CkptlessError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{target.name}: {type(error).__name__}: {error}: {data!r}") from error
    took = time.thread_time() - begun
    assert said, f"no word: {target.name}: {data!r}"
    assert took < most_cpu_s, f"{target.name} took {took:.1f} s: {data!r}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_sound_is_taken(target: Target) -> None:
    """A seed that is refused reaches nothing: most of them must pass."""
    chance = Random(2)
    taken = 0
    for _ in range(20):
        try:
            target.feed(target.seed(chance))
            taken += 1
        except CkptlessError:
            pass
    assert taken >= TAKEN.get(target.name, 20)


# Seeds of some have more to fit than a type can say: names of nodes that are here, files that are there.
TAKEN = {
    "a step's environment": 0,
    "saved manifest": 0,
    "outcome file": 0,
    "data manifest": 0,
    "ckptless.yaml": 5,
    "YAML of such a file": 0,
    "a local agent's file": 3,
    "bulk transfer": 0,
}


def test_every_message_has_a_seed() -> None:
    """A message that nobody fuzzes is one that nobody has thought about: add its edge to `targets.EDGES`."""
    for module in pkgutil.walk_packages(ckptless.daemon.__path__, "ckptless.daemon."):
        if not module.name.endswith(("__main__", "pyslurm_worker")):
            importlib.import_module(module.name)
    known = covered()
    missing = sorted(f"{one.__module__}.{one.__name__}" for one in _all(Message) if one not in known)
    assert missing == []


def _all(kind: type) -> set[type]:
    found: set[type] = set()
    subs: list[type] = kind.__subclasses__()
    for sub in subs:
        found |= {sub, *_all(sub)}
    return {one for one in found if not one.__subclasses__() and one.__module__.startswith("ckptless.")}


def test_each_message_of_an_edge_is_made_and_taken() -> None:
    for target in edges():
        if target.kind is None:
            continue
        for kind in members(target.kind):
            for number in range(5):
                value = build(kind, Random(number))
                data = msgspec.msgpack.encode(value)
                assert msgspec.msgpack.decode(data, type=target.kind) is not None, kind


def test_the_fuzzer_finds_what_is_planted() -> None:
    """A parser that trusts a length, one that raises what is not ours, and one that never ends."""

    def trusts(data: bytes) -> None:
        if data[:4] == b"good" and len(data) >= 8:
            data[8 + int.from_bytes(data[4:8], "little")]

    planted = Target("planted", lambda _: b"good" + bytes(4) + b"xxxx", trusts)
    chance = Random(3)

    def search() -> None:
        for _ in range(10_000):
            attempt(planted, mutate(planted.seed(chance), planted.seed(chance), chance))

    with pytest.raises(AssertionError, match="planted: IndexError"):
        search()

    def slow(_: bytes) -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass

    with pytest.raises(AssertionError, match="took"):
        attempt(Target("slow", lambda _: b"", slow), b"", 0.1)
