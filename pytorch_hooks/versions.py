"""Writes a rank's versions into its agent's memory, and reads them back.

A version of step s is the record of every rank, and on each node the tensors once, written by one of the
node's twins. Tensors go into the slots of a memfd in turn. Main thread only.
"""

import mmap
import os
from dataclasses import dataclass

import torch
import xxhash

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.errors import StateUnavailableError
from ckptless.pytorch_hooks.session import Session
from ckptless.pytorch_hooks.state import TensorSet

SLOTS = 3
PAGE_NBYTES = 4096


@dataclass
class _Mapped:
    """A memfd of the agent's, mapped as one uint8 tensor."""

    number: int
    slot_nbytes: int
    bytes: torch.Tensor
    last_slot: int

    def slot(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]


class Versions:
    """The versions of one rank, through its session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mapped: _Mapped | None = None

    def write_tensors(self, generation: int, tensors: TensorSet) -> m.TensorsAt:
        """Copy all tensors into the next slot. Raises GenerationEnded while asking for memory."""
        nbytes = tensors.layout.nbytes
        mapped = self._mapped
        if mapped is None or mapped.slot_nbytes < nbytes:
            mapped = self._allocate(generation, tensors, nbytes)
        index = (mapped.last_slot + 1) % SLOTS
        slot = mapped.slot(index)
        tensors.pack(slot)
        mapped.last_slot = index
        digest = tensors.digest(slot[:nbytes])
        return m.TensorsAt(
            region=mapped.number, offset=index * mapped.slot_nbytes, nbytes=nbytes, digest=digest
        )

    def _allocate(self, generation: int, tensors: TensorSet, nbytes: int) -> _Mapped:
        # The views that pack() keeps would hold the old mapping.
        tensors.release()
        self._mapped = None
        slot_nbytes = max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES
        reply, fd = self._session.allocate(generation, slot_nbytes, SLOTS)
        self._mapped = _map(fd, reply.region, slot_nbytes, last_slot=-1)
        return self._mapped

    def send(self, commit: m.Commit) -> None:
        """Give a commit to the agent."""
        self._session.send(commit)

    def fetch(
        self, generation: int, step: int, tensors: TensorSet
    ) -> tuple[bytes, m.TensorsAt, torch.Tensor]:
        """Record, place and bytes of the tensors of `step`. Raises StateUnavailableError, GenerationEnded.

        The bytes are the agent's memory: copy them out before the next commit but one.
        """
        reply, fd = self._session.fetch(generation, step)
        if reply.error is not None or reply.tensors is None or fd is None:
            raise StateUnavailableError(f"the state of step {step} is not to be had: {reply.error}")
        at = reply.tensors
        if self._mapped is not None and self._mapped.number == at.region:
            os.close(fd)
        else:
            # The views that pack() keeps would hold the old mapping.
            tensors.release()
            self._mapped = _map(fd, at.region, reply.slot_nbytes, last_slot=-1)
        self._mapped.last_slot = at.offset // reply.slot_nbytes
        data = self._mapped.bytes[at.offset : at.offset + at.nbytes]
        return reply.record, at, data

    def verify(self, tensors: TensorSet, data: torch.Tensor, at: m.TensorsAt, step: int) -> None:
        """Raise StateUnavailableError where the bytes are not those that were committed."""
        if tensors.digest(data) != at.digest:
            raise StateUnavailableError(f"the tensors of step {step} do not match their digest")


def record_digest(record: bytes) -> str:
    """xxh3_128 of a record, hex, as the agent checks it."""
    return xxhash.xxh3_128_hexdigest(record)


def _map(fd: int, number: int, slot_nbytes: int, last_slot: int) -> _Mapped:
    try:
        mapping = mmap.mmap(fd, slot_nbytes * SLOTS)
    finally:
        os.close(fd)
    # The tensor keeps the mapping alive, and unmaps it when the last view of it is gone.
    return _Mapped(number, slot_nbytes, torch.frombuffer(mapping, dtype=torch.uint8), last_slot)
