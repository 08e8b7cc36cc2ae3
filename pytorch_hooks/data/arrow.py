"""Arrow and Parquet files as a source, through pyarrow: memory-mapped, columns of numbers without a copy.

What is encrypted cannot be mapped: its record batches are read when they are wanted, and a few of them kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ckptless.daemon.protocol.errors import BadRecordError, DataError, UsageError
from ckptless.pytorch_hooks.data.cache import Cache, key
from ckptless.pytorch_hooks.data.files import DataFile, SealedFile
from ckptless.pytorch_hooks.data.sources import FileSource, Paths

PARQUET = b"PAR1"
FILE = b"ARROW1"
# Of a record batch that Parquet is decoded to. Whoever wants one row decrypts so many.
ROWS, SEALED_ROWS = 4096, 256
KEPT_BATCHES = 8

_Load = Callable[[int], Any]


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Arrow and Parquet files need pyarrow: pip install 'ckptless[data]' ({error})"
        ) from error
    return pyarrow


class _Rows(NamedTuple):
    """A record batch of a file, and the number of its first row there; `is_own`: it was written by us."""

    given: DataFile
    first: int
    load: Callable[[], Any]
    is_own: bool


class Arrow(FileSource[_Rows]):
    """Files of Arrow (IPC file or stream format) or Parquet, all with the same columns.

    A sample is a dict of the columns' values: a list of numbers as a read-only numpy array that lies in the
    file itself, everything else as Python has it. Parquet has to be decoded: it is written to the cache as
    Arrow once. `columns`: only these. DataError, as the files are first used, where one is not sound.
    """

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, cache: Cache | None = None
    ) -> None:
        super().__init__(paths, cache)
        self._columns = list(columns) if columns is not None else None
        self._checked: set[int] = set()

    def _open(self, given: DataFile) -> Iterator[tuple[_Rows, int]]:
        arrow = _pyarrow()
        head = given.read(0, min(len(FILE), given.stamp.nbytes))
        try:
            file = given
            if head.startswith(PARQUET):
                file, head = self._hold(self._as_arrow(given)), FILE
            is_own = isinstance(file, SealedFile)
            load, counts = (
                self._sealed(given, file) if is_own else self._mapped(given, file, stream=head != FILE)
            )
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{given.path} is no sound Arrow or Parquet file: {error}") from error
        first = 0
        for number, count in enumerate(counts):
            if count:
                yield _Rows(given, first, partial(load, number), is_own), count
                first += count

    def _mapped(self, given: DataFile, file: DataFile, *, stream: bool) -> tuple[_Load, list[int]]:
        """Return what gives the record batches of a file by number, and how many rows each has."""
        arrow = _pyarrow()
        source = arrow.memory_map(str(file.path))
        if stream:
            batches = list(arrow.ipc.open_stream(source))
        else:
            reader = arrow.ipc.open_file(source)
            batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        for batch in batches:
            # Arrow believes a file's numbers; one that is damaged would end the process, or give other bytes.
            batch.validate()
            self._check_columns(given, batch.schema)
        batches = [self._chosen(batch) for batch in batches]
        return batches.__getitem__, [batch.num_rows for batch in batches]

    def _sealed(self, given: DataFile, file: DataFile) -> tuple[_Load, list[int]]:
        """The same of an encrypted file. How many rows each has is kept: it would have to be decrypted."""
        arrow = _pyarrow()
        # No threads: this process may fork.
        options = arrow.ipc.IpcReadOptions(use_threads=False)
        reader = arrow.ipc.open_file(arrow.PythonFile(_Reading(file), mode="r"), options=options)
        self._check_columns(given, reader.schema)

        def count() -> Any:
            return np.array(
                [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)], np.int64
            )

        name = f"{key('rows', file.path.name, file.stamp.nbytes, file.stamp.changed_ns)}.rows"
        load = lru_cache(KEPT_BATCHES)(lambda number: self._chosen(reader.get_batch(number)))
        return load, self.cache.numbers(name, count).tolist()

    def _check_columns(self, given: DataFile, schema: Any) -> None:
        missing = [name for name in self._columns or () if name not in schema.names]
        if missing:
            raise UsageError(f"{given.path} has no column {missing[0]!r}; it has {', '.join(schema.names)}")

    def _chosen(self, batch: Any) -> Any:
        return batch if self._columns is None else batch.select(self._columns)

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
                    rows = SEALED_ROWS if self.cache.encrypts else ROWS
                    for batch in parquet.iter_batches(rows, columns=columns, use_threads=False):
                        writer.write_batch(batch)
            given.check()

        return self.cache.open(name, make, nbytes=stamp.nbytes * 4)

    def get(self, index: int) -> dict[str, Any]:
        """See Source."""
        rows, row = self._find(index)
        # What is cut off a mapped file is a SIGBUS away.
        rows.given.check()
        arrow = _pyarrow()
        try:
            batch = rows.load()
            if not rows.is_own:  # what was encrypted here nobody has changed
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
        rows, row = self._find(index)
        return f"{rows.given.path}, row {rows.first + row}"

    def describe(self, *, strict: bool) -> list[object]:
        """See Source."""
        return [*super().describe(strict=strict), self._columns]


class _Reading(io.RawIOBase):
    """The decrypted bytes of a file as pyarrow wants them. Each process has a position of its own."""

    def __init__(self, file: DataFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.stamp.nbytes}[whence]
        self._at = begin + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        end = self._file.stamp.nbytes if size < 0 else min(self._at + size, self._file.stamp.nbytes)
        data = self._file.read(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


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
