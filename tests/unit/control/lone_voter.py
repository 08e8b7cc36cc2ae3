"""One daemon's part in the agreement, on a disk that is quick; the others are what a test has them say."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.consensus import agreement as a
from ckptless.daemon.ckptlessd.recovery.events import Save, Tell
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.peers.agreement import (
    NO_BALLOT,
    Ballot,
    Decree,
    Durable,
    Promise,
    Say,
    Support,
    Vote,
)

VOTERS = (0, 1, 2)
MINE = Ballot(number=1, node=0)
HIGHER, OTHER = Ballot(number=7, node=2), Ballot(number=1, node=1)


def decree(index: int, text: str = "x", voters: tuple[int, ...] = VOTERS) -> Decree:
    return Decree(index=index, voters=voters, outcome=Outcome(state="failed", exit_code=1, reason=text))


def fresh(
    voters: tuple[int, ...] = VOTERS,
    *,
    promised: Ballot = NO_BALLOT,
    vote: Vote | None = None,
    known: Decree | None = None,
) -> Durable:
    return Durable(promised=promised, vote=vote, known=known or Decree(index=0, voters=voters))


@dataclass
class Daemon:
    """The agreement of node 0, on a disk that is quick."""

    durable: Durable = field(default_factory=fresh)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.it = a.Agreement(0, self.durable)
        self.saves: list[Save] = []
        self.told: list[tuple[int | None, Say]] = []

    def carry(self) -> list[tuple[int | None, Say]]:
        """Return what is said to others for all that has come."""
        before = len(self.told)
        while self.it.out:
            output = self.it.out.pop(0)
            if isinstance(output, Save):
                self.saves.append(output)
                if output.say is not None and output.node == 0:
                    self.it.hear(0, output.say, self.now, content=False)
                elif output.say is not None:
                    self.told.append((output.node, output.say))
            elif isinstance(output, Tell):
                self.told.append((output.node, output.say))
        return self.told[before:]

    def elected(self) -> bool:
        return self.it.elected

    def ready(self) -> bool:
        return self.it.ready

    def hear(self, node: int, say: Say, *, content: bool = False) -> list[tuple[int | None, Say]]:
        self.it.hear(node, say, self.now, content=content)
        return self.carry()

    def campaign(self) -> list[tuple[int | None, Say]]:
        self.it.campaign(self.now)
        return self.carry()

    def stand(self) -> list[tuple[int | None, Say]]:
        self.campaign()
        return self.hear(1, Support(ballot=MINE, index=self.it.known.index))

    def lead(self) -> None:
        self.stand()
        self.hear(1, Promise(ballot=MINE, index=self.it.known.index, vote=None))
        assert self.it.elected

    def propose(self, what: Decree) -> list[tuple[int | None, Say]]:
        self.it.propose(what, self.now)
        return self.carry()

    def repeat(self, later_s: float) -> list[tuple[int | None, Say]]:
        self.now += later_s
        self.it.repeat(self.now)
        return self.carry()
