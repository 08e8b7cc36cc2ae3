"""Record batches of an encrypted Arrow file: read when they are wanted, a few of them kept in memory."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ckptless.pytorch_hooks.data.files import DataFile

KEPT_BATCHES = 8
# Whoever wants one row decrypts so many.
ROWS = 256


class _Reading(io.RawIOBase):
    """The decrypted bytes of a file as pyarrow wants them. Each process has a position of its own."""

    def __init__(self, file: DataFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Have the next read begin elsewhere."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.stamp.nbytes}[whence]
        self._at = begin + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Some bytes; fewer at the end."""
        end = self._file.stamp.nbytes if size < 0 else min(self._at + size, self._file.stamp.nbytes)
        data = self._file.read(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


class SealedBatches:
    """Those of one file."""

    def __init__(self, file: DataFile, arrow: Any) -> None:
        # No threads: this process may fork.
        options = arrow.ipc.IpcReadOptions(use_threads=False)
        self._reader = arrow.ipc.open_file(arrow.PythonFile(_Reading(file), mode="r"), options=options)
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._reader.num_record_batches)

    @property
    def schema(self) -> Any:
        """The file's."""
        return self._reader.schema

    def get(self, number: int) -> Any:
        """A record batch."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        found = self._kept[number] = self._reader.get_batch(number)
        if len(self._kept) > KEPT_BATCHES:
            self._kept.popitem(last=False)
        return found


class SealedBatch:
    """One of them, as far as `Arrow` uses a record batch; `columns` are those of the names in `names`."""

    def __init__(self, of: SealedBatches, number: int, num_rows: int) -> None:
        self._of, self._number, self.num_rows = of, number, num_rows
        self._names: Sequence[str] | None = None

    @property
    def schema(self) -> Any:
        """Of what is selected."""
        return self._of.schema if self._names is None else self._batch().schema

    @property
    def columns(self) -> Any:
        """Of what is selected."""
        return self._batch().columns

    def select(self, names: Sequence[str]) -> SealedBatch:
        """Only these columns."""
        other = SealedBatch(self._of, self._number, self.num_rows)
        other._names = names
        return other

    def _batch(self) -> Any:
        batch = self._of.get(self._number)
        return batch if self._names is None else batch.select(self._names)
