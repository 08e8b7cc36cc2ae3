"""Copies between two network namespaces over two interfaces, one of which loses its cable in the middle."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.bench.nets import Nets, made
from tests.bench.vaults import MIB, Pair

RATE_MBIT, NBYTES = 200, 64 * MIB
DEADLINE_S = 30.0


@pytest.fixture
def net() -> Iterator[Nets]:
    try:
        with made(Nets(2, RATE_MBIT)) as found:
            yield found
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
            raise
        pytest.skip(f"no network namespaces with limited interfaces here: {error}")


@pytest.fixture
def pair(net: Nets) -> Iterator[Pair]:
    found = Pair(net, NBYTES)
    yield found
    found.kill()


def test_both_carry_a_part(net: Nets, pair: Pair) -> None:
    pair.begin()
    pair.took_s()
    sent = [net.sent_nbytes(number) for number in range(2)]
    assert min(sent) >= NBYTES / 4, sent
    assert sum(sent) < NBYTES * 1.2, "once"
    assert pair.end() == [[], []]


@pytest.mark.parametrize("pulled", [0, 1])
def test_a_cable_that_is_pulled_in_the_middle(net: Nets, pair: Pair, pulled: int) -> None:
    """The other carries the rest, and all that comes after it; both ends tell of it once at most."""
    pair.begin()
    limit = time.monotonic() + DEADLINE_S
    while net.sent_nbytes(pulled) < 4 * MIB:
        assert time.monotonic() < limit
    net.pull(pulled)
    pair.took_s()
    before = net.sent_nbytes(1 - pulled)
    pair.begin()
    pair.took_s()
    assert net.sent_nbytes(1 - pulled) - before >= NBYTES
    giver, holder = pair.end()
    assert [kind for kind, _ in holder] == ["interface-lost"], holder
    assert f"10.77.{pulled}.1" in holder[0][1]
    # Only the first one is the giver's to use. What it was sending there ends after a while, too.
    told = [kind for kind, _ in giver if kind != "peer-refused"]
    assert told == ["interface-lost"][pulled:], giver
