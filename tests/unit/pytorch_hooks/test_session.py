"""A rank's connection to its agent: what it waits for, and when it has nothing more to wait for."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import NoRoomError, PeerError
from ckptless.pytorch_hooks.agent_session.session import Session

DEADLINE_S = 20.0


@contextlib.contextmanager
def connected(folder: Path) -> Iterator[tuple[Session, socket.socket]]:
    """A rank's end, and the agent's."""
    path = str(folder / "agent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, ThreadPoolExecutor(1) as pool:
        server.bind(path)
        server.listen()
        server.settimeout(DEADLINE_S)
        session = pool.submit(Session, path)
        agent, _ = server.accept()
        with agent:
            agent.sendall(encode(m.Welcome(job="7", run="0" * 32, slot=0, host="127.0.0.1", pong_s=1.0)))
            found = session.result(DEADLINE_S)
            yield found, agent
            found.close()


def assigned(generation: int) -> m.Assigned:
    return m.Assigned(
        generation=generation,
        rank=0,
        world_size=1,
        local_world_size=1,
        group_rank=0,
        restore_step=None,
        store=("127.0.0.1", 1),
        peers=("127.0.0.1",),
    )


@pytest.mark.parametrize("released", [1, 2])
def test_who_was_stopped_after_all_had_finished_waits_for_nothing(tmp_path: Path, released: int) -> None:
    with connected(tmp_path) as (session, agent), ThreadPoolExecutor(1) as pool:
        agent.sendall(encode(assigned(2)))
        assert session.wait_assigned(after=0) == assigned(2)
        agent.sendall(encode(m.Stop(generation=2, reason="")))
        # A leader that did not know that another one led stopped this rank only; the other one releases all.
        waits = pool.submit(session.wait_assigned, 2)
        agent.sendall(encode(m.Release(generation=released)))
        if released == 2:
            assert waits.result(DEADLINE_S) is None
        else:  # of a generation before: nothing follows from that
            with pytest.raises(TimeoutError):
                waits.result(0.3)
            agent.sendall(encode(assigned(3)))
            assert waits.result(DEADLINE_S) == assigned(3)


def test_a_spare_is_not_sent_home_by_what_was_before_it(tmp_path: Path) -> None:
    with connected(tmp_path) as (session, agent), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(session.wait_assigned, 0)
        agent.sendall(encode(m.Release(generation=1)) + encode(assigned(4)))
        assert waits.result(DEADLINE_S) == assigned(4)


def test_an_agent_that_hangs_up_on_hello(tmp_path: Path) -> None:
    """As one of another version does."""
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, ThreadPoolExecutor(1) as pool:
        server.bind(path)
        server.listen()
        server.settimeout(DEADLINE_S)
        session = pool.submit(Session, path)
        agent, _ = server.accept()
        with agent:
            agent.recv(100)
        with pytest.raises(PeerError, match=r"does not take this process \(it hung up\): its log"):
            session.result(DEADLINE_S)


def test_a_refusal_of_memory_is_the_agents_sentence(tmp_path: Path) -> None:
    with connected(tmp_path) as (session, agent), ThreadPoolExecutor(1) as pool:
        asks = pool.submit(session.allocate, 1, 4096, 3)
        agent.settimeout(DEADLINE_S)
        while b"Allocate" not in agent.recv(1 << 16):
            pass
        agent.sendall(encode(m.Allocated(error="n1 has too little memory")))
        with pytest.raises(NoRoomError, match="n1 has too little memory"):
            asks.result(DEADLINE_S)


def test_what_former_ranks_have_is_asked_for_in_turn(tmp_path: Path) -> None:
    with connected(tmp_path) as (session, agent), ThreadPoolExecutor(1) as pool:
        asked: Decoder[m.FromRank] = Decoder(m.FromRank, RANK_LIMIT)
        asked.feed(agent.recv(1 << 16))
        record = pool.submit(session.fetch_record, 2, 5)
        assert asked.feed(agent.recv(1 << 16)) == [m.FetchRecord(generation=2, rank=5)]
        agent.sendall(encode(m.FetchedRecord(record=b"so")))
        assert record.result(DEADLINE_S).record == b"so"
        found = pool.submit(session.fetch_spans, 2, 1, "ab", ((3, 4), (9, 1)))
        wanted = m.FetchSpans(generation=2, shard=1, layout="ab", spans=((3, 4), (9, 1)))
        assert asked.feed(agent.recv(1 << 16)) == [wanted]
        with (tmp_path / "bytes").open("w+b") as file:
            socket.send_fds(agent, [encode(m.FetchedSpans(nbytes=5))], [file.fileno()])
            reply, fd = found.result(DEADLINE_S)
            assert reply == m.FetchedSpans(nbytes=5)
            assert fd is not None
            assert os.path.sameopenfile(fd, file.fileno())
            os.close(fd)
        found = pool.submit(session.fetch_spans, 2, 1, "ab", ((3, 4),))
        assert len(asked.feed(agent.recv(1 << 16))) == 1
        agent.sendall(encode(m.FetchedSpans(error="nobody has it")))
        assert found.result(DEADLINE_S) == (m.FetchedSpans(error="nobody has it"), None)
