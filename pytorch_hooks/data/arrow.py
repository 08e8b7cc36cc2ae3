"""Arrow and Parquet files as a source, through pyarrow: memory-mapped, columns of numbers without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ckptless.daemon.api.errors import DataError, UsageError
from ckptless.pytorch_hooks.data.arrow_sealed import ROWS as SEALED_ROWS
from ckptless.pytorch_hooks.data.arrow_sealed import SealedBatch, SealedBatches
from ckptless.pytorch_hooks.data.cache import Cache, key
from ckptless.pytorch_hooks.data.files import DataFile
from ckptless.pytorch_hooks.data.sealed import SealedFile
from ckptless.pytorch_hooks.data.sources import Paths, path_list

PARQUET = b"PAR1"
FILE = b"ARROW1"
ROWS = 4096


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Arrow and Parquet files need pyarrow: pip install 'ckptless[data]' ({error})"
        ) from error
    return pyarrow


class Arrow:
    """Files of Arrow (IPC file or stream format) or Parquet, all with the same columns.

    A sample is a dict of the columns' values: a list of numbers as a read-only numpy array that lies in the
    file itself, everything else as Python has it. Parquet has to be decoded: it is written to the cache as
    Arrow once. `columns`: only these.
    """

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, cache: Cache | None = None
    ) -> None:
        self._paths = path_list(paths)
        self._columns = list(columns) if columns is not None else None
        self._cache = cache or Cache()
        self._files: list[DataFile] = []
        self._mapped: list[DataFile] = []
        self._batches: list[tuple[DataFile, Any]] = []
        self._firsts = np.zeros(1, dtype=np.int64)
        self._first_of_file: list[int] = []

    @property
    def cache(self) -> Cache:
        """Where its entries are."""
        return self._cache

    def open(self) -> None:
        """See Source."""
        if self._files:
            return
        try:
            for path in self._paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        counts = [batch.num_rows for _file, batch in self._batches]
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def _open(self, path: Path) -> None:
        arrow = _pyarrow()
        given = DataFile(path)
        self._files.append(given)
        head = given.read(0, min(len(FILE), given.stamp.nbytes))
        try:
            mapped = self._as_arrow(given) if head.startswith(PARQUET) else given
            if mapped is not given:
                self._files.append(mapped)
                head = FILE
            batches = self._batches_of(mapped, stream=head != FILE)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is no sound Arrow or Parquet file: {error}") from error
        for batch in batches:
            if batch.num_rows:
                self._batches.append((given, self._chosen(path, batch)))
        self._mapped.append(given)

    def _batches_of(self, file: DataFile, *, stream: bool) -> list[Any]:
        arrow = _pyarrow()
        if isinstance(file, SealedFile):
            batches = SealedBatches(file, arrow)
            counts = self._counts(file, batches)
            return [SealedBatch(batches, n, count) for n, count in enumerate(counts)]
        source = arrow.memory_map(str(file.path))
        if stream:
            return list(arrow.ipc.open_stream(source))
        reader = arrow.ipc.open_file(source)
        return [reader.get_batch(n) for n in range(reader.num_record_batches)]

    def _counts(self, file: DataFile, batches: SealedBatches) -> list[int]:
        """How many rows each has: found out once, since each would have to be decrypted."""

        def count(out: BinaryIO) -> None:
            out.write(np.array([batches.get(n).num_rows for n in range(len(batches))], dtype="<u8").tobytes())

        name = f"{key('rows', file.path.name, file.stamp.nbytes, file.stamp.changed_ns)}.rows"
        return [int(rows) for rows in np.frombuffer(self._cache.read(name, count), dtype="<u8")]

    def _chosen(self, path: Path, batch: Any) -> Any:
        if self._columns is None:
            return batch
        missing = [name for name in self._columns if name not in batch.schema.names]
        if missing:
            raise UsageError(f"{path} has no column {missing[0]!r}; it has {', '.join(batch.schema.names)}")
        return batch.select(self._columns)

    def _as_arrow(self, given: DataFile) -> DataFile:
        arrow = _pyarrow()
        stamp = given.stamp
        columns = ",".join(self._columns or ["*"])
        name = f"{key('parquet', given.path.resolve(), stamp.nbytes, stamp.changed_ns, columns)}.arrow"

        def make(out: BinaryIO) -> None:
            with arrow.parquet.ParquetFile(given.path) as parquet:
                known = parquet.schema_arrow.names
                columns = [c for c in self._columns if c in known] if self._columns is not None else known
                schema = arrow.schema([parquet.schema_arrow.field(c) for c in columns])
                with arrow.ipc.new_file(out, schema) as writer:
                    # One thread: this process may be about to fork.
                    rows = SEALED_ROWS if self._cache.encrypts else ROWS
                    for batch in parquet.iter_batches(rows, columns=columns, use_threads=False):
                        writer.write_batch(batch)
            given.check()

        return self._cache.open(name, make, nbytes=stamp.nbytes * 4)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _find(self, index: int) -> tuple[DataFile, Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = int(np.searchsorted(self._firsts, index, side="right")) - 1
        file, batch = self._batches[at]
        return file, batch, index - int(self._firsts[at])

    def get(self, index: int) -> dict[str, Any]:
        """See Source."""
        file, batch, row = self._find(index)
        # What is cut off a mapped file is a SIGBUS away.
        file.check()
        return {
            name: _value(column, row) for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }

    def where(self, index: int) -> str:
        """See Source."""
        file, _batch, _row = self._find(index)
        before = sum(batch.num_rows for of, batch in self._before(file))
        return f"{file.path}, row {index - before}"

    def _before(self, file: DataFile) -> list[tuple[DataFile, Any]]:
        files = [of for of, _batch in self._batches]
        return self._batches[: files.index(file)]

    def describe(self, *, strict: bool) -> object:
        """See Source."""
        stamps = [file.stamp for file in self._mapped]
        files = [msgspec.structs.astuple(s) if strict else s.same_content() for s in stamps]
        return ["Arrow", len(self), files, self._columns]

    def close(self) -> None:
        """See Source."""
        for file in self._files:
            file.close()
        self._files, self._mapped, self._batches = [], [], []


def _value(column: Any, row: int) -> Any:
    arrow = _pyarrow()
    kind = column.type
    is_list = (
        arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind)
    )
    scalar = column[row]
    if is_list and scalar.is_valid and _is_number(arrow, kind.value_type) and not scalar.values.null_count:
        return scalar.values.to_numpy(zero_copy_only=True)
    return scalar.as_py()


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind))
