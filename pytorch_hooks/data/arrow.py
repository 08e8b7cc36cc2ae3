"""Arrow and Parquet files as a source, through pyarrow: memory-mapped, columns of numbers without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ckptless.daemon.api.errors import BadRecordError, DataError, UsageError
from ckptless.pytorch_hooks.data.arrow_sealed import ROWS as SEALED_ROWS
from ckptless.pytorch_hooks.data.arrow_sealed import SealedBatch, SealedBatches
from ckptless.pytorch_hooks.data.cache import Cache, key
from ckptless.pytorch_hooks.data.file_source import FileSource, Paths
from ckptless.pytorch_hooks.data.files import DataFile
from ckptless.pytorch_hooks.data.sealed import SealedFile

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


class Arrow(FileSource[tuple[DataFile, Any]]):
    """Files of Arrow (IPC file or stream format) or Parquet, all with the same columns.

    A sample is a dict of the columns' values: a list of numbers as a read-only numpy array that lies in the
    file itself, everything else as Python has it. Parquet has to be decoded: it is written to the cache as
    Arrow once. `columns`: only these.
    """

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, cache: Cache | None = None
    ) -> None:
        super().__init__(paths, cache)
        self._columns = list(columns) if columns is not None else None
        self._checked: set[int] = set()

    def _open(self, given: DataFile) -> Iterator[tuple[tuple[DataFile, Any], int]]:
        arrow = _pyarrow()
        head = given.read(0, min(len(FILE), given.stamp.nbytes))
        try:
            mapped = given
            if head.startswith(PARQUET):
                mapped, head = self._hold(self._as_arrow(given)), FILE
            batches = self._batches_of(mapped, stream=head != FILE)
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{given.path} is no sound Arrow or Parquet file: {error}") from error
        for batch in batches:
            if batch.num_rows:
                if not isinstance(batch, SealedBatch):
                    _check(given, batch)
                yield (given, self._chosen(given.path, batch)), batch.num_rows

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

    def get(self, index: int) -> dict[str, Any]:
        """See Source."""
        (file, batch), row = self._find(index)
        # What is cut off a mapped file is a SIGBUS away.
        file.check()
        arrow = _pyarrow()
        try:
            if not isinstance(batch, SealedBatch):  # what was encrypted here nobody has changed
                batch, row = self._sound(batch, row)
            return {
                name: _value(column, row)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise BadRecordError(f"{self.where(index)}: {error}") from error

    def _sound(self, batch: Any, row: int) -> tuple[Any, int]:
        """A batch in which this row is sound, and the row's number there. Raises ArrowException.

        Arrow checks of columns in columns all there is, however little is asked for: once for each batch.
        """
        if not any(_is_deep(_pyarrow(), column.type) for column in batch.columns):
            one = batch.slice(row, 1)
            one.validate(full=True)
            return one, 0
        if id(batch) not in self._checked:
            batch.validate(full=True)
            self._checked.add(id(batch))  # it lives as long as its file is open
        return batch, row

    def close(self) -> None:
        """See Source."""
        super().close()
        self._checked.clear()

    def where(self, index: int) -> str:
        """See Source."""
        (file, _batch), _row = self._find(index)
        first = next(at for at, (of, _batch) in enumerate(self._parts) if of is file)
        return f"{file.path}, row {index - int(self._firsts[first])}"

    def describe(self, *, strict: bool) -> list[object]:
        """See Source."""
        return [*super().describe(strict=strict), self._columns]


def _check(file: DataFile, batch: Any) -> None:
    """Arrow believes a file's numbers; one that is damaged would end the process, or give other bytes."""
    try:
        batch.validate()
    except (_pyarrow().ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file.path} is no sound Arrow or Parquet file: {error}") from error


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


def _is_deep(arrow: Any, kind: Any) -> bool:
    """Whether it has columns within, of which not only the numbers count."""
    if not arrow.types.is_nested(kind):
        return bool(arrow.types.is_dictionary(kind))
    return not (hasattr(kind, "value_type") and _is_number(arrow, kind.value_type))


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind))
