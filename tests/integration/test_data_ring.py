"""Batches through an agent: real processes, real sockets, and what happens when any of them is killed."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.errors import DataError, PeerError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.pytorch_hooks.data.producer import Made, Produce
from ckptless.pytorch_hooks.data.ring_reader import ReadAhead, Reader, RingName
from ckptless.pytorch_hooks.data.ring_socket import RingSocket

from .ring_world import DEADLINE_S, Agent, links, one_agent, producers, until

MANIFEST = "ab" * 16
NUMBERS = 4096


def batch_of(stream: int, seq: int) -> dict[str, Any]:
    return {"x": torch.arange(NUMBERS) + 1000 * seq + stream, "seq": seq}


def numbers(stream: int, position: int) -> Iterator[Made]:
    """A stream without an end."""
    while True:
        yield position, batch_of(stream, position), position + 1
        position += 1


def ten(stream: int, position: int) -> Iterator[Made]:
    for made in numbers(stream, position):
        if made[0] == 10:
            return
        yield made


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with one_agent(tmp_path) as made:
        yield made


def name(manifest: str = MANIFEST) -> RingName:
    return RingName("train", manifest)


def reader(agent: Agent, produce: Produce = numbers, slot: int = 0, **limits: int) -> Reader:
    return Reader(agent.socket, name(), slot, produce, ReadAhead(**limits))


def expect(found: Reader, stream: int, seqs: range) -> None:
    for seq in seqs:
        taken = found.take(DEADLINE_S)
        assert taken is not None
        assert taken.seq == taken.batch["seq"] == seq
        assert torch.equal(taken.batch["x"], batch_of(stream, seq)["x"])


class Rank:
    """A forked process that does `work`, and says "+" when it is done; it stays until it is killed."""

    def __init__(self, work: Callable[[], object]) -> None:
        ours, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # Kept, or what it has open is closed.
                kept = work()
                os.write(theirs, b"+")
                signal.pause()
                del kept
            except BaseException as error:  # noqa: BLE001 - it must not become a second pytest
                os.write(theirs, repr(error).encode())
            finally:
                os._exit(1)
        os.close(theirs)
        self._said = ours

    def done(self) -> None:
        assert os.read(self._said, 1000) == b"+"

    def children(self) -> list[int]:
        listing = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in listing.read_text().split()]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._said)


# ------------------------------------------------------------------------------------------- one rank


def test_a_stream_to_its_end_and_again(agent: Agent) -> None:
    rank = reader(agent, ten)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(10))
    assert rank.take(DEADLINE_S) is None
    assert rank.take(DEADLINE_S) is None
    rank.seek(0, 7, 7)
    expect(rank, 0, range(7, 10))
    rank.seek(3, 0, 0)
    expect(rank, 3, range(3))
    rank.close()


def test_what_a_script_writes_stays_its_own(agent: Agent) -> None:
    first, second = reader(agent), reader(agent, slot=1)
    for rank in (first, second):
        rank.seek(0, 0, 0)
    taken = first.take(DEADLINE_S)
    assert taken is not None
    taken.batch["x"].zero_()
    expect(second, 0, range(1))
    # And a batch that is still held is what it was, however far the ring has gone on.
    held = first.take(DEADLINE_S)
    assert held is not None
    for seq in range(2, 40):
        first.committed(seq)
        expect(first, 0, range(seq, seq + 1))
    assert torch.equal(held.batch["x"], batch_of(0, 1)["x"])
    first.close()
    second.close()


def test_memory_stays_within_its_budget(agent: Agent) -> None:
    entry = 8 * NUMBERS + 4096
    rank = reader(agent, window=100, budget_nbytes=10 * entry)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(30))
    batches = [link for link in links(agent.pid) if "ckptless-batch" in link]
    # Two may be on their way beyond it.
    assert 0 < len(batches) <= 12
    rank.close()


def test_what_the_loader_raises_is_raised_here(agent: Agent) -> None:
    def bad(stream: int, position: int) -> Iterator[Made]:
        for made in numbers(stream, position):
            if made[0] == 3 and not Path(agent.socket + ".mended").exists():
                raise ValueError(f"line 17 of {stream}.json is broken")
            yield made

    rank = reader(agent, bad)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(3))
    for _ in range(2):
        with pytest.raises(DataError, match=r"(?s)batch 3 of loader 'train'.*in bad.*line 17 of 0\.json"):
            rank.take(DEADLINE_S)
    # What was made is not lost, and after a recovery it is tried again.
    Path(agent.socket + ".mended").touch()
    rank.seek(0, 1, 1)
    expect(rank, 0, range(1, 6))
    rank.close()


def test_what_cannot_be_in_a_batch_is_named(agent: Agent) -> None:
    def bad(_stream: int, position: int) -> Iterator[Made]:
        yield position, {"x": object()}, position + 1

    rank = reader(agent, bad)
    rank.seek(0, 0, 0)
    with pytest.raises(DataError, match=r"batch\[1\]\['x'\]: cannot be saved: object"):
        rank.take(DEADLINE_S)
    rank.close()


def test_a_loader_that_jumps_is_found(agent: Agent) -> None:
    def jumps(stream: int, position: int) -> Iterator[Made]:
        for seq, batch, after in numbers(stream, position):
            yield seq + (seq > 2), batch, after

    rank = reader(agent, jumps)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(3))
    with pytest.raises(DataError, match="batch 4 in place of batch 3"):
        rank.take(DEADLINE_S)
    rank.close()


def test_one_that_waits_is_woken(agent: Agent) -> None:
    def slow(_stream: int, _position: int) -> Iterator[Made]:
        signal.pause()
        yield from ()

    rank = reader(agent, slow)
    rank.seek(0, 0, 0)
    timer = threading.Timer(0.2, rank.interrupt, [InterruptedError("the generation is over")])
    timer.start()
    with pytest.raises(InterruptedError, match="is over"):
        rank.take(DEADLINE_S)
    timer.join()
    rank.resume()
    rank.seek(0, 0, 0)
    with pytest.raises(DataError, match="no batch 0"):
        rank.take(0.05)
    rank.close()


def test_what_is_told_of_a_ring(agent: Agent) -> None:
    """How long a reader waited is as it found it itself; and what lies there."""
    reads, writes = os.pipe()

    def held(stream: int, position: int) -> Iterator[Made]:
        for made in numbers(stream, position):
            os.read(reads, 1)
            yield made

    assert agent.told() == ()
    rank = reader(agent, held, window=4, budget_nbytes=1 << 20)
    begin_s = time.monotonic()
    rank.seek(0, 0, 0)
    timer = threading.Timer(0.2, os.write, [writes, b"+" * 12])
    timer.start()
    # The twelve are all that can be made.
    expect(rank, 0, range(12))
    with pytest.raises(DataError, match="no batch 12"):
        rank.take(0.05)
    took_s = time.monotonic() - begin_s
    timer.join()
    # What a reader says and what we ask come to the agent on two ways.
    until(lambda: [(one.taken, one.starved) for one in agent.told()[0].readers] == [(12, True)])
    (found,) = agent.told()
    assert (found.loader, found.manifest, found.prefetch, found.budget_nbytes) == (
        "train",
        MANIFEST,
        4,
        1 << 20,
    )
    assert (found.made, found.given, found.producer) == (12, 12, producers()[0])
    assert [(one.stream, one.ready, one.ahead) for one in found.streams] == [(0, 12, 0)]
    assert found.nbytes > 12 * 8 * NUMBERS
    (waits,) = found.readers
    assert (waits.slot, waits.stream, waits.taken, waits.starved) == (0, 0, 12, True)
    # For the first one it waited as long as nobody could make it; and all that it took, it did.
    assert 1 <= waits.waits <= 12
    assert 0 < waits.waited_s <= took_s
    assert waits.share is not None
    assert 0 < waits.share <= 1
    rank.close()
    until(lambda: agent.told()[0].closed)
    (over,) = agent.told()
    assert (over.made, over.nbytes, over.producer, over.streams) == (12, 0, None, ())
    assert over.readers[0].waited_s == waits.waited_s
    os.close(reads)
    os.close(writes)


# ------------------------------------------------------------------------------------------ who dies


def test_the_producer_is_killed_again_and_again(agent: Agent) -> None:
    rank = reader(agent)
    rank.seek(0, 0, 0)
    for seq in range(0, 40, 10):
        rank.committed(seq)
        expect(rank, 0, range(seq, seq + 10))
        for pid in producers():
            os.kill(pid, signal.SIGKILL)
    assert "has ended" in agent.expect("ring-producer")
    held = rank.take(DEADLINE_S)
    for pid in producers():
        os.kill(pid, signal.SIGKILL)
    expect(rank, 0, range(41, 60))
    (producer,) = producers()
    assert held is not None
    assert torch.equal(held.batch["x"], batch_of(0, 40)["x"])
    assert "ckptless-batch" in Path("/proc/self/maps").read_text()
    assert "ckptless-batch" not in Path(f"/proc/{producer}/maps").read_text(), "forked with what was mapped"
    rank.close()


def test_a_loader_that_kills_its_process(agent: Agent) -> None:
    def deadly(stream: int, position: int) -> Iterator[Made]:
        for made in numbers(stream, position):
            if made[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield made

    rank = reader(agent, deadly)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(3))
    with pytest.raises(DataError, match="died 3 times in a row"):
        rank.take(DEADLINE_S)
    rank.close()


def test_a_rank_is_killed_and_its_batches_are_there(agent: Agent) -> None:
    def work() -> Reader:
        rank = reader(agent)
        rank.seek(0, 0, 0)
        for seq in range(20):
            rank.committed(max(0, seq - 2))
            expect(rank, 0, range(seq, seq + 1))
        return rank

    dead = Rank(work)
    dead.done()
    (producer,) = dead.children()
    until(lambda: agent.told()[0].made > 20)
    dead.kill()
    # Its producer ends with it.
    until(lambda: not alive(producer))

    def nothing(_stream: int, _position: int) -> Iterator[Made]:
        raise AssertionError("made again")

    heir = reader(agent, nothing)
    heir.seek(0, 17, 17)
    # 17 to 19 are those that were taken and not committed, and one more was made ahead.
    expect(heir, 0, range(17, 21))
    heir.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_another_rank_makes_them_when_the_first_is_killed(agent: Agent) -> None:
    def work() -> Reader:
        rank = reader(agent)
        rank.seek(0, 0, 0)
        expect(rank, 0, range(3))
        return rank

    first = Rank(work)
    first.done()
    second = reader(agent, slot=1)
    second.seek(1, 0, 0)
    expect(second, 1, range(3))
    # One process makes the batches of both.
    assert producers() == []
    assert len(first.children()) == 1
    first.kill()
    for seq in range(3, 30):
        second.committed(seq)
        expect(second, 1, range(seq, seq + 1))
    second.close()


def test_the_agent_is_killed(agent: Agent) -> None:
    rank = reader(agent, window=1)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(1))
    (producer,) = producers()
    agent.kill()
    with pytest.raises(PeerError, match="the agent is gone"):
        expect(rank, 0, range(1, 100))
    until(lambda: not alive(producer))
    rank.abandon()


# ------------------------------------------------------------------------------------------ who is refused


def test_other_data_under_the_same_name(agent: Agent) -> None:
    old = reader(agent)
    old.seek(0, 0, 0)
    expect(old, 0, range(3))
    old.abandon()
    new = Reader(agent.socket, name("cd" * 16), 0, numbers)
    new.seek(0, 0, 0)
    expect(new, 0, range(3))
    new.close()
    assert "are of manifest abababab, and it has cdcdcdcd now" in agent.expect("ring-stale")


def test_a_producer_without_a_lease(agent: Agent) -> None:
    rank = reader(agent)
    rank.seek(0, 0, 0)
    expect(rank, 0, range(1))
    stranger: RingSocket[m.ToProducer] = RingSocket(agent.socket, m.ToProducer)
    stranger.send(m.ProducerHello(protocol=PROTOCOL, lease=1))
    stranger.wait(DEADLINE_S)
    with pytest.raises(PeerError, match="hung up"):
        stranger.next()
    stranger.close()
    expect(rank, 0, range(1, 5))
    rank.close()


@pytest.mark.parametrize("wrong", [{"seq": 99}, {"nbytes": 5}, {"sealed": False}])
def test_a_producer_that_lies(agent: Agent, wrong: dict[str, Any]) -> None:
    """It is ended, and nothing that it has said is used."""
    rank: RingSocket[m.ToReader] = RingSocket(agent.socket, m.ToReader)
    rank.send(
        m.RingOpen(
            protocol=PROTOCOL, loader="train", manifest=MANIFEST, reader=0, window=2, budget_nbytes=1 << 20
        )
    )
    rank.send(m.RingSeek(number=1, stream=0, seq=0, position=b"p"))
    rank.wait(DEADLINE_S)
    found = rank.next()
    assert found is not None
    lease = found[0]
    assert isinstance(lease, m.RingLease)

    def lie() -> None:
        liar: RingSocket[m.ToProducer] = RingSocket(agent.socket, m.ToProducer)
        liar.send(m.ProducerHello(protocol=PROTOCOL, lease=lease.lease))
        liar.wait(DEADLINE_S)
        asked = liar.next()
        assert asked is not None
        job, fd = asked
        assert fd is not None
        os.write(fd, bytes(100))
        if wrong.get("sealed", True):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, m.ALL_SEALS)
        said: dict[str, Any] = {"stream": 0, "seq": job.seq, "nbytes": 100, "position": b"after"}
        said |= {name: value for name, value in wrong.items() if name != "sealed"}
        liar.send(m.RingMade(**said))

    liar = Rank(lie)
    agent.expect("ring-refused")
    until(lambda: not alive(liar.pid))
    os.waitpid(liar.pid, 0)
    os.close(liar._said)
    # Somebody is to make them anew, and no batch has come.
    rank.wait(DEADLINE_S)
    again = rank.next()
    assert again is not None
    assert isinstance(again[0], m.RingLease)
    rank.close()


def test_a_lease_that_nobody_acts_on(tmp_path: Path) -> None:
    agent = Agent(tmp_path, lease_s=0.1)
    # It was to start the producer, and is in a long step.
    busy = reader(agent)
    busy.seek(0, 0, 0)
    other = reader(agent, slot=1)
    other.seek(0, 0, 0)
    expect(other, 0, range(3))
    # The old lease is worth nothing any more.
    expect(busy, 0, range(3))
    expect(other, 0, range(3, 6))
    busy.close()
    other.close()
    agent.close()
