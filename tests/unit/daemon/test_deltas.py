"""What a holder has of a version already is not sent again, and is verified all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.versions.deltas import Run, missing, spans_of, unchanged
from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.peers.messages import MOST_RUNS
from ckptless.daemon.transport.bulk import SendRate
from ckptless.daemon.transport.link import Link

from .vaults import Node, Nodes, payload_of, until

PAGE = version.PAGE_NBYTES
CHUNKS = 12
NBYTES = (CHUNKS - 1) * PAGE + 100


def header(chunks: Sequence[int], nbytes: int, layout: str = "00" * 16) -> version.Header:
    return version.Header("job", 0, 0, 1, 1, layout, nbytes, tuple(chunks), PAGE)


# ---------------------------------------------------------------------------------------------- pure


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, PAGE)
)
def test_what_is_sent_and_what_is_there_is_all_of_it(chunks: list[tuple[int, int]], last: int) -> None:
    nbytes = (len(chunks) - 1) * PAGE + last
    one, other = (header([pair[i] for pair in chunks], nbytes) for i in (0, 1))
    runs = unchanged(one, other)
    same = {index for first, count in runs for index in range(first, first + count)}
    assert same == {index for index, (a, b) in enumerate(chunks) if a == b}
    bytes_of = sorted([*spans_of(one, runs), *missing(one, runs)])
    assert bytes_of[0][0] == 0
    assert bytes_of[-1][1] == one.nbytes
    assert all(before[1] == after[0] for before, after in pairwise(bytes_of))
    assert all(start < end for start, end in bytes_of)


def test_another_layout_has_nothing_in_common() -> None:
    assert unchanged(header([1, 2], PAGE + 1), header([1, 2], PAGE + 2)) == ()
    assert unchanged(header([1, 2], PAGE + 1), header([1, 2], PAGE + 1, layout="11" * 16)) == ()


def test_no_more_runs_than_an_answer_may_have() -> None:
    chunks = range(2 * MOST_RUNS + 4)
    runs = unchanged(
        header(chunks, len(chunks) * PAGE), header([c * (c % 2 == 0) for c in chunks], len(chunks) * PAGE)
    )
    assert len(runs) == MOST_RUNS


@pytest.mark.parametrize("runs", [((0, 0),), ((0, 3),), ((2, 1),), ((1, 1), (0, 1)), ((0, 2), (1, 1))])
def test_nonsense_is_refused(runs: tuple[Run, ...]) -> None:
    with pytest.raises(ProtocolError, match="chunks"):
        missing(header([1, 2], PAGE + 1), runs)


# ------------------------------------------------------------------------------------- real servers


def push(node: Node, step: int, payload: bytes, acked: list[int]) -> None:
    """As a commit of generation 1 of shard 0."""
    node.hold(0, step, payload)
    found = node.vault.tensors(0, step)
    assert found is not None
    node.replicas.push_tensors(
        Version(1, 0, step, *found), frozenset({node.number}), lambda: acked.append(step)
    )


async def first_step(nodes: Nodes) -> tuple[bytes, list[int]]:
    """Its payload, which is held by now, and the steps that are."""
    nodes.follow(nodes.assignment([0], None, generation=1))
    acked: list[int] = []
    first = payload_of(0, 1, NBYTES)
    push(nodes[0], 1, first, acked)
    await until(lambda: acked == [1])
    return first, acked


def changed(payload: bytes, step: int, chunks: Sequence[int]) -> bytes:
    """With other bytes in those chunks."""
    new = bytearray(payload)
    for chunk in chunks:
        start = chunk * PAGE
        end = min(start + PAGE, len(payload))
        new[start:end] = payload_of(chunk, step, end - start)
    return bytes(new)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each transfer."""
    sizes: list[int] = []
    original = Link.send_bulk

    async def send_bulk(self: Link[object], data: memoryview, pace: SendRate) -> None:
        sizes.append(len(data))
        await original(self, data, pace)

    monkeypatch.setattr(Link, "send_bulk", send_bulk)
    return sizes


@pytest.mark.parametrize("chunks", [(), (0,), (CHUNKS - 1,), (3, 4, 9), tuple(range(CHUNKS))])
def test_only_what_has_changed_is_sent(sent: list[int], chunks: tuple[int, ...]) -> None:
    async def play() -> None:
        async with Nodes(2, copies=1) as nodes:
            first, acked = await first_step(nodes)
            assert sum(sent) == NBYTES
            sent.clear()
            second = changed(first, 2, chunks)
            push(nodes[0], 2, second, acked)
            await until(lambda: acked == [1, 2])
            assert nodes[1].payload(0, 1) == first
            assert nodes[1].payload(0, 2) == second
            size = sum(min(PAGE, NBYTES - chunk * PAGE) for chunk in chunks)
            assert sum(sent) == size

    asyncio.run(play())


def test_many_steps_go_round_the_slots(sent: list[int]) -> None:
    async def play() -> None:
        async with Nodes(3) as nodes:
            nodes.follow(nodes.assignment([0], None, generation=1))
            acked: list[int] = []
            payload = payload_of(0, 0, NBYTES)
            for step in range(1, 12):
                payload = changed(payload, step, [1, step % CHUNKS])
                push(nodes[0], step, payload, acked)
                await until(lambda step=step: acked[-1:] == [step])  # type: ignore[misc]
                assert [nodes[n].payload(0, step) for n in (1, 2)] == [payload] * 2
            assert sum(sent) <= 2 * NBYTES + 10 * 2 * 2 * PAGE

    asyncio.run(play())


def test_a_chunk_that_rotted_where_it_lay_is_not_taken(sent: list[int]) -> None:
    async def play() -> None:
        async with Nodes(2, copies=1) as nodes:
            first, acked = await first_step(nodes)
            nodes[1].spoil(0, 1)
            second = changed(first, 2, [0])
            push(nodes[0], 2, second, acked)
            await until(lambda: acked == [1, 2])
            assert nodes[1].payload(0, 2) == second
            assert len(nodes[1].told("refused-version")) == 1
            assert "chunk 11" in nodes[1].told("refused-version")[0]
            assert len(nodes[1].told("bad-version")) == 1
            assert nodes[1].vault.steps(0) == (2,)
            # All of it, the second time.
            assert sum(sent) == NBYTES + PAGE + NBYTES

    asyncio.run(play())
