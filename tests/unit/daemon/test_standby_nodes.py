"""The next batch of another node's rank is there when that node is lost: real sockets between agents."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parent))

from played_rings import (
    LOST,
    MANIFEST,
    OTHER,
    Process,
    Rings,
    entry_of,
    feed,
    follow,
    job,
    position,
    put_record,
    run,
)
from vaults import Nodes, until

from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.ring_standby import FAILURES, WORTH_S
from ckptless.daemon.agent.vault import Held, digest
from ckptless.daemon.api import ring as m
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace

NBYTES = len(entry_of(LOST, 3))


def kept(one: Rings) -> list[tuple[int, int]]:
    return sorted((found.stream, found.seq) for found in one.peers.standby._kept)


async def until_kept(one: Rings, seq: int, stream: int = LOST) -> None:
    await until(lambda: (stream, seq) in kept(one))


async def slow_rank(one: Rings, stream: int, took_s: float = WORTH_S) -> Process:
    """A rank whose loader takes so long, and which has some batches ahead."""
    rank = one.rank(stream, 0, took_s=took_s)
    await until(lambda: len(rank.made) > 6)
    await until(lambda: one.service.nodes.slowest_s == took_s)
    return rank


def make_no_more(*ranks: Process) -> None:
    """Nothing is made any more, and what was made is forgotten."""
    for rank in ranks:
        rank.made.clear()
        assert rank.producer is not None
        rank.producer.silent = True


def count_asked(one: Rings) -> list[int]:
    """Which batches others ask of a node, from here on."""
    asked: list[int] = []
    answer = one.node.replicas.serving.on_batches

    async def counted(link: Peer, wanted: p.GetBatches, pace: Pace) -> None:
        asked.append(wanted.feed.seq)
        await answer(link, wanted, pace)

    one.node.replicas.serving.on_batches = counted
    return asked


async def commit(nodes: Nodes, step: int, seq: int, rank: int = 2, stream: int = LOST) -> None:
    (await put_record(nodes, step, seq, rank, stream)).close()


def test_the_first_batch_is_there_though_it_is_not_made_again() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, new, lost)):
            here, there = await slow_rank(old, 0), await slow_rank(lost, LOST)
            link = await put_record(nodes, 7, 3)
            await until(lambda: kept(old) == [(LOST, 3)])
            assert old.peers.standby.nbytes == NBYTES
            assert there.made.count((LOST, 3)) == 1
            make_no_more(here)
            await lost.lose()
            link.close()
            # The one behind it is asked for when the node is lost.
            await until(lambda: old.guests)
            follow(nodes, [old, new, lost], 3, (0, 1, 1), step=7)
            new.borrowing.want(2, [feed(3)])
            rank = new.rank(LOST, 3, silent=True)
            await until(lambda: rank.got)
            assert rank.got == {3: entry_of(LOST, 3)}
            assert nodes[0].told("ring-standby") == [
                f"loader 'train', stream {LOST}: 1 batches, from 3 on, were kept here"
            ]
            assert not here.made
            make = here.producer
            assert make is not None
            asked = [(job.stream, job.seq) for job in make.heard if isinstance(job, m.RingMake)]
            assert (LOST, 4) in asked
            assert (LOST, 3) not in asked

    run(play)


def test_the_rest_follows_from_the_ring() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, new, lost)):
            here, _there = await slow_rank(old, 0), await slow_rank(lost, LOST)
            await commit(nodes, 7, 3)
            await until(lambda: kept(old) == [(LOST, 3)])
            here.made.clear()
            await lost.lose()
            follow(nodes, [old, new, lost], 3, (0, 1, 1), step=7)
            new.borrowing.want(2, [feed(3)])
            rank = new.rank(LOST, 3, silent=True)
            await until(lambda: len(rank.got) == 4)
            assert rank.got == {seq: entry_of(LOST, seq) for seq in range(3, 7)}
            assert (LOST, 3) not in here.made

    run(play)


def test_a_recovery_to_the_record_before_the_newest() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, new, lost)):
            here, _there = await slow_rank(old, 0), await slow_rank(lost, LOST)
            links = []
            for step, seq in ((6, 2), (7, 3), (8, 4)):
                # While it lasts nothing is begun for the loss of that node.
                links.append(await put_record(nodes, step, seq))
                await until_kept(old, seq)
            assert kept(old) == [(LOST, 3), (LOST, 4)]
            make_no_more(here)
            for link in links:
                link.close()
            await lost.lose()
            follow(nodes, [old, new, lost], 3, (0, 1, 1), step=7)
            new.borrowing.want(2, [feed(3)])
            rank = new.rank(LOST, 3, silent=True)
            # What follows on it is what was kept for the step that never happened.
            await until(lambda: len(rank.got) == 2)
            assert rank.got == {seq: entry_of(LOST, seq) for seq in (3, 4)}

    run(play)


def test_two_nodes_that_are_lost_at_once() -> None:
    async def play() -> None:
        async with job(4) as (nodes, rings):
            old, new, one, two = rings
            here = await slow_rank(old, 0)
            for lost, stream in ((one, LOST), (two, LOST + 1)):
                await slow_rank(lost, stream)
                await commit(nodes, 7, 3, lost.node.number, stream)
            await until(lambda: kept(old) == [(LOST, 3), (LOST + 1, 3)])
            make_no_more(here)
            await one.lose()
            await two.lose()
            follow(nodes, rings, 3, (0, 1, 1, 1), step=7)
            for stream in (LOST, LOST + 1):
                new.borrowing.want(2 + stream - LOST, [structs.replace(feed(3), stream=stream)])
            await until(lambda: len(new.service.lent._kept) == 2)
            assert len(nodes[0].told("ring-standby")) == 2
            for reader, stream in ((1, LOST), (2, LOST + 1)):
                rank = Process(new.service)
                rank.silent = True
                rank.open(stream, 3, reader=reader)
                assert rank.got == {3: entry_of(stream, 3)}
            assert not here.made

    run(play)


@pytest.mark.parametrize("why", ["quick", "other manifest", "no ring", "its own", "what is restored"])
def test_nothing_is_fetched_without_need(why: str) -> None:
    async def play() -> None:
        async with job(3) as (nodes, rings):
            old, _new, lost = rings
            took_s = WORTH_S / 2 if why == "quick" else WORTH_S
            await slow_rank(lost, LOST, took_s)
            if why == "other manifest":
                old.rank(0, 0, OTHER, took_s=took_s)
            elif why == "its own":
                await slow_rank(old, LOST, took_s)
            elif why != "no ring":
                await slow_rank(old, 0, took_s)
            asked = count_asked(lost)
            if why == "what is restored":
                # As its holder gets it from the rank's new node.
                follow(nodes, rings, 3, step=9)
                old.node.vault.put_record(2, 9, Held(b"r", digest(b"r"), 2, (feed(5),)))
            else:
                for step in range(7, 10):
                    await commit(nodes, step, step - 4)
            await until(lambda: old.peers.standby._due is None)
            assert not old.peers.standby._tasks
            assert not asked
            assert not kept(old)
            assert not nodes[0].told("ring-not-kept")

    run(play)


@pytest.mark.parametrize("what", ["bytes", "digest", "seq", "stream", "manifest", "message", "refusal"])
def test_a_wrong_answer_is_not_kept(what: str) -> None:
    asked: list[int] = []

    async def wrong(link: Peer, wanted: p.GetBatches, _pace: Pace) -> None:
        seq = wanted.feed.seq
        asked.append(seq)
        stream, manifest = LOST + (what == "stream"), OTHER if what == "manifest" else MANIFEST
        data = bytearray(entry_of(stream, seq + (what == "seq"), manifest))
        found = entry.decode(bytes(data)).digest
        if what == "message":
            link.send(p.RecordReply(shard=0, record=b"", digest=""))
        elif what == "refusal":
            link.send(p.BatchReply(seq=seq, nbytes=0, why="it will not"))
        else:
            data[60_000] ^= what == "bytes"
            reply = p.BatchReply(seq=seq, nbytes=len(data), digest="00" if what == "digest" else found)
            link.send(reply)
            await link.send_bulk(memoryview(data))

    async def play() -> None:
        async with job(3) as (nodes, (old, _new, lost)):
            await slow_rank(old, 0)
            lost.node.replicas.serving.on_batches = wrong
            for at in range(FAILURES + 3):
                await commit(nodes, 7 + at, 3 + at)
                await until(lambda: not old.peers.standby._tasks and old.peers.standby._due is None)
            # It is told once, and not asked for ever.
            assert asked == list(range(3, 3 + FAILURES))
            assert not kept(old)
            (told,) = nodes[0].told("ring-not-kept")
            assert told.startswith(f"loader 'train', stream {LOST}: no batches are kept here")
            assert told.endswith(f", {FAILURES} in a row")

    run(play)


def test_one_that_takes_too_long_gives_way_to_newer_ones() -> None:
    asked: list[int] = []

    def is_asked(seq: int) -> bool:
        return asked[-1:] == [seq]

    async def late(link: Peer, wanted: p.GetBatches, _pace: Pace) -> None:
        asked.append(wanted.feed.seq)
        with pytest.raises(ConnectionError):
            await link.receive()
        raise ConnectionError

    async def play() -> None:
        async with job(3) as (nodes, (old, _new, lost)):
            await slow_rank(old, 0)
            lost.node.replicas.serving.on_batches = late
            for at in range(7):
                await commit(nodes, 7 + at, 3 + at)
                await until(partial(is_asked, min(7, 3 + at - at % 2)))
            # Each as long as its record is one of the newest two.
            assert asked == [3, 5, 7]
            (told,) = nodes[0].told("ring-not-kept")
            assert told.endswith("in case their node is lost: one takes longer than two commits, 3 in a row")

    run(play)


@pytest.mark.parametrize("why", ["ring", "record", "here", "never happened", "closed"])
def test_what_nobody_can_want_any_more_goes(why: str) -> None:
    async def play() -> None:
        async with job(3) as (nodes, rings):
            old, _new, lost = rings
            here = await slow_rank(old, 0)
            await slow_rank(lost, LOST)
            await commit(nodes, 7, 3)
            await until(lambda: kept(old) == [(LOST, 3)])
            match why:
                case "ring":
                    old.foresight.close()
                    here.says(m.RingDone())
                case "record":
                    old.node.vault.give_back(("record", 2))
                case "here":
                    follow(nodes, rings, 3, (0, 1, 0), step=7)
                case "never happened":
                    follow(nodes, rings, 3, step=6)
                case "closed":
                    await old.peers.close()
            await until(lambda: not kept(old))
            assert old.peers.standby.nbytes == 0

    run(play)


def test_no_more_than_the_ring_may_take() -> None:
    async def play() -> None:
        async with job(4) as (nodes, (old, _new, one, two)):
            rank = Process(old.service)
            rank.took_s = WORTH_S
            # A part may be kept for others: three of them, so one of each stream and the former of one.
            rank.open(0, 0, budget_nbytes=14 * NBYTES)
            await until(lambda: old.service.nodes.slowest_s == WORTH_S)
            await slow_rank(one, LOST)
            await slow_rank(two, LOST + 1)
            for step, seq in ((7, 3), (8, 4), (9, 5)):
                for lost, stream in ((one, LOST), (two, LOST + 1)):
                    await commit(nodes, step, seq, lost.node.number, stream)
                    await until_kept(old, seq, stream)
                    assert len(kept(old)) <= 3
            assert not nodes[0].told("ring-not-kept")

    run(play)


def test_no_room_at_all_is_told() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, _new, lost)):
            rank = Process(old.service)
            rank.took_s = WORTH_S
            rank.open(0, 0, budget_nbytes=NBYTES)
            await until(lambda: old.service.nodes.slowest_s == WORTH_S)
            await slow_rank(lost, LOST)
            for step in range(7, 7 + FAILURES):
                assert not nodes[0].told("ring-not-kept")
                await commit(nodes, step, step - 4)
                await until(lambda: not old.peers.standby._tasks and old.peers.standby._due is None)
            await until(lambda: nodes[0].told("ring-not-kept"))
            assert f"there is no room for {NBYTES} bytes" in nodes[0].told("ring-not-kept")[0]
            assert not kept(old)

    run(play)


@pytest.mark.parametrize(
    "wrong",
    [
        {"position": position(4)},
        {"seq": 4},
        {"stream": LOST + 1},
        {"manifest": OTHER},
        {"loader": "other"},
    ],
)
def test_another_batch_than_that_is_not_given(wrong: dict[str, Any]) -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, _new, lost)):
            await slow_rank(old, 0)
            await slow_rank(lost, LOST)
            await commit(nodes, 7, 3)
            await until(lambda: kept(old) == [(LOST, 3)])
            taken = old.peers.standby.take(structs.replace(feed(3), **wrong), 4)
            assert not taken.fds

    run(play)


def test_a_fetch_is_ended_by_the_next_generation() -> None:
    async def play() -> None:
        async with job(3) as (nodes, rings):
            old, _new, lost = rings
            await slow_rank(old, 0)
            asked = asyncio.Event()

            async def never(link: Peer, _wanted: p.GetBatches, _pace: Pace) -> None:
                asked.set()
                await link.receive()

            lost.node.replicas.serving.on_batches = never
            await commit(nodes, 7, 3)
            await asked.wait()
            follow(nodes, rings, 3, step=7)
            await until(lambda: not old.peers.standby._ending and not old.peers.standby._tasks)
            assert not nodes[0].told("ring-not-kept")

    run(play)
