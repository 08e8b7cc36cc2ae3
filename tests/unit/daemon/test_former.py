"""A node's ranks get their parts of what another number of ranks had: from here, or from others, verified."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from ckptless.daemon.agent.versions import former as former_state
from ckptless.daemon.agent.versions.former import FormerState
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import PeerError

from .vaults import Nodes, payload_of

STEP, PAGE, RANKS = 7, version.PAGE_NBYTES, 2
LAYOUT = "00" * 16
NBYTES = 5 * PAGE + 77
# Within a chunk, over the border of two, and the end.
SPANS = ((10, 20), (PAGE - 5, 10), (NBYTES - 3, 3))


@asynccontextmanager
async def world() -> AsyncIterator[tuple[Nodes, FormerState]]:
    """Nodes 1 and 2 hold the shards of two former ranks. Node 0 has come since, and has the only rank."""
    async with Nodes(3) as nodes:
        for number in (1, 2):
            for shard in range(RANKS):
                nodes[number].hold(shard, STEP, payload_of(shard, STEP, NBYTES))
        known = nodes.assignment([0], STEP)
        held = (1, 2)
        new = m.Assignment(
            job=known.job,
            generation=2,
            term=1,
            leader=0,
            places=known.places,
            nodes=known.nodes,
            restore_step=STEP,
            cut=2,
            former=m.Former(
                cut=1,
                shards=(0, 1),
                tensor_nodes=((0, held), (1, held)),
                record_nodes=(held, held),
            ),
        )
        for node in nodes.values():
            node.vault.follow(new, node.number)
            node.replicas.follow(new)
        state = FormerState(0, nodes[0].vault, nodes[0].replicas)
        state.follow(new)
        await asyncio.sleep(0)
        yield nodes, state
        await state.close()


def play(work: Callable[[Nodes, FormerState], Awaitable[None]]) -> None:
    async def run() -> None:
        async with world() as (nodes, state):
            await work(nodes, state)

    asyncio.run(run())


def asked(shard: int = 1, *, layout: str = LAYOUT) -> m.FetchSpans:
    return m.FetchSpans(generation=2, shard=shard, layout=layout, spans=SPANS)


async def parts(state: FormerState, shard: int = 1) -> bytes:
    fd = await state.spans(asked(shard))
    try:
        return os.pread(fd, NBYTES, 0)
    finally:
        os.close(fd)


def wanted(shard: int = 1) -> bytes:
    payload = payload_of(shard, STEP, NBYTES)
    return b"".join(payload[start : start + count] for start, count in SPANS)


def test_parts_come_from_another_node_one_after_the_other_and_nothing_stays() -> None:
    async def work(nodes: Nodes, state: FormerState) -> None:
        assert await parts(state) == wanted()
        assert await parts(state, 0) == wanted(0)
        assert nodes[0].vault.holdings().tensors == ()
        assert await state.record(1) == b"the record of 1"

    play(work)


def test_what_is_bad_at_one_holder_comes_from_the_next_and_is_given_by_nobody_any_more() -> None:
    async def work(nodes: Nodes, state: FormerState) -> None:
        # The middle of the first chunk, of which a part is asked for, and not these bytes.
        set_aside = nodes[1].vault.former
        assert set_aside is not None
        found = set_aside.tensors(1, STEP)
        assert found is not None
        with found[1].view(found[0].offset, found[0].nbytes) as view:
            view[PAGE + 900] ^= 1
        assert await parts(state) == wanted()
        assert set_aside.tensors(1, STEP) is None
        assert nodes[1].told("bad-version")

    play(work)


def test_nobody_has_it() -> None:
    async def work(nodes: Nodes, state: FormerState) -> None:
        for number in (1, 2):
            nodes[number].vault.forget_former()
        with pytest.raises(PeerError, match="nobody could give parts of shard 1, step 7"):
            await parts(state)
        with pytest.raises(PeerError, match="nobody could give the record of step 7 of rank 0"):
            await state.record(0)

    play(work)


def test_what_is_asked_for_must_be_there() -> None:
    async def work(nodes: Nodes, state: FormerState) -> None:
        with pytest.raises(PeerError, match="no other number of ranks, with a rank 2"):
            await state.record(RANKS)
        with pytest.raises(PeerError, match="nobody could give parts"):
            await state.spans(asked(layout="11" * 16))
        beyond = m.FetchSpans(generation=2, shard=0, layout=LAYOUT, spans=((NBYTES, 1),))
        with pytest.raises(PeerError, match="nobody could give parts"):
            await state.spans(beyond)
        # That is no fault of what lies there.
        assert await parts(state) == wanted()
        assert not nodes[1].told("bad-version")

    play(work)


def test_too_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_state, "SPANS_LIMIT", 32)

    async def work(_nodes: Nodes, state: FormerState) -> None:
        with pytest.raises(PeerError, match="parts of 33 bytes are asked for at once; the limit is 32"):
            await state.spans(asked())

    play(work)


def test_what_lies_here_is_not_asked_of_others() -> None:
    async def work(nodes: Nodes, state: FormerState) -> None:
        here = FormerState(1, nodes[1].vault, nodes[1].replicas)
        follow = state._former
        assert follow is not None
        here._former, here._step = follow, STEP
        await nodes[2].close()
        assert await parts(here) == wanted()
        assert await here.record(0) == b"the record of 0"
        await here.close()

    play(work)
