"""What a daemon remembers of its promises, and who has the casting vote between two halves of a job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from ckptless.daemon.ckptlessd.cluster import LocalCluster
from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.recovery.events import Said
from ckptless.daemon.ckptlessd.session import is_as_new
from ckptless.daemon.ckptlessd.slurm_cluster import SlurmCluster
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import LedgerError
from ckptless.daemon.protocol.peers.agreement import Ballot, Decided, Decree, Durable, Vote
from ckptless.daemon.slurm.adapter import Node
from ckptless.daemon.slurm.cached import Reading

from .fake_slurm import FakeRuntime, FakeSlurm, job
from .test_service import Site, hello

FIRST = Decree(index=0, voters=(0, 1, 2))


def promised(number: int) -> Durable:
    ballot = Ballot(number=number, node=1)
    vote = Vote(ballot=ballot, decree=Decree(index=1, voters=(0, 1)))
    return Durable(promised=ballot, vote=vote, known=FIRST)


def test_the_last_vote_of_each_job_is_kept(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert ledger.vote("4711") is None
        for number in (1, 2):
            ledger.save_vote("4711", "abc", promised(number))
        ledger.save_vote("4712", "def", promised(7))
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert ledger.vote("4711") == ("abc", promised(2))
        assert ledger.vote("4712") == ("def", promised(7))


def test_a_vote_that_somebody_else_wrote_is_an_error(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.save_vote("4711", "abc", promised(1))
        with ledger._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE votes SET state = '{\"promised\": 1}'")
        with pytest.raises(LedgerError, match=r"ledger\.db"):
            ledger.vote("4711")


def test_a_daemon_knows_its_job_again_and_one_that_lost_its_disk_does_not_vote(tmp_path: Path) -> None:
    async def identity(folder: Path, said: str = "") -> tuple[str, bool]:
        folder.mkdir(exist_ok=True)
        async with asyncio.timeout(20.0), Site(folder).running() as site:
            greeting = hello()
            mine = m.AgentHello(
                protocol=m.PROTOCOL, spec=greeting.spec, info=greeting.info, pid=os.getpid(), identity=said
            )
            agent = await site.client(mine)
            admitted = await agent.hears(m.Admitted)
            # A decree that it hears of is nothing that it may build a new memory on.
            site.service.jobs[0].session.feed(Said(0, Decided(decree=Decree(index=5, voters=(0,)))))
            kept = await site.service.ledger.vote("4711")
            assert (kept is None) is (folder.name == "new disk")
            return admitted.identity, site.service.jobs[0].session.control.agreement.may_vote

    first, votes = asyncio.run(identity(tmp_path / "one"))
    assert first
    assert votes
    newest, votes = asyncio.run(identity(tmp_path / "one", first))
    assert newest.startswith(first)
    assert is_as_new(newest, first)
    assert votes
    for _ in range(2):
        assert asyncio.run(identity(tmp_path / "new disk", first)) == (first, False)


@dataclass
class Asked(FakeRuntime):
    """A job whose control plane has asked, and what it was told."""

    dead: list[tuple[int, ...]] = field(default_factory=list)

    def witnessed(self, nodes: Sequence[int]) -> None:
        self.dead.append(tuple(nodes))

    @property
    def it(self) -> JobHost:
        return cast(JobHost, self)


def test_in_local_mode_one_half_is_told_yes(tmp_path: Path) -> None:
    """Whichever asks first, and however often."""
    halves = [LocalCluster(number, (), tmp_path / f"node-{number}") for number in (0, 2)]
    one, other, again = Asked(), Asked(), Asked()
    halves[0].witness(one.it, (2, 3), (0, 1))
    halves[1].witness(other.it, (0, 1), (2, 3))
    assert (one.dead, other.dead) == ([(2, 3)], [])
    # Of another run nothing is known.
    halves[1].witness(Asked(job="4712").it, (0, 1), (2, 3))
    halves[1].witness(again.it, (0, 1), (2, 3))
    assert again.dead == []
    halves[0].witness(again.it, (2, 3), (0, 1))
    assert again.dead == [(2, 3)], "the word may have been lost on its way"


class Controller(FakeSlurm):
    """slurmctld, with the states of nodes; `returns`: nodes that live are up again at once."""

    def __init__(self, down: set[str], *, returns: bool = False) -> None:
        super().__init__(job())
        self.down, self.returns = down, returns
        self.drained: dict[str, str] = {}

    async def drain(self, name: str, reason: str, *, deadline_s: float = 5.0) -> None:
        await super().drain(name, reason)
        self.drained[name] = reason

    async def mark_down(self, name: str, reason: str, *, deadline_s: float = 5.0) -> None:
        await super().mark_down(name, reason)
        if not self.returns:
            self.down.add(name)

    async def nodes(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Node, ...]]:
        assert max_age_s == 0.0  # not what was known before the mark
        names = ("n1", "n2", "n3")
        states = tuple(
            Node(
                name=n,
                address=n,
                state="DOWN" if n in self.down else "ALLOCATED",
                flags=frozenset({"DRAIN"} if n in self.drained else ()),
                reason=self.drained.get(n, ""),
            )
            for n in names
        )
        return Reading(value=states, age_s=0.0, fresh=True, trouble="")


@pytest.mark.parametrize(
    ("way", "down", "told", "does"),
    [
        ("down", set(), [(2,)], ["drain", "down"]),  # it marks n3, and sees that it is marked
        ("down", {"n2"}, [], []),  # its own half is, by the other one, which it leaves in peace
        ("none", set(), [], []),  # it may not mark
        ("none", {"n3"}, [(2,)], []),  # and need not
        ("drain", {"n2", "n3"}, [], []),
    ],
)
def test_on_slurm_it_looks_marks_and_looks_again(
    way: str, down: set[str], told: list[tuple[int, ...]], does: list[str]
) -> None:
    async def work() -> Asked:
        slurm, runtime = Controller(set(down)), Asked()
        edge = SlurmCluster(slurm, "n2", 1, way)  # type: ignore[arg-type]
        edge.witness(runtime.it, (2,), (1,))
        async with asyncio.timeout(20.0):
            await asyncio.gather(*edge._tasks)
        assert [what for what, *_ in slurm.told] == does
        await edge.aclose()
        return runtime

    assert asyncio.run(work()).dead == told


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("", [(2,)]),
        ("ckptless: job 4711: silent, as is half of its nodes", []),
        ("ckptless: job 4711: node-0 does not answer", []),
        ("ckptless: job 4711.1: silent, as is half of its nodes", [(2,)]),
        ("a fan is broken", [(2,)]),
    ],
)
def test_where_marked_nodes_come_back_by_themselves(reason: str, told: list[tuple[int, ...]]) -> None:
    """`reason`: why its own half is drained."""

    async def work() -> Asked:
        slurm, runtime = Controller(set(), returns=True), Asked()
        if reason:
            slurm.drained["n2"] = reason
        edge = SlurmCluster(slurm, "n2", 1, "down")
        edge.witness(runtime.it, (2,), (1,))
        async with asyncio.timeout(20.0):
            await asyncio.gather(*edge._tasks)
        await edge.aclose()
        return runtime

    assert asyncio.run(work()).dead == told
