"""A slot of this node: the process in it, and what is told of it."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.agent.ranks.processes import Process
from ckptless.daemon.protocol.messages import Cause, Phase, SlotState


@dataclass
class Tenant:
    """A training process and its connection.

    `retired`: its end was ordered, so it is no fault. `hung`: it was killed, since it did what this says.
    `lived`: it has been given a rank before.
    `released`: its training is over, so it owes no answer any more.
    """

    process: Process
    link: RankLink | None = None
    hooked: bool = False
    retired: bool = False
    hung: str = ""
    released: bool = False
    lived: bool = False
    heard_at: float = 0.0
    scratch: Path | None = None


@dataclass
class Slot:
    """A slot's state; what is told of it outlives the process. `births` counts the starts that were begun."""

    index: int
    tenant: Tenant | None = None
    phase: Phase = "empty"
    generation: int = 0
    step: int | None = None
    stepped: bool = False
    loss: float | None = None
    every: int | None = None
    share: float | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    hooked: bool = False
    # (generation, shard): what its rank has tensors of, and when it said so.
    shard: tuple[int, int] = (0, 0)
    restarts: int = 0
    births: int = 0
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def enter(self, phase: Phase, generation: int, cause: Cause | None = None) -> None:
        """A new phase begins now."""
        self.stepped &= generation == self.generation and phase != "starting"
        self.phase, self.generation, self.cause = phase, generation, cause
        self.since = asyncio.get_running_loop().time()

    def blame(self, cause: Cause) -> None:
        """Something is wrong with the process, as of now; its phase is what it was."""
        self.cause = cause
        self.since = asyncio.get_running_loop().time()

    def told(self) -> SlotState:
        """The slot as the daemon is told."""
        tenant = self.tenant
        return SlotState(
            slot=self.index,
            phase=self.phase,
            generation=self.generation,
            pid=tenant.process.pid if tenant is not None else None,
            hooked=self.hooked,
            step=self.step,
            stepped=self.stepped,
            loss=self.loss,
            every=self.every,
            share=self.share,
            cause=self.cause,
            exit_code=self.exit_code,
            age_s=asyncio.get_running_loop().time() - self.since,
        )
