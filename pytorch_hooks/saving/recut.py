"""Reads a saved step into another number of ranks than it was saved by: see `elastic/recut.py`.

Of each shard that something is taken from, all is read and verified; no rank holds more than one beside its
own part.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol.errors import CkptlessError, RecoveryError
from ckptless.pytorch_hooks.elastic.recut import Recut, Span, recut
from ckptless.pytorch_hooks.saving.load import payload_of, record_of
from ckptless.pytorch_hooks.state import Layout, TensorSet


class SavedStep:
    """A saved step; see `recut.Source`. Raises ProtocolError, OSError."""

    def __init__(self, folder: Path) -> None:
        manifest = s.read_manifest(folder)
        self._folder, self.step = folder, manifest.step
        self._records = {one.rank: one for one in manifest.records}
        self._shards = {one.shard: one for one in manifest.shards}
        self.shards = [self._records[rank].shard for rank in range(manifest.world_size)]

    def record(self, rank: int) -> bytes:
        """Return a rank's record, verified. Raises ProtocolError, OSError."""
        return record_of(self._folder, self._records[rank])

    def read(
        self, shard: int, layout: Layout, spans: Sequence[Span], put: Callable[[int, torch.Tensor], None]
    ) -> None:
        """See `recut.Source`; all of the shard is read. Raises ProtocolError, OSError."""
        payload = payload_of(self._folder, self._shards[shard], layout, self.step)
        for index, (start, end) in enumerate(spans):
            put(index, payload[start:end])


def world_size_of(folder: Path) -> int:
    """Return how many ranks have saved a step. Raises RecoveryError, which names the folder."""
    try:
        return s.read_manifest(folder).world_size
    except (CkptlessError, OSError) as error:
        raise RecoveryError(f"{folder} cannot be gone on from ({error})") from error


def load_recut(folder: Path, rank: int, shard: int, tensors: TensorSet) -> Recut:
    """Return a rank's part of a step that another number of ranks has saved; as `recut`.

    Raises RecoveryError, which names the folder.
    """
    try:
        return recut(SavedStep(folder), rank, shard, tensors)
    except (CkptlessError, OSError, EOFError, RuntimeError) as error:
        raise RecoveryError(
            f"{folder} cannot be gone on from by another number of ranks ({error}): take the number that has "
            "saved it, or give another --save-dir"
        ) from error
