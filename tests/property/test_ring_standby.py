"""What is kept for the loss of a node, in any order of events: what records name, that batch, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from ckptless.daemon.agent.ring_standby import FAILURES, RECORDS, WORTH_S, Plan, RingFacts, Stand, Standbys
from ckptless.daemon.api.feed import Feed, next_feed, ring_of

RANKS, NODES, ME, ROOM = 4, 4, 0, 50
MANIFESTS = ("ab" * 16, "cd" * 16)
Op = tuple[str, int, int]
Batch = tuple[str, int, int, bytes]


def position(seq: int, world: int) -> bytes:
    """Before batch `seq`, where `world` is what the batches depend on that the manifest does not say."""
    return f"{world}:{seq}".encode()


def named(rank: int, seq: int, world: int, manifest: int) -> Feed:
    return Feed(
        loader="train",
        manifest=MANIFESTS[manifest],
        # Ranks 2 and 3 are of the same replica.
        stream=min(rank, 2),
        seq=seq,
        position=position(seq, world),
    )


def content(feed: Feed) -> Batch:
    """What an owner gives who stands there."""
    return feed.manifest, feed.stream, feed.seq, feed.position


class World:
    """Ranks that commit, a vault of their records, a ring here, and what `Standbys` wants done."""

    def __init__(self, standbys: Standbys) -> None:
        self.standbys = standbys
        self.worlds = [0] * RANKS
        self.manifest = 0
        self.seqs = [0] * RANKS
        self.step, self.began = 0, -1
        self.records: dict[int, dict[int, Feed]] = {rank: {} for rank in range(RANKS)}
        self.places = [rank % NODES for rank in range(RANKS)]
        self.takes_s = WORTH_S
        self.ring = True
        self.kept: dict[Feed, tuple[Batch, int]] = {}
        self.coming: dict[Feed, int] = {}
        self.failures: dict[tuple[str, str, int], int] = {}
        self.fetched = self.given = 0

    # ------------------------------------------------------------------------------------ do

    def facts(self, feed: Feed) -> RingFacts | None:
        there = self.ring and feed.manifest == MANIFESTS[self.manifest]
        # This node's own rank is rank 0.
        return RingFacts(self.takes_s, ROOM) if there and feed.stream else None

    def stands(self) -> list[Stand]:
        found = []
        for rank, steps in self.records.items():
            newest = sorted(steps, reverse=True)[:RECORDS]
            if newest and self.places[rank] != ME:
                node = self.places[rank] if newest[0] > self.began else None
                found.append(Stand(node, [(steps[step],) for step in newest]))
        return found

    def update(self) -> None:
        stands = self.stands()
        plan = self.standbys.update(stands, self.facts)
        self.do(plan)
        again = self.standbys.update(stands, self.facts)
        assert again == Plan(), "nothing has changed"
        self.check()

    def do(self, plan: Plan) -> None:
        for feed in plan.drop:
            del self.kept[feed]
        newest = {feed.stream for stand in self.stands() if stand.node for feed in stand.feeds[0]}
        for feed in plan.cancel:
            del self.coming[feed]
            if self.facts(feed) and feed.stream in newest:
                self.failed(feed, feed in plan.late)
        for feed, node in plan.fetch:
            assert node != ME
            assert feed not in self.kept
            assert self.takes_s >= WORTH_S
            assert self.ring
            # Of this generation, and the newest of its stream.
            step = max(step for steps in self.records.values() for step, one in steps.items() if one == feed)
            assert step > self.began
            self.coming[feed] = 0
            self.fetched += 1

    def check(self) -> None:
        streams = [(ring_of(feed), feed.stream) for feed in self.coming]
        assert len(set(streams)) == len(streams), "two under way of one stream"
        assert sum(nbytes for _content, nbytes in self.kept.values()) + sum(self.coming.values()) <= ROOM
        run_of = {feed for start in self.kept for feed in self.standbys.run_from(start)}
        assert run_of == set(self.kept)
        wanted = {feed for stand in self.stands() for feeds in stand.feeds for feed in feeds}
        wanted = {feed for feed in wanted if self.facts(feed)}
        for feed in sorted(self.kept, key=lambda feed: feed.seq):
            assert feed in wanted, "kept, and no record names it"
            wanted.add(next_feed(feed, self.after(feed)))
        for feed in self.coming:
            assert feed in wanted
        for stream in {feed.stream for feed in self.kept}:
            assert sum(feed.stream == stream for feed in self.kept) <= 2 * RECORDS

    @staticmethod
    def after(feed: Feed) -> bytes:
        return position(feed.seq + 1, int(feed.position.split(b":")[0]))

    # ---------------------------------------------------------------------------------- what happens

    def commit(self, rank: int, ahead: int) -> None:
        self.seqs[rank] += ahead
        self.step += 1
        steps = self.records[rank]
        steps[self.step] = named(rank, self.seqs[rank], self.worlds[rank], self.manifest)
        for old in sorted(steps)[:-3]:
            del steps[old]
        self.update()

    def come(self, which: int, nbytes: int) -> None:
        if not self.coming:
            return
        feed = sorted(self.coming, key=repr)[which % len(self.coming)]
        drop = self.standbys.admit(feed, nbytes, self.facts(feed))
        if drop is None:
            self.fail(which)
            return
        for other in drop:
            del self.kept[other]
        self.coming[feed] = nbytes
        self.check()
        if which % 3:
            assert self.standbys.came(feed, nbytes, self.after(feed))
            del self.coming[feed]
            self.kept[feed] = (content(feed), nbytes)
            self.failures[(*ring_of(feed), feed.stream)] = 0
        self.update()

    def fail(self, which: int) -> None:
        if not self.coming:
            return
        feed = sorted(self.coming, key=repr)[which % len(self.coming)]
        del self.coming[feed]
        self.failed(feed, self.standbys.failed(feed))
        self.update()

    def failed(self, feed: Feed, told: bool) -> None:
        key = (*ring_of(feed), feed.stream)
        self.failures[key] = self.failures.get(key, 0) + 1
        assert told == (self.failures[key] == FAILURES)
        assert self.failures[key] <= FAILURES

    def recover(self, back: int, moved: int) -> None:
        """A new generation, from one of the last records; a rank moves, and ranks go on another way."""
        steps = sorted(step for steps in self.records.values() for step in steps)
        self.began = steps[max(0, len(steps) - 1 - back)] if steps else -1
        for rank in range(RANKS):
            self.records[rank] = {s: f for s, f in self.records[rank].items() if s <= self.began}
            newest = max(self.records[rank], default=None)
            self.seqs[rank] = 0 if newest is None else self.records[rank][newest].seq
        self.step = self.began
        self.places[moved] = (self.places[moved] + 1) % NODES
        stale = list(self.coming)
        self.coming.clear()
        self.failures.clear()
        self.standbys.anew()
        for feed in stale:
            assert not self.standbys.came(feed, 1, self.after(feed)), "of the old generation"
            assert not self.standbys.failed(feed)
        self.update()

    def ask(self, rank: int, seq: int, world: int, manifest: int) -> None:
        """Somebody wants batches: what is given is that, or nothing."""
        feed = named(rank, seq, world, manifest)
        for one in self.standbys.run_from(feed):
            assert self.kept[one][0] == content(feed)
            assert self.facts(feed) is not None
            feed = next_feed(feed, self.after(feed))
            self.given += 1

    def act(self, op: Op) -> None:
        what, a, b = op
        match what:
            case "commit":
                self.commit(a % RANKS, b % 2 + (b == 7))
            case "come":
                self.come(a, 1 + b * 3)
            case "fail":
                self.fail(a)
            case "recover":
                self.recover(a % 4, b % RANKS)
            case "other":
                # It trains on something else from here on: only the position tells.
                self.worlds[a % RANKS] += 1
            case "ring":
                self.ring = not self.ring
                self.update()
            case "manifest":
                self.manifest = a % 2
                self.update()
            case "quick":
                self.takes_s = WORTH_S if b % 2 else WORTH_S / 2
                self.update()
            case "forget":
                self.records[a % RANKS] = {}
                self.update()
            case _:
                for seq in range(max(0, self.seqs[a % RANKS] - 4), self.seqs[a % RANKS] + 2):
                    for world in range(self.worlds[a % RANKS] + 1):
                        self.ask(a % RANKS, seq, world, b % 2)


KINDS = ["commit"] * 5 + ["come"] * 5 + ["ask"] * 3
KINDS += ["fail", "recover", "other", "ring", "manifest", "quick", "forget"]
ops = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7)), max_size=80)


def play(found: list[Op], standbys: Standbys | None = None) -> World:
    world = World(standbys or Standbys())
    for op in found:
        world.act(op)
    return world


@settings(max_examples=400, deadline=None)
@given(ops)
def test_any_order(found: list[Op]) -> None:
    play(found)


@settings(max_examples=30, deadline=None)
@given(ops, st.integers(1, RANKS - 1))
def test_in_the_end_the_newest_is_kept(found: list[Op], rank: int) -> None:
    """Whatever has happened: of a rank that goes on committing the next batch is here."""
    world = play(found)
    assume(world.places[rank] != ME)
    world.ring, world.takes_s = True, WORTH_S
    world.recover(0, 0)
    world.seqs[rank] = max(world.seqs) + 1
    world.commit(rank, 1)
    while world.coming:
        world.come(1, 10)
    (feed,) = (feed for feed in world.kept if feed.seq == world.seqs[rank])
    assert content(feed) == content(named(rank, world.seqs[rank], world.worlds[rank], world.manifest))


def test_all_of_it_is_seen() -> None:
    """One run that gets to what is to be tried."""
    found = []
    for rank in (1, 2, 1, 2):
        found += [("commit", rank, 1), ("come", 1, 3), ("ask", rank, 0)]
    world = play(found)
    assert world.fetched == 4
    assert world.given >= 4


class NoPosition(Standbys):
    """Planted: a batch is found by its number alone."""

    def run_from(self, feed: Feed) -> list[Feed]:
        return [one for one in self._kept if (one.stream, one.seq) == (feed.stream, feed.seq)]


class KeepsAll(Standbys):
    """Planted: what records do not name any more stays."""

    def update(self, stands: Any, facts: Any) -> Plan:
        kept = dict(self._kept)
        plan = super().update(stands, facts)
        self._kept = kept
        return Plan((), plan.cancel, plan.late, plan.fetch)


class OldGeneration(Standbys):
    """Planted: what was under way goes on into the next generation."""

    def anew(self) -> None:
        self._past.clear()


@pytest.mark.parametrize("planted", [NoPosition, KeepsAll, OldGeneration])
def test_a_planted_mistake_is_found(planted: type[Standbys]) -> None:
    # How small it can be made is of no interest.
    @settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])
    @given(ops)
    def tried(found: list[Op]) -> None:
        play(found, planted())

    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)):
        tried()
