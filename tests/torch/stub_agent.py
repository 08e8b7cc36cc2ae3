"""What stands in for the agent: a `Run` talks to it as to its session, and ranks meet in the store."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from ckptless.daemon.protocol import messages as m
from ckptless.pytorch_hooks.agent_session.page import Page
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.commit.slots import SLOTS

from .world import Place

HOST = "127.0.0.1"
REGION = 1


@dataclass
class Kept:
    """A committed step: the record, and a copy of the tensors."""

    record: bytes
    at: m.TensorsAt
    data: bytes


class Agent:
    """Keeps every committed step of one rank, and gives them to whoever becomes that rank."""

    def __init__(self, place: Place, ranks: int) -> None:
        self._place, self._ranks = place, ranks
        self.welcome = SimpleNamespace(slot=0, host=HOST, job="toy", run="0" * 32)
        self.page = Page()
        self.kept: dict[int, Kept] = {}
        self._memory: int | None = None
        self._slot_nbytes = 0

    @property
    def session(self) -> Session:
        return cast("Session", self)

    def assigned(self, generation: int, rank: int, restore_step: int | None) -> m.Assigned:
        return m.Assigned(
            generation=generation,
            rank=rank,
            world_size=self._ranks,
            local_world_size=1,
            group_rank=rank,
            restore_step=restore_step,
            store=(HOST, self._place.port),
            peers=(HOST,),
        )

    # -- what a Run asks of its session

    def send(self, message: Any) -> None:
        if isinstance(message, m.Commit):
            assert message.tensors is not None
            at = message.tensors
            data = os.pread(self._fd(), at.nbytes, at.offset)
            self.kept[message.step] = Kept(message.record, at, data)
            self.kept.pop(message.step - 2, None)

    def wait_go(self, generation: int) -> None:
        self._place.meet(f"go{generation}", self._ranks, deadline=60)

    def wait_writes(self, _generation: int) -> bool:
        return True

    def wait_acked(self, _generation: int, _step: int) -> float:
        return 0.0

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        self._make(slot_nbytes, slots)
        return m.Allocated(region=REGION), os.dup(self._fd())

    def fetch(
        self, _generation: int, step: int, unsound: m.TensorsAt | None = None, why: str = ""
    ) -> tuple[m.Fetched, int]:
        assert unsound is None, why
        kept = self.kept[step]
        if self._memory is None:
            self._make(max(kept.at.nbytes, 4096), SLOTS)
        at = m.TensorsAt(region=REGION, offset=0, nbytes=kept.at.nbytes, digest=kept.at.digest)
        os.pwrite(self._fd(), kept.data, 0)
        return m.Fetched(step=step, record=kept.record, tensors=at, slot_nbytes=self._slot_nbytes), os.dup(
            self._fd()
        )

    # -- the rank moves to another process

    def hand_over(self, name: str, step: int, deadline: float = 30.0) -> None:
        """Leave this rank's newest step, which a thread may still be committing, for another process."""
        limit = time.monotonic() + deadline
        while step not in self.kept:
            if time.monotonic() > limit:
                raise TimeoutError(f"step {step} was not committed, only {sorted(self.kept)}")
            time.sleep(0.002)
        kept = self.kept[step]
        self._place.store.set(f"{name}/record", kept.record)
        self._place.store.set(f"{name}/data", kept.data or b" ")
        self._place.store.set(f"{name}/step", f"{step} {kept.at.nbytes} {kept.at.digest}")
        self._place.store.add(f"{name}/left", 1)
        self.close()

    def take_over(self, name: str) -> None:
        """Become the holder of what another process has left."""
        self._place.meet(f"{name}/left", 2, deadline=90)
        step, nbytes, digest = self._place.store.get(f"{name}/step").decode().split()
        at = m.TensorsAt(region=REGION, offset=0, nbytes=int(nbytes), digest=digest)
        record, data = self._place.store.get(f"{name}/record"), self._place.store.get(f"{name}/data")
        self.kept = {int(step): Kept(record, at, data[: int(nbytes)])}

    def close(self) -> None:
        if self._memory is not None:
            os.close(self._memory)
        self._memory = None

    def _fd(self) -> int:
        assert self._memory is not None
        return self._memory

    def _make(self, slot_nbytes: int, slots: int) -> None:
        self.close()
        self._memory = os.memfd_create("ckptless-test")
        os.ftruncate(self._memory, slot_nbytes * slots)
        self._slot_nbytes = slot_nbytes
