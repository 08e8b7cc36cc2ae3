"""Batches from node to node: real sockets between agents, readers and producers played by the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parent))

from played_rings import (
    LOST,
    MANIFEST,
    OTHER,
    entry_of,
    expect,
    feed,
    follow,
    job,
    put_record,
    run,
)
from vaults import until

from ckptless.daemon.agent import ring_lending
from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.ring_borrowing import COUNT
from ckptless.daemon.api import ring as m
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.api.feed import Feed
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace


def test_the_first_batches_are_there_when_the_rank_asks() -> None:
    async def play() -> None:
        async with job(2) as (nodes, (old, new)):
            old.rank(0, 0)
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[1].told("ring-borrowed"))
            assert nodes[1].told("ring-borrowed") == [
                f"loader 'train', stream {LOST}: {COUNT} batches, from 3 on, came from n0"
            ]
            # It has nobody who could make any.
            rank = new.rank(LOST, 3, silent=True)
            expect(rank, range(3, 3 + COUNT))
            await until(lambda: not old.guests)
            assert not nodes[0].events

    run(play)


def test_what_comes_late_is_used_too() -> None:
    async def play() -> None:
        async with job(2) as (_nodes, (old, new)):
            old.rank(0, 0)
            new.borrowing.want(0, [feed()])
            rank = new.rank(LOST, 3, silent=True)
            assert not rank.got
            await until(lambda: len(rank.got) == COUNT)
            expect(rank, range(3, 3 + COUNT))

    run(play)


def test_batches_of_another_manifest_are_neither_given_nor_used() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (one, two, new)):
            one.rank(0, 0, OTHER)
            two.rank(0, 0)
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[2].told("ring-borrowed"))
            (refused,) = nodes[2].told("ring-not-lent")
            assert refused.endswith(
                f"by n0: it has no ring of 'train', manifest {MANIFEST[:8]}, but {OTHER[:8]}"
            )
            rank = new.rank(LOST, 3, OTHER, silent=True)
            assert not rank.got
            (stale,) = nodes[2].told("ring-stale")
            assert stale.startswith(
                f"{COUNT} batches of loader 'train' that came from other nodes are not used"
            )

    run(play)


@pytest.mark.parametrize("at", [4, entry.HEADER_NBYTES + 3, 60_000], ids=["header", "position", "batch"])
def test_a_bad_batch_is_got_from_the_next_node(at: int) -> None:
    async def damaged(link: Peer, wanted: p.GetBatches, _pace: Pace) -> None:
        for seq in range(wanted.feed.seq, wanted.feed.seq + wanted.count):
            data = bytearray(entry_of(LOST, seq))
            link.send(p.BatchReply(seq=seq, nbytes=len(data), digest=entry.decode(bytes(data)).digest))
            data[at] ^= seq == 4
            await link.send_bulk(memoryview(data))

    async def play() -> None:
        async with job(3) as (nodes, (one, two, new)):
            one.node.replicas.serving.on_batches = damaged
            two.rank(0, 0)
            new.borrowing.want(0, [feed()])
            await until(lambda: len(nodes[2].told("ring-borrowed")) == 2)
            assert [text.split(": ")[1] for text in nodes[2].told("ring-borrowed")] == [
                "1 batches, from 3 on, came from n0",
                f"{COUNT - 1} batches, from 4 on, came from n1",
            ]
            assert len(nodes[2].told("ring-not-lent")) == 1
            expect(new.rank(LOST, 3, silent=True), range(3, 3 + COUNT))

    run(play)


def test_another_batch_than_the_digest_that_was_said() -> None:
    async def exchanged(link: Peer, wanted: p.GetBatches, _pace: Pace) -> None:
        data = entry_of(LOST, wanted.feed.seq)
        link.send(p.BatchReply(seq=wanted.feed.seq, nbytes=len(data), digest="00" * 16))
        await link.send_bulk(memoryview(data))

    async def play() -> None:
        async with job(2) as (nodes, (one, new)):
            one.node.replicas.serving.on_batches = exchanged
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[1].told("ring-not-lent"))
            assert nodes[1].told("ring-not-lent")[0].endswith("has another digest than was said")
            assert not new.rank(LOST, 3, silent=True).got

    run(play)


def test_who_is_of_an_old_generation_gets_nothing() -> None:
    async def play() -> None:
        async with job(2) as (nodes, (old, new)):
            old.rank(0, 0)
            await old.node.replicas.serving.follow(3)
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[1].told("ring-not-lent"))
            assert nodes[1].told("ring-not-lent")[0].endswith("it is not of this generation")
            assert nodes[0].told("stale-record") == ["batches of 'train', generation 2, here 3"]
            assert not old.guests

    run(play)


def test_the_end_of_a_generation_ends_what_is_under_way() -> None:
    async def play() -> None:
        async with job(2) as (nodes, rings):
            old, new = rings
            old.rank(0, 0, silent=True)
            new.borrowing.want(0, [feed()])
            await until(lambda: old.guests)
            follow(nodes, rings, 3)
            await until(lambda: not old.guests)
            assert not new.rank(LOST, 3, silent=True).got

    run(play)


def test_a_ring_that_is_closed_gives_up_its_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with job(2) as (nodes, (old, new)):
            rank = old.rank(0, 0, silent=True)
            new.borrowing.want(0, [feed()])
            await until(lambda: old.guests)
            monkeypatch.setattr(ring_lending, "BATCH_DEADLINE_S", 0.05)
            new.borrowing.want(0, [feed(9)])
            rank.says(m.RingDone())
            await old.service.close()
            await until(lambda: nodes[1].told("ring-not-lent"))
            assert nodes[1].told("ring-not-lent")[0].endswith("by n0: its ring was closed")

    run(play)


def test_a_node_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_lending, "BATCH_DEADLINE_S", 0.05)

    async def play() -> None:
        async with job(2) as (nodes, (old, new)):
            old.rank(0, 0, silent=True)
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[1].told("ring-not-lent"))
            assert nodes[1].told("ring-not-lent")[0].endswith("by n0: it takes too long")
            assert not old.guests

    run(play)


def test_who_takes_a_stream_here_is_not_disturbed() -> None:
    async def play() -> None:
        async with job(2) as (nodes, (old, new)):
            rank = old.rank(LOST, 3)
            strange = Feed(loader="train", manifest=MANIFEST, stream=LOST, seq=3, position=b"another")
            new.borrowing.want(0, [strange])
            await until(lambda: nodes[1].told("ring-not-lent"))
            assert nodes[1].told("ring-not-lent")[0].endswith("stands elsewhere there")
            await until(lambda: rank.got)
            new.borrowing._asked.clear()
            new.borrowing.want(0, [feed()])
            await until(lambda: nodes[1].told("ring-borrowed"))

    run(play)


@pytest.mark.parametrize("seq", [3, 4], ids=["the next one", "one that it is sent back behind"])
def test_the_next_batch_of_a_lost_node_is_begun_before_it_is_asked_for(seq: int) -> None:
    async def play() -> None:
        async with job(3) as (nodes, (old, new, _lost)):
            old.rank(0, 0)
            link = await put_record(nodes, 7, seq - 1)
            link.close()
            await until(lambda: old.guests)
            link = await put_record(nodes, 8, seq)
            assert old.guests == 1
            link.close()
            await until(lambda: (LOST, seq) in next(iter(old.service._rings.values())).ready)
            new.borrowing.want(0, [feed(3)])
            await until(lambda: nodes[1].told("ring-borrowed"))
            expect(new.rank(LOST, 3, silent=True), range(3, 3 + COUNT))
            old.foresight.close()
            assert not old.guests

    run(play)


def test_who_gave_no_record_in_this_generation_is_not_missed() -> None:
    async def play() -> None:
        async with job(3) as (nodes, rings):
            rings[0].rank(0, 0)
            link = await put_record(nodes, 7, 3)
            asked = await nodes[2].replicas.dial(nodes[0].info)
            asked.send(p.GetRecord(rank=2, step=7))
            reply = await asked.receive()
            assert isinstance(reply, p.RecordReply)
            assert reply.feeds == (feed(3),)
            asked.close()
            follow(nodes, rings, 3)
            link.close()
            # What comes later over another connection is answered after the end of these was seen.
            await nodes[1].replicas.knock(nodes[0].info)
            assert not rings[0].guests

    run(play)


def test_nobody_asks_the_node_first_that_has_not_begun() -> None:
    async def play() -> None:
        async with job(3) as (nodes, (one, two, new)):
            one.rank(0, 0)
            two.rank(1, 0)
            assignment = structs.replace(nodes.assignment(range(3), None), record_nodes=((), (), (1,)))
            new.peers.follow(assignment)
            new.borrowing.want(2, [feed()])
            await until(lambda: nodes[2].told("ring-borrowed"))
            assert nodes[2].told("ring-borrowed")[0].endswith("came from n1")

    run(play)
