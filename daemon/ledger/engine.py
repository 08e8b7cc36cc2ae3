"""SQLAlchemy engines for a ledger's file: one that writes, one that can only read."""

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import StaticPool

from ckptless.daemon.protocol.errors import LedgerError

MODE = 0o600
_BUSY_S = 5.0
_BUSY_POLL_S = 0.01
# A write-ahead log that was larger once is cut to this.
_LOG_NBYTES = 16 << 20


def writing_engine(path: Path) -> Engine:
    """Make the file if need be. Every transaction is BEGIN IMMEDIATE: no wait for a lock once one has begun.

    One connection; usable from any thread, by one at a time. The file, and SQLite's beside it, are for their
    owner alone.
    """

    def connect() -> sqlite3.Connection:
        _close_to_others(path)
        connection = _connect(path.absolute().as_uri() + "?mode=rwc")
        try:
            # Of a new file, which then gives back what is free when it is asked to.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _enter_wal(connection)
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_NBYTES:d}")
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection

    return _engine(connect, "BEGIN IMMEDIATE")


def _close_to_others(path: Path) -> None:
    """Mode 0600, from the beginning on; -wal and -shm are made with the mode that the file has."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
        for name in (path, *beside(path)):
            if name.exists() and stat.S_IMODE(name.stat().st_mode) != MODE:
                name.chmod(MODE)
    except OSError as error:
        raise LedgerError(f"the ledger cannot be opened: {error.strerror}") from error


def beside(path: Path) -> tuple[Path, Path]:
    """Return what SQLite keeps beside a ledger while it is open, or when its writer was killed."""
    return Path(f"{path}-wal"), Path(f"{path}-shm")


def reading_engine(path: Path) -> Engine:
    """Never changes the file; works beside a living writer and after one that was killed."""

    def connect() -> sqlite3.Connection:
        connection = _connect_to_read(path)
        connection.execute("PRAGMA query_only = ON")
        return connection

    return _engine(connect, "BEGIN")


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Make it a WAL database. This one statement does not wait for another that does the same, so we do."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_POLL_S)
        else:
            return


def durable(connection: Connection, *, full: bool) -> None:
    """Say, before the transaction begins, whether its commit shall outlast a power failure.

    NORMAL survives any death of the process, FULL also that of the node, for one more fsync.
    """
    _raw(connection).execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")


def used_nbytes(connection: Connection) -> int:
    """Return the bytes of a ledger's pages that are not free."""
    pages, free, nbytes = (
        int(_raw(connection).execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * nbytes


def give_back(connection: Connection, pages: int, times: int) -> None:
    """Give free pages back to the file system: so many in each of so many transactions, or all there are."""
    raw = _raw(connection)
    for _ in range(times):
        if not raw.execute("PRAGMA freelist_count").fetchone()[0]:
            return
        # It takes a step for each page, and has no columns: `execute` makes one step of it.
        raw.executescript(f"PRAGMA incremental_vacuum({pages:d})")


def _raw(connection: Connection) -> sqlite3.Connection:
    """Return SQLite's own connection, on which a statement is a transaction by itself."""
    raw = connection.connection.driver_connection
    if not isinstance(raw, sqlite3.Connection):
        raise TypeError("a ledger's connection is SQLite's")
    return raw


def _connect(uri: str) -> sqlite3.Connection:
    # isolation_level=None: sqlite3 itself opens no transaction; `_engine` does, at every begin.
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _connect_to_read(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri() + "?mode=ro"
    connection = _connect(uri)
    try:
        connection.execute("PRAGMA schema_version").fetchone()  # the first read is what opens the -wal
    except sqlite3.OperationalError:
        connection.close()
        if Path(f"{path}-wal").exists():
            raise
    except BaseException:
        connection.close()
        raise
    else:
        return connection
    # A daemon that ended in peace took -wal and -shm away, and who may not write the folder cannot make them
    # again. Nobody writes then, so the file can be read as it lies.
    return _connect(uri + "&immutable=1")


def _engine(connect: Callable[[], sqlite3.Connection], begin: str) -> Engine:
    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
